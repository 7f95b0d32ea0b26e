"""Whether Triton may run the requests of several clients as one batch, for any graph.

The first dimension of each input must be that of the rows, by its role, and each row must give the same output as by
itself. Names don't tell the latter, so it is tested in float64, on drawn rows that differ in positions and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from posexport.errors import Reason
from posexport.export.triton.batching import Batching, decided, seldom
from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.graphs.cases import cases_of
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.evaluator import EVALUATOR
from posexport.graphs.roles import Role
from posexport.graphs.sizes import check_sizes, fitted, is_dynamic, shape_of
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Pool, result
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.contract import Values

TRIALS = 6
"""The most sets of inputs that are tried."""

EQUAL = 1e-9
"""The largest difference between a row in a batch and the same row by itself, as a part of the largest value."""

TIME_LIMIT = 300.0
"""The seconds for all evaluations of one kind."""

_COUNTS = {
    *("past_length", "total_length", "lengths", "last_key", "write_indices", "cache_position"),
    *("logits_to_keep", "use_cache"),
}
"""Roles of inputs for which zeros would be contradictory: an engine may reject such a request."""

_USUAL = ({SEQ: 128}, {SEQ: 16}, {SEQ: 1, PAST: 1024}, {SEQ: 1, PAST: 16})
"""Sizes of a request that warms up: the first that the graph takes. The last two are for a graph with a cache."""


class GraphTrial:
    """A graph that is tried in a separate process, which ends with the block.

    `roles` are those of its inputs, or the reason why they aren't known.
    """

    def __init__(self, path: Path, roles: Mapping[str, Role] | Reason, values: Values) -> None:
        self._path, self._values, self._pool = path, values, Pool(TIME_LIMIT)
        self._unknown = roles if isinstance(roles, Reason) else None
        self._roles: Mapping[str, Role] = {} if isinstance(roles, Reason) else roles

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    def batching(self, requested: int | None) -> Batching:
        """The batching that suits the graph; RequestError if joining `requested` rows would be wrong."""
        never = self._mixed_axes()
        tried = 0
        if never is None and requested != 0:
            tried, never = self._tried()
        grouped = any(role.grouped for role in self._roles.values())
        sets = "1 set" if tried == 1 else f"{tried} sets"
        condition = f"requests of equal shapes are joined; rows came out as they do alone on {sets} of drawn inputs"
        return decided(requested, never, seldom("their length", is_dynamic(self._roles, PAST), grouped), condition)

    def usual(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a request of zeros that the graph takes; empty if none is known.

        RequestError if the graph fixes sizes that nobody can give.
        """
        if self._unknown is not None or _COUNTS & {role.kind for role in self._roles.values()}:
            return {}
        cached = is_dynamic(self._roles, PAST)
        for sizes in _USUAL[2:] if cached else _USUAL[:2]:
            known = fitted(self._roles, {BATCH: 1, **sizes})
            check_sizes(self._roles, known)
            shapes = {name: shape_of(role, known) for name, role in self._roles.items()}
            zeros = {name: np.zeros(shapes[name], _dtype(role)) for name, role in self._roles.items()}
            if not isinstance(self._evaluated([zeros]), Reason):
                return shapes
        return {}

    def _evaluated(self, inputs: list[Arrays]) -> list[Arrays] | Reason:
        answer = result(self._pool.submit(EVALUATOR, self._path, inputs))
        return list(answer.outputs) if answer.failure is None else answer.failure

    def _mixed_axes(self) -> str | None:
        """Why the first dimensions are not those of the rows; None if they are."""
        if self._unknown is not None:
            return self._unknown.text
        for name, (shape, _) in self._values.items():
            role = self._roles.get(name)
            if not shape or isinstance(shape[0], int):
                what = "has no dimensions" if not shape else "has a fixed first dimension"
                return f"{name} {what}, so a request holds all rows"
            if role is not None and role.axes[0] != BATCH:
                return f"the first dimension of {name} {list(shape)} is not the batch ({role.kind})"
        return None

    def _tried(self) -> tuple[int, str | None]:
        """The number of sets of inputs that were tried, and on which a row differed, or why none was tried."""
        tried, failure = 0, None
        several = [case for case in cases_of(self._roles, 0) if case.sizes[BATCH] > 1]
        for case in several:
            if tried == TRIALS:
                break
            answer = self._evaluated([case.arrays, *_rows_of(case)])
            if isinstance(answer, Reason):  # this graph may not take inputs of such sizes
                failure = failure or answer
                continue
            tried += 1
            together, *alone = answer
            name = _unlike(together, alone)
            if name is not None:
                return tried, f"a row of {name} depends on the others of its batch ({case.label})"
        if not tried:
            why = "no drawn inputs have several rows" if failure is None else failure.text.rstrip(".")
            return 0, f"whether rows come out as they do alone could not be tried: {why}"
        return tried, None


def _rows_of(case: DrawnInputs) -> Iterator[Arrays]:
    """Each row as a separate request."""
    for row in range(case.sizes[BATCH]):
        yield {name: array[row : row + 1] for name, array in case.arrays.items()}


def _unlike(together: Arrays, alone: list[Arrays]) -> str | None:
    """The first output with a row that differs from the same row by itself, or without a row for each request."""
    for name, whole in together.items():
        parts = [one[name] for one in alone]
        shapes = {part.shape for part in parts}
        if len(shapes) != 1 or whole.shape != (len(parts), *next(iter(shapes))[1:]):
            return name
        each = np.concatenate(parts)
        if each.dtype.kind in "biu":
            if (each != whole).any():
                return name
            continue
        one, other = (np.asarray(values, np.float64) for values in (whole, each))
        finite = np.isfinite(other)
        largest = float(np.abs(other[finite]).max(initial=0.0))
        same = np.where(finite, np.abs(np.where(finite, one - np.where(finite, other, 0), 0)) <= EQUAL * largest, False)
        if not (same | (one == other) | (np.isnan(one) & np.isnan(other))).all():
            return name
    return None


def _dtype(role: Role) -> np.dtype[Any]:
    return NUMPY_DTYPES.get(role.dtype) or np.dtype(role.dtype)
