"""What TensorRT's layers compute, one function for each kind, in float64.

Written from NVIDIA's documentation of operators
(https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators) and of the C++ API. Each function gets a layer,
downcast to its own class, and the values of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from posexport.runtimes.tensorrt import data_movement, windows
from posexport.runtimes.tensorrt.attention import attention, kv_cache_update, rotary_embedding
from posexport.runtimes.tensorrt.values import CannotEvaluate, bits, cast, ints, read_weights

Tensor = torch.Tensor


def chosen(table: Mapping[str, Callable[..., Tensor]], kind: Any) -> Callable[..., Tensor]:
    """The function of an operation, or CannotEvaluate."""
    if kind.name not in table:
        raise CannotEvaluate(f"the operation {kind.name} is not known")
    return table[kind.name]


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": lambda a, b: torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc"),
    "POW": torch.pow,
    "FLOOR_DIV": torch.floor_divide,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name.lower())
        for name in (
            *("EXP", "LOG", "SQRT", "ABS", "NEG", "SIN", "COS", "TAN", "SINH", "COSH", "ASIN", "ACOS", "ATAN", "ASINH"),
            *("ACOSH", "ATANH", "CEIL", "FLOOR", "ERF", "SIGN", "ROUND", "ISINF", "ISNAN"),
        )
    },
    "RECIP": torch.reciprocal,
    "NOT": torch.logical_not,
}

ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "RELU": lambda x, a, b: x.clamp(min=0),
    "SIGMOID": lambda x, a, b: torch.sigmoid(x),
    "TANH": lambda x, a, b: torch.tanh(x),
    "LEAKY_RELU": lambda x, a, b: torch.where(x >= 0, x, a * x),
    "ELU": lambda x, a, b: torch.where(x >= 0, x, a * torch.expm1(x)),
    "SELU": lambda x, a, b: torch.where(x > 0, b * x, b * a * torch.expm1(x)),
    "SOFTSIGN": lambda x, a, b: x / (1 + x.abs()),
    "SOFTPLUS": lambda x, a, b: a * torch.logaddexp(b * x, torch.zeros_like(x)),
    "CLIP": lambda x, a, b: x.clamp(max=b).clamp(min=a),
    "HARD_SIGMOID": lambda x, a, b: (a * x + b).clamp(0, 1),
    "SCALED_TANH": lambda x, a, b: a * torch.tanh(b * x),
    "THRESHOLDED_RELU": lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
    "GELU_ERF": lambda x, a, b: torch.nn.functional.gelu(x),
    "GELU_TANH": lambda x, a, b: torch.nn.functional.gelu(x, approximate="tanh"),
}
"""Functions of x and the layer's alpha and beta."""


def matrix_multiply(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices or vectors; the layer says which are transposed."""
    ops = [layer.op0.name, layer.op1.name]
    a = a.transpose(-1, -2) if ops[0] == "TRANSPOSE" else a.unsqueeze(-2) if ops[0] == "VECTOR" else a
    b = b.transpose(-1, -2) if ops[1] == "TRANSPOSE" else b.unsqueeze(-1) if ops[1] == "VECTOR" else b
    product = torch.matmul(a, b)
    product = product.squeeze(-2) if ops[0] == "VECTOR" else product
    return product.squeeze(-1) if ops[1] == "VECTOR" else product


def softmax(layer: Any, x: Tensor) -> Tensor:
    """Softmax along the only axis in the bitmask."""
    axes = bits(layer.axes)
    if len(axes) != 1:
        raise CannotEvaluate(f"its axes are {axes}")
    return torch.softmax(x, axes[0])


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in reversed(axes):
        x = x.prod(axis, keepdim=keep)
    return x


REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "SUM": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "PROD": _product,
    "MAX": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "MIN": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "AVG": lambda x, axes, keep: x.mean(axes, keepdim=keep),
}


def reduce(layer: Any, x: Tensor) -> Tensor:
    """A reduction over the axes in the bitmask."""
    axes = bits(layer.axes)
    if not axes or (layer.op.name == "AVG" and not x.is_floating_point()):
        raise CannotEvaluate(f"it reduces {x.dtype} by {layer.op.name} over axes {axes}")
    return chosen(REDUCTIONS, layer.op)(x, axes, layer.keep_dims)


def fill(layer: Any, dims: Tensor | None = None, alpha: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    """alpha plus beta times the index, summed over axes; both are inputs or attributes, integers or floats."""
    if layer.operation.name != "LINSPACE":
        raise CannotEvaluate(f"the operation {layer.operation.name} is random")
    sizes = tuple(layer.shape) if dims is None else ints(dims)
    dtype = torch.float64 if layer.to_type.name == "FLOAT" else torch.int64
    if (alpha is None) != (beta is None) or (beta is None and len(sizes) != 1):
        raise CannotEvaluate("its start and step are not both given")
    start = torch.as_tensor(layer.alpha if alpha is None else alpha).to(dtype)
    steps = torch.as_tensor([layer.beta] if beta is None else beta).to(dtype).reshape(-1)
    if len(steps) != len(sizes):
        raise CannotEvaluate(f"it has {len(steps)} steps for {len(sizes)} axes")
    filled = start.reshape(()).expand(sizes)
    for axis, size in enumerate(sizes):
        filled = filled + steps[axis] * data_movement.along(torch.arange(size, dtype=dtype), axis, len(sizes))
    return filled


def cumulative(layer: Any, x: Tensor, axes: Tensor) -> Tensor:
    """Cumulative sums along an axis, without the element if `exclusive`, from the end if `reverse`."""
    if layer.op.name != "SUM":
        raise CannotEvaluate(f"the operation {layer.op.name} is not known")
    (axis,) = ints(axes)
    x = x.flip(axis) if layer.reverse else x
    sums = x.cumsum(axis)
    if layer.exclusive and x.shape[axis]:
        sums = torch.cat((torch.zeros_like(x.narrow(axis, 0, 1)), sums.narrow(axis, 0, x.shape[axis] - 1)), axis)
    return sums.flip(axis) if layer.reverse else sums


def normalization(layer: Any, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, over the axes of the bitmask."""
    if layer.num_groups != 1:
        raise CannotEvaluate(f"it has {layer.num_groups} groups")
    axes = bits(layer.axes)
    centred = x - x.mean(axes, keepdim=True)
    normal = centred / torch.sqrt((centred**2).mean(axes, keepdim=True) + layer.epsilon)
    return torch.addcmul(bias, normal, scale)


def scale(layer: Any, x: Tensor) -> Tensor:
    """(x * scale + shift) ^ power, with one coefficient for all channels or one per channel."""
    shapes: dict[str, list[int]] = {"UNIFORM": [], "CHANNEL": [-1, *[1] * (x.ndim - layer.channel_axis - 1)]}
    if layer.mode.name not in shapes:
        raise CannotEvaluate(f"the mode {layer.mode.name} is not known")
    weights = [layer.scale, layer.shift, layer.power]
    factor, shift, power = (read_weights(given, shapes[layer.mode.name]) if len(given) else None for given in weights)
    x = x if factor is None else x * factor
    x = x if shift is None else x + shift
    return x if power is None else x**power


def assertion(layer: Any, condition: Tensor) -> tuple[Tensor, ...]:
    """No output; RuntimeError if the input is false, as TensorRT raises at run time."""
    if not bool(condition.all()):
        raise RuntimeError(f"an assertion of TensorRT's fails: {layer.message}")
    return ()


Evaluate = Callable[..., Tensor | tuple[Tensor, ...]]
"""Computes a kind of layer from the layer and the values of its inputs, None for an absent one."""


def _first(layer: Any, x: Tensor, *others: Tensor) -> Tensor:
    """The first input unchanged: for layers at the borders of a conditional and of an attention."""
    return x


LAYERS: dict[str, tuple[str, Evaluate]] = {
    "ACTIVATION": ("IActivationLayer", lambda layer, x: chosen(ACTIVATIONS, layer.type)(x, layer.alpha, layer.beta)),
    "ASSERTION": ("IAssertionLayer", assertion),
    "ATTENTION_INPUT": ("IAttentionInputLayer", attention),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", _first),
    "CAST": ("ICastLayer", lambda layer, x: cast(x, layer.to_type.name)),
    "CONCATENATION": ("IConcatenationLayer", lambda layer, *parts: torch.cat(parts, layer.axis)),
    "CONDITION": ("IConditionLayer", _first),
    "CONDITIONAL_INPUT": ("IIfConditionalInputLayer", _first),
    "CONDITIONAL_OUTPUT": ("IIfConditionalOutputLayer", _first),
    "CONSTANT": ("IConstantLayer", lambda layer: read_weights(layer.weights, tuple(layer.shape))),
    "CONVOLUTION": ("IConvolutionLayer", windows.convolution),
    "CUMULATIVE": ("ICumulativeLayer", cumulative),
    "DECONVOLUTION": ("IDeconvolutionLayer", windows.deconvolution),
    "EINSUM": ("IEinsumLayer", lambda layer, *x: torch.einsum(layer.equation, *x)),
    "ELEMENTWISE": ("IElementWiseLayer", lambda layer, a, b: chosen(BINARY, layer.op)(a, b)),
    "FILL": ("IFillLayer", fill),
    "GATHER": ("IGatherLayer", data_movement.gather),
    "IDENTITY": ("IIdentityLayer", lambda layer, x: cast(x, layer.get_output(0).dtype.name)),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", kv_cache_update),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", matrix_multiply),
    "NON_ZERO": ("INonZeroLayer", lambda _, x: torch.nonzero(x).T),
    "NORMALIZATION": ("INormalizationLayer", normalization),
    "ONE_HOT": ("IOneHotLayer", data_movement.one_hot),
    "PARAMETRIC_RELU": ("IParametricReLULayer", lambda _, x, slope: torch.where(x >= 0, x, x * slope)),
    "POOLING": ("IPoolingLayer", windows.pooling),
    "REDUCE": ("IReduceLayer", reduce),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", rotary_embedding),
    "SCALE": ("IScaleLayer", scale),
    "SCATTER": ("IScatterLayer", data_movement.scatter),
    "SELECT": ("ISelectLayer", lambda _, condition, a, b: torch.where(condition, a, b)),
    "SHAPE": ("IShapeLayer", lambda _, x: torch.tensor(x.shape, dtype=torch.int64)),
    "SHUFFLE": ("IShuffleLayer", data_movement.shuffle),
    "SLICE": ("ISliceLayer", data_movement.slice_),
    "SOFTMAX": ("ISoftMaxLayer", softmax),
    "SQUEEZE": ("ISqueezeLayer", data_movement.squeeze),
    "TOPK": ("ITopKLayer", data_movement.top_k),
    "UNARY": ("IUnaryLayer", lambda layer, x: chosen(UNARY, layer.op)(x)),
    "UNSQUEEZE": ("IUnsqueezeLayer", data_movement.unsqueeze),
}
"""Every known kind of layer, by the name of TensorRT's LayerType: its class, and the function that computes it."""
