"""Cosines and sines of positions: cos(a), sin(a) with a = sum over axes of p_axis * frequency[axis].

sinusoids      (positions [B, S] or [B, S, axes] int, frequencies [P] or [axes, P]) -> cos, sin [B, S, P]
pair_features  (first, second [B, S, P]) -> [B, S, 2P], features alternating or one half each

Angles, cosines and sines are fp32 whatever the graph's dtype (fp64 in the float64 reference): an angle in half
precision is wrong by radians from position 1000 on. Who uses them casts last.
"""

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.operator import Operator


def _sinusoids(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if frequencies.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"frequencies are {frequencies.dtype}: angles need float32 or float64, so cast the block's weights only, "
            "not its constants."
        )
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    if frequencies.dim() == 2:
        angles = angles.sum(-2)
    return angles.cos(), angles.sin()


def _sinusoids_fake(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*positions.shape[:2], frequencies.shape[-1])
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


def _sinusoids_onnx(op: Any, positions: ir.Value, frequencies: ir.Value) -> tuple[ir.Value, ir.Value]:
    # Products and a sum, not MatMul: TF32 would round the positions to 11 bits.
    angles = op.Mul(op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1]), frequencies)
    assert frequencies.shape is not None
    if len(frequencies.shape) == 2:
        angles = op.ReduceSum(angles, [-2], keepdims=0)
    return op.Cos(angles), op.Sin(angles)


sinusoids = Operator(
    name="sinusoids",
    function="Sinusoids",
    inputs=("positions", "frequencies"),
    outputs=("cos", "sin"),
    eager=_sinusoids,
    fake=_sinusoids_fake,
    body=_sinusoids_onnx,
)


def _pair_features(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def _pair_features_fake(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return first.new_empty((*first.shape[:-1], 2 * first.shape[-1]))


def _pair_features_onnx(op: Any, first: ir.Value, second: ir.Value, *, interleaved: bool) -> ir.Value:
    made: ir.Value
    if interleaved:
        made = op.Reshape(op.Concat(op.Unsqueeze(first, [-1]), op.Unsqueeze(second, [-1]), axis=-1), [0, 0, -1])
    else:
        made = op.Concat(first, second, axis=-1)
    return made


pair_features = Operator(
    name="pair_features",
    function="PairFeatures",
    inputs=("first", "second"),
    outputs=("features",),
    eager=_pair_features,
    fake=_pair_features_fake,
    body=_pair_features_onnx,
)
