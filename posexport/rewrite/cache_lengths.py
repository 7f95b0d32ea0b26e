"""Whether all caches of a graph have the same length, although the file has several names for it.

torch names the lengths of keys and of values apart. The graph itself may say that they are equal: if one cache alone
gets longer, it can't be computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from posexport.errors import RequestError, shown
from posexport.graphs.axes import PAST
from posexport.graphs.cases import cases_of
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.roles import Role
from posexport.runtimes.tensors import to_tensors

MORE = 3
"""The tokens by which a cache is made longer."""


def check_one_length(model: ir.Model, roles: Mapping[str, Role]) -> None:
    """Raise RequestError if caches have lengths with different names, and the graph takes different lengths."""
    names: dict[str, list[str]] = {}
    for name, role in roles.items():
        if role.kind == "past" and PAST in role.axes:
            names.setdefault(str(role.shape[role.axes.index(PAST)]), []).append(name)
    if len(names) < 2:
        return
    (first, one), *others = names.items()
    for length, caches in others:
        if not _is_bound(model, roles, caches):
            raise RequestError(
                f"the caches {shown(one[0])} and {shown(caches[0])} have lengths of their own, {shown(first)} and "
                f"{shown(length)}, and shared ones have one: drop --kv-cache, or export the model with one name for "
                "both."
            )


def _is_bound(model: ir.Model, roles: Mapping[str, Role], caches: list[str]) -> bool:
    """Whether the graph can be computed on a set of inputs, but not if these caches alone are longer."""
    cases = [case for case in cases_of(roles, 0) if case.sizes.get(PAST, 0) > 1]
    outputs = [value.name or "" for value in model.graph.outputs]
    evaluator, taken = Evaluator(model), False
    for case in sorted(cases, key=lambda case: case.sizes[PAST])[:1]:
        longer = dict(case.arrays)
        for name in caches:
            axis = roles[name].axes.index(PAST)
            first = np.take(longer[name], np.arange(MORE) % longer[name].shape[axis], axis)
            longer[name] = np.concatenate((longer[name], first), axis)
        try:
            evaluator.run(to_tensors(case.arrays), outputs)
            taken = True
            evaluator.run(to_tensors(longer), outputs)
        except RequestError:
            continue
        return False
    return taken
