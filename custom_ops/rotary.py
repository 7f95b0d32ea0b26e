"""Rotation of pairs of features: (a, b) -> (a cos - b sin, a sin + b cos), Su et al. 2021, arXiv:2104.09864, eq. 34.

rotate  x [B, S, heads*head_dim], cos and sin [B, S, P] -> like x; of each head the first 2P features turn.
`interleaved`: pair i is (2i, 2i+1). Otherwise the 2P features fall into `groups` equal runs, and in each a feature of
the first half pairs with one of the second half: (i, i + P) for one group (Hugging Face's rotate_half).

Splits and a concatenation, no strided assignment (40 times slower on ONNX Runtime, and it breaks TensorRT's fusion).
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.operator import Operator, cast
from posexport.errors import RequestError


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


def _one_group(
    op: Any,
    x: ir.Value,
    head_dim: int,
    pairs: int,
    interleaved: bool,
    groups: int,
    turn: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """`turn` of features brought into the one order that operators know: all first halves, then all second ones."""
    if interleaved or groups == 1:
        return turn(x)
    if 2 * pairs != head_dim:
        raise RequestError(
            f"{groups} groups turn {2 * pairs} of {head_dim} features: RotaryEmbedding takes groups that fill the head."
        )
    runs = [0, 0, -1, groups, 2, pairs // groups]
    swapped = op.Transpose(op.Reshape(x, runs), perm=[0, 1, 2, 4, 3, 5])
    turned = op.Reshape(turn(op.Reshape(swapped, [0, 0, -1])), [0, 0, -1, 2, groups, pairs // groups])
    made: ir.Value = op.Reshape(op.Transpose(turned, perm=[0, 1, 2, 4, 3, 5]), [0, 0, -1])
    return made


def _sizes(x: ir.Value, cos: ir.Value, head_dim: int) -> tuple[int, int]:
    """Heads, and pairs that turn."""
    assert x.shape is not None and cos.shape is not None
    return int(x.shape[-1]) // head_dim, int(cos.shape[-1])  # type: ignore[arg-type]


def _rotate_native(
    op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, *, head_dim: int, interleaved: bool, groups: int
) -> ir.Value:
    # Caches per token, [B, S, P], and no position_ids: positions stay data, on any number of axes.
    assert x.dtype is not None
    heads, pairs = _sizes(x, cos, head_dim)
    cos, sin = (cast(op, t, ir.DataType.FLOAT, x.dtype) for t in (cos, sin))
    partial = {"rotary_embedding_dim": 2 * pairs} if 2 * pairs < head_dim else {}

    def turn(features: ir.Value) -> ir.Value:
        made: ir.Value = op.RotaryEmbedding(
            features, cos, sin, num_heads=heads, interleaved=int(interleaved), **partial
        )
        return made

    return _one_group(op, x, head_dim, pairs, interleaved, groups, turn)


def _rotate_contrib(
    op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, *, head_dim: int, interleaved: bool, groups: int
) -> ir.Value:
    # Its caches are rows by position. A row per token of the batch, and the token's number for its position, make any
    # positions data.
    assert x.dtype is not None
    heads, pairs = _sizes(x, cos, head_dim)
    batch, seq = (op.Squeeze(op.Shape(cos, start=axis, end=axis + 1)) for axis in (0, 1))
    rows = op.Add(op.Mul(op.Unsqueeze(op.Range(0, batch, 1), [1]), seq), op.Range(0, seq, 1))
    cos, sin = (op.Reshape(cast(op, t, ir.DataType.FLOAT, x.dtype), [-1, pairs]) for t in (cos, sin))
    partial = {"rotary_embedding_dim": 2 * pairs} if 2 * pairs < head_dim else {}

    def turn(features: ir.Value) -> ir.Value:
        made: ir.Value = op.RotaryEmbedding(
            features,
            rows,
            cos,
            sin,
            num_heads=heads,
            interleaved=int(interleaved),
            _domain="com.microsoft",
            _version=1,
            **partial,
        )
        return made

    return _one_group(op, x, head_dim, pairs, interleaved, groups, turn)


rotate = Operator(
    name="rotate",
    function="RotaryPosition",
    inputs=("x", "cos", "sin"),
    outputs=("rotated",),
    eager=_rotate,
    fake=_rotate_fake,
    body=_rotate_onnx,
    forms={"native": _rotate_native, "contrib": _rotate_contrib},
)
