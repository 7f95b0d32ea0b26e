"""Control flow, sequences and optional values."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from posexport.graphs.kernels.registry import Call, Value, integers, kernel

MOST_STEPS = 100_000
"""The most steps of a Loop, so that evaluation always ends."""


@kernel("If")
def if_(call: Call, condition: Tensor) -> tuple[Value, ...]:
    """Runs one of two bodies, which read outer values."""
    if condition.numel() != 1:
        raise ValueError("its condition is not one value")
    return tuple(call.run_body(call.get("then_branch" if bool(condition) else "else_branch"), ()))


@kernel("Loop")
def loop(call: Call, limit: Tensor | None, condition: Tensor | None, *carried: Value) -> tuple[Value, ...]:
    """Body: (iteration, condition, carried...) to (condition, carried..., scanned...)."""
    body, values = call.get("body"), list(carried)
    going = True if condition is None else bool(condition)
    scanned: list[list[Tensor]] = [[] for _ in range(len(body.outputs) - 1 - len(values))]
    count = 0
    while going and (limit is None or count < int(limit)):
        if count >= MOST_STEPS:
            raise ValueError(f"its body would run more than {MOST_STEPS:,} times")
        results = call.run_body(body, (torch.tensor(count), torch.tensor(going), *values))
        going, values = bool(results[0]), results[1 : 1 + len(values)]
        for collected, value in zip(scanned, results[1 + len(values) :], strict=True):
            collected.append(value)
        count += 1
    kept = body.outputs[1 + len(values) :]
    stacked = [
        torch.stack(parts) if parts else _none_of(call, value) for parts, value in zip(scanned, kept, strict=True)
    ]
    return (*values, *stacked)


def _none_of(call: Call, value: ir.Value) -> Tensor:
    """The empty result of an output of a body that never ran, in the shape and dtype that the file states."""
    sizes = [dim if isinstance(dim, int) else 0 for dim in value.shape or ()]
    return torch.zeros(0, *sizes, dtype=call.dtype((value.dtype or ir.DataType.FLOAT).value))


@kernel("Scan")
def scan(call: Call, *values: Value) -> tuple[Value, ...]:
    """States are carried, each scanned input is read one slice at a time, and scanned outputs are stacked.

    Before opset 9, the first input is lengths, and all others have a batch axis first: each row is one scan.
    """
    if call.version >= 9:
        return _scan(call, list(values))
    if values[0] is not None:
        raise ValueError("the lengths of a Scan can't be evaluated")
    rows = [_scan(call, [value[row] for value in values[1:]]) for row in range(values[1].shape[0])]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _scan(call: Call, values: list[Tensor]) -> tuple[Tensor, ...]:
    body, read = call.get("body"), call.get("num_scan_inputs")
    states, inputs = values[: len(values) - read], values[len(values) - read :]
    axes = list(call.get("scan_input_axes", [0] * read))
    backwards = list(call.get("scan_input_directions", call.get("directions", [0] * read)))
    made = len(body.outputs) - len(states)
    out_axes = list(call.get("scan_output_axes", [0] * made))
    out_backwards = list(call.get("scan_output_directions", [0] * made))
    scanned: list[list[Tensor]] = [[] for _ in range(made)]
    length = inputs[0].shape[axes[0]]
    for step in range(length):
        places = [length - 1 - step if back else step for back in backwards]
        slices = [x.select(axis, place) for x, axis, place in zip(inputs, axes, places, strict=True)]
        results = call.run_body(body, (*states, *slices))
        for collected, value in zip(scanned, results[len(states) :], strict=True):
            collected.append(value)
        states = results[: len(states)]
    stacked = [
        torch.stack(parts[::-1] if back else parts, dim=axis)
        for parts, axis, back in zip(scanned, out_axes, out_backwards, strict=True)
    ]
    return (*states, *stacked)


@kernel("SequenceEmpty")
def sequence_empty(call: Call) -> list[Tensor]:
    """An empty sequence."""
    return []


@kernel("SequenceConstruct")
def sequence_construct(call: Call, *values: Tensor) -> list[Tensor]:
    """A sequence of the inputs."""
    return list(values)


@kernel("SequenceInsert")
def sequence_insert(call: Call, sequence: list[Tensor], value: Tensor, at: Tensor | None = None) -> list[Tensor]:
    """The sequence with a tensor inserted before a place, or at its end."""
    place = len(sequence) if at is None else int(at)
    place = place + len(sequence) if place < 0 else place
    return [*sequence[:place], value, *sequence[place:]]


@kernel("SequenceErase")
def sequence_erase(call: Call, sequence: list[Tensor], at: Tensor | None = None) -> list[Tensor]:
    """The sequence without one tensor, by default the last."""
    place = (-1 if at is None else int(at)) % len(sequence)
    return [*sequence[:place], *sequence[place + 1 :]]


@kernel("SequenceAt")
def sequence_at(call: Call, sequence: list[Tensor], at: Tensor) -> Tensor:
    """One tensor of a sequence."""
    return sequence[int(at)]


@kernel("SequenceLength")
def sequence_length(call: Call, sequence: list[Tensor]) -> Tensor:
    """The number of tensors in a sequence."""
    return torch.tensor(len(sequence))


@kernel("ConcatFromSequence")
def concat_from_sequence(call: Call, sequence: list[Tensor]) -> Tensor:
    """Joins the tensors, or stacks them with `new_axis`."""
    return (torch.stack if call.get("new_axis", 0) else torch.cat)(sequence, dim=call.get("axis"))


@kernel("SplitToSequence")
def split_to_sequence(call: Call, x: Tensor, split: Tensor | None = None) -> list[Tensor]:
    """Parts of one size, of stated sizes, or single slices (which lose the axis unless `keepdims`)."""
    axis = call.get("axis", 0)
    if split is None:
        parts = list(torch.split(x, 1, dim=axis))
        return parts if call.get("keepdims", 1) else [part.squeeze(axis) for part in parts]
    return list(torch.split(x, int(split) if split.dim() == 0 else integers(split), dim=axis))


@kernel("SequenceMap")
def sequence_map(call: Call, sequence: list[Tensor], *others: Value) -> tuple[Value, ...]:
    """Runs a body for each tensor. Other sequences are read at the same place."""
    rows = [
        call.run_body(call.get("body"), (value, *(o[at] if isinstance(o, list) else o for o in others)))
        for at, value in enumerate(sequence)
    ]
    return tuple(list(column) for column in zip(*rows, strict=True))


@kernel("Optional")
def optional(call: Call, value: Value = None) -> Value:
    """A value that may be absent."""
    return value


@kernel("OptionalHasElement")
def optional_has_element(call: Call, value: Value = None) -> Tensor:
    """Whether a value is present."""
    return torch.tensor(value is not None)


@kernel("OptionalGetElement")
def optional_get_element(call: Call, value: Value) -> Value:
    """The value itself."""
    if value is None:
        raise ValueError("its optional input is empty")
    return value
