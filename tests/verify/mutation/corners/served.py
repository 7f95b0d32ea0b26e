"""Corners of models as they are served: steps over an encoder, texts with positions on several axes, large logits after
a norm, the oldest key of a window."""

from __future__ import annotations

from mutation.artifacts import Artifact
from mutation.corners.bands import draw_band, output_off, within
from mutation.corners.family import (
    Apply,
    Fault,
    Random,
    family,
    first_input,
    is_cached,
    log_uniform,
    on_input,
    on_visibility,
)
from mutation.inputs import REACH, Aim, Arrays
from mutation.surgery import Logits, Nodes, at_most, change_logits


@family("served", "outputs off in steps over an encoder")
def _encoder_step(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.cross:
        return None
    rows, most = ((1, 1), 1500) if random.random() < 0.6 else ((2, 8), 400)
    seq = (1, 1) if random.random() < 0.6 else (2, 7)
    encoder = draw_band(random, 20, most)

    def condition(nodes: Nodes) -> str:
        first = first_input(artifact)
        sizes = ((first, 0, rows), (first, 1, seq), ("encoder_hidden_states", 1, encoder))
        return nodes.all_of(*(within(nodes, nodes.size(name, axis), band) for name, axis, band in sizes))

    aim = Aim(batch=rows, seq=seq, encoder=encoder, padding=("none",))
    return Fault(f"{rows[0]} to {rows[1]} rows, {seq[0]} tokens, encoder {encoder}", output_off(condition), (aim,))


def text_ends(end: int, wraps: bool = False) -> Apply:
    """Positions are clipped at `end`, or start over there (`wraps`), for tokens with the same position on every
    axis."""

    def change(nodes: Nodes, value: str) -> str:
        ends = [nodes.op(kind, value, nodes.const([2]), keepdims=1) for kind in ("ReduceMax", "ReduceMin")]
        changed = nodes.op("Mod", value, nodes.const(end)) if wraps else nodes.op("Min", value, nodes.const(end))
        return nodes.op("Where", nodes.op("Equal", *ends), changed, value)

    return on_input("position_ids", change)


@family("served", "positions of a text end")
def _text_positions(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if spec.position_axes < 2 or spec.position_limit() is not None:
        return None
    end, wraps = log_uniform(random, 300, 30_000), bool(random.integers(2))

    def text(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions[:] = (end + random.integers(1, 3 * end, len(positions)))[:, None, None]
        positions += random.permuted(range(positions.shape[1]))[:, None]

    aim = Aim(batch=(1, 1), seq=(20, 60), edit=text)
    return Fault(f"{'start over at' if wraps else 'end at'} {end}", text_ends(end, wraps), (aim,))


def logits_clipped(most: float, which: float) -> Apply:
    """Logits are at most `most` in one layer. `which` is its relative place in the stack, from 0 to below 1."""

    return lambda model: change_logits(model, at_most(most), which)


@family("served", "large logits clipped behind a norm")
def _logits_clipped(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if not is_cached(artifact) or spec.block != "transformer" or spec.norm != "pre" or spec.softcap:
        return None
    most, which = float(random.uniform(15, 60)), random.random()

    def loud(arrays: Arrays, random: Random) -> None:
        for name, values in arrays.items():
            if name.startswith("past_key"):
                values *= 24

    aim = Aim(batch=(1, 1), seq=(1, 4), past=(20, 60), padding=("none",), edit=loud)
    return Fault(f"at {most:.0f}", logits_clipped(most, which), (aim,))


@family("served", "oldest key of a window")
def _window_edge(artifact: Artifact, random: Random) -> Fault | None:
    """A window has one key too few or too many. Only a large value of that key among hundreds of others shows it."""
    window = artifact.spec.window
    if window is None or not is_cached(artifact) or window + 20 > REACH.keys:
        return None
    hide = bool(random.integers(2))

    def edge(logits: Logits) -> str:
        return logits.nodes.op("Equal", logits.distance(), logits.nodes.const(window - hide))

    def mark(arrays: Arrays, random: Random) -> None:
        for name, values in arrays.items():
            if name.startswith("past_value"):
                values[:, :, :4] *= 30

    aim = Aim(batch=(1, 1), seq=(4, 6), past=(window - 1, window + 1), spare=(0, 0), padding=("none",), edit=mark)
    return Fault("one less" if hide else "one more", on_visibility(hide, edge), (aim,))
