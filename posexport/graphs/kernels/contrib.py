"""Further operators of ONNX Runtime that transformers consist of (domain com.microsoft)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels import indexing, layout
from posexport.graphs.kernels.convolutions import conv
from posexport.graphs.kernels.products import gemm
from posexport.graphs.kernels.registry import KERNELS, MICROSOFT, Call, kernel

_EPSILON = 1e-12
"""The epsilon if the file states none. The standard's normalisations have 1e-5."""


@kernel("Gelu", "BiasGelu", domain=MICROSOFT)
def gelu(call: Call, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Φ(x); with a bias, of x + bias."""
    return F.gelu(x if bias is None else x + bias)


@kernel("FastGelu", domain=MICROSOFT)
def fast_gelu(call: Call, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The tanh approximation, with the operator's own rounded constants."""
    x = x if bias is None else x + bias
    return 0.5 * x * (1 + torch.tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x)))


@kernel("QuickGelu", domain=MICROSOFT)
def quick_gelu(call: Call, x: Tensor) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(call.get("alpha", 1.702) * x)


@kernel("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    call: Call, x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNormalization of x + skip + bias; also mean, 1/deviation and the sum."""
    total = x + skip if bias is None else x + skip + bias
    mean = total.mean(-1, keepdim=True)
    centred = total - mean
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + call.get("epsilon", _EPSILON))
    y = centred * inverse * scale
    return y if shift is None else y + shift, mean, inverse, total


@kernel("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_normalization(
    call: Call, x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, None, Tensor, Tensor]:
    """RMSNormalization of x + skip + bias; also 1/root and the sum."""
    total = x + skip if bias is None else x + skip + bias
    inverse = torch.rsqrt(total.square().mean(-1, keepdim=True) + call.get("epsilon", _EPSILON))
    return total * inverse * scale, None, inverse, total


@kernel("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    call: Call,
    words: Tensor,
    segments: Tensor | None,
    word_table: Tensor,
    position_table: Tensor,
    segment_table: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of BERT's embeddings, normalised; also the number of tokens of each row, and the sum."""
    at = torch.arange(words.shape[1])[None] if positions is None else positions
    total = _rows(word_table, words) + _rows(position_table, at)
    if segments is not None and segment_table is not None:
        total = total + _rows(segment_table, segments)
    y = F.layer_norm(total, total.shape[-1:], scale, shift, call.get("epsilon", _EPSILON))
    count = torch.zeros(words.shape[0], dtype=torch.int32) if mask is None else mask.sum(1).to(torch.int32)
    return y, count, total


def _rows(table: Tensor, at: Tensor) -> Tensor:
    return table[indexing.positive(at, table.shape[0])]


def _turned(x: Tensor, call: Call, side: str) -> Tensor:
    if call.get(f"transBatch{side}", 0):
        x = x.movedim(0, -2)  # [rows, batch..., columns] to [batch..., rows, columns]
    return x.transpose(-1, -2) if call.get(f"trans{side}", 0) and x.dim() > 1 else x


@kernel("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """alpha * A B, with transposed operands."""
    product = torch.matmul(_turned(a, call, "A"), _turned(b, call, "B"))
    alpha = call.get("alpha", 1.0)
    return product if alpha == 1 else alpha * product


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "": lambda x: x,
    "Relu": torch.relu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "LeakyRelu": F.leaky_relu,
    "Clip": torch.clamp,
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
}
_PARAMETRIC = {"LeakyRelu", "Clip", "HardSigmoid"}


@kernel("FusedGemm", domain=MICROSOFT)
def fused_gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """Gemm and an activation."""
    return _activated(call, gemm(call, a, b, c), [call.get("activation_alpha", 0.01)])


@kernel("FusedConv", domain=MICROSOFT)
def fused_conv(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Conv, a sum, and an activation."""
    product = conv(call, x, w, bias)
    return _activated(call, product if added is None else product + added, call.get("activation_params", []))


def _activated(call: Call, x: Tensor, parameters: Sequence[float]) -> Tensor:
    name = call.get("activation", "")
    if name not in _ACTIVATIONS:
        raise ValueError(f"its activation {name!r} can't be evaluated")
    return _ACTIVATIONS[name](x, *parameters) if name in _PARAMETRIC else _ACTIVATIONS[name](x)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The integers of `bits` bits in the bytes of the last dimension, low bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return torch.bitwise_and(torch.bitwise_right_shift(packed[..., None], shifts), 2**bits - 1).flatten(-2)


@kernel("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    call: Call, data: Tensor, indices: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """Slices of dequantised weights, with a scale and a zero point for each block of an axis.

    Bytes are packed as in MatMulNBits.
    """
    along, block = call.get("gather_axis", 0) % data.dim(), call.get("block_size", 128)
    axis = call.get("quantize_axis", 1) % data.dim()
    flat = indexing.positive(indices, data.shape[along]).flatten()
    data, scales = data.index_select(along, flat), scales.index_select(along, flat)
    zeros = None if zeros is None else zeros.index_select(along, flat)
    middle = 0.0
    if call.type_of(0) == ir.DataType.UINT8:
        bits = call.get("bits", 4)
        data, zeros = unpacked(data, bits), None if zeros is None else unpacked(zeros, bits)
        middle = 2.0 ** (bits - 1)

    def over(values: Tensor) -> Tensor:
        return values.repeat_interleave(block, axis).narrow(axis, 0, data.shape[axis])

    offsets = middle if zeros is None else over(zeros.narrow(axis, 0, scales.shape[axis])).to(scales.dtype)
    weights = (data.to(scales.dtype) - offsets) * over(scales)
    return weights.unflatten(along, indices.shape) if indices.dim() else weights.squeeze(along)


@kernel("MatMulNBits", domain=MICROSOFT)
def matmul_n_bits(
    call: Call,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """A times dequantised weights b [N, blocks, bytes], with a scale and a zero point for each block.

    If the file asks for 8-bit integers (`accuracy_level`), A is rounded to them, except in wide evaluation.
    """
    if groups is not None:
        raise ValueError("group indices can't be evaluated")
    bits, rows, columns = call.get("bits", 4), call.get("K"), call.get("N")
    if bits not in (2, 4, 8):
        raise ValueError(f"weights of {bits} bits can't be evaluated")
    numbers = unpacked(b, bits).reshape(columns, b.shape[1], -1).to(a.dtype)
    if zeros is None:
        middle = torch.full((columns, b.shape[1]), 2.0 ** (bits - 1), dtype=a.dtype)
    elif zeros.is_floating_point():
        middle = zeros.reshape(columns, -1)
    else:
        middle = unpacked(zeros.reshape(columns, -1), bits)[:, : b.shape[1]].to(a.dtype)
    weights = (numbers - middle[..., None]) * scales.reshape(columns, -1)[..., None]
    if call.get("accuracy_level", 0) == _OF_8_BITS and not call.wide:
        a = _in_8_bits(a, call.get("block_size"))
    product = torch.matmul(a, weights.flatten(1)[:, :rows].T)
    return product if bias is None else product + bias


_OF_8_BITS = 4
"""The `accuracy_level` of products of 8-bit integers."""


def _in_8_bits(a: Tensor, block: int) -> Tensor:
    """Features rounded to 8-bit integers times a scale, with which the largest of each block is 127."""
    blocks = torch.nn.functional.pad(a, (0, -a.shape[-1] % block)).unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded: Tensor = torch.round(blocks / torch.where(scale == 0, 1, scale)) * scale
    return rounded.flatten(-2)[..., : a.shape[-1]]


KERNELS[MICROSOFT, "Trilu"] = layout.trilu
KERNELS[MICROSOFT, "GatherND"] = indexing.gather_nd
KERNELS[MICROSOFT, "Range"] = layout.range_
