"""Random mutants of 20 kinds: one node, constant or wire is changed, in the main graph or in a function.

The weights stay as they are, because verify takes the float64 block from them. Instead, a mutant's graph misreads them.
"""

from __future__ import annotations

import numpy as np
import onnx

from mutation.artifacts import Artifact
from mutation.constant_faults import (
    Mutate,
    changed_constant,
    changed_reads,
    epsilon,
    label,
    one_off,
    permuted,
    perturbed,
    swapped_dims,
    weight_misread,
)
from mutation.surgery import Holder, Nodes, change_value, constant_value, copy_of, insert, mask_sites, sites

Random = np.random.Generator

SWAPS = {
    **{"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Cos": "Sin", "Sin": "Cos", "Min": "Max", "Max": "Min"},
    **{"GreaterOrEqual": "Greater", "Greater": "GreaterOrEqual", "Less": "LessOrEqual", "LessOrEqual": "Less"},
    **{"And": "Or", "Or": "And", "ReduceMean": "ReduceSum", "ReduceMax": "ReduceMin", "Tanh": "Sigmoid"},
    **{"Sigmoid": "Tanh", "Sqrt": "Reciprocal", "Reciprocal": "Sqrt", "Floor": "Ceil", "Log": "Sqrt", "Erf": "Tanh"},
    **{"Abs": "Neg", "Neg": "Abs", "Relu": "Abs", "Exp": "Sigmoid", "Equal": "Less"},
}
"""Replacements of operators by others that take the same inputs."""


def _pick(random: Random, found: list[tuple[Holder, int, onnx.NodeProto]]) -> tuple[Holder, int, onnx.NodeProto] | None:
    return found[int(random.integers(len(found)))] if found else None


def _other_operator(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    found = _pick(random, list(sites(model, *SWAPS)))
    if found is None:
        return None
    node = found[2]
    said = label(node)
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
    return label(node)


_PASSING = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Cos", "Sin", "Softmax", "Sqrt", "Reciprocal", "Tanh", "Sigmoid")


def _bypassed(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    kinds = (*_PASSING, "And", "Or", "Not", "Where", "Erf", "Abs", "Floor", "RotaryEmbedding", "Log", "Exp", "Relu")
    site = _pick(random, list(sites(model, *kinds)))
    if site is None:
        return None
    _, _, node = site
    said = label(node)
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
        return f"{attribute.name} of {label(node)}"

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
    said = f"{label(node)} in {onnx.TensorProto.DataType.Name(low)}"

    def change(nodes: Nodes, name: str) -> str:
        wide = nodes.op("Cast", name, to=onnx.TensorProto.FLOAT)
        rounded = nodes.op("Cast", nodes.op("Cast", wide, to=low), to=onnx.TensorProto.FLOAT)
        return nodes.op("CastLike", rounded, name)

    change_value(holder, node.output[0], change)
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
    return f"perm of {label(node)}"


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
    if step > 0:  # indices after the last row become the last row
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        last = nodes.op("Sub", nodes.size(node.input[0], int(axis)), nodes.const(1))
        node.input[1] = nodes.op("Min", moved, last)
    insert(holder, index, nodes)
    return f"indices of {label(node)} {step:+d}"


def _inverted(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, list(sites(model, "Where")))
    if site is None:
        return None
    holder, index, node = site
    nodes = Nodes()
    node.input[0] = nodes.op("Not", node.input[0])
    insert(holder, index, nodes)
    return label(node)


def _scaled(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    site = _pick(random, _floats(model))
    if site is None:
        return None
    holder, _, node = site
    said = label(node)
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
    said = label(node)
    kept = {"mask": 1, "condition": int(random.integers(2)), "term": 0}[what]
    node.op_type = "Identity"
    node.input[:] = [node.input[kept]]
    return f"{what} of {said}"


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
    said = label(node)
    node.input[0] = str(random.choice(others))
    return f"{said} reads {node.input[0]!r}"


def _rolled(model: onnx.ModelProto, random: Random, weights: frozenset[str]) -> str | None:
    """The last element of an axis moves to the front."""
    site = _pick(random, _floats(model))
    if site is None:
        return None
    holder, _, node = site
    said, axis = label(node), int(random.choice([-1, -2]))

    def change(nodes: Nodes, name: str) -> str:
        ends = [nodes.const([number]) for number in (-1, 2**62, axis, 0)]
        last = nodes.op("Slice", name, ends[0], ends[1], ends[2])
        rest = nodes.op("Slice", name, ends[3], ends[0], ends[2])
        return nodes.op("Concat", last, rest, axis=axis)

    change_value(holder, node.output[0], change)
    return f"{said} along axis {axis}"


KINDS: dict[str, Mutate] = {
    "constant perturbed": changed_constant("f", perturbed),
    "constant permuted": changed_constant("f", permuted),
    "integer one off": changed_constant("i", one_off),
    "other operator": _other_operator,
    "other order of inputs": _other_order,
    "node bypassed": _bypassed,
    "attribute changed": _attribute(),
    "lower precision": _lower_precision,
    "other axis": _attribute("axis"),
    "epsilon changed": epsilon,
    "other permutation": _other_perm,
    "slice or range one off": changed_reads(("Slice", "Range", "Split", "Clip", "Min", "Max"), (0, 1, 2), one_off),
    "index one off": _index_one_off,
    "condition inverted": _inverted,
    "other dimensions": changed_reads(("Reshape", "Unsqueeze", "Expand"), (1,), swapped_dims),
    "value scaled": _scaled,
    "term dropped": _dropped,
    "weight misread": weight_misread,
    "wrong wire": _other_wire,
    "value rolled": _rolled,
}
"""The kinds of random mutants, by name."""


def random_mutant(artifact: Artifact, kind: str, random: Random) -> tuple[onnx.ModelProto, str] | None:
    """A mutant of a kind and a description of its change. None if the graph has no place for the kind."""
    model = copy_of(artifact.model)
    said = KINDS[kind](model, random, frozenset(artifact.weights))
    return None if said is None else (model, said)
