"""What makes the angles of a graph's rotations exact, or why they stay, for each attention.

recognised    parameters whose frequencies are known in float64 (posexport.rewrite.angles.parameters)
positions     the value of the graph that the angles follow, row by row (posexport.rewrite.angles.positions)
tested        at all positions the graph's cosines and sines are those of the parameters, but for what rounding of
              its frequencies to float32 explains; and its rotations take their angles from nowhere else
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import onnx_ir as ir

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.caches import written_keys
from posexport.graphs.attention.measure import Measure
from posexport.graphs.attention.rotary import AngleSource, Rotary
from posexport.graphs.attention.rotation import rotary_encoding
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.view import View
from posexport.rewrite.angles.columns import Columns, columns_of
from posexport.rewrite.angles.parameters import UNKNOWN, ExactAngles, exact_of
from posexport.rewrite.angles.positions import PositionSource, candidates
from posexport.rewrite.angles.trial import Trial, far, near_and_far
from posexport.rewrite.angles.turned import EXACT, turning_error

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]

POSITIONS, DIFFER, ELSEWHERE, SHARED = "angles-positions", "angles-differ", "angles-elsewhere", "angles-shared"
"""Codes of reasons why angles stay: no value has the positions; they are others than those of the parameters; the
rotation has angles in other values too; keys are shared with an attention whose angles stay."""

PROMISED = 2.5e-7
"""What posexport.custom_ops.exact_sinusoids may be off by at positions below 2^24."""

_UNITS = {ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}
"""Half a unit in the last place of 1, for dtypes to which cosines and sines are rounded."""


@attrs.frozen(kw_only=True, eq=False)
class AnglePlan:
    """Cosines and sines of the graph, and what they are in exact arithmetic.

    `columns` are those of the values of `cos` and `sin`. `limit` is the number of positions that the graph takes;
    `error` that of its own angles in its own dtypes, at far ones; `is_exact` where it needs no change.
    """

    cos: AngleSource
    sin: AngleSource
    positions: PositionSource
    exact: ExactAngles
    columns: tuple[Columns, Columns]
    limit: int
    error: float
    bound: float

    @property
    def is_exact(self) -> bool:
        """Whether the graph's own angles are as exact as they can be made."""
        return self.error <= self.bound

    @property
    def sources(self) -> tuple[AngleSource, AngleSource]:
        """Cosines and sines."""
        return self.cos, self.sin


Plan = tuple[AnglePlan, ...]
"""The plans of one attention: of queries, and of keys where they have angles of their own."""


class Planner:
    """Plans for the rotations of a view; `model` is its model, which is only evaluated."""

    def __init__(self, view: View) -> None:
        self._view, self._measure = view, Measure(view)
        self._evaluator = Evaluator(view.model)
        self._known: dict[object, AnglePlan | Reason] = {}
        self._outputs = {one.output.value for one in view.attentions if isinstance(one, Attention)}
        self.owners: dict[str, str] = {}

    def plan(self, attention: Attention) -> Plan | Reason | None:
        """What makes the angles of an attention exact, or why they stay; None where nothing is rotated."""
        q, k = attention.q.rotary, attention.k.rotary
        if q is not None and k is None and attention.k.cache is None:
            written = written_keys(self._view, attention, self._outputs)
            k = None if written is None else written.rotary
            if k is not None and (owner := self._owner(k)) is not None:
                self.owners[attention.name] = owner
            elif k is not None:
                k = None
        if q is None and k is None:
            if attention.q.rotates or attention.k.rotates:
                return Reason(UNKNOWN, "its queries or keys are turned by numbers that are no values of the graph")
            return None
        if q is None or k is None:
            return Reason(UNKNOWN, f"only its {'queries' if k is None else 'keys'} are known to be rotated")
        plans = []
        for side in (q, k):
            plan = self._of_rotation(q, k, side, attention.head_dim)
            if isinstance(plan, Reason):
                return plan
            plans.append(plan)
        return tuple(dict.fromkeys(plans))

    def _owner(self, rotary: Rotary) -> str | None:
        """The attention whose keys these are."""
        for one in self._view.attentions:
            if isinstance(one, Attention) and one.k.rotary is not None and one.k.rotary.target is rotary.target:
                return one.name
        return None

    def _of_rotation(self, q: Rotary, k: Rotary, side: Rotary, dim: int) -> AnglePlan | Reason:
        key = (q.cos, q.sin, k.cos, k.sin, q.pairs, k.pairs, side is q and (q.cos, q.sin) != (k.cos, k.sin))
        if key not in self._known:
            encoding, _ = rotary_encoding(self._measure, q, k, dim)
            self._known[key] = self._planned(encoding, side)
        plan = self._known[key]
        if isinstance(plan, Reason):
            return plan
        error = turning_error(self._view, self._evaluator, side, plan.exact, plan.columns, dim)
        if not error <= EXACT:
            return Reason(ELSEWHERE, "its rotation takes angles from other values of the graph too")
        return plan

    def _planned(self, encoding: Mapping[str, Any], rotary: Rotary) -> AnglePlan | Reason:
        exact = exact_of(encoding, rotary.pairs.count)
        if isinstance(exact, Reason):
            return exact
        sources, differs = (rotary.cos, rotary.sin), None
        trial = Trial(self._view, sources, self._view.model)
        for source in candidates(self._view, sources):
            try:
                limit = trial.limit(source)
                positions = near_and_far(limit) if limit > 1 else np.zeros(0, np.int64)
                values = trial.at(source, positions) if limit > 1 else []
            except RequestError:
                continue
            if not values or all(float(np.ptp(value, 0).max()) < 1e-6 for value in values):
                continue  # angles don't follow it
            columns = columns_of(values, exact, positions)
            if isinstance(columns, float):
                differs = columns if differs is None else min(differs, columns)
                continue
            return self._measured(rotary, source, exact, (columns[0], columns[1]), limit)
        if differs is not None:
            text = f"its angles are farther from those of its parameters than rounding explains ({differs:.1e} times)"
            return Reason(DIFFER, text)
        return Reason(POSITIONS, "no value of the graph holds the positions that its angles follow")

    def _measured(
        self, rotary: Rotary, source: PositionSource, exact: ExactAngles, columns: tuple[Columns, Columns], limit: int
    ) -> AnglePlan:
        sources = (rotary.cos, rotary.sin)
        positions = far(limit)
        values = Trial(self._view, sources, self._view.model, wide=False).at(source, positions)
        return AnglePlan(
            cos=rotary.cos,
            sin=rotary.sin,
            positions=source,
            exact=exact,
            columns=columns,
            limit=limit,
            error=error_of(values, exact, columns, positions),
            bound=bound_of(self._view, sources, exact),
        )


def error_of(
    values: Collection[Array], exact: ExactAngles, columns: tuple[Columns, Columns], positions: Array
) -> float:
    """The largest error of values [n, F] at positions [n] against float64."""
    cos, sin = exact.cos_sin(positions)
    errors = [np.abs(value - one.of(cos, sin)).max() for value, one in zip(values, columns, strict=True)]
    return float(np.nan_to_num(max(errors), nan=np.inf))


def bound_of(view: View, sources: Collection[AngleSource], exact: ExactAngles) -> float:
    """What exact cosines and sines may be off by in the dtypes of these values."""
    dtypes = view.dtypes([source.value for source in sources]).values()
    return exact.scale * (PROMISED + max((_UNITS.get(dtype, 0.0) for dtype in dtypes), default=0.0))
