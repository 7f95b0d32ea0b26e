"""The projection of queries, keys or values: the norm after it, and whether positions act after it.

Without a rotation, tokens in another order must give queries in that order. This is tried with random features.
"""

from __future__ import annotations

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.heads import Source
from posexport.graphs.attention.layouts import EXACT
from posexport.graphs.attention.probe import Probe

_PRODUCTS = {"MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "Einsum"}

_NORMS = {
    "RMSNormalization": "rms",
    "SimplifiedLayerNormalization": "rms",
    "SkipSimplifiedLayerNormalization": "rms",
    "LayerNormalization": "layer",
    "SkipLayerNormalization": "layer",
    "GroupNormalization": "group",
    "InstanceNormalization": "instance",
    "LpNormalization": "l2",
    "ReduceL2": "l2",
}
"""Operators that are a norm, or a part of one that tells its kind."""


@attrs.frozen(kw_only=True)
class Projection:
    """The projection above one side of an attention.

    A product with weights computes `result` from `projected`. `nodes` are those between `result` and the side, in the
    graph's order.
    """

    projected: ir.Value
    result: ir.Value
    nodes: tuple[ir.Node, ...]


def projection_of(flow: Dataflow, source: ir.Value) -> Projection | None:
    """The nearest product with weights that all of a value passes through; None if there is none."""
    for value in flow.dominators(source):
        node = value.producer()
        if node is None or node.op_type not in _PRODUCTS:
            continue
        content = flow.content_inputs(node)
        others = [one for one in node.inputs[:2] if one is not None and one not in content]
        if len(content) == 1 and others and all(one in flow.constant for one in others):
            return Projection(projected=content[0], result=value, nodes=tuple(flow.between(value, source)))
    return None


def norm_of(probe: Probe, projection: Projection, head_dim: int) -> dict[str, object] | None:
    """The norm of queries or keys after their projection: its kind, and whether each head has its own."""
    for node in projection.nodes:
        kind = _NORMS.get(node.op_type) or _decomposed(node, projection)
        if kind is not None:
            normed = node.inputs[0]
            size = probe.shape(normed)[-1] if normed is not None and probe.shape(normed) else 0
            return {"kind": kind, "per_head": size == head_dim}
    return None


def _decomposed(node: ir.Node, projection: Projection) -> str | None:
    """The kind of a norm that is written in primitive operators, told by its reduction."""
    if node.op_type not in ("ReduceMean", "ReduceSumSquare", "ReduceSum"):
        return None
    if node.op_type == "ReduceSumSquare":
        return "l2"
    squared = node.inputs[0].producer() if node.inputs[0] is not None else None
    squares = squared is not None and (
        squared.op_type == "Pow"
        or (squared.op_type == "Mul" and squared.inputs[0] is squared.inputs[1])
        or squared.op_type == "Abs"
    )
    if node.op_type == "ReduceSum":
        return "l2" if squares else None
    return "rms" if squares else "layer"


def keeps_order(probe: Probe, projection: Projection, source: Source, sizes: tuple[int, int, int, int]) -> bool | None:
    """Whether tokens in another order give the same queries in that order; None if it can't be tried.

    `sizes` are those of the side: rows, heads, tokens, features.
    """
    rows, _, tokens, _ = sizes
    shape = probe.shape(projection.projected)
    if tokens < 2 or len(shape) < 2:
        return None
    first = 2 if shape[:2] == (rows, tokens) else 1 if shape[0] == rows * tokens else 0
    if not first:
        return None
    drawn = probe.random_like(projection.projected)
    by_tokens = drawn.reshape(rows, tokens, *shape[first:])
    turned = by_tokens.flip(1).reshape(shape)
    before, after = (
        source.layout.to_heads(probe.through(projection.projected, [source.value], one)[0], sizes)
        for one in (drawn, turned)
    )
    return float((before.flip(2) - after).abs().max()) <= EXACT * max(float(before.abs().max()), 1e-30)


def varies_by_token(tensor: torch.Tensor, tokens: int) -> bool:
    """Whether a tensor [..., tokens, features] differs from token to token."""
    if tensor.dim() < 2 or tensor.shape[-2] != tokens:
        return False
    return bool((tensor != tensor[..., :1, :]).any())
