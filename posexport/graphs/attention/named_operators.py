"""Operators that say in their name that they stand for attention, whether anything here reads them or not."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from posexport.errors import Reason, shown
from posexport.graphs.expand import domain_of
from posexport.graphs.expansions import EXPANSIONS
from posexport.graphs.kernels import KERNELS


def is_operator(node: ir.Node) -> bool:
    """Whether an operator of ONNX or of ONNX Runtime stands for attention with a softmax."""
    known = domain_of(node) in ("", "com.microsoft")
    return known and "Attention" in node.op_type and node.op_type != "LinearAttention"


def is_unread(node: ir.Node) -> bool:
    """Whether an operator stands for attention that can't be evaluated here, such as ONNX Runtime's on whole numbers
    (QAttention) or on packed rows."""
    return is_operator(node) and _kind(node) not in KERNELS


def operator_reason(node: ir.Node, refused: Mapping[ir.Node, str]) -> Reason:
    """Why an operator that stands for attention is left; `refused` are those that could not be written out."""
    name = shown(node.name or node.outputs[0].name or "")
    left = "one of its outputs is not known" if _kind(node) in EXPANSIONS else "the operator is not read"
    return Reason("operator", f"{node.op_type} {name} is not understood: {refused.get(node, left)}")


def _kind(node: ir.Node) -> tuple[str, str]:
    return domain_of(node), node.op_type
