"""Whether all caches of a graph have the same length, although the file has several names for it.

torch names the lengths of keys and of values apart. The graph itself may say that they are equal: if one cache alone
gets longer, it can't be computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from posexport.errors import RequestError, shown
from posexport.graphs.axes import PAST, TOTAL
from posexport.graphs.cases import cases_of
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.roles import Role
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import to_tensors

MORE = 3
"""The tokens by which a cache is made longer."""


def check_one_length(model: ir.Model, roles: Mapping[str, Role]) -> None:
    """Raise RequestError if caches have lengths with different names, and the graph takes different lengths.

    A mask of all tokens says that they are equal.
    """
    names: dict[str, list[str]] = {}
    for name, role in roles.items():
        if role.kind == "past" and PAST in role.axes:
            names.setdefault(str(role.shape[role.axes.index(PAST)]), []).append(name)
    if len(names) < 2 or any(role.kind == "attention_mask" and TOTAL in role.axes for role in roles.values()):
        return
    (first, one), *others = names.items()
    runs = partial(_runs, Evaluator(model), [value.name or "" for value in model.graph.outputs])
    cases = [case for case in cases_of(roles, 0) if case.sizes.get(PAST, 0) > 1]
    case = min(cases, key=lambda case: case.sizes[PAST], default=None)
    given = case.arrays if case is not None and runs(case.arrays) else None
    for length, caches in others:
        if given is None or runs(_with_longer(given, roles, caches)):
            raise RequestError(
                f"the caches {shown(one[0])} and {shown(caches[0])} have lengths of their own, {shown(first)} and "
                f"{shown(length)}, and shared ones have one: drop --kv-cache, or export the model with one name for "
                "both."
            )


def _runs(evaluator: Evaluator, outputs: Sequence[str], inputs: Arrays) -> bool:
    """Whether these outputs of a graph can be computed from these inputs."""
    try:
        evaluator.run(to_tensors(inputs), outputs)
    except RequestError:
        return False
    return True


def _with_longer(inputs: Arrays, roles: Mapping[str, Role], caches: Iterable[str]) -> Arrays:
    """The inputs with MORE tokens in these caches."""
    longer = dict(inputs)
    for name in caches:
        axis = roles[name].axes.index(PAST)
        first = np.take(longer[name], np.arange(MORE) % longer[name].shape[axis], axis)
        longer[name] = np.concatenate((longer[name], first), axis)
    return longer
