"""The output shape of each operator, as polynomials of the dimensions of a graph's inputs.

Lengths that are not polynomials, such as a minimum, are symbols of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from posexport.custom_ops.angles import exact_sinusoids
from posexport.graphs import attended_shapes, branch_shapes, cut_shapes
from posexport.graphs.convolved_shapes import CONVOLUTIONS, convolved
from posexport.graphs.node_arguments import input_of
from posexport.graphs.symbolic_sizes import ONE, Shape, Size, product

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes


def of_output(shapes: SymbolicShapes, node: ir.Node, at: int) -> Shape | None:
    """The shape of an output of a node; None if no rule tells."""
    if node.op_type == exact_sinusoids.function:
        return _sinusoids(shapes, node)
    if node.op_type == "Split":
        return cut_shapes.part(shapes, node, at)
    if node.op_type == "If":
        return branch_shapes.chosen(shapes, node, at)
    rule = _RULES.get(node.op_type)
    if rule is None or not all(value is None or shapes.knows(value) for value in node.inputs):
        return None
    return rule(shapes, node) if at == 0 or (node.op_type, at) in _FURTHER else None


def _sinusoids(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """Cosines, or sines, of each position [...] for each of P pairs [2, P]: [..., P]."""
    positions, turns = shapes.of_input(node, 0), shapes.of_input(node, 1)
    return None if positions is None or not turns else (*positions, turns[-1])


def _like_first(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    return shapes.of_input(node, 0)


def _like_second(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    return shapes.of_input(node, 1)


def _broadcast(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    return _together(shapes, [(shapes.of(value), shapes.actual(value)) for value in node.inputs if value is not None])


def _together(shapes: SymbolicShapes, values: Sequence[tuple[Shape, tuple[int, ...]]]) -> Shape:
    """The broadcast shape of values; each is given with its shape in the probe."""
    rank = max(len(shape) for shape, _ in values)
    by_axis = (
        [(shape[axis], actual[axis]) for shape, actual in values if len(shape) >= -axis] for axis in range(-rank, 0)
    )
    return tuple(_common(shapes, sizes) for sizes in by_axis)


def _common(shapes: SymbolicShapes, sizes: Sequence[tuple[Size, int]]) -> Size:
    """The broadcast length of an axis: a length that isn't 1. Each length is given with its length in the probe."""
    other = {size for size, _ in sizes if size != ONE}
    if len(other) < 2:
        return next(iter(other), ONE)
    shapes.met.append(tuple(other))
    fixed = next((size for size, actual in sizes if size.is_fixed and actual != 1), None)
    if fixed is not None:
        return fixed
    for size, actual in sizes:  # if this one may be 1, no other may be larger
        largest = (shapes.symbols.least(size) or 0) > 1 or all(shapes.symbols.is_at_most(one, size) for one in other)
        if actual != 1 and largest:
            return size
    return shapes.symbols.broadcast(other)


def _transposed(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape = shapes.of_input(node, 0)
    attribute = node.attributes.get("perm")
    if shape is None or attribute is None:
        return shape and shape[::-1]
    perm = attribute.as_ints()
    return tuple(shape[axis] for axis in perm) if len(perm) == len(shape) else None


def _reshaped(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, to = shapes.of_input(node, 0), shapes.numbers(input_of(node, 1))
    if shape is None or to is None:
        return None
    copies = not node.attributes.get_int("allowzero", 0)
    sizes: list[Size | None] = []
    for axis, size in enumerate(to):
        if size == Size(0) and copies:
            sizes.append(shape[axis] if axis < len(shape) else None)
        else:
            sizes.append(None if size == Size(-1) else size)
    if sizes.count(None) > 1:
        return None
    known, whole = product(size for size in sizes if size is not None), product(shape)
    if None not in sizes:
        shapes.equal.append((whole, known))
    left = shapes.symbols.exact_quotient(whole, known)
    return tuple(left if size is None else size for size in sizes)


def _flattened(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, axis = shapes.of_input(node, 0), node.attributes.get_int("axis", 1)
    return None if shape is None else (product(shape[:axis]), product(shape[axis:]))


def _squeezed(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, axes = shapes.of_input(node, 0), shapes.axes(node)
    if shape is None or axes is None:
        return None
    dropped = {axis % len(shape) for axis in axes} if shape else set()
    return tuple(size for axis, size in enumerate(shape) if axis not in dropped)


def _unsqueezed(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, axes = shapes.of_input(node, 0), shapes.axes(node)
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    added = {axis % rank for axis in axes}
    rest = iter(shape)
    return tuple(ONE if axis in added else next(rest, ONE) for axis in range(rank))


def _expanded(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, to = shapes.of_input(node, 0), shapes.numbers(input_of(node, 1))
    if shape is None or to is None or node.inputs[0] is None:
        return None
    here = shapes.tensor(node.outputs[0])
    actual = shapes.actual(node.inputs[0])
    if here is None:
        return None
    number = None if node.inputs[1] is None else shapes.tensor(node.inputs[1])
    asked = tuple(here.shape[-len(to) :]) if number is None else tuple(int(one) for one in number.reshape(-1).tolist())
    return _together(shapes, [(shape, actual), (to, asked)])


def _tiled(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, times = shapes.of_input(node, 0), shapes.numbers(input_of(node, 1))
    if shape is None or times is None or len(shape) != len(times):
        return None
    return tuple(size * count for size, count in zip(shape, times, strict=True))


def _joined(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    values = node.inputs[2::3] if node.op_type == "QLinearConcat" else node.inputs
    parts = [(shapes.of(value), shapes.actual(value)) for value in values if value is not None]
    rank = len(parts[0][0])
    if not rank or any(len(shape) != rank for shape, _ in parts):
        return None
    axis = node.attributes.get_int("axis", 0) % rank
    common = _together(shapes, parts)
    return (*common[:axis], shapes.symbols.total(shape[axis] for shape, _ in parts), *common[axis + 1 :])


def _gathered(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    data, indices = shapes.of_input(node, 0), shapes.of_input(node, 1)
    if not data or indices is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(data)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _gathered_by_places(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    data, indices, batch = shapes.of_input(node, 0), shapes.of_input(node, 1), node.attributes.get_int("batch_dims", 0)
    if data is None or not indices or not indices[-1].is_fixed:
        return None
    return (*indices[:-1], *data[batch + indices[-1].number :])


def _padded(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape = shapes.of_input(node, 0)
    attribute = node.attributes.get("pads")
    pads = tuple(map(Size, attribute.as_ints())) if attribute is not None else shapes.numbers(input_of(node, 1))
    axes = None if input_of(node, 3) is None else shapes.whole_numbers(input_of(node, 3))
    if shape is None or pads is None or (axes is None and input_of(node, 3) is not None):
        return None
    axes = [*range(len(shape))] if axes is None else axes
    if len(pads) != 2 * len(axes):
        return None
    sizes = list(shape)
    for at, axis in enumerate(axes):
        sizes[axis] = shapes.symbols.total([shape[axis], pads[at], pads[at + len(axes)]])
    return tuple(sizes)


def _largest(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, count = shapes.of_input(node, 0), shapes.numbers(input_of(node, 1))
    if not shape or not count:
        return None
    axis = node.attributes.get_int("axis", -1) % len(shape)
    return (*shape[:axis], count[0], *shape[axis + 1 :])


def _one_hot(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, depth = shapes.of_input(node, 0), shapes.numbers(input_of(node, 1))
    axis = node.attributes.get_int("axis", -1)
    if shape is None or depth is None or len(depth) != 1:
        return None
    axis %= len(shape) + 1
    return (*shape[:axis], depth[0], *shape[axis:])


def _multiplied(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    values = node.inputs[:4:3] if node.op_type == "QGemm" else node.inputs[:2]
    pairs = [(shapes.of(value), shapes.actual(value)) for value in values if value is not None]
    for at, name in enumerate(("transA", "transB")):
        if at < len(pairs) and node.attributes.get_int(name, 0) != 0:
            shape, actual = pairs[at]
            pairs[at] = ((*shape[:-2], *shape[:-3:-1]), (*actual[:-2], *actual[:-3:-1]))
    if len(pairs) != 2 or any(len(shape) < 2 for shape, _ in pairs):
        return None
    (left, a), (right, b) = pairs
    rows = _together(shapes, [(left[:-2], a[:-2]), (right[:-2], b[:-2])]) if len(left) + len(right) > 4 else ()
    shapes.equal.append((left[-1], right[-2]))
    return (*rows, left[-2], right[-1])


def _summed(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    letters = shapes.letters(node)
    if letters is None:
        return None
    lengths = {letter: next((one for one in sizes if one != ONE), ONE) for letter, sizes in letters[0].items()}
    return tuple(lengths[letter] for letter in letters[1])


def _reduced(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, axes = shapes.of_input(node, 0), shapes.axes(node)
    if node.op_type.startswith("Arg"):
        axes = [node.attributes.get_int("axis", 0)]
    if shape is None or (axes is None and input_of(node, 1) is not None):
        return None
    if not axes and node.attributes.get_int("noop_with_empty_axes", 0) != 0:
        return shape
    dropped = {axis % len(shape) for axis in axes} if axes else set(range(len(shape)))
    kept = node.attributes.get_int("keepdims", 1)
    return tuple(ONE if axis in dropped else size for axis, size in enumerate(shape) if kept or axis not in dropped)


def _made(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    return shapes.numbers(input_of(node, 0))


def _ranged(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """A range with step 1 up to an integer, from an integer or from a fraction, which is rounded down."""
    limit, step, first = shapes.numbers(node.inputs[1]), shapes.numbers(node.inputs[2]), node.inputs[0]
    start = shapes.numbers(first)
    if start is None and first in shapes.fixed and first is not None:
        number = shapes.tensor(first)
        start = None if number is None else (Size(math.floor(float(number))),)
    if start is None or limit is None or step != (ONE,) or len(start) != 1 or len(limit) != 1:
        return None
    count = shapes.symbols.difference(limit[0], start[0])
    least = shapes.symbols.least(count)
    return (count if least is not None and least >= 0 else shapes.symbols.other("Range", limit[0], start[0]),)


def _rank(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    found = shapes.tensor(node.outputs[0])
    return (Size(found.numel()),) if found is not None else None


_Rule = Callable[["SymbolicShapes", ir.Node], "Shape | None"]

_BROADCAST = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Where", "Min", "Max", "Sum", "Mean", "And", "Or", "Xor", "PRelu"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("BitShift", "QLinearAdd", "QLinearMul", "QLinearWhere"),  # scales and zero points are single numbers
)
_LIKE_FIRST = (
    *(
        "Abs",
        "Acos",
        "Acosh",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "BitwiseNot",
        "Cosh",
        "Sinh",
        "Shrink",
        "Cast",
        "CastLike",
        "Ceil",
        "Celu",
        "Clip",
        "Cos",
        "CumSum",
        "Dropout",
        "Elu",
    ),
    *("Erf", "Exp", "Floor", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "HardSigmoid", "HardSwish", "Identity"),
    *("IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid"),
    *("Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Trilu", "Softmax"),
    *("LogSoftmax", "Hardmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BatchNormalization", "InstanceNormalization"),
    *("GroupNormalization", "LpNormalization", "LRN", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    *("ScatterElements", "ScatterND", "Scatter", "TensorScatter", "RotaryEmbedding", "EyeLike", "ReverseSequence"),
    *("CausalConvWithState", "CumProd", "MeanVarianceNormalization"),
    *("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"),
)
_REDUCTIONS = (
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"),
    *("ReduceSumSquare", "ReduceLogSum", "ArgMax", "ArgMin"),
)
_PRODUCTS = (
    *("MatMul", "FusedMatMul", "TransposeMatMul", "Gemm", "FusedGemm", "QGemm"),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
)
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_BROADCAST, _broadcast),
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys(CONVOLUTIONS, convolved),
    **dict.fromkeys(_PRODUCTS, _multiplied),
    **attended_shapes.RULES,
    **dict.fromkeys(("Concat", "QLinearConcat"), _joined),
    "ConstantOfShape": _made,
    "Einsum": _summed,
    "Expand": _expanded,
    "Flatten": _flattened,
    "Gather": _gathered,
    "GatherElements": _like_second,
    "GatherND": _gathered_by_places,
    "OneHot": _one_hot,
    "Pad": _padded,
    "Range": _ranged,
    "Reshape": _reshaped,
    "SequenceAt": cut_shapes.of_sequence,
    "Shape": _rank,
    "Slice": cut_shapes.cut,
    "Squeeze": _squeezed,
    "Tile": _tiled,
    "TopK": _largest,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
"""The shape of an operator's first output."""

_FURTHER = {("TopK", 1), ("SkipLayerNormalization", 3), ("SkipSimplifiedLayerNormalization", 3)}
"""Other outputs with the same shape."""
