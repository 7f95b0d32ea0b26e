"""Drawn bands of sizes, and conditions in a graph: whether inputs lie in a band."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import onnx

from mutation.artifacts import Artifact
from mutation.corners.family import Apply, Random, first_input, inputs_named, log_uniform, on_input
from mutation.inputs import REACH, Aim, Arrays, Range
from mutation.surgery import Change, Nodes, change_value

ANY_ROWS: Range = (1, REACH.batch)
ROWS: tuple[Range, ...] = ((1, 1), (2, 4), (5, REACH.batch))
"""Bands of rows: one, a few, and many."""

Condition = Callable[[Nodes], str]
"""Adds nodes to the main graph and returns the name of a scalar boolean."""


def draw_band(random: Random, low: int, high: int, *, least: float = 1.9, most: float = 2.5, width: int = 0) -> Range:
    """A band within [low, high]. Its end is `least` to `most` times its beginning, and at least `width` more."""
    first = log_uniform(random, low, min(high / (least + 0.05), high - width))
    last = max(round(first * random.uniform(least, most)), first + width)
    return first, min(last, high)


def within(nodes: Nodes, value: str, band: Range) -> str:
    """Whether a scalar lies in a band that includes both ends."""
    return nodes.all_of(
        nodes.op("GreaterOrEqual", value, nodes.const(band[0])), nodes.op("LessOrEqual", value, nodes.const(band[1]))
    )


def cached_tokens(artifact: Artifact, nodes: Nodes) -> str:
    """The number of cached tokens: the past length, or the largest of `write_indices` for a shared buffer."""
    if artifact.spec.kv_cache == "shared":
        return nodes.op("ReduceMax", "write_indices", keepdims=0)
    return nodes.size(inputs_named(artifact, "past_key")[0], 2)


def sizes_within(
    artifact: Artifact, *, rows: Range = ANY_ROWS, seq: Range | None = None, past: Range | None = None
) -> Condition:
    """Whether a call has so many rows, tokens and cached tokens. `past` is ignored without a cache."""
    first = first_input(artifact)

    def condition(nodes: Nodes) -> str:
        parts = [within(nodes, nodes.size(first, 0), (rows[0], rows[1] if rows[1] < REACH.batch else 2**40))]
        if seq is not None:
            parts.append(within(nodes, nodes.size(first, 1), seq))
        if past is not None and artifact.spec.kv_cache:
            parts.append(within(nodes, cached_tokens(artifact, nodes), past))
        return nodes.all_of(*parts)

    return condition


def _level(arrays: Arrays, random: Random) -> None:
    """Make one row of a shared buffer full after this call, if the buffer has no spare slots."""
    if "write_indices" in arrays:
        tokens = arrays.get("hidden_states", arrays.get("input_ids"))
        caches = [values for name, values in arrays.items() if name.startswith("past_key")]
        assert tokens is not None
        arrays["write_indices"][random.integers(len(tokens))] = caches[0].shape[2] - tokens.shape[1]


def aim_at(*, rows: Range = ANY_ROWS, seq: Range, past: Range = (0, 0)) -> Aim:
    """Inputs of these sizes with consecutive positions and without padding."""
    return Aim(batch=rows, seq=seq, past=past, spare=(0, 0), padding=("none",), edit=_level)


def output_off(condition: Condition) -> Apply:
    """The output is a tenth too large if a condition holds."""

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Where", condition(nodes), nodes.op("Mul", value, nodes.like(value, 1.1)), value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    return apply


def input_off(name: str, condition: Condition, changed: Change) -> Apply:
    """If a condition holds, readers of a graph input read the value that `changed` makes of it."""
    return on_input(name, lambda nodes, value: nodes.op("Where", condition(nodes), changed(nodes, value), value))


def mask_ignored(condition: Condition) -> Apply:
    """Every key counts as attended if a condition holds."""
    return input_off("attention_mask", condition, lambda nodes, value: nodes.const(1))


def positions_clipped(condition: Condition, most: int) -> Apply:
    """Positions are clipped at `most`, the end of a table of cosines, if a condition holds."""
    return input_off("position_ids", condition, lambda nodes, value: nodes.op("Min", value, nodes.const(most)))


def draw_table(random: Random) -> int:
    """The last row of a table of cosines and sines."""
    return int(random.choice([4095, 8191, 16383, log_uniform(random, 3000, 30_000)]))


def padded(aim: Aim) -> Aim:
    """The same sizes with padding of any kind."""
    return attrs.evolve(aim, padding=("left", "right", "both", "holes"))


def far(aim: Aim, beyond: int) -> Aim:
    """The same sizes at positions that start between `beyond` and four times `beyond`."""
    return attrs.evolve(aim, start=(beyond, 4 * beyond))
