"""Sums and maxima of a softmax that is written out: whether their shapes show that they are over the keys.

    exp(x - max) / sum,  x [B, N, S, T],  sum [B, N, S, 1],  max the same for all keys

A sum over the last axis has one number for each place on the others, in their order. Reshape, Unsqueeze and the like
keep this order. So a value in the shape of the logits with one key is the sum over the keys of each query.
"""

from __future__ import annotations

from itertools import takewhile

import onnx_ir as ir

from posexport.errors import shown
from posexport.graphs.attention.powers import Beside
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.scores import Declined, Scores
from posexport.graphs.attention.softmaxes import Softmax
from posexport.graphs.symbolic_sizes import ONE


def check_written_out(probe: Probe, softmax: Softmax, scores: Scores, name: str) -> None:
    """Raise Declined unless sums are over the last axis, and maxima are the same for all keys."""
    shape = probe.shapes.of(softmax.logits)
    if softmax.total is not None:
        divided = softmax.node.outputs[0]
        if probe.shapes.of(softmax.total) != (*shape[:-1], ONE) or probe.shapes.of(divided) != shape:
            raise Declined("softmax-axis", f"the sums of {shown(name)} don't stand beside the keys that they are of")
    if softmax.beside is not None and not _stands_beside(probe, softmax.beside):
        text = f"the number that {shown(name)} adds to its sums is not known to be one for each sum"
        raise Declined("sinks", text)
    zeroed = softmax.zeroed
    if zeroed is not None and (scores.column is not None or probe.shapes.of(zeroed.result) != shape):
        raise Declined("softmax-form", f"{shown(name)} sets exponentials to zero, but not one for each score")
    product = softmax.product
    if product is not None and probe.shapes.of(product.result) != probe.shapes.of(product.node.outputs[0]):
        raise Declined("softmax-axis", f"the sums of {shown(name)} don't stand beside the keys that they are of")
    for node, maximum in scores.maxima:
        if probe.shapes.of(maximum)[-1:] != (ONE,) or not _keeps_keys(probe, scores, node):
            text = f"{shown(node.name or '')} subtracts a maximum that may not be the maximum over all keys"
            raise Declined("score-operator", text)


def _stands_beside(probe: Probe, beside: Beside) -> bool:
    """Whether what is added to sums over keys, and subtracted from the logits, is one number for each sum.

    Both are laid out by the same operators as the sums, or are one number for all.
    """
    if beside.level is None or beside.whole is None or beside.less is None:
        return True
    shapes = probe.shapes
    whole, level = shapes.of(beside.whole), shapes.of(beside.level)
    if shapes.of(beside.less) != whole:
        return False
    if all(size == ONE for size in (*level, *shapes.of(beside.number))):
        return True
    return level == (*whole[:-1], ONE) and shapes.of(beside.number) == shapes.of(beside.sums)


def _keeps_keys(probe: Probe, scores: Scores, node: ir.Node) -> bool:
    """Whether the last axis is that of the keys from a node to the softmax."""
    keys = probe.shapes.of(node.outputs[0])[-1:]
    later = takewhile(lambda one: one is not node, scores.nodes)
    return all(one.op_type != "Transpose" and probe.shapes.of(one.outputs[0])[-1:] == keys for one in later)
