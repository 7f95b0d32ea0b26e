"""The column that a Pad puts beside the scores: one more logit for each query, the same number for all."""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.uniform import number_of

LARGEST_SINK = 1e3
"""The largest logit of a sink that all heads share. Larger ones, and those below minus this, are masks."""


def padded_logit(probe: Probe, node: ir.Node) -> tuple[float, int] | None:
    """The logit that a Pad puts before the first key (0) or after the last one (-1), and this place.

    None if the Pad does more, or if this depends on the inputs.
    """
    inputs = (*node.inputs, None, None, None)[:4]
    pads, axes = (probe.shapes.whole_numbers(inputs[at]) for at in (1, 3))
    logit = 0.0 if inputs[2] is None else number_of(probe, inputs[2])
    is_constant = node.attributes.get_string("mode", "constant") == "constant"
    if inputs[0] is None or pads is None or logit is None or not is_constant or (axes is None) != (inputs[3] is None):
        return None
    rank = len(probe.shape(inputs[0]))
    padded = [axis % rank for axis in (range(rank) if axes is None else axes)]
    found = [one for one in zip(padded, pads, pads[len(pads) // 2 :], strict=False) if one[1:] != (0, 0)]
    places = {(rank - 1, 1, 0): 0, (rank - 1, 0, 1): -1}
    return (logit, places[found[0]]) if len(found) == 1 and found[0] in places else None
