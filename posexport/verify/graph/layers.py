"""Which layer of a whole model departs, if the file is another function than the checkpoint.

A file has no names of layers, but it computes what they return. Each of these hidden states is looked for among all
values of the file, in float64. The file departs after the last one that is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from posexport.graphs.load import model_at
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.pool import result
from posexport.verify.graph.locate import LARGEST
from posexport.verify.graph.outputs import selected, token_axes
from posexport.verify.graph.parity import Expected, own_error_share, tolerance_of
from posexport.verify.graph.reference import evaluate
from posexport.verify.graph.truth import LUCK

if TYPE_CHECKING:
    from posexport.verify.graph.job import GraphJob


def departure(job: GraphJob, index: int) -> str | None:
    """A clause on the first layer that departs, on the case with this number; None if it isn't known."""
    if checkpoint_of(job.module) is None or job.subject.weight_bytes > LARGEST:
        return None
    names = [str(value.name) for node in model_at(job.path).graph for value in node.outputs if value.name]
    mine = _evaluated(job, index, {"outputs": names})
    exact = _evaluated(job, index, {"module": job.module, "layers": True})
    honest = {"module": job.module, "layers": True, "wide": False, "dtype": job.subject.dtype}
    own = _evaluated(job, index, honest)
    if exact.keys() != own.keys():
        return None
    clause = None
    for path in (name for name in exact if f"{name}.0" in exact):
        layers = [name for name in exact if name.startswith(f"{path}.")]
        there = [_is_there(_expected(job, index, exact[name], own[name]), mine) for name in (path, *layers)]
        if True not in there:
            return clause
        last = len(there) - 1 - there[::-1].index(True)
        if last < len(layers):
            return f"the first layer that differs is {layers[last]!r}"
        clause = f"all layers of {path!r} agree, so the difference comes after them"
    return clause


def _evaluated(job: GraphJob, index: int, options: dict[str, Any]) -> Arrays:
    """The requested values; none if they can't be evaluated."""
    answer = result(evaluate(job.pool, job.path, [job.cases[index].arrays], options))
    return {} if answer.failure is not None else answer.outputs[0]


def _expected(job: GraphJob, index: int, exact: Any, own: Any) -> Expected:
    case = job.cases[index]
    select = selected(case, token_axes("states", [case], [exact.shape]), exact.shape)
    tolerance = tolerance_of("", job.subject.dtype)
    return Expected(name="states", exact=exact, own=[own], select=select, dtype="", tolerance=tolerance)


def _is_there(state: Expected, values: Arrays) -> bool:
    """Whether one of the values is this state, apart from rounding."""
    size, most = np.size(state.exact), max(LUCK * own_error_share(state), state.tolerance.floor)
    return any(
        own_error_share(attrs.evolve(state, own=[value.reshape(state.exact.shape)])) <= most
        for value in values.values()
        if value.size == size and value.dtype.kind == "f"
    )
