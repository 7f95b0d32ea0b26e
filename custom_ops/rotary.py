"""Rotation of pairs of features by angles.

The graphs use splits and a concatenation. Strided assignment is 40 times slower on ONNX Runtime and breaks TensorRT's
fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import CallError, Derived
from posexport.custom_ops.operator import MICROSOFT, Ops, cast, dtype_of, operator, rank_of, size_of

ONE_RUN: Any = Derived("[P]", "P", lambda pairs: [pairs])


@dataclass(frozen=True)
class Layout:
    """Which features of a head of `head_dim` form pairs."""

    head_dim: int
    interleaved: bool
    runs: Sequence[int]


def _check_runs(head_dim: int, pairs: int, interleaved: bool, runs: Sequence[int]) -> None:
    if 2 * pairs > head_dim:
        raise CallError(f"rotate: {pairs} pairs don't fit into a head_dim of {head_dim}.")
    if not interleaved and sum(runs) != pairs:
        raise CallError(f"rotate: runs are {[*runs]}, whose sum must be the number of pairs, {pairs}.")


def _rotate_fake(call: Any) -> Tensor:
    _check_runs(call.head_dim, call.cos.shape[-1], call.interleaved, call.runs)
    return torch.empty_like(call.x)


@operator("RotaryPosition", "rotated", fake=_rotate_fake)
def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool = False, runs: Sequence[int] = ONE_RUN
) -> Tensor:
    """Rotation of pairs of features: (a, b) -> (a cos - b sin, a sin + b cos) (Su et al. 2021, arXiv:2104.09864, eq.
    34). The first 2P features of each head rotate. The others stay unchanged.

    Args:
        x: [B, S, heads*head_dim], queries or keys.
        cos, sin: [B, S, P] or [B, S, heads, P], for all heads or for each head; they are cast to the dtype of x.
        head_dim: width of a head.
        interleaved: whether pair i is (2i, 2i + 1).
        runs: if not interleaved, run r has 2 * runs[r] features, and feature i of its first half is paired with
            feature i of its second half; by default one run with pairs (i, i + P), as Hugging Face's rotate_half.

    Returns:
        A tensor like x.

    Example:
        >>> cos, sin = torch.tensor([[[0.0]]]), torch.tensor([[[1.0]]])  # a quarter turn
        >>> rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), cos, sin, head_dim=2)
        tensor([[[-2.,  1., -4.,  3.]]])
    """
    pairs = cos.shape[-1]
    _check_runs(head_dim, pairs, interleaved, runs)
    batch, seq, width = x.shape
    heads = x.view(batch, seq, width // head_dim, head_dim)
    cos, sin = (t.to(x.dtype) if t.dim() == 4 else t.to(x.dtype).unsqueeze(2) for t in (cos, sin))
    parts, first = [], 0
    for run in [pairs] if interleaved else runs:
        shape, axis = ((run, 2), -1) if interleaved else ((2, run), -2)
        a, b = heads[..., 2 * first : 2 * (first + run)].unflatten(-1, shape).unbind(axis)
        c, s = (t[..., first : first + run] for t in (cos, sin))
        parts.append(torch.stack((a * c - b * s, a * s + b * c), axis).flatten(3))
        first += run
    if 2 * pairs < head_dim:
        parts.append(heads[..., 2 * pairs :])
    return (torch.cat(parts, -1) if len(parts) > 1 else parts[0]).reshape(batch, seq, width)


@rotate.onnx
def _rotate_onnx(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, layout: Layout) -> ir.Value:
    head_dim, runs = layout.head_dim, layout.runs
    pairs, per_head = size_of(cos, -1), rank_of(cos) == 4
    cos, sin = (cast(op, t, dtype_of(x)) for t in (cos, sin))
    cos, sin = (t if per_head else op.Unsqueeze(t, [2]) for t in (cos, sin))
    turned, kept = op.Reshape(x, [0, 0, -1, head_dim]), None
    if 2 * pairs < head_dim:
        turned, kept = op.Split(turned, [2 * pairs, head_dim - 2 * pairs], axis=-1, _outputs=2)
    shape = [0, 0, -1, 2 * pairs]
    if layout.interleaved:
        turned = op.Reshape(turned, [0, 0, -1, pairs, 2])
        cos, sin = (op.Unsqueeze(t, [4]) for t in (cos, sin))
        rotated = op.Reshape(_turned_onnx(op, turned, cos, sin), shape)
    elif len(runs) == 1:
        rotated = _turned_onnx(op, turned, cos, sin)
    elif len(set(runs)) == 1:
        turned = op.Reshape(turned, [0, 0, -1, len(runs), 2 * runs[0]])
        cos, sin = (op.Reshape(t, [0, 0, -1, len(runs), runs[0]]) for t in (cos, sin))
        rotated = op.Reshape(_turned_onnx(op, turned, cos, sin), shape)
    else:
        doubled, count = [2 * run for run in runs], {"_outputs": len(runs), "axis": -1}
        parts = (op.Split(turned, doubled, **count), *(op.Split(t, [*runs], **count) for t in (cos, sin)))
        rotated = op.Concat(*(_turned_onnx(op, *part) for part in zip(*parts, strict=True)), axis=-1)
    if kept is not None:
        rotated = op.Concat(rotated, kept, axis=-1)
    return op.Reshape(rotated, [0, 0, -1])


def _turned_onnx(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotate the halves of the last axis."""
    a, b = op.Split(x, num_outputs=2, axis=-1, _outputs=2)
    first = op.Sub(op.Mul(a, cos), op.Mul(b, sin))
    second = op.Add(op.Mul(a, sin), op.Mul(b, cos))
    return op.Concat(first, second, axis=-1)


def has_operator(rank: int, layout: Layout, dtype: ir.DataType | None) -> bool:
    """Whether RotaryEmbedding can do the rotation.

    It needs angles that all heads share (`rank` of the cosines below 4), one run or equal runs that fill a head, and no
    double precision.
    """
    runs = layout.runs
    even = len(set(runs)) == 1 and 2 * sum(runs) == layout.head_dim
    return rank < 4 and dtype != ir.DataType.DOUBLE and (layout.interleaved or len(runs) == 1 or even)


def _embedded(op: Ops, x: ir.Value, angles: Sequence[ir.Value], pairs: int, layout: Layout, **domain: Any) -> ir.Value:
    """RotaryEmbedding of features in the order that it supports: all first halves, then all second halves."""
    attributes = {"num_heads": size_of(x, -1) // layout.head_dim, "interleaved": int(layout.interleaved)}
    if 2 * pairs < layout.head_dim:
        attributes["rotary_embedding_dim"] = 2 * pairs
    if layout.interleaved or len(layout.runs) == 1:
        return op.RotaryEmbedding(x, *angles, **attributes, **domain)
    count, run = len(layout.runs), layout.runs[0]
    swapped = op.Transpose(op.Reshape(x, [0, 0, -1, count, 2, run]), perm=[0, 1, 2, 4, 3, 5])
    turned = op.RotaryEmbedding(op.Reshape(swapped, [0, 0, -1]), *angles, **attributes, **domain)
    turned = op.Transpose(op.Reshape(turned, [0, 0, -1, 2, count, run]), perm=[0, 1, 2, 4, 3, 5])
    return op.Reshape(turned, [0, 0, -1])


@rotate.form("native")
def _rotate_native(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, layout: Layout) -> ir.Value:
    # cosines and sines for each token, [B, S, P], instead of position_ids: any positions, on any number of axes
    if not has_operator(rank_of(cos), layout, dtype_of(x)):
        return _rotate_onnx(op, x, cos, sin, layout)
    angles = [cast(op, t, dtype_of(x)) for t in (cos, sin)]
    return _embedded(op, x, angles, size_of(cos, -1), layout)


@rotate.form("contrib")
def _rotate_contrib(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, layout: Layout) -> ir.Value:
    # The operator looks up rows of cosines by position. There is one row for each token of the batch, and the token's
    # index is its position. This supports any positions.
    if not has_operator(rank_of(cos), layout, dtype_of(x)):
        return _rotate_onnx(op, x, cos, sin, layout)
    pairs = size_of(cos, -1)
    batch, seq = (op.Squeeze(op.Shape(cos, start=axis, end=axis + 1)) for axis in (0, 1))
    rows = op.Reshape(op.Range(0, op.Mul(batch, seq), 1), op.Shape(cos, start=0, end=2))
    angles = [op.Reshape(cast(op, t, dtype_of(x)), [-1, pairs]) for t in (cos, sin)]
    return _embedded(op, x, [rows, *angles], pairs, layout, **MICROSOFT)


@operator("AnglesByHeads", "split")
def angles_by_heads(angles: Tensor, heads: int) -> Tensor:
    """Angles for each head, for `rotate`, from the angles of all heads side by side.

    Args:
        angles: [B, S, heads*P], angles or their cosines or sines.
        heads: number of heads.

    Returns:
        [B, S, heads, P].

    Example:
        >>> angles_by_heads(torch.arange(4.0).view(1, 1, 4), 2)
        tensor([[[[0., 1.],
                  [2., 3.]]]])
    """
    by_heads: Tensor = angles.unflatten(-1, (heads, -1))
    return by_heads


@angles_by_heads.onnx
def _by_heads_onnx(op: Ops, angles: ir.Value, heads: int) -> ir.Value:
    return op.Reshape(angles, [0, 0, heads, -1])


@operator("RotaryFeatures", "rotated", fake=lambda call: torch.empty_like(call.x))
def rotate_features(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    """Pairs (2i, 2i + 1) with an angle for each feature: (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b). This is a
    rotation if both angles are equal (V-JEPA 2: Assran et al. 2025, arXiv:2506.09985, as in its code).

    Args:
        x: [B, S, heads*head_dim].
        cos, sin: [B, S, 2*P], for the first 2P features of each head.
        head_dim: width of a head.

    Returns:
        A tensor like x.

    Example:
        >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> rotate_features(torch.tensor([[[1.0, 2.0]]]), cos, sin, head_dim=2)
        tensor([[[-2.,  1.]]])
    """
    width = cos.shape[-1]
    heads = x.unflatten(-1, (-1, head_dim))
    turned = heads[..., :width]
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (cos, sin))
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
    out = turned * cos + torch.stack((-b, a), -1).flatten(-2) * sin
    return torch.cat((out, heads[..., width:]), -1).flatten(2)


@rotate_features.onnx
def _features_onnx(op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, head_dim: int) -> ir.Value:
    width = size_of(cos, -1)
    turned, kept = op.Reshape(x, [0, 0, -1, head_dim]), None
    if width < head_dim:
        turned, kept = op.Split(turned, [width, head_dim - width], axis=-1, _outputs=2)
    pairs = op.Reshape(turned, [0, 0, -1, width // 2, 2])
    a, b = op.Split(pairs, num_outputs=2, axis=-1, _outputs=2)
    across = op.Reshape(op.Concat(op.Neg(b), a, axis=-1), [0, 0, -1, width])
    cos, sin = (op.Unsqueeze(cast(op, t, dtype_of(x)), [2]) for t in (cos, sin))
    rotated = op.Add(op.Mul(turned, cos), op.Mul(across, sin))
    if kept is not None:
        rotated = op.Concat(rotated, kept, axis=-1)
    return op.Reshape(rotated, [0, 0, -1])
