"""The dtypes in which a graph computes an attention: its replacement must not compute with fewer digits.

For example, if queries and keys of fp16 are cast to fp32 before their product, their scores may be too large for fp16.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from posexport.graphs.attention.absorbed import digits
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.computations import above
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.rotary import Rotary
from posexport.graphs.attention.scores import HIDDEN
from posexport.graphs.input_facts import takes_scores
from posexport.graphs.view import View

_ARITHMETIC = {"Add", "Sub", "Mul", "MatMul", "Einsum", "Sum", "ReduceSum"}


def operands(attention: Attention) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries, keys and values as the graph's products read them."""
    near = attention if attention.near is None else attention.near
    return near.q.source.value, near.k.source.value, near.v.source.value


def turned_values(flow: Dataflow, rotary: Rotary) -> list[ir.Value]:
    """The values that a rotation computes from its source by arithmetic, not by casts and layouts."""
    nodes = [node for node in flow.between(rotary.source, rotary.target) if node.op_type in _ARITHMETIC]
    return [value for node in nodes for value in node.outputs if value in flow.content]


def widest(flow: Dataflow, rotary: Rotary, dtypes: Mapping[str, ir.DataType]) -> ir.DataType | None:
    """The dtype with the most digits among what a rotation computes; None if none is known."""
    found = [dtypes.get(value.name or "") for value in turned_values(flow, rotary)]
    return max((dtype for dtype in found if dtype is not None), key=digits, default=None)


def logit_types(view: View, attention: Attention, dtypes: Mapping[str, ir.DataType]) -> set[ir.DataType]:
    """The dtypes of what is added to the scores, and of sinks; not those of masks, whose numbers fit in any dtype.

    A value that is computed from an input that may hold scores is not a mask, whatever numbers it has on the probe's
    inputs.
    """
    found = set()
    if isinstance(attention.sinks, ir.Value):  # no more digits than the logits of the same softmax
        both = [dtypes.get(value.name or "") for value in (attention.sinks, attention.logits)]
        known = [dtype for dtype in both if dtype is not None]
        found.update(sorted(known, key=digits)[:1])
    scored = {name for name, role in view.roles.items() if takes_scores(role)}
    for term in attention.terms:
        dtype = dtypes.get(term.value.name or "")
        if dtype is None or term.seen_if is not None:
            continue
        number = view.probe.get(term.value)
        is_mask = bool(((number == 0) | (number * term.factor <= HIDDEN)).all())
        if not is_mask or any(value.name in scored for value in above(view.flow, [term.value])):
            found.add(dtype)
    return found
