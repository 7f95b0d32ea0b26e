"""Normalisations over features, channels and groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels.registry import Call, kernel


def _stash(call: Call, x: Tensor) -> Tensor:
    """x in the dtype in which statistics are computed: float32 by default, float64 in wide evaluation."""
    return x.to(call.dtype(call.get("stash_type", 1)))


@kernel("LayerNormalization")
def layer_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + epsilon) over the axes from `axis` on; also the mean and 1/deviation."""
    axis = call.get("axis", -1) % x.dim()
    axes, inside = list(range(axis, x.dim())), _stash(call, x)
    mean = inside.mean(axes, keepdim=True)
    centred = inside - mean
    inverse = torch.rsqrt(centred.square().mean(axes, keepdim=True) + call.get("epsilon", 1e-5))
    y = (centred * inverse).to(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@kernel("RMSNormalization", "SimplifiedLayerNormalization")
def rms_normalization(call: Call, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + epsilon) over the axes from `axis` on; also 1/root."""
    axis = call.get("axis", -1) % x.dim()
    axes, inside = list(range(axis, x.dim())), _stash(call, x)
    inverse = torch.rsqrt(inside.square().mean(axes, keepdim=True) + call.get("epsilon", 1e-5))
    return (inside * inverse).to(scale.dtype) * scale, inverse


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


@kernel("BatchNormalization")
def batch_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """With running statistics; in training, with those of the batch, and then also the new running ones."""
    epsilon = call.get("epsilon", 1e-5)
    if not call.get("training_mode", 0):
        inverse = torch.rsqrt(_by_channel(variance, x) + epsilon)
        return ((x - _by_channel(mean, x)) * inverse * _by_channel(scale, x) + _by_channel(bias, x)).to(x.dtype)
    axes, momentum = [0, *range(2, x.dim())], call.get("momentum", 0.9)
    now_mean, now_variance = x.mean(axes), x.var(axes, correction=0)
    y = (x - _by_channel(now_mean, x)) * torch.rsqrt(_by_channel(now_variance, x) + epsilon)
    y = y * _by_channel(scale, x) + _by_channel(bias, x)
    return (y, mean * momentum + now_mean * (1 - momentum), variance * momentum + now_variance * (1 - momentum))


@kernel("InstanceNormalization")
def instance_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """With the statistics of each channel of each sample."""
    return F.group_norm(x, x.shape[1], scale, bias, call.get("epsilon", 1e-5))


@kernel("GroupNormalization")
def group_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """With the statistics of groups of channels. Before opset 21, scale and bias belong to groups."""
    groups = call.get("num_groups")
    if scale.numel() == groups and groups != x.shape[1]:
        scale, bias = (values.repeat_interleave(x.shape[1] // groups) for values in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.get("epsilon", 1e-5))


@kernel("MeanVarianceNormalization")
def mean_variance_normalization(call: Call, x: Tensor) -> Tensor:
    """(x - mean) / (deviation + 1e-9)."""
    axes = list(call.get("axes", (0, 2, 3)))
    return (x - x.mean(axes, keepdim=True)) / (x.std(axes, correction=0, keepdim=True) + 1e-9)


@kernel("LRN")
def local_response_normalization(call: Call, x: Tensor) -> Tensor:
    """x / (bias + alpha/size * sum of squares of neighbouring channels) ^ beta."""
    size = call.get("size")
    padded = F.pad(x.square().movedim(1, -1), ((size - 1) // 2, size - 1 - (size - 1) // 2))
    sums = padded.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    scale = call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * sums
    return x / torch.pow(scale, call.get("beta", 0.75))
