"""Random mutants: one node, constant or wire of a graph changed, in 20 kinds, in the main graph or in a function.

The weights themselves stay as they are, because verify takes the float64 block from them: a mutant's graph reads them
wrongly instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper

from mutation.artifacts import Artifact
from mutation.surgery import (
    Array,
    Holder,
    Nodes,
    change_input,
    change_value,
    constant_value,
    copy_of,
    insert,
    mask_sites,
    read_constant,
    sites,
)

Random = np.random.Generator
Mutate = Callable[[onnx.ModelProto, Random, frozenset[str]], str | None]
"""Change a graph, whose weights have these names; what was done, or None where nothing could be."""

SWAPS = {
    **{"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Cos": "Sin", "Sin": "Cos", "Min": "Max", "Max": "Min"},
    **{"GreaterOrEqual": "Greater", "Greater": "GreaterOrEqual", "Less": "LessOrEqual", "LessOrEqual": "Less"},
    **{"And": "Or", "Or": "And", "ReduceMean": "ReduceSum", "ReduceMax": "ReduceMin", "Tanh": "Sigmoid"},
    **{"Sigmoid": "Tanh", "Sqrt": "Reciprocal", "Reciprocal": "Sqrt", "Floor": "Ceil", "Log": "Sqrt", "Erf": "Tanh"},
    **{"Abs": "Neg", "Neg": "Abs", "Relu": "Abs", "Exp": "Sigmoid", "Equal": "Less"},
}
"""Operators of the same inputs."""


def _pick(random: Random, found: list[tuple[Holder, int, onnx.NodeProto]]) -> tuple[Holder, int, onnx.NodeProto] | None:
    return found[int(random.integers(len(found)))] if found else None


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.output[0]!r}"


def _constants(model: onnx.ModelProto, weights: frozenset[str], kind: str) -> list[tuple[Holder, int, int, Array]]:
    """Each constant that a node reads, of a numpy kind: holder, index of the reader, number of the input, value."""
    found = []
    for holder, index, node in sites(model):
        for at, name in enumerate(node.input):
            if name and name not in weights:
                value = constant_value(holder, model, name)
                if value is not None and value.size and value.dtype.kind == kind:
                    found.append((holder, index, at, value))
    return found


def _changed_constant(kind: str, change: Callable[[Array, Random], Array | None]) -> Mutate:
    def mutate(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
        found = _constants(model, weights, kind)
        random.shuffle(found)
        for holder, index, at, value in found:
            other = change(np.array(value), random)
            if other is not None and not np.array_equal(other, value):
                node = holder.node[index]
                said = f"input {at} of {_label(node)} was {value.ravel()[:4].tolist()}"
                named = {tensor.name: tensor for tensor in model.graph.initializer}
                if holder is model.graph and node.input[at] in named:
                    name = node.input[at]
                    named[name].CopyFrom(numpy_helper.from_array(other.astype(value.dtype), name))
                else:
                    read_constant(holder, index, at, other.astype(value.dtype))
                return said
        return None

    return mutate


def _one_off(values: Array, random: Random) -> Array:
    flat = values.reshape(-1)
    flat[random.integers(flat.size)] += random.choice([-1, 1])
    return values


def _perturbed(values: Array, random: Random) -> Array:
    if random.random() < 0.2:
        return -values
    flat = values.reshape(-1)
    at = random.integers(flat.size)
    flat[at] = flat[at] * (1 + random.choice([-1, 1]) * random.uniform(0.003, 0.5)) if flat[at] else 0.1
    return values


def _permuted(values: Array, random: Random) -> Array | None:
    if values.ndim == 0 or values.shape[0] < 2:
        return None
    first, second = random.choice(values.shape[0], 2, replace=False)
    values[[first, second]] = values[[second, first]]
    return values


def _other_operator(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    found = _pick(random, list(sites(model, *SWAPS)))
    if found is None:
        return None
    node = found[2]
    said = _label(node)
    node.op_type = SWAPS[node.op_type]
    return f"{said} is {node.op_type}"


def _other_order(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    kinds = ("Sub", "Div", "MatMul", "Concat", "Where", "Less", "GreaterOrEqual", "Pow", "Mul", "Attention")
    found = [site for site in sites(model, *kinds) if len(site[2].input) > 1 and site[2].op_type != "Mul"]
    site = _pick(random, found)
    if site is None:
        return None
    node = site[2]
    first, second = (1, 2) if node.op_type in ("Where", "Attention") else (0, 1)
    node.input[first], node.input[second] = node.input[second], node.input[first]
    return _label(node)


_PASSING = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Cos", "Sin", "Softmax", "Sqrt", "Reciprocal", "Tanh", "Sigmoid")


def _bypassed(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    kinds = (*_PASSING, "And", "Or", "Not", "Where", "Erf", "Abs", "Floor", "RotaryEmbedding", "Log", "Exp", "Relu")
    site = _pick(random, list(sites(model, *kinds)))
    if site is None:
        return None
    _, _, node = site
    said = _label(node)
    inputs = list(node.input)[1:] if node.op_type == "Where" else list(node.input)[:2]
    kept = inputs[0] if node.op_type == "RotaryEmbedding" else str(random.choice([name for name in inputs if name]))
    node.op_type = "Identity"
    node.domain = ""
    del node.attribute[:]
    node.input[:] = [kept]
    return f"{said} gives {kept!r}"


def _attribute(*names: str) -> Mutate:
    def mutate(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
        numbers = (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT)
        found = []
        for _, _, node in sites(model):
            for attribute in node.attribute:
                wanted = attribute.name in names if names else attribute.name not in ("to", "axis", "perm")
                if wanted and attribute.type in numbers and node.op_type != "Constant":
                    found.append((node, attribute))
        if not found:
            return None
        node, attribute = found[int(random.integers(len(found)))]
        if attribute.type == onnx.AttributeProto.FLOAT:
            attribute.f *= random.choice([0.5, 0.9, 1.02, 2.0])
        elif attribute.i in (0, 1) and attribute.name not in ("axis", "start", "end", "batch_dims"):
            attribute.i = 1 - attribute.i
        else:
            attribute.i += int(random.choice([-1, 1]))
        return f"{attribute.name} of {_label(node)}"

    return mutate


def _floats(model: onnx.ModelProto) -> list[tuple[Holder, int, onnx.NodeProto]]:
    kinds = (
        *_PASSING,
        "MatMul",
        "Reshape",
        "Transpose",
        "Concat",
        "Attention",
        "RotaryEmbedding",
        "MultiHeadAttention",
    )
    kept = []
    for holder, index, node in sites(model, *kinds):
        integer = any(
            (value := constant_value(holder, model, name)) is not None and value.dtype.kind == "i"
            for name in node.input[: 1 if node.op_type in ("Reshape", "Transpose") else 2]
        )
        if not integer:
            kept.append((holder, index, node))
    return kept


def _lower_precision(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, _floats(model))
    if site is None:
        return None
    holder, _, node = site
    low = int(random.choice([onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16]))
    said = f"{_label(node)} in {onnx.TensorProto.DataType.Name(low)}"

    def change(nodes: Nodes, name: str) -> str:
        wide = nodes.op("Cast", name, to=onnx.TensorProto.FLOAT)
        rounded = nodes.op("Cast", nodes.op("Cast", wide, to=low), to=onnx.TensorProto.FLOAT)
        return nodes.op("CastLike", rounded, name)

    change_value(holder, node.output[0], change)
    return said


def _epsilon(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    factor = float(random.choice([0.0, 0.01, 100.0, 1e4]))
    named = [
        (node, attribute) for _, _, node in sites(model) for attribute in node.attribute if attribute.name == "epsilon"
    ]
    added = [
        (holder, index, at, value)
        for holder, index, at, value in _constants(model, weights, "f")
        if holder.node[index].op_type in ("Add", "Max") and value.size == 1 and 0 < abs(float(value.ravel()[0])) < 1e-3
    ]
    choice = int(random.integers(len(named) + len(added))) if named or added else None
    if choice is None:
        return None
    if choice < len(named):
        node, attribute = named[choice]
        attribute.f *= factor
        return f"epsilon of {_label(node)} times {factor:g}"
    holder, index, at, value = added[choice - len(named)]
    said = f"epsilon of {_label(holder.node[index])} times {factor:g}"
    read_constant(holder, index, at, np.asarray(value * value.dtype.type(factor), value.dtype))
    return said


def _other_perm(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, list(sites(model, "Transpose")))
    if site is None:
        return None
    node = site[2]
    perm = next((attribute for attribute in node.attribute if attribute.name == "perm"), None)
    if perm is None:
        return None
    first, second = random.choice(len(perm.ints), 2, replace=False)
    perm.ints[first], perm.ints[second] = perm.ints[second], perm.ints[first]
    return f"perm of {_label(node)}"


def _reads(kinds: tuple[str, ...], ats: tuple[int, ...], change: Callable[[Array, Random], Array | None]) -> Mutate:
    """A constant integer input of some operators changed."""

    def mutate(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
        found = [
            (holder, index, at, value)
            for holder, index, at, value in _constants(model, weights, "i")
            if holder.node[index].op_type in kinds and at in ats
        ]
        if not found:
            return None
        holder, index, at, value = found[int(random.integers(len(found)))]
        other = change(np.array(value), random)
        if other is None or np.array_equal(other, value):
            return None
        said = f"input {at} of {_label(holder.node[index])} was {value.tolist()}"
        read_constant(holder, index, at, other.astype(value.dtype))
        return said

    return mutate


def _swapped_dims(values: Array, random: Random) -> Array | None:
    if values.ndim != 1 or values.size < 2:
        return None
    first, second = random.choice(values.size, 2, replace=False)
    values[[first, second]] = values[[second, first]]
    return values


def _index_one_off(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, list(sites(model, "Gather", "GatherND", "GatherElements")))
    if site is None:
        return None
    holder, index, node = site
    if constant_value(holder, model, node.input[1]) is not None:
        return None
    nodes = Nodes()
    step = int(random.choice([-1, 1]))
    moved = nodes.op("Add", node.input[1], nodes.const(step))
    node.input[1] = nodes.op("Max", moved, nodes.const(0)) if step < 0 else moved
    if step > 0:  # the last row stands for those after it
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        last = nodes.op("Sub", nodes.size(node.input[0], int(axis)), nodes.const(1))
        node.input[1] = nodes.op("Min", moved, last)
    insert(holder, index, nodes)
    return f"indices of {_label(node)} {step:+d}"


def _inverted(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, list(sites(model, "Where")))
    if site is None:
        return None
    holder, index, node = site
    nodes = Nodes()
    node.input[0] = nodes.op("Not", node.input[0])
    insert(holder, index, nodes)
    return _label(node)


def _scaled(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, _floats(model))
    if site is None:
        return None
    holder, _, node = site
    said = _label(node)
    factor = float(random.choice([0.9, 0.99, 0.999, 1.001, 1.01, 1.1]))
    change_value(holder, node.output[0], lambda nodes, name: nodes.op("Mul", name, nodes.like(name, factor)))
    return f"{said} times {factor}"


def _dropped(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    """A mask, one of its conditions, or a bias is left out."""
    places = [("mask", site.holder, site.node) for site in mask_sites(model)]
    places += [("condition", holder, node) for holder, _, node in sites(model, "And")]
    places += [("term", holder, node) for holder, _, node in sites(model, "Add")]
    if not places:
        return None
    what, _, node = places[int(random.integers(len(places)))]
    said = _label(node)
    kept = {"mask": 1, "condition": int(random.integers(2)), "term": 0}[what]
    node.op_type = "Identity"
    node.input[:] = [node.input[kept]]
    return f"{what} of {said}"


def _weight_misread(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    """The graph reads another tensor than the weight: an element, two rows, a sign, or all of it transposed."""
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in weights]
    tensor = tensors[int(random.integers(len(tensors)))]
    value = np.array(numpy_helper.to_array(tensor))
    how = str(random.choice(["element", "rows", "sign", "transposed", "zero row"]))
    if how == "transposed" and (value.ndim != 2 or value.shape[0] != value.shape[1]):
        how = "element"
    other = value
    if how == "element":
        other = _perturbed(value.copy(), random)
    elif how == "rows":
        swapped = _permuted(value.copy(), random)
        other = -value if swapped is None else swapped
    elif how == "sign":
        other = -value
    elif how == "transposed":
        other = value.T.copy()
    else:
        other = value.copy()
        other[int(random.integers(value.shape[0]))] = 0
    change_input(model, tensor.name, lambda nodes, name: nodes.const(other, value.dtype))
    return f"{how} of {tensor.name}"


def _other_wire(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    """A node reads what another node of the same operator reads."""
    kinds = ("MatMul", "Mul", "Add", "Reshape", "Unsqueeze", "Cos", "Sin", "Transpose", "Concat", "RotaryEmbedding")
    found = list(sites(model, *kinds))
    site = _pick(random, found)
    if site is None:
        return None
    holder, index, node = site
    others = [
        other.input[0]
        for place, at, other in found
        if place is holder and at < index and other.op_type == node.op_type and other.input[0] != node.input[0]
    ]
    if not others:
        return None
    said = _label(node)
    node.input[0] = str(random.choice(others))
    return f"{said} reads {node.input[0]!r}"


def _rolled(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    """The last of an axis comes first."""
    site = _pick(random, _floats(model))
    if site is None:
        return None
    holder, _, node = site
    said, axis = _label(node), int(random.choice([-1, -2]))

    def change(nodes: Nodes, name: str) -> str:
        ends = [nodes.const([number]) for number in (-1, 2**62, axis, 0)]
        last = nodes.op("Slice", name, ends[0], ends[1], ends[2])
        rest = nodes.op("Slice", name, ends[3], ends[0], ends[2])
        return nodes.op("Concat", last, rest, axis=axis)

    change_value(holder, node.output[0], change)
    return f"{said} along axis {axis}"


KINDS: dict[str, Mutate] = {
    "constant perturbed": _changed_constant("f", _perturbed),
    "constant permuted": _changed_constant("f", _permuted),
    "integer one off": _changed_constant("i", _one_off),
    "other operator": _other_operator,
    "other order of inputs": _other_order,
    "node bypassed": _bypassed,
    "attribute changed": _attribute(),
    "lower precision": _lower_precision,
    "other axis": _attribute("axis"),
    "epsilon changed": _epsilon,
    "other permutation": _other_perm,
    "slice or range one off": _reads(("Slice", "Range", "Split", "Clip", "Min", "Max"), (0, 1, 2), _one_off),
    "index one off": _index_one_off,
    "condition inverted": _inverted,
    "other dimensions": _reads(("Reshape", "Unsqueeze", "Expand"), (1,), _swapped_dims),
    "value scaled": _scaled,
    "term dropped": _dropped,
    "weight misread": _weight_misread,
    "wrong wire": _other_wire,
    "value rolled": _rolled,
}
"""The kinds of random mutants by name."""


def random_mutant(artifact: Artifact, kind: str, random: Random) -> tuple[onnx.ModelProto, str] | None:
    """A mutant of a kind, and what was done to it; None where the graph has no place for the kind."""
    model = copy_of(artifact.model)
    said = KINDS[kind](model, random, frozenset(artifact.weights))
    return None if said is None else (model, said)
