"""Softmaxes of a graph: the operator, or its formula in other operators.

    exp(x) / sum(exp(x))      exp(LogSoftmax(x))      exp(x - log(sum(exp(x))))      (exp(x) v) / sum(exp(x))

Exponentials may have another base, and a number beside their sum is a sink (posexport.graphs.attention.powers).
The exponentials of hidden keys may be set to zero before the sum (posexport.graphs.attention.zeroed). This is the
softmax of logits that are minus infinity there: in both, a query that sees no key gives zero divided by zero.
The sum may drop its axis and get it back by a Reshape or an Unsqueeze. Its shape then tells whether that is the same
axis (posexport.graphs.attention.written_out).
"""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs
import onnx_ir as ir

from posexport.errors import Reason, shown
from posexport.graphs.attention.behind import KEEPS_ORDER, PASSED, above, behind, stored_number, unexpanded
from posexport.graphs.attention.dataflow import constant_of
from posexport.graphs.attention.powers import Beside, Power, beside, parted, power_above, power_of
from posexport.graphs.attention.products import PRODUCTS, WEIGHTED, Product, product_of
from posexport.graphs.attention.zeroed import Zeroed, zeroed_by
from posexport.graphs.nearest import nearest_first

_DEPTH = 6
"""The most operators between exponentials and their sum, or between the sum and a division by it."""


@attrs.frozen(kw_only=True)
class Softmax:
    """A softmax of `logits` whose last node is `node`. `axis` is None if the operator doesn't state it.

    If the softmax is written out, exponentials are divided by `total`. With `product`, the product with values is
    divided instead, and the result of `product` is that of the division. `zeroed` sets exponentials of hidden keys to
    zero before. `factor` multiplies the logits, and `beside` is added to the sum of the exponentials. `doubt` says why
    it is not known to be a softmax.
    """

    node: ir.Node
    logits: ir.Value
    axis: int | None
    total: ir.Value | None = None
    product: Product | None = None
    zeroed: Zeroed | None = None
    factor: float = 1.0
    beside: Beside | None = None
    doubt: Reason | None = None

    @property
    def sink(self) -> float | None:
        """The logit of the sink that the number beside the sum is; None without one."""
        return None if self.beside is None else math.log(self.beside.weight)


def softmax_of(node: ir.Node) -> Softmax | None:
    """The softmax that ends in a node; None if none does."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Softmax":
        return Softmax(node=node, logits=node.inputs[0], axis=_axis_of(node))
    if node.op_type == "Exp":
        return _of_logarithms(node, node.inputs[0])
    return _divided(node)


def _axis_of(node: ir.Node) -> int | None:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else None


def _of_logarithms(node: ir.Node, logarithms: ir.Value) -> Softmax | None:
    """The exponentials of a LogSoftmax, or of logits minus the logarithm of the sum of their exponentials."""
    whole, less = above(logarithms, "LogSoftmax"), above(logarithms, "Sub")
    if whole is not None and whole.inputs[0] is not None:
        return Softmax(node=node, logits=whole.inputs[0], axis=_axis_of(whole))
    logits, total = (None, None) if less is None else less.inputs
    if logits is None or total is None:
        return None
    sums = above(total, "ReduceLogSumExp", KEEPS_ORDER)
    source = None if sums is None else sums.inputs[0]
    if sums is None:
        logarithm = above(total, "Log", KEEPS_ORDER)
        sums = None if logarithm is None else above(logarithm.inputs[0], "ReduceSum", KEEPS_ORDER)
        exponentials = None if sums is None else above(sums.inputs[0], "Exp")
        source = None if exponentials is None else exponentials.inputs[0]
    if sums is None or source is None or behind(source, PASSED) is not behind(logits, PASSED):
        return _doubted(node, logits) if _sums_of(total) else None
    return _of_sums(node, logits, sums, total)


def _divided(node: ir.Node) -> Softmax | None:
    """Exponentials, or their product with values, divided by the sum or multiplied by its reciprocal."""
    for part, divisor in _quotients(node):
        total = _inverse(divisor) if node.op_type == "Mul" else divisor
        parts = parted(total)
        summed = total if parts is None else parts[0]
        sums = above(_unbounded(summed), "ReduceSum", KEEPS_ORDER)
        powers = None if sums is None or sums.inputs[0] is None else behind(sums.inputs[0], PASSED)
        zeroed = None if powers is None else zeroed_by(powers.producer())
        power = power_above(powers if zeroed is None else zeroed.kept)
        if sums is None or powers is None or power is None:
            continue
        if zeroed is not None and above(summed, "ReduceSum", KEEPS_ORDER) is None:
            continue  # a bound changes the sum if the largest logit is that of a hidden key
        more = None if parts is None else beside(*parts, power)
        if parts is not None and more is None:
            continue
        if behind(part, PASSED) is powers:
            return _of_powers(node, power, sums, divisor, more, zeroed)
        late = _product_with(powers, part)
        last = powers.producer()
        if late is not None and last is not None:
            found = _of_powers(last, power, sums, divisor, more, zeroed)
            return attrs.evolve(found, product=attrs.evolve(late, result=node.outputs[0]))
    return _almost_divided(node)


def _of_powers(
    node: ir.Node, power: Power, sums: ir.Node, total: ir.Value, more: Beside | None, zeroed: Zeroed | None
) -> Softmax:
    """A softmax whose exponentials are `power`, with `more` added to their sum."""
    logits = power.exponent if more is None or more.whole is None else more.whole
    return attrs.evolve(_of_sums(node, logits, sums, total), zeroed=zeroed, factor=power.factor, beside=more)


def _quotients(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Each value that a node divides, with the divisor. A Mul divides by a factor that is a reciprocal."""
    if node.op_type not in ("Div", "Mul") or len(node.inputs) != 2:
        return []
    one, other = node.inputs
    if one is None or other is None:
        return []
    if node.op_type == "Div":
        return [(one, other)]
    return [(part, divisor) for part, divisor in ((one, other), (other, one)) if _inverse(divisor) is not None]


def _inverse(value: ir.Value | None) -> ir.Value | None:
    """The value that another one is the reciprocal of; None if it is not a reciprocal."""
    node = above(value, "Reciprocal", KEEPS_ORDER)
    if node is not None:
        return node.inputs[0]
    node = above(value, "Div", KEEPS_ORDER)
    return node.inputs[1] if node is not None and stored_number(node.inputs[0]) == 1.0 else None


def _unbounded(value: ir.Value | None) -> ir.Value | None:
    """A sum before a lower bound is applied, if the bound never changes it; otherwise the value itself.

    If the maximum is subtracted from logits, one of the exponentials is 1, so their sum is at least 1.
    """
    node = None if value is None else behind(value, KEEPS_ORDER).producer()
    if node is None or node.op_type not in ("Max", "Clip") or len([one for one in node.inputs if one is not None]) != 2:
        return value
    number = stored_number(node.inputs[1])
    sums = above(node.inputs[0], "ReduceSum", KEEPS_ORDER)
    source = None if sums is None else power_above(sums.inputs[0])
    less = None if source is None else above(source.exponent, "Sub", ())
    if number is None or sums is None or less is None:
        return value
    maximum = above(less.inputs[1], "ReduceMax", KEEPS_ORDER)
    is_less = maximum is not None and maximum.inputs[0] is less.inputs[0] and _axes_of(maximum) == _axes_of(sums)
    return node.inputs[0] if is_less and number <= 1.0 else value


def _product_with(powers: ir.Value, result: ir.Value) -> Product | None:
    """The product of exponentials with values whose result has features in place of keys, and otherwise the same axes.

    So a sum over the keys divides each row of the result.
    """
    node = result.producer()
    for weights in () if node is None else node.inputs:
        if node is None or weights is None or behind(weights, PASSED) is not powers:
            continue
        product = product_of(node, WEIGHTED, weights=weights)
        if product is not None and product.axes[0].endswith("st") and product.axes[2] == product.axes[0][:-1] + "d":
            return product
    return None


def _of_sums(node: ir.Node, logits: ir.Value, sums: ir.Node, total: ir.Value) -> Softmax:
    """A softmax that is written out with these sums. It is doubted unless they are over one axis."""
    axes = _axes_of(sums)
    if len(axes) != 1:
        return _doubted(node, logits)
    return Softmax(node=node, logits=logits, axis=axes[0], total=unexpanded(total))


def _axes_of(node: ir.Node) -> list[int]:
    """The axes of a reduction as written; none if they are not known, or if it reduces all axes."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    tensor = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return [] if tensor is None else [int(axis) for axis in tensor.numpy().reshape(-1)]


def _doubted(node: ir.Node, logits: ir.Value) -> Softmax:
    name = shown(node.name or node.outputs[0].name or "")
    text = f"{name} divides exponentials by sums, which may not be a softmax"
    return Softmax(node=node, logits=logits, axis=None, doubt=Reason("softmax-form", text))


def _almost_divided(node: ir.Node) -> Softmax | None:
    """A division of exponentials by their sum after either was changed, for example by a mask or an added number."""
    for part, divisor in _quotients(node):
        sums = _sums_of(divisor)
        summed = {source for one in sums for source in _exponentials(one.inputs[0])}
        product = behind(part, (*KEEPS_ORDER, "Transpose")).producer()
        is_late = product is not None and product.op_type in PRODUCTS
        parts = [*product.inputs[:2]] if product is not None and is_late else [part]
        source = next((one for value in parts for one in _exponentials(value) if one in summed), None)
        power = power_of(source)
        if power is None:
            continue
        found = _doubted(node, power.exponent)
        if product is not None and is_late:
            return attrs.evolve(found, product=product_of(product, WEIGHTED))
        if any(_is_added_to(divisor, one) for one in sums):
            text = f"the sum of {shown(node.name or node.outputs[0].name or '')} has a number beside those of the keys"
            return attrs.evolve(found, doubt=Reason("sinks", text))
        return found
    return None


_CHANGES = {*KEEPS_ORDER, "Mul", "Where", "Dropout", "Transpose"}
"""Operators that may be between exponentials and their product or sum."""

_OF_SUMS = {*KEEPS_ORDER, "Add", "Max", "Clip", "Where", "Log", "Mul", "Reciprocal", "Div", "Transpose"}
"""Operators that may be between a sum of exponentials and a division by it."""


def _exponentials(value: ir.Value | None) -> list[ir.Node]:
    return [one for one in _found(value, {"Exp", "Pow"}, _CHANGES) if power_of(one) is not None]


def _sums_of(value: ir.Value | None) -> list[ir.Node]:
    """The sums of exponentials that a value is computed from."""
    sums = _found(value, {"ReduceSum", "ReduceLogSumExp"}, _OF_SUMS)
    return [one for one in sums if one.op_type == "ReduceLogSumExp" or _exponentials(one.inputs[0])]


def _is_added_to(value: ir.Value, sums: ir.Node) -> bool:
    added = above(value, "Add", (*KEEPS_ORDER, "Reciprocal"))
    return added is not None and any(above(one, "ReduceSum", KEEPS_ORDER) is sums for one in added.inputs)


def _found(value: ir.Value | None, operators: Collection[str], through: Collection[str]) -> list[ir.Node]:
    """The nodes of these operators that a value is computed from, with only operators of `through` in between.

    The nearest node comes first.
    """

    def onward(one: ir.Value) -> list[ir.Value]:
        node = one.producer()
        ends = node is None or node.op_type in operators or node.op_type not in through
        return [] if node is None or ends else [source for source in node.inputs if source is not None]

    reached = () if value is None else nearest_first(value, onward, _DEPTH)
    nodes = (one.producer() for one in reached)
    return list(dict.fromkeys(node for node in nodes if node is not None and node.op_type in operators))
