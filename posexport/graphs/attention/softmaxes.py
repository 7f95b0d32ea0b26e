"""Softmaxes of a graph: the operator, or its formula written out, exp(x) / sum(exp(x))."""

from __future__ import annotations

import attrs
import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of

_PASSED = ("Cast", "Identity")


@attrs.frozen(kw_only=True)
class Softmax:
    """A softmax of `logits` whose last node is `node`; `axis` is None where the operator names none. `has_more` says
    that something is added to its sum, as if there were a key more whose value is zero."""

    node: ir.Node
    logits: ir.Value
    axis: int | None
    has_more: bool = False


def softmax_of(node: ir.Node) -> Softmax | None:
    """The softmax that ends in a node, None where none does."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Softmax":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else None
        return Softmax(node=node, logits=node.inputs[0], axis=axis)
    return _written_out(node)


def _written_out(node: ir.Node) -> Softmax | None:
    """exp(x) divided by its sum, or multiplied by the reciprocal of it."""
    if node.op_type not in ("Div", "Mul") or len(node.inputs) != 2:
        return None
    operands = [tuple(node.inputs)]
    if node.op_type == "Mul":
        operands = [(one, _inverse(other)) for one, other in (operands[0], operands[0][::-1])]
    for exponent, total in operands:
        source, sums, has_more = _maker(exponent, "Exp"), _maker(total, "ReduceSum"), False
        if sums is None:
            sums, has_more = _sum_and_more(total), True
        if source is None or sums is None or _maker(sums.inputs[0], "Exp") is not source:
            continue
        axis, logits = _summed(sums), source.inputs[0]
        if axis is None or logits is None:
            return None
        return Softmax(node=node, logits=logits, axis=axis, has_more=has_more)
    return None


def _sum_and_more(total: ir.Value | None) -> ir.Node | None:
    """The sum that something is added to."""
    added = _maker(total, "Add")
    sums = [] if added is None else [_maker(one, "ReduceSum") for one in added.inputs]
    return next(filter(None, sums), None)


def _inverse(value: ir.Value | None) -> ir.Value | None:
    """What a value is the reciprocal of."""
    node = _maker(value, "Reciprocal")
    return None if node is None else node.inputs[0]


def _maker(value: ir.Value | None, operator: str) -> ir.Node | None:
    """The node of this operator that a value comes from, behind casts."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _PASSED and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == operator else None


def _summed(node: ir.Node) -> int | None:
    """The only axis of a ReduceSum that keeps it, None where it is another kind of sum."""
    if node.attributes.get_int("keepdims", 1) != 1:
        return None
    if "axes" in node.attributes:
        axes = list(node.attributes["axes"].as_ints())
    else:
        tensor = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = [] if tensor is None else [int(axis) for axis in tensor.numpy().reshape(-1)]
    return axes[0] if len(axes) == 1 else None
