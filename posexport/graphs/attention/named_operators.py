"""Operators whose names say that they compute attention, whether they can be evaluated here or not."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from posexport.errors import Reason, shown
from posexport.graphs.expand import domain_of, kind_of
from posexport.graphs.expansions import EXPANSIONS
from posexport.graphs.kernels import KERNELS


def is_operator(node: ir.Node) -> bool:
    """Whether an operator of any domain, such as that of a plugin, computes attention with a softmax.

    Operators for linear attention, masks and biases don't count.
    """
    return "Attention" in node.op_type and not node.op_type.endswith(("LinearAttention", "Mask", "Bias"))


def is_other_softmax(node: ir.Node) -> bool:
    """Whether an operator that is not ONNX's own is a softmax, such as ONNX Runtime's BiasSoftmax."""
    return domain_of(node) != "" and node.op_type.endswith("Softmax")


def is_unread(node: ir.Node) -> bool:
    """Whether an operator that computes attention can't be evaluated here.

    Examples are ONNX Runtime's operators on packed rows (PackedAttention).
    """
    return kind_of(node) not in KERNELS


def operator_reason(node: ir.Node, refused: Mapping[ir.Node, str]) -> Reason:
    """Why an operator that computes attention is left as it is. `refused` are those that could not be expanded."""
    name = shown(node.name or node.outputs[0].name or "")
    left = "one of its outputs is not known" if kind_of(node) in EXPANSIONS else "the operator is not read"
    return Reason("operator", f"{node.op_type} {name} is not understood: {refused.get(node, left)}")
