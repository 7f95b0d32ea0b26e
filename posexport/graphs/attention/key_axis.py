"""The scores of a softmax, and their axis of keys: the axis that the softmax is over.

softmax(q k^T, axis=-1) v        scores [B, N, S, T], the usual form
v^T softmax(k q^T, axis=-2)      scores [B, N, T, S]: queries and keys are exchanged
softmax((k q^T)^T, axis=-1) v    the same, until the scores are transposed

Scores may be transposed in any other way too, if each transpose can be followed.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import onnx_ir as ir

from posexport.errors import shown
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.head_count import by_rows
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import SCORES, Product, with_keys_at
from posexport.graphs.attention.score_axes import MOVES, USUAL, ScoreAxes, score_axes, turned
from posexport.graphs.attention.scores import Declined, Scores, scores_of
from posexport.graphs.attention.softmaxes import Softmax

Axes = dict[ir.Value, ScoreAxes]
"""The axes of values between a product and its softmax, for values whose axes are not the usual ones."""


def scores_by_key(
    flow: Dataflow, probe: Probe, softmax: Softmax, weighted: tuple[Product, Sequence[ir.Node]], name: str
) -> tuple[Scores, Axes]:
    """The scores of a softmax with their axes. Raises Declined.

    `weighted` is the product of the softmax with values, and the nodes before that product.
    """
    rank = len(probe.shape(softmax.logits))
    scores = scores_of(flow, probe, softmax.logits, factor=softmax.factor, sink=softmax.sink)
    scores = attrs.evolve(scores, product=by_rows(probe, scores.product))
    is_operator = softmax.total is None  # Softmax or LogSoftmax, not a softmax that is written out
    old = flow.graph.opset_imports.get("", 13) < 13 and is_operator
    axis = softmax.axis if softmax.axis is not None else 1 if old else -1
    axis = axis - rank if axis >= 0 else axis
    over = f"{shown(name)} normalises over axis {axis + rank}"
    if old and axis != -1:  # before opset 13, Softmax merged its axis and all axes after it
        raise Declined("softmax-axis", f"{over} and those behind it together")
    product, passed = weighted
    if not passed and "t" not in product.axes[0][axis:][:1]:
        raise Declined("softmax-axis", f"{over}, and values are summed over another one")
    axes = score_axes(probe, scores.product, scores.nodes)
    order = axes.get(softmax.logits, USUAL)
    if order == USUAL and rank == 4 and scores.column is None:
        order = USUAL if any(node.op_type in MOVES for node in scores.nodes) else _AS_PRODUCED
    if len(order) == 4 and all(len(group) == 1 for group in order):
        if order[axis] == "t":
            return scores, axes
        exchanged = _exchanged(scores, axes) if order[axis] == "s" else None
        if exchanged is not None and exchanged[0].product.right in flow.content:
            return exchanged
    elif axis == -1:
        letters = scores.product.axes[2]
        keys = probe.shape(scores.product.result)[letters.index("t") - len(letters)]
        if probe.shape(softmax.logits)[-1] != keys + (scores.column is not None):
            raise Declined("softmax-axis", f"{over}, which holds more than the keys of one query")
        return scores, axes
    raise Declined("softmax-axis", f"{over}, and keys are looked for on another one")


_AS_PRODUCED = tuple(SCORES[2])
"""The usual axes, written out."""


def _exchanged(scores: Scores, axes: Axes) -> tuple[Scores, Axes] | None:
    """The scores with the names of queries and keys exchanged; None if not all axes are separate."""
    product = with_keys_at(scores.product, scores.product.axes[2].index("s"))
    values = (scores.product.result, *(node.outputs[0] for node in scores.nodes))
    renamed = {value: turned(axes.get(value, USUAL)) for value in values}
    known = {value: one for value, one in renamed.items() if one is not None}
    if product is None or len(known) < len(values):
        return None
    return attrs.evolve(scores, product=product), {value: one for value, one in known.items() if one != USUAL}
