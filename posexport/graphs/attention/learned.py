"""Features that no input carries: queries that a model has learned, repeated for all rows, as in DETR.

    values = MatMul(Expand(table, [rows, queries, size]), weight)

Positions and biases are computed from constants and lengths too. So such values count as features only if a softmax
weighs them that would otherwise be left.
"""

from __future__ import annotations

from collections.abc import Iterable

from posexport.graphs.attention.attention import UnknownAttention
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.recognise import Found
from posexport.graphs.attention.softmaxes import softmax_of
from posexport.graphs.attention.unweighted import FEATURES_UNKNOWN, weighed_others

_REPEAT = {"Expand", "Tile", "ConstantOfShape"}
"""Operators that make constants as many as there are rows."""


def learned_values(flow: Dataflow, found: Iterable[Found]) -> set[str]:
    """The names of repeated constants from which the values of attentions in `found` are computed.

    These are the attentions that are left because nothing is known to carry features to their values.
    """
    left = {one.name for one in found if isinstance(one, UnknownAttention) and one.reason.code == FEATURES_UNKNOWN}
    nodes = [node for node in flow.graph if (node.name or node.outputs[0].name) in left] if left else []
    softmaxes = [softmax for node in nodes if (softmax := softmax_of(node)) is not None]
    pending = [value for softmax in softmaxes for value in weighed_others(flow, softmax.node.outputs[0])]
    seen, names = set(pending), set[str]()
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None:
            continue
        if node.op_type in _REPEAT:
            if node.op_type == "ConstantOfShape" or node.inputs[0] in flow.constant:
                names.add(value.name or "")
            continue
        new = [one for one in node.inputs if one is not None and one not in flow.constant and one not in seen]
        seen.update(new)
        pending += new
    return names


def knows_more(new: Iterable[Found], old: Iterable[Found]) -> bool:
    """Whether attentions of `new` are understood that are not in `old`, and all that are understood in `old`."""
    after, before = ({one.name for one in some if not isinstance(one, UnknownAttention)} for some in (new, old))
    return before < after
