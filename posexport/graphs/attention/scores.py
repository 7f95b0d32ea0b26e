"""From the input of a softmax up to the product of queries and keys: scale, softcap, biases, masks and sinks.

    logits = softcap(scale * q k^T) + bias, or a hidden value where a mask says so; sinks are one more logit per head

Every node in between must be in the table below. Any other node is a reason to leave the attention as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import attrs
import onnx_ir as ir

from posexport.errors import Reason, shown
from posexport.graphs.attention.behind import PASSED, above, unexpanded
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.maxima import maximum_of
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import SCORES, Product, product_of
from posexport.graphs.attention.sink_column import LARGEST_SINK, padded_logit
from posexport.graphs.attention.uniform import factor_of, number_of
from posexport.graphs.nearest import nearest_first

HIDDEN = -5e3
"""A logit of at most this hides its key: exp(-5000) is 0 in every dtype."""

DEPTH = 24
"""The most nodes between a softmax and its product."""


@attrs.frozen(kw_only=True)
class Term:
    """A term that is added to the logits: `value` times `factor`, or `fill` where the boolean `value` is not `seen_if`.

    The term is broadcast to the shape of `level`, a value between the product and the softmax. `axes` are the axes of
    `level` (posexport.graphs.attention.score_axes).
    """

    value: ir.Value
    level: ir.Value
    factor: float = 1.0
    seen_if: bool | None = None
    fill: float = 0.0
    axes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Scores:
    """What was found between a softmax and its product. `nodes` are the nodes in between, the last one first.

    The product of `factors` is the scale. `maxima` are subtracted before the softmax; each has the node that does it.
    `sinks` are values, or the same logit for all heads. They are a column of the logits, which is their first
    (`column` 0) or last one (-1), or come only after the exponentials, without a column.
    """

    product: Product
    factors: tuple[float, ...]
    softcap: float = 0.0
    terms: tuple[Term, ...] = ()
    sinks: ir.Value | float | None = None
    column: int | None = None
    head_scales: tuple[tuple[ir.Value, bool], ...] = ()
    maxima: tuple[tuple[ir.Node, ir.Value], ...] = ()
    nodes: tuple[ir.Node, ...] = ()


class Declined(Exception):
    """Raised for an attention that is left as it is, with the reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.reason = Reason(code, text)


@attrs.define
class _Walk:
    """What is known so far. Further down, the logits at `value` are multiplied by `factor`."""

    value: ir.Value
    probe: Probe
    factor: float = 1.0
    softcap: float = 0.0
    terms: list[Term] = attrs.Factory(list)
    sinks: ir.Value | float | None = None
    column: int | None = None
    head_scales: list[tuple[ir.Value, bool]] = attrs.Factory(list)
    maxima: list[tuple[ir.Node, ir.Value]] = attrs.Factory(list)
    nodes: list[ir.Node] = attrs.Factory(list)
    factors: list[float] = attrs.Factory(list)

    def multiply(self, number: float) -> None:
        """Note a factor of the scores."""
        self.factor *= number
        self.factors.append(number)


def scores_of(
    flow: Dataflow, probe: Probe, logits: ir.Value, *, factor: float = 1.0, sink: float | None = None
) -> Scores:
    """What is between the input of a softmax and the product of queries and keys. Raises Declined.

    The softmax multiplies the logits by `factor`. Its sum has the exponential of `sink` too, unless it is None.
    """
    walk = _Walk(logits, probe, sinks=sink)
    if factor != 1.0:
        walk.multiply(factor)
    for _ in range(DEPTH):
        node = walk.value.producer()
        if node is None:
            break
        product = product_of(node, SCORES)
        if product is not None and is_scores(flow, product):
            if node.op_type in ("FusedMatMul", "Gemm") and "alpha" in node.attributes:
                walk.multiply(node.attributes["alpha"].as_float())
            _check_fills(walk)
            return Scores(
                product=product,
                factors=tuple(walk.factors),
                softcap=walk.softcap,
                terms=tuple(walk.terms),
                sinks=walk.sinks,
                column=walk.column,
                head_scales=tuple(walk.head_scales),
                maxima=tuple(walk.maxima),
                nodes=tuple(walk.nodes),
            )
        step = _STEPS.get(node.op_type)
        if step is None:
            raise Declined("score-operator", f"{node.op_type} {shown(node.name or '')} is between its two products")
        walk.nodes.append(node)
        step(flow, walk, node)
    raise Declined("no-scores", "the input of its softmax is not a product of queries and keys")


def is_scores(flow: Dataflow, product: Product) -> bool:
    """Whether a product may be that of queries and keys.

    Keys must be features. Queries may be features, or learned and the same for all rows, as in pooling.
    """
    left, right = product.left, product.right
    if right not in flow.content:
        return False
    if left in flow.content:
        return True
    return left.dtype is None or left.dtype.is_floating_point()


def reaches_product(flow: Dataflow, value: ir.Value) -> bool:
    """Whether a product of queries and keys lies above a value, with only operators of the table in between."""
    return next(products_above(flow, value, _STEPS), None) is not None


def products_above(flow: Dataflow, value: ir.Value, through: Collection[str], depth: int = DEPTH) -> Iterator[Product]:
    """The products of queries and keys above a value, with only operators of `through` in between, nearest first."""

    def product_at(one: ir.Value) -> Product | None:
        node = one.producer()
        product = None if node is None or one not in flow.content else product_of(node, SCORES)
        return product if product is not None and is_scores(flow, product) else None

    def onward(one: ir.Value) -> list[ir.Value]:
        node = one.producer()
        if node is None or one not in flow.content or node.op_type not in through or product_at(one) is not None:
            return []
        return flow.content_inputs(node)

    products = (product_at(one) for one in nearest_first(value, onward, depth))
    return (product for product in products if product is not None)


def _through(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    assert node.inputs[0] is not None
    walk.value = node.inputs[0]


def _negate(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    walk.multiply(-1.0)
    _through(flow, walk, node)


def _sides(flow: Dataflow, node: ir.Node) -> tuple[ir.Value, ir.Value, int]:
    """The operand that leads to the product, the other operand, and the index of the first."""
    first, second = node.inputs[0], node.inputs[1]
    assert first is not None and second is not None
    leads = [reaches_product(flow, side) for side in (first, second)]
    if leads[0]:
        return first, second, 0
    if leads[1]:
        return second, first, 1
    raise Declined("no-scores", "the input of its softmax is not a product of queries and keys")


def _add(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    path, other, _ = _sides(flow, node)
    _check_affine(walk, node)
    walk.terms.append(Term(value=other, level=node.outputs[0], factor=walk.factor))
    walk.value = path


def _check_affine(walk: _Walk, node: ir.Node) -> None:
    """Raise Declined if a node adds something before a cap or a scale per head: posexport adds it after these."""
    if walk.softcap or walk.head_scales:
        raise Declined("score-order", f"{shown(node.name or '')} adds to the scores before they are capped or scaled")


def _sub(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    path, other, place = _sides(flow, node)
    maximum = maximum_of(walk.probe, other)
    if place == 0 and maximum is not None and maximum.inputs[0] is path:
        if walk.softcap or walk.sinks is not None:
            raise Declined("score-order", f"{shown(node.name or '')} subtracts a maximum before a cap or sinks")
        walk.maxima.append((node, unexpanded(other)))  # doesn't change a softmax if it is the same for all keys
        walk.value = path
        return
    if place == 1:
        raise Declined("score-sign", f"{shown(node.name or '')} subtracts the scores from another value")
    _check_affine(walk, node)
    walk.terms.append(Term(value=other, level=node.outputs[0], factor=-walk.factor))
    walk.value = path


def _multiply(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    path, other, place = _sides(flow, node)
    number = factor_of(walk.probe, other)
    divides = node.op_type == "Div"
    if divides and place == 1:
        raise Declined("score-operator", f"{shown(node.name or '')} divides by the scores")
    if number is not None and number != 0.0:
        walk.multiply(1.0 / number if divides else number)
    elif walk.softcap or other in flow.content:
        raise Declined(
            "score-scale", f"{shown(node.name or '')} multiplies the scores by a value that is not a number in fp32"
        )
    else:
        walk.head_scales.append((other, divides))
    walk.value = path


def _where(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    condition, kept, other = node.inputs[:3]
    assert condition is not None and kept is not None and other is not None
    seen_if = reaches_product(flow, kept)
    path, replaced = (kept, other) if seen_if else (other, kept)
    _check_affine(walk, node)
    fill = number_of(walk.probe, replaced)
    if fill is None or not reaches_product(flow, path):
        raise Declined(
            "score-where", f"{shown(node.name or '')} chooses between the scores and a value that is not one number"
        )
    walk.terms.append(Term(value=condition, level=node.outputs[0], seen_if=seen_if, fill=fill * walk.factor))
    walk.value = path


def _bounded(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    """Max or Min with bounds that no logit reaches, which guard against overflow, or Min with a mask."""
    inputs = [value for value in node.inputs if value is not None]
    paths = [value for value in inputs if reaches_product(flow, value)]
    if not paths:
        raise Declined("no-scores", "the input of its softmax is not a product of queries and keys")
    for value in inputs:
        if value is paths[0]:
            continue
        number = number_of(walk.probe, value)
        mask = _least(walk, node, value) if node.op_type == "Min" else None
        if mask is not None:
            _check_affine(walk, node)
            walk.terms.append(mask)
        elif number is None or walk.factor < 0 or not _is_far(number, walk.factor, node):
            raise Declined("score-bound", f"{shown(node.name or '')} bounds the scores")
    walk.value = paths[0]


def _is_far(number: float, factor: float, node: ir.Node) -> bool:
    """Whether no logit reaches a bound: hidden keys may be below that of a Max, and nothing is above that of a Min."""
    if node.op_type == "Max":
        return number * factor <= HIDDEN
    dtype = node.outputs[0].dtype
    return number >= (_LARGEST_FP16 if dtype == ir.DataType.FLOAT16 else _LARGE)


_LARGE = 1e30
"""A number above all logits. Results beyond it don't count in any comparison."""

_LARGEST_FP16 = 65504.0


def _least(walk: _Walk, node: ir.Node, value: ir.Value) -> Term | None:
    """The mask of a Min: `value` is a number that no logit reaches where a key is seen, and hides the others."""
    choice, shapes = above(value, "Where", (*PASSED, "Expand")), walk.probe.shapes
    condition = None if choice is None else choice.inputs[0]
    if choice is None or condition is None or walk.factor < 0:
        return None
    numbers = [number_of(walk.probe, one) for one in choice.inputs[1:3]]
    if None in numbers or shapes.of(condition) != shapes.of(choice.outputs[0]):
        return None
    first, second = (one for one in numbers if one is not None)
    fill = min(first, second)
    if not _is_far(max(first, second), walk.factor, node) or fill * walk.factor > HIDDEN:
        return None
    seen_if = first > second
    return Term(value=condition, level=node.outputs[0], seen_if=seen_if, fill=fill * walk.factor)


def _check_fills(walk: _Walk) -> None:
    """Raise Declined if scores may come near the logits of hidden keys."""
    weak = [term for term in walk.terms if term.seen_if is not None and term.fill > HIDDEN]
    if not weak:
        return
    # capped scores have a lower bound, unless something is added to them
    bounded = walk.softcap > 0 and walk.sinks is None and all(term.seen_if is not None for term in walk.terms)
    for term in weak:
        if not bounded or term.fill > -walk.softcap - _VANISHES:
            node = term.level.producer()
            name = shown((node.name if node is not None else None) or term.level.name or "")
            text = f"gives hidden keys a logit of {term.fill:g}, and scores may come near what is above {HIDDEN:g}"
            raise Declined("score-fill", f"{name} {text}")


_VANISHES = 800.0
"""The exponential of minus this is zero in float64."""


def _tanh(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    if walk.softcap or walk.factor <= 0 or walk.head_scales:
        raise Declined(
            "score-softcap",
            f"{shown(node.name or '')} caps the scores twice, or by a value that is not a number in fp32",
        )
    walk.softcap, walk.factor = walk.factor, walk.factor
    _through(flow, walk, node)


def _sinks(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    inputs = [value for value in node.inputs if value is not None]
    leads = [reaches_product(flow, value) for value in inputs]
    axis = node.attributes["axis"].as_int()
    if len(inputs) != 2 or sum(leads) != 1 or axis not in (-1, 3) or walk.sinks is not None or walk.terms:
        raise Declined("score-concat", f"{shown(node.name or '')} concatenates the scores with another value")
    path = leads.index(True)
    if inputs[1 - path] in flow.content:
        raise Declined("score-concat", f"{shown(node.name or '')} concatenates the scores with features")
    if walk.factor != 1.0 or walk.softcap or walk.head_scales:
        text = f"{shown(node.name or '')} concatenates the scores with sinks before they are capped or scaled"
        raise Declined("score-order", text)
    walk.sinks, walk.column, walk.value = inputs[1 - path], path - 1, inputs[path]


def _padded(flow: Dataflow, walk: _Walk, node: ir.Node) -> None:
    """One more logit for each query, the same number for all."""
    path, name = node.inputs[0], shown(node.name or "")
    assert path is not None
    found = padded_logit(walk.probe, node)
    if found is None or walk.sinks is not None or walk.terms:
        raise Declined("score-concat", f"{name} pads the scores with more than one logit that is the same for all")
    if walk.factor != 1.0 or walk.softcap or walk.head_scales:
        raise Declined("score-order", f"{name} pads the scores with a sink before they are capped or scaled")
    if abs(found[0]) > LARGEST_SINK:
        raise Declined("sinks", f"{name} pads the scores with a logit of {found[0]:g}, which is no sink")
    walk.sinks, walk.column = found
    walk.value = path


_STEPS: dict[str, Callable[[Dataflow, _Walk, ir.Node], None]] = {
    "Add": _add,
    "Sub": _sub,
    "Mul": _multiply,
    "Div": _multiply,
    "Neg": _negate,
    "Where": _where,
    "Max": _bounded,
    "Min": _bounded,
    "Tanh": _tanh,
    "Concat": _sinks,
    "Pad": _padded,
    "Cast": _through,
    "Identity": _through,
    "Dropout": _through,
    "Reshape": _through,
    "Unsqueeze": _through,
    "Squeeze": _through,
    "Transpose": _through,
    "Flatten": _through,
}
"""What may be between the products, by operator."""
