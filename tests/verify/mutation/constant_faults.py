"""Random mutants by constants: one number of a graph is changed, or a weight is misread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper

from mutation.surgery import Array, Holder, change_input, constant_value, read_constant, sites

Random = np.random.Generator
ChangeValues = Callable[[Array, Random], Array | None]
"""Returns other values for a constant, or None if the constant can't be changed."""

Mutate = Callable[[onnx.ModelProto, Random, frozenset[str]], str | None]
"""Changes a graph whose weights have the given names. Returns a description of the change, or None if the graph has no
place for it."""


def label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.output[0]!r}"


def _constants(model: onnx.ModelProto, weights: frozenset[str], kind: str) -> list[tuple[Holder, int, int, Array]]:
    """Each constant with a numpy kind that a node reads: (holder, index of the reader, number of the input, value)."""
    found = []
    for holder, index, node in sites(model):
        for at, name in enumerate(node.input):
            if name and name not in weights:
                value = constant_value(holder, model, name)
                if value is not None and value.size and value.dtype.kind == kind:
                    found.append((holder, index, at, value))
    return found


def changed_constant(kind: str, change: ChangeValues) -> Mutate:
    def mutate(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
        found = _constants(model, weights, kind)
        random.shuffle(found)
        for holder, index, at, value in found:
            other = change(np.array(value), random)
            if other is not None and not np.array_equal(other, value):
                node = holder.node[index]
                said = f"input {at} of {label(node)} was {value.ravel()[:4].tolist()}"
                named = {tensor.name: tensor for tensor in model.graph.initializer}
                if holder is model.graph and node.input[at] in named:
                    name = node.input[at]
                    named[name].CopyFrom(numpy_helper.from_array(other.astype(value.dtype), name))
                else:
                    read_constant(holder, index, at, other.astype(value.dtype))
                return said
        return None

    return mutate


def one_off(values: Array, random: Random) -> Array:
    flat = values.reshape(-1)
    flat[random.integers(flat.size)] += random.choice([-1, 1])
    return values


def perturbed(values: Array, random: Random) -> Array:
    if random.random() < 0.2:
        return -values
    flat = values.reshape(-1)
    at = random.integers(flat.size)
    factor = 1 + random.choice([-1, 1]) * random.uniform(0.003, 0.5)
    with np.errstate(over="ignore"):  # half precision may overflow
        flat[at] = flat[at] * factor if flat[at] else 0.1
    return values


def permuted(values: Array, random: Random) -> Array | None:
    if values.ndim == 0 or values.shape[0] < 2:
        return None
    first, second = random.choice(values.shape[0], 2, replace=False)
    values[[first, second]] = values[[second, first]]
    return values


def epsilon(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
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
        return f"epsilon of {label(node)} times {factor:g}"
    holder, index, at, value = added[choice - len(named)]
    said = f"epsilon of {label(holder.node[index])} times {factor:g}"
    read_constant(holder, index, at, np.asarray(value * value.dtype.type(factor), value.dtype))
    return said


def changed_reads(
    kinds: tuple[str, ...], ats: tuple[int, ...], change: Callable[[Array, Random], Array | None]
) -> Mutate:
    """Change a constant integer input (number in `ats`) of an operator in `kinds`."""

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
        said = f"input {at} of {label(holder.node[index])} was {value.tolist()}"
        read_constant(holder, index, at, other.astype(value.dtype))
        return said

    return mutate


def swapped_dims(values: Array, random: Random) -> Array | None:
    if values.ndim != 1 or values.size < 2:
        return None
    first, second = random.choice(values.size, 2, replace=False)
    values[[first, second]] = values[[second, first]]
    return values


def weight_misread(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    """The graph reads a changed weight: one element, two rows, a sign or a zero row, or the whole weight transposed."""
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in weights]
    tensor = tensors[int(random.integers(len(tensors)))]
    value = np.array(numpy_helper.to_array(tensor))
    how = str(random.choice(["element", "rows", "sign", "transposed", "zero row"]))
    if how == "transposed" and (value.ndim != 2 or value.shape[0] != value.shape[1]):
        how = "element"
    other = value
    if how == "element":
        other = perturbed(value.copy(), random)
    elif how == "rows":
        swapped = permuted(value.copy(), random)
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
