"""Finds the structure of attention in any graph, for tests that plant faults there.

This file does not import posexport: it is independent of the recognisers that it tests. It may miss sites, but it must
not report a site that is not one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import onnx_ir as ir

SCORE_STEPS = {"Add", "Sub", "Where", "Cast", "Mul", "Div", "Tanh", "Concat", "Identity", "Max", "Clip", "Reshape"}
"""Operators between the product of queries and keys and the softmax."""
WEIGHT_STEPS = {"Cast", "Where", "Mul", "Div", "Identity", "Slice", "Split", "Reshape", "Dropout"}
"""Operators between the softmax and the product with the values."""
LAYOUT_STEPS = {"Reshape", "Identity", "Cast", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile"}
ATTENTION = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}


@attrs.frozen(kw_only=True, eq=False)
class Site:
    """One attention: two products around a softmax, or one operator.

    `query` and `key` are the direct operands of the first product, and `value` is one of the second.
    """

    node: ir.Node
    """The softmax, or the operator that computes the whole attention."""
    product: ir.Node | None = None
    context: ir.Node | None = None
    value_index: int = 1

    @property
    def operands(self) -> dict[str, tuple[ir.Node, int]]:
        """query, key and value as (reader, index of its input)."""
        if self.product is None or self.context is None:
            return {"query": (self.node, 0), "key": (self.node, 1), "value": (self.node, 2)}
        return {"query": (self.product, 0), "key": (self.product, 1), "value": (self.context, self.value_index)}


@attrs.frozen(kw_only=True, eq=False)
class Rotation:
    """x * cos + turned(x) * sin, with turned(x) = (-x2, x1). `layout` is "half" or "interleaved"."""

    x: ir.Value
    turned: ir.Value
    concat: ir.Node
    negation: ir.Node
    cos: tuple[ir.Node, int]
    sin: tuple[ir.Node, int]
    sum: ir.Node
    layout: str


def number(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant, or None for everything else."""
    if value is None:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor().numpy()
    return None


def inputs_of(value: ir.Value | None) -> Sequence[ir.Value]:
    """Values that the producer reads."""
    node = value.producer() if value is not None else None
    return [] if node is None else [entry for entry in node.inputs if entry is not None]


def ancestors(value: ir.Value | None, deepest: int = 200) -> Iterator[ir.Node]:
    """Nodes that a value depends on, nearest first. The search does not go beyond Shape and Size."""
    seen: set[ir.Node] = set()
    level = [value]
    for _ in range(deepest):
        nodes = [v.producer() for v in level if v is not None]
        fresh = [node for node in dict.fromkeys(nodes) if node is not None and node not in seen]
        if not fresh:
            return
        seen.update(fresh)
        yield from fresh
        level = [entry for node in fresh if node.op_type not in ("Shape", "Size") for entry in node.inputs]


def product_above(value: ir.Value | None, depth: int = 12) -> ir.Node | None:
    """The product of two activations that yields the scores, or None."""
    node = value.producer() if value is not None else None
    if node is None or depth == 0:
        return None
    if node.op_type in ("MatMul", "Einsum"):
        return node if all(number(entry) is None for entry in node.inputs) and len(node.inputs) == 2 else None
    if node.op_type not in SCORE_STEPS:
        return None
    entries = node.inputs[1:] if node.op_type == "Where" else node.inputs
    return next((product for entry in entries if (product := product_above(entry, depth - 1))), None)


def context_below(value: ir.Value, depth: int = 8) -> tuple[ir.Node, int] | None:
    """The product with the values, and the index of the values in it."""
    for node, index in value.uses():
        if node.op_type in ("MatMul", "Einsum") and len(node.inputs) == 2:
            return node, 1 - index
        if node.op_type in WEIGHT_STEPS and depth and (index == 0 or node.op_type == "Where"):
            below = next((c for out in node.outputs if (c := context_below(out, depth - 1))), None)
            if below:
                return below
    return None


def sites(model: ir.Model) -> list[Site]:
    """The attentions of the main graph, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type in ATTENTION:
            found.append(Site(node=node))
        elif node.op_type == "Softmax":
            product, below = product_above(node.inputs[0]), context_below(node.outputs[0])
            if product is not None and below is not None:
                found.append(Site(node=node, product=product, context=below[0], value_index=below[1]))
    return found


def score_path(site: Site) -> list[ir.Node]:
    """Nodes between the product and the softmax, nearest the softmax first."""
    path: list[ir.Node] = []
    value = site.node.inputs[0]
    while value is not None and (node := value.producer()) is not None and node is not site.product:
        path.append(node)
        entries = node.inputs[1:] if node.op_type == "Where" else node.inputs
        value = next((entry for entry in entries if product_above(entry) is site.product), None)
    return path


def side_inputs(site: Site) -> list[tuple[ir.Node, int]]:
    """Masks and biases that join the scores, nearest the softmax first. Single numbers do not count."""
    joins = []
    for node in score_path(site):
        if node.op_type in ("Add", "Sub", "Where", "Max"):
            entries = range(1, 3) if node.op_type == "Where" else range(2)
            joins += [(node, i) for i in entries if product_above(node.inputs[i]) is not site.product]
            if node.op_type == "Where":
                joins.append((node, 0))
    return [(node, i) for node, i in joins if (array := number(node.inputs[i])) is None or array.size > 1]


def masks(site: Site) -> list[tuple[ir.Node, int]]:
    """Like side_inputs, but also for Attention, which takes a mask as an input."""
    if site.product is not None:
        return side_inputs(site)
    if site.node.op_type == "Attention" and len(site.node.inputs) > 3 and site.node.inputs[3] is not None:
        return [(site.node, 3)]
    return []


def through(value: ir.Value | None, operators: set[str] = LAYOUT_STEPS) -> ir.Value | None:
    """The value above layout operators."""
    while value is not None and (node := value.producer()) is not None and node.op_type in operators:
        value = node.inputs[0]
    return value


def below(value: ir.Value, operators: set[str]) -> tuple[ir.Value, list[tuple[ir.Node, int]]]:
    """Follows a value down through operators as long as it has one reader; returns the last value and its readers.

    Readers of its shape do not count.
    """
    while True:
        uses = [use for use in value.uses() if use[0].op_type != "Shape"]
        if len(uses) == 1 and uses[0][0].op_type in operators and uses[0][1] == 0:
            value = uses[0][0].outputs[0]
            continue
        return value, uses


def rotations(model: ir.Model) -> list[Rotation]:
    """Rotations written as x * cos + turned(x) * sin."""
    candidates = (_rotation(node) for node in model.graph if node.op_type == "Concat" and len(node.inputs) == 2)
    return [rotation for rotation in candidates if rotation is not None]


def _rotation(concat: ir.Node) -> Rotation | None:
    parts = [through(value, {"Unsqueeze", "Reshape", "Identity"}) for value in concat.inputs]
    nodes = [value.producer() if value is not None else None for value in parts]
    negation, other = nodes
    if negation is None or other is None or negation.op_type != "Neg" or other.op_type not in SLICES:
        return None
    turned, uses = below(concat.outputs[0], {"Reshape", "Identity", "Cast", "Flatten"})
    sources = []
    x: ir.Value | None = other.outputs[0]
    while x is not None and (node := x.producer()) is not None and node.op_type in SLICES:
        x = node.inputs[0]
        sources.append(through(x))
    for node, index in uses:
        if node.op_type != "Mul":
            continue
        for total, place in node.outputs[0].uses():
            straight = total.inputs[1 - place].producer() if total.op_type == "Add" else None
            if straight is not None and straight.op_type == "Mul":
                sides = [through(entry) in sources for entry in straight.inputs]
                if any(sides):
                    return Rotation(
                        x=straight.inputs[sides.index(True)],
                        turned=turned,
                        concat=concat,
                        negation=negation,
                        cos=(straight, 1 - sides.index(True)),
                        sin=(node, 1 - index),
                        sum=total,
                        layout="half" if concat.inputs[0].producer() is negation else "interleaved",
                    )
    return None


SLICES = {"Slice", "Split", "Gather", "GatherND", "StridedSlice"}


def caches(model: ir.Model) -> list[tuple[ir.Node, int]]:
    """Concats of past and new keys or values, with the index of the past input."""
    inputs = {value: None for value in model.graph.inputs if value.shape is not None and len(value.shape) == 4}
    found = []
    for node in model.graph:
        if node.op_type == "Concat" and len(node.inputs) == 2:
            pasts = [i for i, value in enumerate(node.inputs) if _past(value) in inputs]
            found += [(node, pasts[0])] if len(pasts) == 1 else []
    return found


def _past(value: ir.Value | None) -> ir.Value | None:
    node = value.producer() if value is not None else None
    while node is not None and (node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)):
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    return value


def find(value: ir.Value | None, wanted: Callable[[ir.Node], bool], deepest: int = 200) -> list[ir.Node]:
    """Ancestors that meet a condition, nearest first; `deepest` limits the search."""
    return [node for node in ancestors(value, deepest) if wanted(node)]
