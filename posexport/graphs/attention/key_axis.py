"""The scores of a softmax, and their axis of keys: the axis that the softmax is over.

softmax(q k^T, axis=-1) v        scores [B, N, S, T], the usual form
v^T softmax(k q^T, axis=-2)      scores [B, N, T, S]: queries and keys are exchanged
softmax((k q^T)^T, axis=-1) v    the same, until the scores are transposed
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import onnx_ir as ir

from posexport.errors import shown
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.head_count import by_rows
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import Product, with_keys_at
from posexport.graphs.attention.score_axes import KEYS_FIRST, MOVES, ScoreAxes, score_axes
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
    transposed = axis == -1
    if transposed and axes.get(softmax.logits) != KEYS_FIRST:
        letters = scores.product.axes[2]
        keys = probe.shape(scores.product.result)[letters.index("t") - len(letters)]
        if probe.shape(softmax.logits)[-1] != keys + (scores.column is not None):
            raise Declined("softmax-axis", f"{over}, which holds more than the keys of one query")
        return scores, axes
    whole = rank == 4 and scores.column is None
    known = whole and (transposed or not any(node.op_type in MOVES for node in scores.nodes))
    turned = with_keys_at(scores.product, -2 if transposed else axis) if known else None
    if turned is None or turned.right not in flow.content:
        raise Declined("softmax-axis", f"{over}, and keys are looked for on another one")
    values = (turned.result, *(node.outputs[0] for node in scores.nodes))
    if transposed:  # values after the Transpose have the usual axes
        values = tuple(value for value in values if axes.get(value) != KEYS_FIRST)
    return attrs.evolve(scores, product=turned), dict.fromkeys(values, tuple(turned.axes[2]))
