"""Corner mutants: graphs that are right but for one corner, drawn from families with continuous parameters.

A family gives for an artifact, and numbers drawn, a change of the graph and the inputs at which it should show. Families
know no test cases of verify: they are drawn from what goes wrong in production, class by class (CLASSES).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import numpy as np
import onnx
from onnx import TensorProto, helper

from mutation.artifacts import Artifact
from mutation.inputs import REACH, Aim, Arrays, Range, position_reach, zero_rows
from mutation.surgery import (
    LOWEST,
    Logits,
    Nodes,
    change_input,
    change_value,
    change_visibility,
    constant_value,
    copy_of,
    insert,
    mask_sites,
    read_constant,
    sites,
)

Random = np.random.Generator

CLASSES = {
    "grid": "limited grids: clipped rows, single cells, offsets without their bias",
    "padding": "padding: ignored from a column, on one side, in holes, in some rows, in large batches",
    "batch": "batches: a row reads another row's data, masks lost in large batches",
    "chunk": "chunks over a cache: causality lost, keys hidden",
    "length": "lengths: keys hidden, windows dropped or invented, buffers that wrap, single rows of tables",
    "position": "far positions: relative errors, clipping, narrow types, trained lengths",
    "magnitude": "magnitudes: epsilon, clipping, overflow, masks that are not low enough, quiet inputs",
    "special": "others: no keys, first and last token id, order and sign of positions, single tokens",
}
"""What each class holds."""


@attrs.frozen
class Fault:
    """A change of a graph (false where it has no place), with its numbers and the inputs at which it should show."""

    numbers: str
    apply: Callable[[onnx.ModelProto], bool]
    aims: tuple[Aim, ...]


Family = Callable[[Artifact, Random], "Fault | None"]

FAMILIES: dict[str, tuple[str, Family]] = {}
"""Families by name: (class, the function that draws a fault)."""


def family(kind: str, name: str) -> Callable[[Family], Family]:
    def register(function: Family) -> Family:
        FAMILIES[name] = (kind, function)
        return function

    return register


def corner_mutant(artifact: Artifact, name: str, random: Random) -> tuple[onnx.ModelProto, Fault] | None:
    """A mutant of a family; None where the artifact has no such corner."""
    fault = FAMILIES[name][1](artifact, random)
    if fault is None:
        return None
    model = copy_of(artifact.model)
    return (model, fault) if fault.apply(model) else None


def _log(random: Random, low: float, high: float) -> int:
    """A whole number, its logarithm drawn evenly."""
    return round(float(np.exp(random.uniform(np.log(low), np.log(high)))))


def _on_input(name: str, change: Callable[[Nodes, str], str]) -> Callable[[onnx.ModelProto], bool]:
    def apply(model: onnx.ModelProto) -> bool:
        if all(value.name != name for value in model.graph.input):
            return False
        change_input(model, name, change)
        return True

    return apply


def _has(artifact: Artifact, *names: str) -> list[str]:
    inputs = [value.name for value in artifact.model.graph.input]
    return [name for name in inputs if name.split(".")[0] in names]


def _first(artifact: Artifact) -> str:
    return artifact.model.graph.input[0].name


def _padded(artifact: Artifact) -> bool:
    return artifact.spec.padding_mask


def _cached(artifact: Artifact) -> bool:
    return artifact.spec.kv_cache is not None


def _key_aim(artifact: Artifact, low: int, **more: object) -> tuple[Aim, ...]:
    """Inputs with `low` keys and more, as the spec gets them: in a cache, from an encoder, or as tokens."""
    high = min(low + 40, REACH.keys)
    if artifact.spec.cross:
        return (attrs.evolve(Aim(batch=(1, 2), encoder=(low, high), padding=("none",)), **more),)
    if _cached(artifact):
        step = Aim(batch=(1, 2), seq=(1, 4), past=(low, high), padding=("none",))
        whole = Aim(batch=(1, 1), seq=(low, high), past=(0, 0), padding=("none",))
        aims = (step, whole) if low <= REACH.tokens - 40 else (step,)
        return tuple(attrs.evolve(aim, **more) for aim in aims)
    return (attrs.evolve(Aim(batch=(1, 1), seq=(low, high), padding=("none",)), **more),)


def _most_keys(artifact: Artifact) -> int:
    return REACH.keys - 100 if _cached(artifact) or artifact.spec.cross else REACH.tokens - 60


def _token_limit(artifact: Artifact) -> int:
    """The number of tokens with different positions, where that is small."""
    spec = artifact.spec
    return min(spec.token_limit() or 10**9, REACH.tokens) if spec.position_axes > 1 else 10**9


# Grids


def _grid_aims(artifact: Artifact) -> tuple[Aim, ...]:
    limit = artifact.spec.position_limit()
    if limit is not None:
        return (Aim(batch=(1, 2), seq=(limit**2, limit**2)), Aim(batch=(2, 3), seq=(30, 60)))
    return (
        Aim(batch=(1, 2), seq=(30, 60), positions=("gaps", "shuffled"), start=(0, 200)),
        Aim(batch=(1, 1), seq=(600, 1000)),
    )


@family("grid", "row or column clipped")
def _clipped_axis(artifact: Artifact, random: Random) -> Fault | None:
    axes, limit = artifact.spec.position_axes, artifact.spec.position_limit()
    if axes < 2:
        return None
    axis, most = int(random.integers(axes)), (limit or 30) - 2
    clipped = int(random.integers(2, most + 1))
    limits = [2**40] * axes
    limits[axis] = clipped

    def change(nodes: Nodes, name: str) -> str:
        return nodes.op("Min", name, nodes.const(limits))

    return Fault(f"axis {axis} above {clipped}", _on_input("position_ids", change), _grid_aims(artifact))


@family("grid", "one cell misread")
def _one_cell(artifact: Artifact, random: Random) -> Fault | None:
    axes, limit = artifact.spec.position_axes, artifact.spec.position_limit()
    if axes < 2 or limit is None:
        return None
    cell, other = random.integers(0, limit, (2, axes))
    if (cell == other).all():
        return None

    def change(nodes: Nodes, name: str) -> str:
        same = nodes.op("Cast", nodes.op("Equal", name, nodes.const(cell)), to=TensorProto.INT64)
        here = nodes.op("Cast", nodes.op("ReduceMin", same, nodes.const([-1]), keepdims=1), to=TensorProto.BOOL)
        return nodes.op("Where", here, nodes.const(other), name)

    return Fault(f"{cell.tolist()} as {other.tolist()}", _on_input("position_ids", change), _grid_aims(artifact))


@family("grid", "axes exchanged from a row on")
def _exchanged(artifact: Artifact, random: Random) -> Fault | None:
    axes, limit = artifact.spec.position_axes, artifact.spec.position_limit()
    if axes < 2:
        return None
    row = int(random.integers(2, (limit or 40) - 1))
    order = [1, 0, 2][:axes]

    def change(nodes: Nodes, name: str) -> str:
        rows = nodes.op("Gather", name, nodes.const([1]), axis=-1)
        other = nodes.op("Gather", name, nodes.const(order), axis=-1)
        return nodes.op("Where", nodes.op("GreaterOrEqual", rows, nodes.const(row)), other, name)

    return Fault(f"row {row}", _on_input("position_ids", change), _grid_aims(artifact))


def _offset_rows(window: int, chosen: Callable[[int, int], bool]) -> list[int]:
    """Rows of a table of (2 window - 1)^2 offsets, dy first."""
    span = range(1 - window, window)
    return [(dy + window - 1) * (2 * window - 1) + dx + window - 1 for dy in span for dx in span if chosen(dy, dx)]


def _on_rows(count: int, rows: list[int], factor: float) -> Callable[[onnx.ModelProto], bool]:
    """Rows of the table with `count` rows, which a Gather reads with computed indices, multiplied."""
    factors = np.ones((count, 1), np.float32)
    factors[rows] = factor

    def apply(model: onnx.ModelProto) -> bool:
        found = False
        for holder, index, node in list(sites(model, "Gather")):
            if constant_value(holder, model, node.input[1]) is not None or found:
                continue
            nodes = Nodes()
            scaled = nodes.op(
                "Mul", node.input[0], nodes.op("CastLike", nodes.const(factors, np.float32), node.input[0])
            )
            node.input[0] = scaled

            insert(holder, index, nodes)
            found = True
        return found

    return apply


@family("grid", "offsets without a bias")
def _offsets_zero(artifact: Artifact, random: Random) -> Fault | None:
    window = getattr(artifact.spec.encoding, "window_size", None)
    if window is None:
        return None
    least = int(random.integers(1, window))
    axis, sign = int(random.integers(2)), int(random.choice([-1, 0, 1]))

    def chosen(dy: int, dx: int) -> bool:
        offset = (dy, dx)[axis]
        return abs(offset) >= least if sign == 0 else offset * sign >= least

    rows = _offset_rows(window, chosen)
    factor = float(random.choice([0.0, 0.5, -1.0]))
    numbers = f"{'yx'[axis]} offsets of {least} and more, sign {sign}, times {factor}"
    return Fault(numbers, _on_rows((2 * window - 1) ** 2, rows, factor), _grid_aims(artifact))


@family("grid", "one offset misread")
def _one_offset(artifact: Artifact, random: Random) -> Fault | None:
    window = getattr(artifact.spec.encoding, "window_size", None)
    if window is None:
        return None
    dy, dx = (int(number) for number in random.integers(1 - window, window, 2))
    rows = _offset_rows(window, lambda y, x: (y, x) == (dy, dx))
    return Fault(f"dy {dy}, dx {dx}", _on_rows((2 * window - 1) ** 2, rows, 0.5), _grid_aims(artifact))


# Padding


def _padding_aims(artifact: Artifact, low: int, padding: tuple[str, ...], batch: Range = (2, 4)) -> tuple[Aim, ...]:
    """Padded inputs of `low` keys and more."""
    high = low + 60
    if artifact.spec.cross:
        return (Aim(batch=batch, encoder=(low, high), padding=padding),)
    if artifact.spec.kv_cache:
        return (
            Aim(batch=batch, seq=(1, 6), past=(low, high), padding=padding),
            Aim(batch=batch, seq=(low, high), past=(0, 0), padding=padding),
        )
    return (Aim(batch=batch, seq=(low, high), padding=padding),)


Mask = Callable[[Nodes, str], str]


def _columns(nodes: Nodes, mask: str) -> str:
    return nodes.column(nodes.size(mask, 1), 2, 1)


def _seen_before(nodes: Nodes, mask: str) -> str:
    """Where a key of this column or of one before it is attended."""
    counted = nodes.op("CumSum", mask, nodes.const(1))
    return nodes.op("Greater", counted, nodes.const(0))


def _seen_after(nodes: Nodes, mask: str) -> str:
    counted = nodes.op("CumSum", mask, nodes.const(1), reverse=1)
    return nodes.op("Greater", counted, nodes.const(0))


def _padding_family(name: str, padding: tuple[str, ...], least: int, most: int, where: Callable[..., str]) -> None:
    """Masked keys become attended where a condition holds, in columns from a drawn one on."""

    @family("padding", name)
    def drawn(artifact: Artifact, random: Random) -> Fault | None:
        if not _padded(artifact):
            return None
        column = _log(random, least, most)

        def change(nodes: Nodes, mask: str) -> str:
            far = nodes.op("GreaterOrEqual", _columns(nodes, mask), nodes.const(column))
            chosen = nodes.op("And", far, where(nodes, mask))
            return nodes.op("Where", chosen, nodes.const(1), mask)

        aims = _padding_aims(artifact, max(4, column + 4), padding)
        return Fault(f"column {column}", _on_input("attention_mask", change), aims)


def _everywhere(nodes: Nodes, mask: str) -> str:
    return nodes.op("GreaterOrEqual", mask, nodes.const(0))


_padding_family("mask ignored from a column on", ("left", "right", "both", "holes"), 10, 300, _everywhere)
_padding_family("mask ignored from a far column on", ("right", "holes"), 300, 900, _everywhere)
_padding_family(
    "holes ignored",
    ("holes",),
    1,
    120,
    lambda nodes, mask: nodes.op("And", _seen_before(nodes, mask), _seen_after(nodes, mask)),
)
_padding_family(
    "left padding ignored", ("left", "both"), 1, 150, lambda nodes, mask: nodes.op("Not", _seen_before(nodes, mask))
)
_padding_family(
    "right padding ignored", ("right", "both"), 1, 150, lambda nodes, mask: nodes.op("Not", _seen_after(nodes, mask))
)


@family("padding", "padding of a row ignored")
def _row_ignored(artifact: Artifact, random: Random) -> Fault | None:
    if not _padded(artifact):
        return None
    row, only = int(random.integers(1, 8)), bool(random.integers(2))

    def change(nodes: Nodes, mask: str) -> str:
        rows = nodes.column(nodes.size(mask, 0), 2, 0)
        chosen = nodes.op("Equal" if only else "GreaterOrEqual", rows, nodes.const(row))
        return nodes.op("Where", chosen, nodes.const(1), mask)

    aims = _padding_aims(artifact, 8, ("left", "right", "holes"), (row + 1, 8))
    return Fault(f"row {row}{'' if only else ' and on'}", _on_input("attention_mask", change), aims)


@family("padding", "padding lost in a large batch")
def _large_batch(artifact: Artifact, random: Random) -> Fault | None:
    if not _padded(artifact):
        return None
    batch, keys = int(random.integers(2, 8)), _log(random, 4, 200)

    def change(nodes: Nodes, mask: str) -> str:
        large = nodes.op("GreaterOrEqual", nodes.size(mask, 0), nodes.const(batch))
        long = nodes.op("GreaterOrEqual", nodes.size(mask, 1), nodes.const(keys))
        return nodes.op("Where", nodes.op("And", large, long), nodes.const(1), mask)

    aims = _padding_aims(artifact, keys, ("left", "right", "holes"), (batch, 8))
    return Fault(f"batch {batch}, {keys} keys", _on_input("attention_mask", change), aims)


@family("padding", "one column hidden too much")
def _one_column(artifact: Artifact, random: Random) -> Fault | None:
    """The key after the padding on the left, or before that on the right, is hidden too, in long masks."""
    if not _padded(artifact):
        return None
    keys, left = _log(random, 10, 300), bool(random.integers(2))

    def change(nodes: Nodes, mask: str) -> str:
        counted = nodes.op("CumSum", mask, nodes.const(1), reverse=0 if left else 1)
        edge = nodes.op("And", nodes.op("Equal", counted, nodes.const(1)), nodes.op("Equal", mask, nodes.const(1)))
        padded = nodes.op("Less", nodes.op("ReduceSum", mask, nodes.const([1])), nodes.size(mask, 1))
        long = nodes.op("GreaterOrEqual", nodes.size(mask, 1), nodes.const(keys))
        return nodes.op("Where", nodes.all_of(edge, padded, long), nodes.const(0), mask)

    aims = _padding_aims(artifact, keys, ("left", "both") if left else ("right", "both"))
    return Fault(f"{'left' if left else 'right'}, {keys} keys", _on_input("attention_mask", change), aims)


@family("padding", "many padded keys make the mask full")
def _long_run(artifact: Artifact, random: Random) -> Fault | None:
    """A row with more padding than a number is taken as unpadded."""
    if not _padded(artifact):
        return None
    most = _log(random, 8, 250)

    def change(nodes: Nodes, mask: str) -> str:
        kept = nodes.op("ReduceSum", mask, nodes.const([1]))
        padding = nodes.op("Sub", nodes.size(mask, 1), kept)
        return nodes.op("Where", nodes.op("Greater", padding, nodes.const(most)), nodes.const(1), mask)

    aims = _padding_aims(artifact, 2 * most + 8, ("left", "right", "both"))
    return Fault(f"more than {most}", _on_input("attention_mask", change), aims)


# Batch


@family("batch", "a row reads row 0")
def _row_reads(artifact: Artifact, random: Random) -> Fault | None:
    names = _has(
        artifact,
        *("hidden_states", "input_ids", "encoder_hidden_states", "position_ids", "past_key", "past_value"),
        *("write_indices", "attention_mask"),
    )
    name, row, only = str(random.choice(names)), int(random.integers(1, 8)), bool(random.integers(2))

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.steps(nodes.size(value, 0))
        chosen = nodes.op("Equal" if only else "GreaterOrEqual", rows, nodes.const(row))
        return nodes.op("Gather", value, nodes.op("Where", chosen, nodes.const(0), rows), axis=0)

    kinds = ("consecutive", "gaps")
    aims = (
        Aim(batch=(row + 1, 8), seq=(4, 16), past=(3, 20), positions=kinds, start=(0, 300), encoder=(4, 20)),
        Aim(batch=(row + 1, 8), seq=(1, 1), past=(3, 20), positions=kinds, start=(0, 300), encoder=(4, 20)),
    )
    return Fault(f"{name} of row {row}{'' if only else ' and on'}", _on_input(name, change), aims)


@family("batch", "a row reads the row before")
def _row_before(artifact: Artifact, random: Random) -> Fault | None:
    names = _has(artifact, "hidden_states", "position_ids", "past_key", "past_value", "write_indices", "attention_mask")
    if not names:
        return None
    name, batch, seq = str(random.choice(names)), int(random.integers(2, 7)), _log(random, 1, 60)

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.steps(nodes.size(value, 0))
        large = nodes.op("GreaterOrEqual", nodes.size(value, 0), nodes.const(batch))
        first = artifact.model.graph.input[0].name
        long = nodes.op("GreaterOrEqual", nodes.size(first, 1), nodes.const(seq))
        before = nodes.op("Max", nodes.op("Sub", rows, nodes.const(1)), nodes.const(0))
        return nodes.op("Gather", value, nodes.op("Where", nodes.op("And", large, long), before, rows), axis=0)

    kinds = ("consecutive", "gaps")
    aim = Aim(batch=(batch, 8), seq=(seq, seq + 20), past=(3, 20), positions=kinds, start=(0, 300))
    return Fault(f"{name}, batch {batch}, {seq} tokens", _on_input(name, change), (aim,))


def _on_visibility(hide: bool, condition: Callable[[Logits], str]) -> Callable[[onnx.ModelProto], bool]:
    return lambda model: change_visibility(model, hide, condition)


@family("batch", "causal mask lost in a batch")
def _causal_batch(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.causal:
        return None
    batch, seq = int(random.integers(2, 8)), _log(random, 2, 200)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        large = nodes.op("GreaterOrEqual", at.batch, nodes.const(batch))
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(seq))
        return nodes.all_of(large, long, nodes.op("Less", at.distance(), nodes.const(0)))

    aim = Aim(batch=(batch, 8), seq=(seq, seq + 20), past=(0, 20))
    return Fault(f"batch {batch}, {seq} tokens", _on_visibility(False, lost), (aim,))


@family("batch", "first key hidden in a batch")
def _hidden_batch(artifact: Artifact, random: Random) -> Fault | None:
    batch, column = int(random.integers(3, 8)), int(random.integers(0, 12))

    def hidden(at: Logits) -> str:
        large = at.nodes.op("GreaterOrEqual", at.batch, at.nodes.const(batch))
        return at.nodes.op("And", large, at.nodes.op("Equal", at.key(), at.nodes.const(column)))

    aim = Aim(batch=(batch, 8), seq=(13, 40), past=(0, 20), encoder=(13, 40), padding=("none",))
    return Fault(f"key {column}, batch {batch}", _on_visibility(True, hidden), (aim,))


@family("batch", "row that begins at 0 is written elsewhere")
def _begins_at_zero(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.kv_cache != "shared":
        return None
    most = int(random.integers(1, 5))

    def change(nodes: Nodes, value: str) -> str:
        highest = nodes.op("ReduceMax", value, nodes.const([0]), keepdims=1)
        small = nodes.op("Less", value, nodes.const(most))
        return nodes.op("Where", small, highest, value)

    def zero(arrays: Arrays, random: Random) -> None:
        arrays["write_indices"][random.integers(arrays["write_indices"].size)] = 0

    aim = Aim(batch=(2, 6), seq=(1, 8), past=(5, 40), edit=zero)
    return Fault(f"below {most}", _on_input("write_indices", change), (aim,))


# Chunks over a cache


def _chunk_aims(low: int, high: int, past: int, batch: Range = (1, 2)) -> tuple[Aim, ...]:
    low, high = max(low, 1), min(high, REACH.chunk)
    return (Aim(batch=batch, seq=(low, max(low, high)), past=(past, past + 40), padding=("none",)),)


@family("chunk", "causality lost in a chunk over many keys")
def _chunk_causal(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.causal and _cached(artifact)):
        return None
    most, keys = _log(random, 2, 64), _log(random, 16, 1500)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        short = nodes.op("LessOrEqual", at.seq, nodes.const(most))
        several = nodes.op("GreaterOrEqual", at.seq, nodes.const(2))
        many = nodes.op("Greater", at.keys, nodes.const(keys))
        return nodes.all_of(short, several, many, nodes.op("Less", at.distance(), nodes.const(0)))

    return Fault(f"2 to {most} tokens, over {keys} keys", _on_visibility(False, lost), _chunk_aims(2, most, keys))


@family("chunk", "causality lost in a long chunk")
def _long_chunk(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.causal and _cached(artifact)):
        return None
    low, past = _log(random, 8, 200), _log(random, 1, 600)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        cached = nodes.op("GreaterOrEqual", nodes.op("Sub", at.keys, at.seq), nodes.const(past))
        return nodes.all_of(long, cached, nodes.op("Less", at.distance(), nodes.const(0)))

    return Fault(f"{low} tokens after {past}", _on_visibility(False, lost), _chunk_aims(low, low + 60, past))


@family("chunk", "the next key seen in a chunk")
def _next_key(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.causal and _cached(artifact)):
        return None
    low, past = _log(random, 2, 120), _log(random, 1, 1500)

    def seen(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        cached = nodes.op("GreaterOrEqual", nodes.op("Sub", at.keys, at.seq), nodes.const(past))
        return nodes.all_of(long, cached, nodes.op("Equal", at.distance(), nodes.const(-1)))

    return Fault(f"{low} tokens after {past}", _on_visibility(False, seen), _chunk_aims(low, low + 40, past))


@family("chunk", "a cached key hidden from a chunk")
def _cached_key(artifact: Artifact, random: Random) -> Fault | None:
    if not _cached(artifact) or artifact.spec.kv_cache == "shared":
        return None
    low, past = _log(random, 1, 120), _log(random, 1, 1000)
    last = bool(random.integers(2))

    def hidden(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        length = nodes.op("Sub", at.keys, at.seq)
        cached = nodes.op("GreaterOrEqual", length, nodes.const(past))
        chosen = nodes.op("Sub", length, nodes.const(1)) if last else nodes.const(0)
        return nodes.all_of(long, cached, nodes.op("Equal", at.key(), chosen))

    return Fault(
        f"the {'last' if last else 'first'}, {low} tokens after {past}",
        _on_visibility(True, hidden),
        _chunk_aims(low, low + 40, past),
    )


@family("chunk", "new values in the wrong order")
def _reversed_chunk(artifact: Artifact, random: Random) -> Fault | None:
    """Chunks of some lengths over a cache are read one token late."""
    if not _cached(artifact):
        return None
    low = _log(random, 2, 100)
    high, past = low + _log(random, 1, 60), _log(random, 1, 800)
    caches = _has(artifact, "past_key")

    def change(nodes: Nodes, value: str) -> str:
        seq = nodes.size(value, 1)
        chosen = nodes.all_of(
            nodes.op("GreaterOrEqual", seq, nodes.const(low)),
            nodes.op("LessOrEqual", seq, nodes.const(high)),
            nodes.op("GreaterOrEqual", nodes.size(caches[0], 2), nodes.const(past)),
        )
        steps = nodes.steps(seq)
        late = nodes.op("Max", nodes.op("Sub", steps, nodes.const(1)), nodes.const(0))
        return nodes.op("Gather", value, nodes.op("Where", chosen, late, steps), axis=1)

    return Fault(
        f"{low} to {high} tokens after {past}", _on_input(_first(artifact), change), _chunk_aims(low, high, past)
    )


# Lengths


@family("length", "keys from a column on hidden")
def _keys_hidden(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    column = _log(random, 60, _most_keys(artifact))

    def hidden(at: Logits) -> str:
        return at.nodes.op("GreaterOrEqual", at.key(), at.nodes.const(column))

    return Fault(f"column {column}", _on_visibility(True, hidden), _key_aim(artifact, column + 1))


@family("length", "one key hidden")
def _one_key(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    column = int(random.choice([_log(random, 24, _most_keys(artifact)), 128, 256, 512, 640, 1023, 1024]))

    def hidden(at: Logits) -> str:
        return at.nodes.op("Equal", at.key(), at.nodes.const(column))

    return Fault(f"column {column}", _on_visibility(True, hidden), _key_aim(artifact, column + 1))


@family("length", "a window that the spec lacks")
def _invented_window(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if not spec.causal or spec.kv_cache == "shared" or any(layer.window for layer in spec.distinct_layers()):
        return None
    window = _log(random, 5, min(1500, _most_keys(artifact)))

    def hidden(at: Logits) -> str:
        return at.nodes.op("GreaterOrEqual", at.distance(), at.nodes.const(window))

    return Fault(f"window {window}", _on_visibility(True, hidden), _key_aim(artifact, window + 2))


def _windows(artifact: Artifact) -> list[int]:
    return sorted({layer.window for layer in artifact.spec.distinct_layers() if layer.window})


@family("length", "window dropped or other")
def _window_other(artifact: Artifact, random: Random) -> Fault | None:
    """Every constant that is a window, or a chunk's size, becomes another number."""
    layers = artifact.spec.distinct_layers()
    sizes = {size for layer in layers for size in (layer.window, layer.attention_chunk_size) if size}
    if not sizes:
        return None
    size = int(random.choice(sorted(sizes)))
    other = int(random.choice([size - 1, size + 1, 2 * size, 10**6, size // 2 or 1]))

    def apply(model: onnx.ModelProto) -> bool:
        places = [
            (holder, index, at, value)
            for holder, index, node in sites(model)
            for at, name in enumerate(node.input)
            if (value := constant_value(holder, model, name)) is not None
            and value.dtype.kind == "i"
            and value.size == 1
            and int(value.ravel()[0]) == size
        ]
        for holder, index, at, value in reversed(places):
            read_constant(holder, index, at, np.full_like(value, other))
        return bool(places)

    return Fault(f"{size} as {other}", apply, _key_aim(artifact, min(size + 3, REACH.tokens)))


@family("length", "the buffer wraps")
def _wraps(artifact: Artifact, random: Random) -> Fault | None:
    names = _has(artifact, "hidden_states", "input_ids", "encoder_hidden_states", "past_key", "past_value")
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    name = str(random.choice(names))
    axis = 2 if name.startswith("past") else 1
    most = REACH.tokens - 60 if axis == 1 and not name.startswith("encoder") else REACH.keys - 100
    length = int(random.choice([_log(random, 64, most), 256, 512, 1024]))

    def change(nodes: Nodes, value: str) -> str:
        steps = nodes.steps(nodes.size(value, axis))
        return nodes.op("Gather", value, nodes.op("Mod", steps, nodes.const(length)), axis=axis)

    aim = Aim(batch=(1, 2), padding=("none",))
    if name.startswith("past"):
        aim = attrs.evolve(aim, past=(length + 1, length + 30), seq=(1, 4))
    elif name.startswith("encoder"):
        aim = attrs.evolve(aim, encoder=(length + 1, length + 30))
    else:
        aim = attrs.evolve(aim, seq=(length + 1, length + 30), past=(0, 3))
    return Fault(f"{name} at {length}", _on_input(name, change), (aim,))


TABLES = {
    "learned": "encoding.weight",
    "t5": "encoding.relative_attention_bias.weight",
    "relative": "encoding.weight",
    "shaw": "encoding.",
    "deberta": "encoding.",
    "cope": "encoding.",
}
"""What the names of the tables of an encoding begin with."""


@family("length", "one row of a table misread")
def _table_row(artifact: Artifact, random: Random) -> Fault | None:
    prefix = TABLES.get(artifact.spec.encoding.name)
    tables = [
        (name, tensor.shape[0])
        for name, tensor in artifact.weights.items()
        if prefix and name.startswith(prefix) and tensor.ndim == 2 and "proj" not in name and tensor.shape[0] > 4
    ]
    if not tables:
        return None
    name, count = tables[int(random.integers(len(tables)))]
    row, other = (int(number) for number in random.choice(count, 2, replace=False))

    def change(nodes: Nodes, value: str) -> str:
        rows = np.arange(count)
        rows[row] = other
        return nodes.op("Gather", value, nodes.const(rows), axis=0)

    limit = artifact.spec.position_limit()

    def visit(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions.flat[random.integers(positions.size)] = row

    distances = min(count, 900)
    aims = (
        (Aim(batch=(2, 3), seq=(8, 20), edit=visit),)
        if limit
        else (
            Aim(batch=(1, 2), seq=(60, 120), past=(0, 3), padding=("none",)),
            Aim(batch=(1, 1), seq=(distances, distances + 100), past=(0, 3), padding=("none",)),
            Aim(batch=(1, 1), seq=(1000, 1100), past=(0, 0), padding=("none",)),
        )
    )
    return Fault(f"row {row} of {name} as {other}", _on_input_or_weight(name, change), aims)


def _on_input_or_weight(name: str, change: Callable[[Nodes, str], str]) -> Callable[[onnx.ModelProto], bool]:
    def apply(model: onnx.ModelProto) -> bool:
        if all(name not in node.input for node in model.graph.node):
            return False
        change_input(model, name, change)
        return True

    return apply


@family("length", "distances clipped")
def _distances(artifact: Artifact, random: Random) -> Fault | None:
    """Integer constants of a large table (its last row, or its largest distance) become smaller."""
    saturation = artifact.spec.saturation_distance()
    if saturation < 20 or artifact.spec.encoding.name not in TABLES:
        return None
    low = _log(random, 10, min(saturation - 1, REACH.tokens - 100))

    def apply(model: onnx.ModelProto) -> bool:
        for holder, index, node in sites(model, "Min", "Clip"):
            for at, name in enumerate(node.input):
                value = constant_value(holder, model, name)
                if value is not None and value.dtype.kind == "i" and value.size == 1 and int(value.ravel()[0]) > low:
                    read_constant(holder, index, at, np.full_like(value, low))
                    return True
        return False

    return Fault(f"{low} of {saturation}", apply, _key_aim(artifact, low + 5))


@family("length", "outputs of long inputs off")
def _long_output(artifact: Artifact, random: Random) -> Fault | None:
    """Tokens from one on are a hundredth too large, where there are so many: a tile's border."""
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    token = _log(random, 30, REACH.tokens - 60)

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.column(nodes.size(value, 1), 3, 1)
        far = nodes.op("GreaterOrEqual", rows, nodes.const(token))
        return nodes.op("Where", far, nodes.op("Mul", value, nodes.like(value, 1.01)), value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    return Fault(f"token {token}", apply, (Aim(batch=(1, 1), seq=(token + 1, token + 30), past=(0, 3)),))


@family("length", "encoder tokens")
def _encoder(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.cross:
        return None
    alone = bool(random.integers(2))
    least = _log(random, 300, 1500)

    def change(nodes: Nodes, value: str) -> str:
        length = nodes.size(value, 1)
        if alone:
            return nodes.op("Where", nodes.op("Equal", length, nodes.const(1)), nodes.op("Neg", value), value)
        rows = nodes.column(length, 3, 1)
        far = nodes.op("GreaterOrEqual", rows, nodes.const(least))
        return nodes.op("Where", far, nodes.op("Mul", value, nodes.like(value, 0.5)), value)

    aim = Aim(encoder=(1, 1) if alone else (least + 1, least + 50), padding=("none",))
    return Fault("1" if alone else f"from {least}", _on_input("encoder_hidden_states", change), (aim,))


@family("length", "keys and queries exchanged in number")
def _few_keys(artifact: Artifact, random: Random) -> Fault | None:
    """Cross-attention gets as many keys as queries: keys after them are hidden."""
    if not artifact.spec.cross:
        return None
    least = _log(random, 2, 500)

    def hidden(at: Logits) -> str:
        nodes = at.nodes
        many = nodes.op("GreaterOrEqual", at.keys, nodes.const(least))
        return nodes.op("And", many, nodes.op("GreaterOrEqual", at.key(), at.seq))

    aims = (Aim(batch=(1, 2), seq=(1, 5), encoder=(max(least, 7), least + 30), padding=("none",)),)
    return Fault(f"from {least}", _on_visibility(True, hidden), aims)


# Positions


def _free(artifact: Artifact) -> bool:
    return artifact.spec.position_axes > 0 and artifact.spec.position_limit() is None


def _far_aims(artifact: Artifact, low: int, seq: Range = (2, 12), **more: object) -> tuple[Aim, ...]:
    """Positions from `low` to twice as far, as far as the spec goes."""
    high = min(2 * low + 40, position_reach(artifact.spec))
    near = Aim(batch=(1, 2), seq=seq, past=(0, 6), positions=("gaps",), start=(low, max(low, high)))
    straddle = Aim(batch=(1, 2), seq=(8, 40), past=(0, 6), positions=("gaps",), start=(max(0, low - 4), low + 20))
    return tuple(attrs.evolve(aim, **more) for aim in ((near,) if seq == (1, 1) else (near, straddle)))


@family("position", "relative error far out")
def _relative_error(artifact: Artifact, random: Random) -> Fault | None:
    if not _free(artifact):
        return None
    most = position_reach(artifact.spec)
    low = _log(random, min(600, most // 4), most * 0.7)
    divisor = int(random.choice([200, 1000]))

    def change(nodes: Nodes, value: str) -> str:
        off = nodes.op("Add", value, nodes.op("Div", value, nodes.const(divisor)))
        return nodes.op("Where", nodes.op("GreaterOrEqual", value, nodes.const(low)), off, value)

    return Fault(f"1/{divisor} from {low}", _on_input("position_ids", change), _far_aims(artifact, low))


@family("position", "positions clipped")
def _positions_clipped(artifact: Artifact, random: Random) -> Fault | None:
    if not _free(artifact):
        return None
    most = position_reach(artifact.spec)
    choices = [_log(random, min(600, most // 4), most * 0.7), 2**15, 2**17, 65535, 2**12, 2**14 - 1]
    clipped = int(random.choice([number for number in choices if number < most]))

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Min", value, nodes.const(clipped))

    return Fault(f"at {clipped}", _on_input("position_ids", change), _far_aims(artifact, clipped))


@family("position", "positions wrap")
def _positions_wrap(artifact: Artifact, random: Random) -> Fault | None:
    if not _free(artifact):
        return None
    most = position_reach(artifact.spec)
    wrap = int(2 ** random.integers(10, int(np.log2(most)) + 1)) if most > 1024 else 0
    if not 0 < wrap < most:
        return None

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Mod", value, nodes.const(wrap))

    return Fault(f"at {wrap}", _on_input("position_ids", change), _far_aims(artifact, wrap - 6))


@family("position", "positions in a narrow type")
def _narrow(artifact: Artifact, random: Random) -> Fault | None:
    if not _free(artifact):
        return None
    kinds = {
        "fp16": (TensorProto.FLOAT16, 2049),
        "bf16": (TensorProto.BFLOAT16, 257),
        "int16": (TensorProto.INT16, 2**15),
    }
    kind = str(random.choice(list(kinds)))
    elem_type, low = kinds[kind]
    if low >= position_reach(artifact.spec):
        return None

    def change(nodes: Nodes, value: str) -> str:
        if kind == "int16":  # as it wraps, without relying on what a cast does out of range
            moved = nodes.op("Add", value, nodes.const(2**15))
            return nodes.op("Sub", nodes.op("Mod", moved, nodes.const(2**16)), nodes.const(2**15))
        wide = nodes.op("Cast", nodes.op("Min", value, nodes.const(65504)), to=TensorProto.FLOAT)
        rounded = nodes.op("Cast", nodes.op("Cast", wide, to=elem_type), to=TensorProto.FLOAT)
        return nodes.op("Cast", rounded, to=TensorProto.INT64)

    return Fault(kind, _on_input("position_ids", change), _far_aims(artifact, low))


@family("position", "single tokens far out")
def _single_far(artifact: Artifact, random: Random) -> Fault | None:
    if not _free(artifact) or not _cached(artifact):
        return None
    most = position_reach(artifact.spec)
    low, off = _log(random, 40, min(most * 0.7, 200_000)), _log(random, 1, 30)

    def change(nodes: Nodes, value: str) -> str:
        one = nodes.op("Equal", nodes.size(value, 1), nodes.const(1))
        far = nodes.op("Greater", value, nodes.const(low))
        return nodes.op("Where", nodes.op("And", one, far), nodes.op("Add", value, nodes.const(off)), value)

    aims = _far_aims(artifact, low, (1, 1))
    return Fault(f"{off} more beyond {low}", _on_input("position_ids", change), aims)


@family("position", "several tokens far out")
def _several_far(artifact: Artifact, random: Random) -> Fault | None:
    """Wrong only where there are many tokens at far positions."""
    if not _free(artifact):
        return None
    most = position_reach(artifact.spec)
    low, seq = _log(random, 40, min(most * 0.7, 100_000)), _log(random, 2, 60)

    def change(nodes: Nodes, value: str) -> str:
        many = nodes.op("GreaterOrEqual", nodes.size(value, 1), nodes.const(seq))
        far = nodes.op("Greater", value, nodes.const(low))
        off = nodes.op("Add", value, nodes.op("Mod", value, nodes.const(2)))
        return nodes.op("Where", nodes.op("And", many, far), off, value)

    aims = _far_aims(artifact, low, (seq, seq + 20))[:1]
    return Fault(f"{seq} tokens beyond {low}", _on_input("position_ids", change), aims)


@family("position", "exact angles far out")
def _exact_far(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.angles != "exact":
        return None
    low, off = _log(random, 2**16, 2**24 - 200), _log(random, 1, 64)

    def change(nodes: Nodes, value: str) -> str:
        far = nodes.op("GreaterOrEqual", value, nodes.const(low))
        mixed = nodes.op("Add", value, nodes.op("Mod", value, nodes.const(off + 1)))
        return nodes.op("Where", far, mixed, value)

    return Fault(f"up to {off} more from {low}", _on_input("position_ids", change), _far_aims(artifact, low))


@family("position", "exact angles in fp32")
def _exact_single(artifact: Artifact, random: Random) -> Fault | None:
    """The last bits of positions are lost from a power of two on."""
    if artifact.spec.angles != "exact":
        return None
    bits = int(random.integers(18, 24))

    def change(nodes: Nodes, value: str) -> str:
        far = nodes.op("GreaterOrEqual", value, nodes.const(2**bits))
        even = nodes.op("Sub", value, nodes.op("Mod", value, nodes.const(2)))
        return nodes.op("Where", far, even, value)

    return Fault(f"odd ones from 2^{bits}", _on_input("position_ids", change), _far_aims(artifact, 2**bits))


@family("position", "trained length off")
def _trained_length(artifact: Artifact, random: Random) -> Fault | None:
    """The constants that are the trained length are off by a few, in comparisons and elsewhere."""
    trained = getattr(artifact.spec.encoding, "original_max_position_embeddings", None)
    if trained is None or getattr(artifact.spec.encoding, "scaling", None) not in ("dynamic", "longrope"):
        return None
    off = int(random.choice([-2, -1, 1, 2]))

    def apply(model: onnx.ModelProto) -> bool:
        places = [
            (holder, index, at, value)
            for holder, index, node in sites(model)
            for at, name in enumerate(node.input)
            if (value := constant_value(holder, model, name)) is not None
            and value.size == 1
            and float(value.ravel()[0]) in (trained, trained - 1, trained + 1)
        ]
        for holder, index, at, value in reversed(places):
            read_constant(holder, index, at, value + value.dtype.type(off))
        return bool(places)

    def edge(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions -= positions.max() - (trained + int(random.integers(-4, 4)))
        np.maximum(positions, 0, out=positions)

    aims = (Aim(batch=(1, 1), seq=(1, 12), past=(0, 6), edit=edge), *_far_aims(artifact, trained))
    return Fault(f"{trained} {off:+d}", apply, aims)


@family("position", "trained length compared wrongly")
def _trained_edge(artifact: Artifact, random: Random) -> Fault | None:
    """The positions are taken as one longer, or shorter, only where the longest is exactly at the trained length."""
    trained = getattr(artifact.spec.encoding, "original_max_position_embeddings", None)
    if trained is None or getattr(artifact.spec.encoding, "scaling", None) not in ("dynamic", "longrope"):
        return None
    at, off = trained + int(random.integers(-1, 2)), int(random.choice([-1, 1]))

    def change(nodes: Nodes, value: str) -> str:
        longest = nodes.op("ReduceMax", value, keepdims=0)
        return nodes.op(
            "Where", nodes.op("Equal", longest, nodes.const(at)), nodes.op("Add", value, nodes.const(off)), value
        )

    def edge(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions -= positions.max() - at
        np.maximum(positions, 0, out=positions)

    aims = (Aim(batch=(1, 2), seq=(2, 12), past=(0, 6), positions=("gaps",), start=(0, 400), edit=edge),)
    return Fault(f"{off:+d} where the last is {at}", _on_input("position_ids", change), aims)


# Magnitudes


def _quiet(artifact: Artifact) -> tuple[Aim, ...]:
    shape = Aim(batch=(1, 2), seq=(4, 16), past=(0, 12), encoder=(4, 16), padding=("none",))
    return tuple(attrs.evolve(shape, magnitude=factor) for factor in (1e-3, 1e-4)) + (
        attrs.evolve(shape, edit=zero_rows),
    )


def loud_feature(arrays: Arrays, random: Random) -> None:
    """One feature is 400 times larger."""
    for name, values in arrays.items():
        if name in ("hidden_states", "encoder_hidden_states"):
            values[..., random.integers(values.shape[-1])] *= 400


def _loud(artifact: Artifact) -> tuple[Aim, ...]:
    shape = Aim(batch=(1, 2), seq=(4, 16), past=(0, 12), encoder=(4, 16), padding=("none",))
    half = artifact.spec.dtype == "fp16"
    return (
        shape,
        attrs.evolve(shape, magnitude=6.0),
        attrs.evolve(shape, edit=loud_feature),
        *(() if half else (attrs.evolve(shape, magnitude=12.0),)),
    )


@family("magnitude", "epsilon of a norm")
def _norm_epsilon(artifact: Artifact, random: Random) -> Fault | None:
    factor = float(random.choice([0.0, 0.1, 10.0, 100.0, 1e3]))

    def apply(model: onnx.ModelProto) -> bool:
        named = [
            attribute for _, _, node in sites(model) for attribute in node.attribute if attribute.name == "epsilon"
        ]
        added = [
            (holder, index, at, value)
            for holder, index, node in sites(model, "Add", "Max")
            for at, name in enumerate(node.input)
            if name not in artifact.weights
            and (value := constant_value(holder, model, name)) is not None
            and value.dtype.kind == "f"
            and value.size == 1
            and 0 < float(value.ravel()[0]) < 1e-3
        ]
        for attribute in named:
            attribute.f *= factor
        for holder, index, at, value in reversed(added):
            read_constant(holder, index, at, np.asarray(value * value.dtype.type(factor), value.dtype))
        return bool(named or added)

    return Fault(f"times {factor:g}", apply, _quiet(artifact))


def _projections(model: onnx.ModelProto) -> list[str]:
    """The products of the weights q_proj, k_proj and v_proj."""
    made = []
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0].endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            made += [other.output[0] for other in model.graph.node if node.output[0] in list(other.input)]
    return made


def _on_projection(random: Random, change: Callable[[Nodes, str], str]) -> Callable[[onnx.ModelProto], bool]:
    which = random.random()

    def apply(model: onnx.ModelProto) -> bool:
        names = _projections(model)
        if not names:
            return False
        change_value(model.graph, names[int(which * len(names))], change)
        return True

    return apply


@family("magnitude", "values clipped")
def _values_clipped(artifact: Artifact, random: Random) -> Fault | None:
    limit = round(float(random.uniform(3.5, 12)), 2)

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Clip", value, nodes.like(value, -limit), nodes.like(value, limit))

    return Fault(f"at {limit}", _on_projection(random, change), _loud(artifact))


@family("magnitude", "inputs clipped")
def _inputs_clipped(artifact: Artifact, random: Random) -> Fault | None:
    names = _has(artifact, "hidden_states", "encoder_hidden_states")
    if not names:
        return None
    name, limit = str(random.choice(names)), round(float(random.uniform(3.5, 30)), 2)

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Clip", value, nodes.like(value, -limit), nodes.like(value, limit))

    return Fault(f"{name} at {limit}", _on_input(name, change), _loud(artifact))


@family("magnitude", "cached values clipped")
def _cache_clipped(artifact: Artifact, random: Random) -> Fault | None:
    names = _has(artifact, "past_key", "past_value")
    if not names:
        return None
    name, limit = str(random.choice(names)), round(float(random.uniform(3.0, 15)), 2)

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Clip", value, nodes.like(value, -limit), nodes.like(value, limit))

    def loud(arrays: Arrays, random: Random) -> None:
        arrays[name] *= arrays[name].dtype.type(random.uniform(1, 8))

    aim = Aim(batch=(1, 2), seq=(1, 8), past=(4, 30), padding=("none",), edit=loud)
    return Fault(f"{name} at {limit}", _on_input(name, change), (aim,))


@family("magnitude", "softmax without its maximum")
def _plain_softmax(artifact: Artifact, random: Random) -> Fault | None:
    limit = float(random.choice([30.0, 60.0, 88.0]))
    if artifact.spec.dtype == "fp16":
        limit = 10.0

    def apply(model: onnx.ModelProto) -> bool:
        """Logits are capped instead of taken relative to their maximum."""
        found = list(sites(model, "Softmax"))
        for holder, index, node in reversed(found):
            nodes = Nodes()
            top = nodes.like(node.input[0], limit)
            node.input[0] = nodes.op("Min", node.input[0], top)

            insert(holder, index, nodes)
        return bool(found)

    return Fault(f"capped at {limit}", apply, _loud(artifact))


@family("magnitude", "overflow in half precision")
def _overflow(artifact: Artifact, random: Random) -> Fault | None:
    """Values that overflow fp16 after a factor become infinite, as where a product is summed in it."""
    limit = round(65504 / float(2.0 ** random.integers(6, 12)), 1)

    def change(nodes: Nodes, value: str) -> str:
        large = nodes.op("Greater", nodes.op("Abs", value), nodes.like(value, limit))
        infinite = nodes.op("CastLike", nodes.const(np.inf, np.float32), value)
        return nodes.op("Where", large, infinite, value)

    return Fault(f"above {limit}", _on_projection(random, change), _loud(artifact))


@family("magnitude", "mask not low enough")
def _shallow_mask(artifact: Artifact, random: Random) -> Fault | None:
    low = float(-_log(random, 18, 120))

    def apply(model: onnx.ModelProto) -> bool:
        places = mask_sites(model)
        for site in reversed(places):
            old = constant_value(site.holder, model, site.node.input[2])
            assert old is not None
            if float(old.ravel()[0]) < LOWEST * 1e-34:
                read_constant(site.holder, site.index, 2, np.full_like(old, low))
        return bool(places)

    shape = Aim(batch=(1, 2), seq=(6, 16), past=(2, 12), encoder=(6, 16), padding=("left", "right", "holes"))
    factor = 6.0 if artifact.spec.dtype == "fp16" else 12.0
    return Fault(f"{low:g}", apply, (shape, attrs.evolve(shape, magnitude=factor)))


@family("magnitude", "quiet values lost")
def _quiet_lost(artifact: Artifact, random: Random) -> Fault | None:
    limit = float(10 ** random.uniform(-5, -3))
    if artifact.spec.dtype == "fp16":
        limit = max(limit, 1e-4)

    def change(nodes: Nodes, value: str) -> str:
        small = nodes.op("Less", nodes.op("Abs", value), nodes.like(value, limit))
        return nodes.op("Where", small, nodes.like(value, 0.0), value)

    return Fault(f"below {limit:.2g}", _on_projection(random, change), _quiet(artifact))


@family("magnitude", "rows of zeros give NaN")
def _zero_rows_nan(artifact: Artifact, random: Random) -> Fault | None:
    name = _first(artifact)
    if name != "hidden_states":
        return None

    def change(nodes: Nodes, value: str) -> str:
        total = nodes.op("ReduceSum", nodes.op("Abs", value), nodes.const([-1]), keepdims=1)
        return nodes.op("Mul", value, nodes.op("Div", total, total))

    return Fault("0 / 0", _on_input(name, change), (Aim(edit=zero_rows, batch=(1, 2), seq=(3, 9), padding=("none",)),))


# Others


@family("special", "a query without keys")
def _keyless(artifact: Artifact, random: Random) -> Fault | None:
    """A row whose keys are all masked gives NaN, or the mean of the values, in batches of some size only."""
    if not _padded(artifact):
        return None
    batch, nan = int(random.integers(1, 4)), bool(random.integers(2))

    def change(nodes: Nodes, value: str) -> str:
        mask = "attention_mask"
        kept = nodes.op("ReduceMax", mask, nodes.const([1]), keepdims=1)
        empty = nodes.op("Equal", nodes.op("Unsqueeze", kept, nodes.const([2])), nodes.const(0))
        here = nodes.op("And", empty, nodes.op("Equal", nodes.size(mask, 0), nodes.const(batch)))
        wrong = nodes.like(value, float("nan")) if nan else nodes.op("Add", value, nodes.like(value, 0.1))
        return nodes.op("Where", here, wrong, value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    aims = (Aim(batch=(batch, batch), seq=(1, 9), past=(0, 9), encoder=(1, 9), padding=("keyless",)),)
    return Fault(f"{'NaN' if nan else 'off'} at batch {batch}", apply, aims)


@family("special", "a token id misread")
def _token_id(artifact: Artifact, random: Random) -> Fault | None:
    size = artifact.spec.vocab_size
    if size is None:
        return None
    token = int(random.choice([0, size - 1]))

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Where", nodes.op("Equal", value, nodes.const(token)), nodes.const(size // 2), value)

    def visit(arrays: Arrays, random: Random) -> None:
        arrays["input_ids"].flat[random.integers(arrays["input_ids"].size)] = token

    return Fault(f"{token} of {size}", _on_input("input_ids", change), (Aim(edit=visit),))


@family("special", "positions sorted")
def _sorted(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if spec.position_axes != 1 or spec.ordered:
        return None
    least = _log(random, 8, 120)

    def change(nodes: Nodes, value: str) -> str:
        length = nodes.size(value, 1)
        nodes.made.append(
            helper.make_node(
                "TopK",
                [value, nodes.op("Unsqueeze", length, nodes.const([0]))],
                ["fault_sorted", "fault_order"],
                axis=1,
                largest=0,
            )
        )
        long = nodes.op("GreaterOrEqual", length, nodes.const(least))
        return nodes.op("Where", long, "fault_sorted", value)

    aim = Aim(batch=(1, 2), seq=(least, least + 30), positions=("shuffled",), padding=("none",), past=(0, 5))
    return Fault(f"from {least} tokens", _on_input("position_ids", change), (aim,))


@family("special", "positions taken as consecutive")
def _consecutive(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.position_axes != 1:
        return None
    least, kind = _log(random, 2, 100), str(random.choice(["gaps", "repeated"]))

    def change(nodes: Nodes, value: str) -> str:
        first = nodes.op("Slice", value, nodes.const([0]), nodes.const([1]), nodes.const([1]))
        length = nodes.size(value, 1)
        made = nodes.op("Add", first, nodes.column(length, 2, 1))
        return nodes.op("Where", nodes.op("GreaterOrEqual", length, nodes.const(least)), made, value)

    aim = Aim(batch=(1, 2), seq=(least, least + 20), positions=(kind,), start=(0, 40), padding=("none",))
    return Fault(f"{kind}, from {least} tokens", _on_input("position_ids", change), (aim,))


@family("special", "negative positions taken as 0")
def _negative(artifact: Artifact, random: Random) -> Fault | None:
    if not _free(artifact) or artifact.spec.encoding.name not in (
        "rope",
        "sinusoidal",
        "rope2d",
        "mrope",
        "rope-mixed",
    ):
        return None

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Max", value, nodes.const(0))

    aim = Aim(batch=(1, 2), seq=(4, 20), positions=("negative",), past=(0, 5))
    return Fault("below 0", _on_input("position_ids", change), (aim,))


@family("special", "a single token")
def _single_token(artifact: Artifact, random: Random) -> Fault | None:
    """Wrong for one token alone: after no cached one, or at one batch size."""
    batch, first = int(random.integers(1, 5)), bool(random.integers(2)) and _cached(artifact)
    caches = _has(artifact, "past_key")

    def change(nodes: Nodes, value: str) -> str:
        conditions = [
            nodes.op("Equal", nodes.size(value, 1), nodes.const(1)),
            nodes.op("Equal", nodes.size(value, 0), nodes.const(batch)),
        ]
        if first and artifact.spec.kv_cache == "concat":
            conditions.append(nodes.op("Equal", nodes.size(caches[0], 2), nodes.const(0)))
        return nodes.op("Where", nodes.all_of(*conditions), nodes.op("Mul", value, nodes.like(value, 1.02)), value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    past = (0, 0) if first else (0, 20)
    aims = (Aim(batch=(batch, batch), seq=(1, 1), past=past, padding=("none",)),)
    return Fault(f"batch {batch}{', nothing cached' if first else ''}", apply, aims)


@family("special", "an unused cache read")
def _unused_slots(artifact: Artifact, random: Random) -> Fault | None:
    """Slots of a shared buffer after the last token are seen."""
    if artifact.spec.kv_cache != "shared":
        return None
    slots = _log(random, 6, 400)

    def seen(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.keys, nodes.const(slots))
        return nodes.op("And", long, nodes.op("Equal", at.key(), nodes.op("Sub", at.keys, nodes.const(1))))

    aim = Aim(batch=(1, 4), seq=(1, 6), past=(slots, slots + 20), padding=("none",))
    return Fault(f"from {slots} slots", _on_visibility(False, seen), (aim,))


@family("special", "present keys or values off")
def _present(artifact: Artifact, random: Random) -> Fault | None:
    """What is cached for the next call is wrong from a slot on, what is attended is right."""
    names = [value.name for value in artifact.model.graph.output if value.name.startswith("present")]
    if not names:
        return None
    name, slot = str(random.choice(names)), _log(random, 10, REACH.keys - 200)

    def apply(model: onnx.ModelProto) -> bool:
        inner = f"{name}_inner"
        for node in model.graph.node:
            node.output[:] = [inner if output == name else output for output in node.output]
            node.input[:] = [inner if value == name else value for value in node.input]
        nodes = Nodes()
        columns = nodes.column(nodes.size(inner, 2), 4, 2)
        far = nodes.op("GreaterOrEqual", columns, nodes.const(slot))
        wrong = nodes.op("Where", far, nodes.op("Mul", inner, nodes.like(inner, 1.01)), inner)
        nodes.made.append(helper.make_node("Identity", [wrong], [name], name="fault_present"))
        model.graph.node.extend(nodes.made)
        return True

    return Fault(f"{name} from {slot}", apply, _key_aim(artifact, slot + 2))


def families_of(kind: str) -> Iterator[str]:
    """The families of a class."""
    return (name for name, (of, _) in FAMILIES.items() if of == kind)
