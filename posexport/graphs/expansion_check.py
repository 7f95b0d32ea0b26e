"""Checks that operators that were written out give the same values: the graph before and after, in float64.

Each operator is tried by itself, on random features and on the masks, positions and lengths of one run. So a wrong
expansion is found by its own outputs, whether another node reads them or they are outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.expand import Expanded

LIMITS = {ir.DataType.DOUBLE: 1e-9, ir.DataType.FLOAT: 1e-6, ir.DataType.FLOAT16: 1e-2, ir.DataType.BFLOAT16: 0.1}
"""The largest difference between two computations of the same function in float64, as a part of the largest value.

It depends on the dtype in which the scale and other constants of an operator are stored.
"""

_CACHES = (1, 2)
"""The outputs of all these operators that are keys and values, if there are any."""


def wrong_ones(
    before: ir.Model, after: ir.Model, flow: Dataflow, probe: Probe, expanded: Sequence[Expanded]
) -> Iterator[Expanded]:
    """The operators of `before` that give other numbers in their expanded form in `after`.

    `flow` and `probe` belong to `after`.
    """
    old, new = Evaluator(before), Evaluator(after)
    inputs = {name: probe.values[name] for value in before.graph.inputs if (name := value.name or "") in probe.values}
    kept = {value.name for node in after.graph for value in node.outputs}
    read = [[value for value in one.inputs if value is not None and not value.is_initializer()] for one in expanded]
    others = {value.name or "" for values in read for value in values if not _is_feature(flow, probe, value)}
    known = old.run(inputs, [*others])  # the expanded graph may lack some
    for one, values in zip(expanded, read, strict=True):
        features = {value.name or "": value for value in values if value.name not in others}
        given = known | {name: probe.random_like(value) for name, value in features.items()}
        names = [name for name in one.outputs if name in kept]
        expected = old.run(given, names)
        try:
            actual = new.run(given, names)
        except RequestError:
            yield one
        else:
            stated = [LIMITS[value.dtype] for value in values if value.dtype in LIMITS]
            limit = max(stated, default=LIMITS[ir.DataType.FLOAT16])
            made = ((index, name) for index, name in enumerate(one.outputs) if name in kept)
            if not all(_same_output(index, expected[name], actual[name], limit) for index, name in made):
                yield one


def _is_feature(flow: Dataflow, probe: Probe, value: ir.Value) -> bool:
    """Whether a value can be replaced by random numbers: it is not a mask, a position or a length."""
    return value in flow.content and probe.dtype(value).is_floating_point


def _same_output(index: int, want: torch.Tensor, have: torch.Tensor, limit: float) -> bool:
    """Whether an output is the same. Free slots of a buffer may differ: operators leave zeros or old values there."""
    if index in _CACHES and want.ndim == 4 and want.shape == have.shape:
        have = have.masked_fill((want == 0).all(-1, keepdim=True), 0)
    return _same(want, have, limit)


def _same(want: torch.Tensor, have: torch.Tensor, limit: float) -> bool:
    if want.shape != have.shape:
        return False
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(have)):
        return False
    want, have = want[finite], have[finite]
    return not want.numel() or float((want - have).abs().max()) <= limit * max(float(want.abs().max()), 1e-300)
