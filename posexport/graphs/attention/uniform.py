"""Values that are one number everywhere on all inputs, however a graph makes them.

Cast(constant), Expand(constant, lengths), ones_like(scores) * -1e9   one number each, whatever the lengths are

A constant is looked at element by element. Of what is as long as lengths say, the operators tell that all elements are
alike, and the run on the probe's inputs which number they are.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from posexport.graphs.attention.probe import Probe

_DEPTH = 8
"""Operators between a value and the constants that it is made of, at most."""

_LAYOUTS = {"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Tile", "Slice", "Gather"}
_LAYOUTS |= {"CastLike"}
"""Operators that give elements of their first input."""

_BY_ELEMENT = {"Cast", "Neg", "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Min", "Max", "Abs"}
"""Operators that compute each element from those in its place."""


def number_of(probe: Probe, value: ir.Value | None) -> float | None:
    """The number that every element of a value is on all inputs; None where there is none, or it is not known."""
    return None if value is None or not _is_uniform(probe, value, _DEPTH, {}) else _only(probe.get(value))


def factor_of(probe: Probe, value: ir.Value) -> float | None:
    """`number_of` for what scores are multiplied or divided by: an attribute can hold it, or one divided by it.

    A stored number counts whatever it is.
    """
    number = number_of(probe, value)
    node = value.producer()
    if not number or node is None or node.op_type == "Constant":
        return number
    return number if any(one == torch.tensor(one).item() for one in (number, 1.0 / number)) else None


def _is_uniform(probe: Probe, value: ir.Value, depth: int, known: dict[tuple[ir.Value, int], bool]) -> bool:
    """Whether all elements of a value are one number, by at most `depth` operators; `known` are answers so far."""
    if (value, depth) not in known:
        known[value, depth] = _is_made_uniform(probe, value, depth, known)
    return known[value, depth]


def _is_made_uniform(probe: Probe, value: ir.Value, depth: int, known: dict[tuple[ir.Value, int], bool]) -> bool:
    if value in probe.fixed:
        return _only(probe.get(value)) is not None
    node = value.producer()
    if node is None or node.domain or not depth:
        return False
    if node.op_type == "ConstantOfShape":
        return True
    sources = node.inputs[: node.op_type in _LAYOUTS]
    if node.op_type in _BY_ELEMENT:
        sources = node.inputs
    elif node.op_type == "Where":
        sources = node.inputs[1:]
    if not sources or not all(one is not None and _is_uniform(probe, one, depth - 1, known) for one in sources):
        return False
    return node.op_type != "Where" or len({_only(probe.get(one)) for one in sources if one is not None}) == 1


def _only(array: torch.Tensor) -> float | None:
    """The number that all elements are; None where they differ, or there are none."""
    if not array.numel():
        return None
    first = array.reshape(-1)[0]
    return float(first) if bool((array == first).all()) else None
