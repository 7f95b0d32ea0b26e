"""Rotation of pairs of features: (a, b) -> (a cos - b sin, a sin + b cos), Su et al. 2021, arXiv:2104.09864, eq. 34.

rotate  x [B, S, heads*head_dim], cos and sin [B, S, P] -> like x; of each head the first 2P features turn.
`interleaved`: pair i is (2i, 2i+1). Otherwise the 2P features fall into `groups` equal runs, and in each a feature of
the first half pairs with one of the second half: (i, i + P) for one group (Hugging Face's rotate_half).

Splits and a concatenation, no strided assignment (40 times slower on ONNX Runtime, and it breaks TensorRT's fusion).
"""

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.operator import Operator, cast


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim: int, interleaved: bool, groups: int
) -> torch.Tensor:
    batch, seq, width = x.shape
    pairs = cos.shape[-1]
    heads = x.view(batch, seq, width // head_dim, head_dim)
    turned, kept = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
    if interleaved:
        shape: tuple[int, ...] = (pairs, 2)
        axis = -1
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    else:
        shape, axis = (groups, 2, pairs // groups), -2
        cos, sin = (t.reshape(batch, seq, 1, groups, pairs // groups) for t in (cos, sin))
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = turned.unflatten(-1, shape).unbind(axis)
    out = torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(3)
    if kept.shape[-1]:
        out = torch.cat((out, kept), -1)
    return out.reshape(batch, seq, width)


def _rotate_fake(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim: int, interleaved: bool, groups: int
) -> torch.Tensor:
    return torch.empty_like(x)


def _rotate_onnx(
    op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, *, head_dim: int, interleaved: bool, groups: int
) -> ir.Value:
    assert x.dtype is not None and cos.shape is not None
    pairs = int(cos.shape[-1])  # type: ignore[arg-type]
    cos, sin = (cast(op, t, ir.DataType.FLOAT, x.dtype) for t in (cos, sin))
    heads = op.Reshape(x, [0, 0, -1, head_dim])
    turned, kept = heads, None
    if 2 * pairs < head_dim:
        turned, kept = op.Split(heads, [2 * pairs, head_dim - 2 * pairs], axis=-1, _outputs=2)
    shape = [0, 0, -1, head_dim]
    if interleaved:
        turned = op.Reshape(turned, [0, 0, -1, pairs, 2])
        cos, sin = (op.Unsqueeze(t, [2, 4]) for t in (cos, sin))
    elif groups > 1:
        turned = op.Reshape(turned, [0, 0, -1, groups, 2 * pairs // groups])
        cos, sin = (op.Reshape(t, [0, 0, 1, groups, pairs // groups]) for t in (cos, sin))
    else:
        cos, sin = (op.Unsqueeze(t, [2]) for t in (cos, sin))
    a, b = op.Split(turned, num_outputs=2, axis=-1, _outputs=2)
    first = op.Sub(op.Mul(a, cos), op.Mul(b, sin))
    second = op.Add(op.Mul(a, sin), op.Mul(b, cos))
    out = op.Concat(first, second, axis=-1)
    if kept is not None:
        shape[-1] = 2 * pairs
        out = op.Concat(op.Reshape(out, shape) if interleaved or groups > 1 else out, kept, axis=-1)
    made: ir.Value = op.Reshape(out, [0, 0, -1])
    return made


rotate = Operator(
    name="rotate",
    function="RotaryPosition",
    inputs=("x", "cos", "sin"),
    outputs=("rotated",),
    eager=_rotate,
    fake=_rotate_fake,
    body=_rotate_onnx,
)
