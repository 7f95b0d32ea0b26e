"""Why a softmax of attention is left if no product has its weights, or if its scores are mixed with others."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from posexport.errors import PosexportError, Reason, shown
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import WEIGHTED, product_of
from posexport.graphs.attention.scores import Declined, products_above, scores_of
from posexport.graphs.attention.softmaxes import Softmax
from posexport.graphs.nearest import nearest_first

WEIGHT_OPS = {"Cast", "Identity", "Dropout", "Where", "Slice", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Mul"}
WEIGHT_OPS |= {"Div"}
"""Operators that may be between a softmax and its product with values."""

COMBINING = {"Add", "Sub", "Sum", "Concat", "Split", "Gather", "Expand"}
"""Operators that combine the weights of several softmaxes, or of several heads."""

MIXING = {"MatMul", "Gemm", "Einsum", "Conv", "BatchNormalization", "LayerNormalization"}
"""Operators that compute the scores or weights of a head from those of all heads, with learned numbers."""

FEATURES_UNKNOWN = "features-unknown"
"""The code of the reason that values are neither constant nor known to be features."""

_DEPTH = 8
"""The most operators between a softmax and what is looked for after it."""

_AROUND_MIXING = {
    "Transpose",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Where",
    "Cast",
    "Identity",
}


def mixed_scores(flow: Dataflow, probe: Probe, softmax: Softmax, name: str) -> Reason | None:
    """The reason for scores that are mixed before a softmax; None if they are not."""
    plain = next(products_above(flow, softmax.logits, _AROUND_MIXING), None)
    return _mixed_heads(flow, probe, softmax, name) if plain is None else None


def _mixed_heads(flow: Dataflow, probe: Probe, softmax: Softmax, name: str) -> Reason | None:
    """The reason for scores or weights that are mixed.

    None if no product above has the queries and keys of the softmax. For example, the product of features with the
    weight of a router has other axes.
    """
    shape = probe.shapes.of(softmax.logits)
    products = products_above(flow, softmax.logits, MIXING | _AROUND_MIXING, 12)
    shapes = [probe.shapes.of(one.result) for one in products if {one.left, one.right} <= flow.content]
    if not any(len(one) == len(shape) > 2 and one[-2:] == shape[-2:] for one in shapes):
        return None
    return Reason("mixed-heads", f"the scores or weights of {shown(name)} are mixed across heads")


def reason_without_product(flow: Dataflow, probe: Probe, softmax: Softmax, name: str) -> Reason | None:
    """Why a softmax is left whose weights no product with features reads; None if it is not an attention's."""
    weights, shown_name = softmax.node.outputs[0], shown(name)
    if _meets_content(flow, weights):
        return Reason("einsum", f"{shown_name} is combined with the values in an Einsum that is not a matrix product")
    if any(True for _ in weighed_others(flow, weights)):
        text = "weights values that don't depend on an input known to hold ids or features"
        return Reason(FEATURES_UNKNOWN, f"{shown_name} {text}")
    if _is_combined(flow, probe, softmax):
        text = "are combined with others before the product with the values"
        return Reason("weights", f"the weights of {shown_name} {text}")
    if _weighs_features(flow, softmax.node.outputs[0], MIXING | COMBINING):
        return _mixed_heads(flow, probe, softmax, name)
    return None


def leads_to(value: ir.Value, goals: Collection[str], through: Collection[str]) -> bool:
    """Whether an operator of `goals` reads a value, with only operators of `through` in between."""

    def onward(one: ir.Value) -> list[ir.Value]:
        return [use.node.outputs[0] for use in one.uses() if use.node.op_type in through]

    reached = nearest_first(value, onward, _DEPTH)
    return any(use.node.op_type in goals for one in reached for use in one.uses())


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value."""
    return list(dict.fromkeys(use.node for use in value.uses()))


def weighed_others(flow: Dataflow, value: ir.Value) -> Iterator[ir.Value]:
    """The values that products weight by a value, and that are neither constant nor known to be features."""

    def onward(one: ir.Value) -> list[ir.Value]:
        return [node.outputs[0] for node in _readers(one) if node.op_type in WEIGHT_OPS]

    for one in nearest_first(value, onward, _DEPTH + 1):
        products = (product_of(node, WEIGHTED, weights=one) for node in _readers(one))
        weighed = (product.right for product in products if product is not None)
        yield from (each for each in weighed if each not in flow.constant and each not in flow.content)


def _meets_content(flow: Dataflow, value: ir.Value) -> bool:
    """Whether an Einsum multiplies a value by features."""
    return any(
        use.node.op_type == "Einsum" and sum(one in flow.content for one in use.node.inputs) > 1 for use in value.uses()
    )


def _is_combined(flow: Dataflow, probe: Probe, softmax: Softmax) -> bool:
    """Whether a softmax of products of features weights features only after it is combined with others.

    An example is the difference of two softmaxes.
    """
    try:
        product = scores_of(flow, probe, softmax.logits).product
    except (Declined, PosexportError):
        return False
    return {product.left, product.right} <= flow.content and _weighs_features(flow, softmax.node.outputs[0])


def _weighs_features(flow: Dataflow, value: ir.Value, combining: Collection[str] = COMBINING) -> bool:
    """Whether a value weights features after operators of `combining`."""

    def onward(state: tuple[ir.Value, bool]) -> Iterator[tuple[ir.Value, bool]]:
        one, is_combined = state
        for node in _readers(one):
            if node.op_type in MIXING and flow.content_inputs(node) != [one]:
                continue
            if node.op_type in {*WEIGHT_OPS, *combining}:
                yield from ((output, is_combined or node.op_type in combining) for output in node.outputs)

    for one, is_combined in nearest_first((value, False), onward, _DEPTH + 1):
        products = (product_of(node, WEIGHTED, weights=one) for node in _readers(one)) if is_combined else ()
        if any(each is not None and each.right in flow.content for each in products):
            return True
        if is_combined and _meets_content(flow, one):
            return True
    return False
