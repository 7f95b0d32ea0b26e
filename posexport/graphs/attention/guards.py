"""Whether a guard ever gives zeros to queries that see no key.

It doesn't if the logits of a query are never all minus infinity.

Where(seen, 0, -3.4e38)    never gives infinity
Where(seen, 0, -inf)       may give infinity
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from posexport.graphs.attention.absorbed import lays_out
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.scores import Term

_LARGEST = {
    ir.DataType.FLOAT16: 65504.0,
    ir.DataType.BFLOAT16: 3.3895313892515355e38,
    ir.DataType.FLOAT: 3.4028234663852886e38,
    ir.DataType.DOUBLE: 1.7976931348623157e308,
}
"""The largest number of each dtype."""

HALF_END = (2.0**15, 2.0**16)
"""Masks in this range may add up with a logit to infinity in fp16, which ends at 65,504.

In other dtypes, no logit is large enough for that.
"""


def can_act(probe: Probe, guard: float | None, terms: Sequence[Term]) -> bool:
    """Whether a guard (Attention.guard) ever gives zeros with these terms."""
    if guard is None or not terms:
        return False
    if guard != -math.inf:
        return True
    if any(term.seen_if is None for term in terms):  # two large numbers may add up to infinity
        largest = _largest(probe, terms[0].value) * abs(terms[0].factor)
        return len(terms) > 1 or not math.isfinite(largest) or HALF_END[0] < largest <= HALF_END[1]
    return any(term.fill == -math.inf for term in terms)


def _largest(probe: Probe, value: ir.Value | None) -> float:
    """The largest absolute number of a value; infinity if it isn't known."""
    if value is None:
        return math.inf
    node = value.producer()
    if value in probe.fixed if node is None else node.op_type in ("Constant", "ConstantOfShape"):
        numbers = probe.get(value)
        return float(numbers.double().abs().max()) if numbers.numel() else 0.0
    if node is None:
        return math.inf
    if node.op_type == "Where":
        return max(_largest(probe, node.inputs[1]), _largest(probe, node.inputs[2]))
    if not lays_out(probe, node):
        return math.inf
    largest = _largest(probe, node.inputs[0])
    to = ir.DataType(node.attributes["to"].as_int()) if node.op_type == "Cast" else None
    return math.inf if to is not None and largest > _LARGEST.get(to, 0.0) else largest
