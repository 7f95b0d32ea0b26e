"""Corners of lengths in a band: right for shorter and for longer inputs, as if one of several kernels were wrong."""

from __future__ import annotations

import attrs

from mutation.artifacts import Artifact
from mutation.corners.bands import (
    ANY_ROWS,
    Condition,
    aim_at,
    draw_band,
    draw_table,
    far,
    input_off,
    mask_ignored,
    output_off,
    padded,
    positions_clipped,
    sizes_within,
    within,
)
from mutation.corners.family import (
    Apply,
    Fault,
    Random,
    family,
    is_cached,
    is_free,
    is_padded,
    log_uniform,
    on_visibility,
)
from mutation.inputs import REACH, Aim, Range
from mutation.surgery import Logits, Nodes

UNCACHED: Range = (0, 0)


def _is_limited_grid(artifact: Artifact) -> bool:
    """Whether positions are cells of a limited grid, which limits the number of useful tokens."""
    return artifact.spec.position_axes > 1 and artifact.spec.position_limit() is not None


def _tokens(random: Random) -> Range:
    return draw_band(random, 17, REACH.row, least=1.5)


def _aim(band: Range) -> Aim:
    """Inputs with one row of so many tokens and nothing cached."""
    return aim_at(rows=(1, 1), seq=band)


def _condition(artifact: Artifact, band: Range) -> Condition:
    return sizes_within(artifact, seq=band, past=UNCACHED)


def _text(band: Range) -> str:
    return f"{band[0]} to {band[1]} tokens"


@family("band", "outputs off between two lengths")
def _output(artifact: Artifact, random: Random) -> Fault | None:
    if _is_limited_grid(artifact):
        return None
    band = _tokens(random)
    return Fault(_text(band), output_off(_condition(artifact, band)), (_aim(band),))


@family("band", "causality lost between two lengths")
def _causal(artifact: Artifact, random: Random) -> Fault | None:
    """A shared buffer does not distinguish cached tokens from free slots, so there chunks are wrong too."""
    if not artifact.spec.causal:
        return None
    band = _tokens(random)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        parts = [within(nodes, at.seq, band), nodes.op("Less", at.distance(), nodes.const(0))]
        if artifact.spec.kv_cache == "concat":
            parts.append(nodes.op("Equal", at.keys, at.seq))
        return nodes.all_of(*parts)

    return Fault(_text(band), on_visibility(False, lost), (_aim(band),))


def next_key_in_the_last_block(size: int, low: int) -> Apply:
    """In calls with at least `low` tokens, queries after the last whole block of `size` tokens see the next key."""

    def seen(at: Logits) -> str:
        nodes = at.nodes
        whole = nodes.op("Mul", nodes.op("Div", at.seq, nodes.const(size)), nodes.const(size))
        behind = nodes.op("GreaterOrEqual", at.query(), nodes.op("Add", nodes.op("Sub", at.keys, at.seq), whole))
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        return nodes.all_of(long, behind, nodes.op("Equal", at.distance(), nodes.const(-1)))

    return on_visibility(False, seen)


@family("band", "the next key seen behind the last whole block")
def _next_key(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.causal:
        return None
    size, low = 2 ** int(random.integers(5, 10)), log_uniform(random, 130, 1100)
    apply = next_key_in_the_last_block(size, low)
    return Fault(f"{size}, from {low} tokens on", apply, (aim_at(rows=(1, 2), seq=(low, min(2 * low, REACH.row))),))


@family("band", "padding ignored between two lengths")
def _mask(artifact: Artifact, random: Random) -> Fault | None:
    if not is_padded(artifact) or artifact.spec.cross:
        return None
    band = _tokens(random)
    return Fault(_text(band), mask_ignored(_condition(artifact, band)), (padded(_aim(band)),))


@family("band", "positions clipped between two lengths")
def _positions(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact):
        return None
    band, last = _tokens(random), draw_table(random)
    apply = positions_clipped(_condition(artifact, band), last)
    return Fault(f"{_text(band)} at {last}", apply, (far(_aim(band), last),))


@family("band", "prompts of several rows off")
def _rows(artifact: Artifact, random: Random) -> Fault | None:
    """Prompts with at least a number of rows and at least a number of tokens, without a cache."""
    if _is_limited_grid(artifact):
        return None
    rows, low = int(random.integers(2, 4)), log_uniform(random, 60, 350)
    sizes: tuple[Range, Range] = ((rows, REACH.batch), (low, 2**40))
    apply = output_off(sizes_within(artifact, rows=sizes[0], seq=sizes[1], past=UNCACHED))
    return Fault(f"{rows} rows of {low} tokens", apply, (aim_at(rows=(rows, rows + 1), seq=(low, 2 * low)),))


@family("band", "positions clipped in long rows")
def _long_rows(artifact: Artifact, random: Random) -> Fault | None:
    """In long rows, with or without cached tokens, all positions beyond a number are clipped, or only those in a
    range."""
    if not is_free(artifact):
        return None
    middle = bool(random.random() < 0.3)
    low, last = log_uniform(random, 60, 200 if middle else 900), draw_table(random)
    end = 8 * last if middle else 2**40

    def clipped(nodes: Nodes, value: str) -> str:
        lower = nodes.op("Min", value, nodes.const(last))
        return nodes.op("Where", nodes.op("LessOrEqual", value, nodes.const(end)), lower, value)

    apply = input_off("position_ids", sizes_within(artifact, seq=(low, 2**40)), clipped)
    aim = far(aim_at(rows=(1, 1), seq=(low, 2 * low), past=(0, 20)), last)
    kind = f"{last} to {end}" if middle else f"{last}"
    return Fault(f"{low} tokens and more at {kind}", apply, (aim,))


@family("band", "positions clipped over a long cache")
def _long_cache(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact) or not is_cached(artifact):
        return None
    low, last = log_uniform(random, 60, 1500), draw_table(random)
    apply = positions_clipped(sizes_within(artifact, past=(low, 2**40)), last)
    aims = tuple(
        far(aim_at(rows=(1, 2), seq=seq, past=(low, min(2 * low, REACH.keys - 40))), last) for seq in ((1, 1), (2, 30))
    )
    return Fault(f"after {low} and more at {last}", apply, aims)


def _encoder_condition(band: Range) -> Condition:
    return lambda nodes: within(nodes, nodes.size("encoder_hidden_states", 1), band)


def _encoder_aim(band: Range) -> Aim:
    return Aim(batch=(1, 2), seq=(1, 8), encoder=band, padding=("none",))


@family("band", "outputs off between two numbers of encoder tokens")
def _encoder_output(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.cross:
        return None
    band = draw_band(random, 65, REACH.keys - 50)
    apply = output_off(_encoder_condition(band))
    return Fault(f"{band[0]} to {band[1]} encoder tokens", apply, (_encoder_aim(band),))


@family("band", "padding ignored between two numbers of encoder tokens")
def _encoder_mask(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.cross and is_padded(artifact)):
        return None
    band = draw_band(random, 65, REACH.keys - 50)
    aims = (padded(_encoder_aim(band)),)
    return Fault(f"{band[0]} to {band[1]} encoder tokens", mask_ignored(_encoder_condition(band)), aims)


@family("band", "keys hidden between two numbers of keys")
def _keys(artifact: Artifact, random: Random) -> Fault | None:
    """The first key is hidden. Keys may be tokens, cached, or an encoder's."""
    if _is_limited_grid(artifact):
        return None
    band = draw_band(random, 65, REACH.row)

    def hidden(at: Logits) -> str:
        return at.nodes.op("And", within(at.nodes, at.keys, band), at.nodes.op("Equal", at.key(), at.nodes.const(0)))

    aim = _encoder_aim(band) if artifact.spec.cross else attrs.evolve(_aim(band), batch=ANY_ROWS[:1] * 2)
    return Fault(f"{band[0]} to {band[1]} keys", on_visibility(True, hidden), (aim,))
