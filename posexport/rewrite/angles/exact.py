"""A graph whose recognised rotations have exact angles, and is otherwise unchanged.

Rewritten graphs are compared with it. Each value that is replaced is tested. On inputs drawn by role, cosines and sines
of the new graph equal those of the old one, except for what rounding of the old frequencies explains. At far positions,
where they differ, the new ones equal those of float64, in the graph's own dtypes. This is tested, with these bounds,
and not proved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import onnx_ir as ir
import torch

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.rotary import AngleSource, Rotary
from posexport.graphs.cases import cases_of
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.expand import expand
from posexport.graphs.load import live
from posexport.graphs.view import View, view_of
from posexport.rewrite.angles.plan import DIFFER, SHARED, AnglePlan, Planner, Turnings, error_of
from posexport.rewrite.angles.result import EXACT, PARITY, SiteAngles
from posexport.rewrite.angles.trial import Trial, far
from posexport.rewrite.angles.write import Reader, Written, write_exact
from posexport.rewrite.opset import converted
from posexport.rewrite.request import RewriteOptions
from posexport.runtimes.tensors import to_tensors


@attrs.frozen(kw_only=True)
class ExactModel:
    """A model with exact angles.

    `angles` has the angles of attentions that rotate, by name. `view` is that of the model before.
    """

    model: ir.Model
    view: View
    angles: Mapping[str, SiteAngles]

    @property
    def changed(self) -> set[str]:
        """The names of the attentions whose angles changed."""
        return {name for name, one in self.angles.items() if one.changed}


@attrs.define(kw_only=True)
class _Test:
    """The test of one plan: why it can't be used, its error, and the number of cases."""

    problem: str | None = None
    error: float = 0.0
    cases: int = 0


def exact_model(model: ir.Model, options: RewriteOptions, without: Mapping[str, Reason] | None = None) -> ExactModel:
    """A copy of the model, in an opset of the form, with exact angles in all attentions for which that is possible.

    `without` names attentions whose angles stay, with the reason. RequestError as posexport.rewrite.rewriter raises it.
    """
    view = view_of(_converted(model, options), options.roles, options.seed)
    planner = Planner(view)
    plans: dict[str, Turnings] = {}
    angles: dict[str, SiteAngles] = {}
    for name, site in ((one.name, one) for one in view.attentions if isinstance(one, Attention)):
        plan = planner.plan(site)  # also of one that isn't chosen, which may share keys
        if plan is None or (options.only and name not in options.only):
            continue
        reason = plan if isinstance(plan, Reason) else (without or {}).get(name)
        if reason is not None:
            angles[name] = SiteAngles(state=PARITY, reason=reason)
        elif not isinstance(plan, Reason):
            plans[name] = plan
    cases = cases_of(view.roles, options.seed) if plans else []
    tests: dict[AnglePlan, _Test] = {}
    while True:
        _leave_shared(planner.owners, plans, angles)
        changed = {name: plan for name, plan in plans.items() if not _are_exact(plan)}
        if not changed:
            result, tests = model, dict[AnglePlan, _Test]()
        else:
            result, tests = _written(view, model, changed, cases, options)
        wrong = {name: test for name in changed if (test := _worst(tests, plans[name])).problem is not None}
        for name, test in wrong.items():
            angles[name] = SiteAngles(state=PARITY, reason=Reason(DIFFER, str(test.problem)))
            del plans[name]
        if not wrong:
            break
    angles |= {name: _site(plan, _worst(tests, plan)) for name, plan in plans.items()}
    return ExactModel(model=result, view=view, angles=angles)


def _converted(model: ir.Model, options: RewriteOptions) -> ir.Model:
    return converted(model, options.form, options.target, options.opset, options.kv_cache == "shared")


def _leave_shared(owners: Mapping[str, str], plans: dict[str, Turnings], angles: dict[str, SiteAngles]) -> None:
    """Leave the angles of attentions that share keys with one whose angles stay: scores need the same angles on both
    sides."""
    left = True
    while left:
        left = False
        for reader, owner in owners.items():
            for name, other in ((reader, owner), (owner, reader)):
                if name in plans and other not in plans:
                    reason = Reason(SHARED, f"its keys are those of {other}, whose angles are left as they are")
                    angles[name] = SiteAngles(state=PARITY, reason=reason)
                    del plans[name]
                    left = True


def _are_exact(turnings: Turnings) -> bool:
    """Whether the graph's own angles are exact."""
    return all(one.plan.is_exact for one in turnings)


def _worst(tests: Mapping[AnglePlan, _Test], turnings: Turnings) -> _Test:
    """The test results of all plans of an attention together."""
    found = [tests[one.plan] for one in turnings if one.plan in tests]
    problem = next((test.problem for test in found if test.problem is not None), None)
    error = max((test.error for test in found), default=0.0)
    return _Test(problem=problem, error=error, cases=min((test.cases for test in found), default=0))


def _site(turnings: Turnings, test: _Test) -> SiteAngles:
    plans = [one.plan for one in turnings]
    changed = not _are_exact(turnings)
    original = max(plan.error for plan in plans)
    return SiteAngles(
        state=EXACT,
        positions=min(plan.limit for plan in plans) - 1,
        original_error=original,
        error=test.error if changed else original,
        cases=test.cases,
        changed=changed,
    )


def _written(
    view: View, model: ir.Model, plans: Mapping[str, Turnings], cases: Sequence[DrawnInputs], options: RewriteOptions
) -> tuple[ir.Model, dict[AnglePlan, _Test]]:
    """A copy of the model with these exact angles, and the test of each plan."""
    written = _places(view, plans)
    base = _converted(model, options)
    live(base)
    expand(base, view.operator_shapes, _operators(view, written))
    sources = [source for one in written for source in one.plan.sources]
    dtypes, shapes = view.dtypes([source.value for source in sources]), view.shapes([one.value for one in sources])
    ranks = {name: len(shape) for name, shape in shapes.items()}
    moved = write_exact(base, written, dtypes, ranks, options.form)
    tests = {plan: _Test() for plan in moved}
    for plan, test in tests.items():
        positions = far(plan.limit)
        values = Trial(view, moved[plan], base, wide=False).at(plan.positions, positions)
        test.error = error_of(values, plan.exact, plan.columns, positions)
        if not test.error <= plan.bound:
            test.problem = f"exact angles are off by {test.error:.2g} at far positions"
    _compare(view, base, moved, cases, tests)
    return base, tests


def _places(view: View, plans: Mapping[str, Turnings]) -> list[Written]:
    """The places where the rotations of these attentions read cosines and sines, by plan."""
    found: dict[AnglePlan, list[dict[Reader, None]]] = {}
    for turning in (one for turnings in plans.values() for one in turnings):
        places = found.setdefault(turning.plan, [{} for _ in turning.plan.sources])
        for place, source in zip(places, turning.plan.sources, strict=True):
            place.update(dict.fromkeys(_readers(view, turning.rotary, source)))
    return [Written(plan=plan, readers=tuple(map(tuple, places))) for plan, places in found.items()]


def _readers(view: View, rotary: Rotary, source: AngleSource) -> list[Reader]:
    nodes = view.flow.between(rotary.source, rotary.target)
    return [
        (node.outputs[0].name or "", at)
        for node in nodes
        for at, value in enumerate(node.inputs)
        if value is source.value
    ]


def _operators(view: View, written: Sequence[Written]) -> set[str]:
    """The operators that must be written out, so that their angles are values of the graph."""
    producers = {value.name: node for node in view.model.graph for value in node.outputs}
    names = {name for one in written for readers in one.readers for name, _ in readers}
    names |= {value.name or "" for one in written for value in (one.plan.positions.value, *_values(one.plan))}
    nodes = {producers[name].name for name in names if name in producers}
    return {one.name for one in view.expanded if nodes & one.nodes}


def _values(plan: AnglePlan) -> list[ir.Value]:
    return [source.value for source in plan.sources]


def _compare(
    view: View,
    model: ir.Model,
    moved: Mapping[AnglePlan, tuple[AngleSource, ...]],
    cases: Sequence[DrawnInputs],
    tests: Mapping[AnglePlan, _Test],
) -> None:
    """Compare old and new cosines and sines on inputs drawn by role, in float64."""
    old, new = Evaluator(view.model), Evaluator(model)
    before = {value.name or "" for plan in moved for value in (plan.positions.value, *_values(plan))}
    after = {source.value.name or "" for sources in moved.values() for source in sources}
    for case in cases:
        arrays = to_tensors(case.arrays)
        try:
            expected = old.run(arrays, sorted(before))
            actual = new.run(arrays, sorted(after))
        except RequestError:
            continue  # the model takes no such inputs, or a table ends before
        for plan, test in tests.items():
            test.cases += 1
            far_off = _misfit(plan, moved[plan], expected, actual, case)
            if far_off is not None:
                test.problem = test.problem or f"exact angles differ on {case.label}: {far_off}"
    for test in tests.values():
        if not test.cases:
            test.problem = test.problem or "no drawn inputs gave angles that could be compared"


def _misfit(
    plan: AnglePlan,
    moved: tuple[AngleSource, ...],
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    case: DrawnInputs,
) -> str | None:
    """How new cosines and sines differ by more than rounding explains; None if they don't."""
    numbers = plan.positions.read(expected[plan.positions.value.name or ""]).numpy()
    for source, new, columns in zip(plan.sources, moved, plan.columns, strict=True):
        want, have = expected[source.value.name or ""], actual[new.value.name or ""]
        if want.shape != have.shape:
            return f"shape {list(have.shape)} instead of {list(want.shape)}"
        values = [source.by_token(one.double()).numpy() for one in (want, have)]
        positions = np.broadcast_to(numbers, values[0].shape[:2])
        known = positions >= 0  # padding may have any position
        if known.shape == case.tokens.shape:
            known = known & case.tokens
        allowed = plan.exact.tolerance(positions)[..., list(columns.pairs)][known]
        old, exact = (value[known] for value in values)
        if not (np.abs(old - exact) <= allowed).all():
            return f"they differ by {np.abs(old - exact).max():.2g}"
        told = columns.of(*plan.exact.cos_sin(positions))[known]
        if not np.abs(exact - told).max(initial=0.0) <= plan.exact.scale * 1e-6:
            return "they are not those of their positions"
    return None
