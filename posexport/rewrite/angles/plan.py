"""How the angles of a graph's rotations can be made exact, or why they stay, for each attention.

recognised    parameters whose frequencies are known in float64 (posexport.rewrite.angles.parameters)
positions     the value of the graph that the angles follow, row by row (posexport.rewrite.angles.positions)
tested        at all positions the graph's cosines and sines are those of the parameters, except for what rounding
              of its frequencies to float32 explains; and its rotations take their angles from nowhere else
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import onnx_ir as ir

from posexport.errors import Reason
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.caches import written_keys
from posexport.graphs.attention.further_angles import UNKNOWN_ANGLES, further_angles, further_text, one_side_text
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.measure import Measure
from posexport.graphs.attention.rotary import AngleSource, Rotary
from posexport.graphs.attention.rotation import rotary_encoding
from posexport.graphs.axes import BATCH
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.view import View
from posexport.rewrite.angles.columns import Columns, columns_of
from posexport.rewrite.angles.parameters import BY_LENGTH, UNKNOWN, ExactAngles, exact_of
from posexport.rewrite.angles.positions import PositionSource, candidates
from posexport.rewrite.angles.trial import MOST, Trial, far, near_and_far
from posexport.rewrite.angles.turned import EXACT, turning_error

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]
    Whole = np.ndarray[Any, np.dtype[np.int64]]

POSITIONS, DIFFER, ELSEWHERE, SHARED = "angles-positions", "angles-differ", "angles-elsewhere", "angles-shared"
"""Codes of reasons why angles stay.

No value has the positions; the angles differ from those of the parameters; the rotation has angles in other values too;
keys are shared with an attention whose angles stay.
"""

PROMISED = 2.5e-7
"""The largest error of posexport.custom_ops.exact_sinusoids at positions below 2^24."""

_ROWS = 2**14
"""The number of rows of a table that are compared at a time."""

_UNITS = {ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}
"""Half a unit in the last place of 1, for dtypes to which cosines and sines are rounded."""


@attrs.frozen(kw_only=True, eq=False)
class AnglePlan:
    """The values `sources` with cosines and sines of the graph, and what they are in exact arithmetic.

    `columns` are those of each. `limit` is the number of positions that the graph takes. `error` is the error of the
    graph's own angles in its own dtypes, at far positions; `bound` is the largest error that exact angles may have.
    `rows` are an input of the graph and the axis with its rows.
    """

    sources: tuple[AngleSource, ...]
    positions: PositionSource
    exact: ExactAngles
    columns: tuple[Columns, ...]
    limit: int
    error: float
    bound: float
    rows: tuple[str, int] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the graph's own angles are as exact as they can be made."""
        return self.error <= self.bound


@attrs.frozen(kw_only=True, eq=False)
class Turning:
    """A rotation of heads with `dim` features, with the plan of its angles."""

    rotary: Rotary
    dim: int
    plan: AnglePlan


Turnings = tuple[Turning, ...]
"""The rotations of one attention; for its keys, only its own rotations."""


class Planner:
    """Plans for the rotations of a view, whose model is only evaluated.

    `owners` has the names of attentions that read the keys of another one, with the name of the latter.
    """

    def __init__(self, view: View) -> None:
        self._view, self._measure = view, Measure(view)
        self._evaluator = Evaluator(view.model)
        self._known: dict[object, AnglePlan | Reason] = {}
        self._outputs = {one.output.value for one in view.attentions if isinstance(one, Attention)}
        self.owners: dict[str, str] = {}

    def plan(self, attention: Attention) -> Turnings | Reason | None:
        """How the angles of an attention can be made exact, or why they stay; None if nothing is rotated."""
        queries, keys = (_rotations(side, attention.head_dim) for side in (attention.q, attention.k))
        owner = self._owner(attention) if queries and not keys and attention.k.cache is None else None
        if not queries and not keys:
            if attention.q.rotates or attention.k.rotates:
                return Reason(UNKNOWN, UNKNOWN_ANGLES)
            return None
        if not queries or not (keys or owner):
            return Reason(UNKNOWN, one_side_text("queries" if queries else "keys"))
        for name, side in (("queries", attention.q), ("keys", attention.k)):
            if further_angles(self._view.flow, self._view.probe, side):
                return Reason(ELSEWHERE, further_text(name))
        if owner is not None:
            self.owners[attention.name] = owner
        turnings = []
        for rotary, dim in (*queries, *keys):
            plan = self._of_rotation(rotary, dim)
            if isinstance(plan, Reason):
                return plan
            turnings.append(Turning(rotary=rotary, dim=dim, plan=plan))
        return tuple(turnings)

    def _owner(self, attention: Attention) -> str | None:
        """The attention whose keys this one reads."""
        written = written_keys(self._view, attention, self._outputs)
        if written is None or written.rotary is None:
            return None
        for one in self._view.attentions:
            if isinstance(one, Attention) and one.k.rotary is not None and one.k.rotary.target is written.rotary.target:
                return one.name
        return None

    def _of_rotation(self, rotary: Rotary, dim: int) -> AnglePlan | Reason:
        key = (rotary.cos, rotary.sin, rotary.pairs)
        if key not in self._known:
            encoding, _ = rotary_encoding(self._measure, rotary, rotary, dim)
            self._known[key] = self._planned(encoding, rotary)
        plan = self._known[key]
        if isinstance(plan, Reason):
            return plan
        error = turning_error(self._view, self._evaluator, rotary, plan.exact, plan.columns, dim)
        if not error <= EXACT:
            return Reason(ELSEWHERE, "its rotation takes angles from other values of the graph too")
        return plan

    def _planned(self, encoding: Mapping[str, Any], rotary: Rotary) -> AnglePlan | Reason:
        exact = exact_of(encoding, rotary.pairs.count)
        if isinstance(exact, Reason):
            return exact
        sources, differs = (rotary.cos, rotary.sin), None  # in columns, or its encoding has a reason
        trial = Trial(self._view, sources, self._view.model)
        held = candidates(self._view, sources)
        for one in held.sources:
            limit, source = max(
                ((trial.limit(each), each) for each in (attrs.evolve(one, whole={}), one)), key=lambda pair: pair[0]
            )
            if limit < 2:
                continue
            positions = near_and_far(limit)
            values = trial.at(source, positions)
            if all(float(np.ptp(value, 0).max()) < 1e-6 for value in values):
                continue  # angles don't follow it
            columns = columns_of(values, exact, positions)
            if (
                not isinstance(columns, float)
                and limit < MOST
                and (far_off := _table_misfit(trial, source, exact, columns, limit)) > 1.0
            ):
                columns = far_off
            if isinstance(columns, float):
                differs = columns if differs is None else min(differs, columns)
                continue
            return self._measured(sources, source, exact, columns, limit)
        if differs is not None:
            text = (
                "the difference between its angles and those of its parameters is larger than rounding explains "
                f"({differs:.1e} times)"
            )
            return Reason(DIFFER, text)
        if held.by_length:
            return Reason(BY_LENGTH, "its angles depend on lengths too, not only on positions")
        return Reason(POSITIONS, "no value of the graph holds the positions of its angles")

    def _measured(
        self,
        sources: tuple[AngleSource, ...],
        positions: PositionSource,
        exact: ExactAngles,
        columns: tuple[Columns, ...],
        limit: int,
    ) -> AnglePlan:
        tried = far(limit)
        values = Trial(self._view, sources, self._view.model, wide=False).at(positions, tried)
        return AnglePlan(
            sources=sources,
            positions=positions,
            exact=exact,
            columns=columns,
            limit=limit,
            error=error_of(values, exact, columns, tried),
            bound=bound_of(self._view, sources, exact),
            rows=_rows(self._view),
        )


def _rows(view: View) -> tuple[str, int] | None:
    """An input of the graph that has all rows, and its axis of rows."""
    held = ((name, role.axes) for name, role in view.roles.items())
    return next(((name, axes.index(BATCH)) for name, axes in held if BATCH in axes), None)


def _table_misfit(
    trial: Trial, source: PositionSource, exact: ExactAngles, columns: Collection[Columns], limit: int
) -> float:
    """How many times more than rounding explains any row of a table differs: a single row may have been edited."""
    worst = 0.0
    for start in range(0, limit, _ROWS):
        positions = np.arange(start, min(start + _ROWS, limit))
        cos, sin = exact.cos_sin(positions)
        tolerance = exact.tolerance(positions)
        for value, one in zip(trial.at(source, positions), columns, strict=True):
            worst = max(worst, float(np.nan_to_num(one.misfit(value, cos, sin, tolerance), nan=np.inf)))
    return worst


def _rotations(side: Side, head_dim: int) -> list[tuple[Rotary, int]]:
    """The rotations of queries or keys, with the features of the heads that they rotate."""
    if side.rotary is not None:
        return [(side.rotary, head_dim)]
    return [(turn.rotary, turn.dim) for turn in side.turns]


def error_of(values: Collection[Array], exact: ExactAngles, columns: Collection[Columns], positions: Whole) -> float:
    """The largest error of values [n, F] at positions [n], compared with float64."""
    cos, sin = exact.cos_sin(positions)
    errors = [np.abs(value - one.of(cos, sin)).max() for value, one in zip(values, columns, strict=True)]
    return float(np.nan_to_num(max(errors), nan=np.inf))


def bound_of(view: View, sources: Collection[AngleSource], exact: ExactAngles) -> float:
    """The largest error that exact cosines and sines may have in the dtypes of these values."""
    dtypes = view.dtypes([source.value for source in sources]).values()
    return exact.scale * (PROMISED + max((_UNITS.get(dtype, 0.0) for dtype in dtypes), default=0.0))
