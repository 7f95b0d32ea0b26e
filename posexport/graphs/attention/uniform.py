"""Values that are one number everywhere on all inputs, however a graph computes them.

Cast(constant), Expand(constant, lengths), ones_like(scores) * -1e9   one number each, whatever the lengths are

A constant is compared element by element. If a value is as long as lengths say, its operators show that all elements
are equal, and the run on the probe's inputs shows which number they are.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from posexport.graphs.attention.probe import Probe

_DEPTH = 8
"""The most operators between a value and the constants that it is computed from."""

_LAYOUTS = {"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Tile", "Slice", "Gather"}
_LAYOUTS |= {"CastLike"}
"""Operators that give elements of their first input."""

_BY_ELEMENT = {"Cast", "Neg", "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Min", "Max", "Abs"}
"""Operators that compute each element from the elements in the same place."""


def number_of(probe: Probe, value: ir.Value | None) -> float | None:
    """The number that every element of a value is on all inputs; None if there is none, or if it is not known."""
    return None if value is None or not _is_uniform(probe, value, _DEPTH, {}) else _only(probe.get(value))


def factor_of(probe: Probe, value: ir.Value) -> float | None:
    """`number_of` for a factor or a divisor of scores, which an attribute must be able to hold.

    So a computed number, or its inverse, must be a float32 number. A stored number always counts.
    """
    number = number_of(probe, value)
    node = value.producer()
    if not number or node is None or node.op_type == "Constant":
        return number
    return number if any(one == torch.tensor(one).item() for one in (number, 1.0 / number)) else None


def _is_uniform(probe: Probe, value: ir.Value, depth: int, known: dict[tuple[ir.Value, int], bool]) -> bool:
    """Whether all elements of a value are one number, traced through at most `depth` operators.

    `known` are earlier answers.
    """
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
    """The number that all elements are; None if they differ, or if there are none."""
    if not array.numel():
        return None
    first = array.reshape(-1)[0]
    return float(first) if bool((array == first).all()) else None
