"""Softmaxes of a graph: the operator, or its formula written out, exp(x) / sum(exp(x))."""

from __future__ import annotations

import attrs
import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of

_PASSED = ("Cast", "Identity")


@attrs.frozen(kw_only=True)
class Softmax:
    """A softmax of `logits` whose last node is `node`; `axis` is None where the operator names none."""

    node: ir.Node
    logits: ir.Value
    axis: int | None


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
        source, sums = _maker(exponent, "Exp"), _maker(total, "ReduceSum")
        if source is None or sums is None or _maker(sums.inputs[0], "Exp") is not source:
            continue
        axis, logits = _summed(sums), source.inputs[0]
        return None if axis is None or logits is None else Softmax(node=node, logits=logits, axis=axis)
    return None


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
