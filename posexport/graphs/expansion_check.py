"""Whether operators that were written out give what they gave: the graph before and after, in float64.

Each is tried alone, on random features and on the masks, positions and lengths of the probe, so that a wrong expansion
is known by its own numbers, whether something reads them or they are an output of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.expand import Expanded

LIMIT = 1e-9
"""Of the largest value: as far as two float64 computations of the same function may differ."""


def wrong_ones(
    before: ir.Model, after: ir.Model, flow: Dataflow, probe: Probe, expanded: Iterable[Expanded]
) -> Iterator[Expanded]:
    """The operators of `before` that give other numbers as they are written out in `after`, of which `flow` and `probe`
    are."""
    old, new = Evaluator(before), Evaluator(after)
    kept = {value.name for node in after.graph for value in node.outputs}
    for one in expanded:
        read = [value for value in dict.fromkeys(one.inputs) if value is not None and value not in flow.constant]
        known = {value.name or "": _numbers(flow, probe, value) for value in read}
        names = [name for name in one.outputs if name in kept]
        expected = old.run(known, names)
        try:
            actual = new.run(known, names)
        except RequestError:
            yield one
        else:
            if not all(_same(expected[name], actual[name]) for name in names):
                yield one


def _numbers(flow: Dataflow, probe: Probe, value: ir.Value) -> torch.Tensor:
    """Random features, or what a mask, a position or a length is."""
    is_feature = value in flow.content and probe.dtype(value).is_floating_point
    return probe.random_like(value) if is_feature else probe.get(value)


def _same(want: torch.Tensor, have: torch.Tensor) -> bool:
    if want.shape != have.shape:
        return False
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(have)):
        return False
    want, have = want[finite], have[finite]
    return not want.numel() or float((want - have).abs().max()) <= LIMIT * max(float(want.abs().max()), 1e-300)
