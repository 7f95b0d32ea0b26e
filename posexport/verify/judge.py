"""The verification of one artifact: its runs on every runtime, the verdict on each, and what the inputs can't show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport import temporary
from posexport.errors import Reason, RequestError
from posexport.processes import CRASHED, EXITED, INVALID, MISSING, NOTHING_SHOWN
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES, TORCH_WORKER, Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, Pool, result
from posexport.verify import eligibility
from posexport.verify.cases import Case
from posexport.verify.coverage import lost_in_layers, not_shown, reached
from posexport.verify.graph.parity import Expected
from posexport.verify.parity import (
    TOLERANCES,
    compare,
    inconclusive_reason,
    is_unclear,
    judge,
    not_computed,
    set_aside,
    worst_of,
)
from posexport.verify.property_runs import PropertyRuns
from posexport.verify.result import (
    CONTRACT,
    FAILED,
    INCONCLUSIVE,
    NOT_RUN,
    REFERENCE_FAILED,
    Comparison,
    State,
    Tolerance,
    Verdict,
    VerifyOverrides,
)
from posexport.verify.rounding import DRAWS, LOST, Draws, Rerun, drawn, is_near, medians, tolerances_of, without_copies
from posexport.verify.runs import Ran, Run
from posexport.verify.torch_outputs import TorchOutputs, within_usual

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.original import Original
    from posexport.verify.locate import Graphs

NO_REFERENCE = (*LOST, CRASHED, EXITED)
"""Failures of the reference that say nothing about the artifact, so that no runtime is judged: its process ended, for
whatever cause. An ordinary error on a file that was read is not one of them."""

TORCH_EAGER = "torch eager"

MOVES = 2
"""The number of copies of a case that are used to see how far the reference moves."""


@attrs.define(kw_only=True)
class ArtifactJob:
    """One artifact with its runs under way.

    `given` says that the cases are the user's own inputs. `original` is what the file was exported from, if that is
    known: the references have its weights. `run_torch`, `run_reference`, `reference` and `by_torch` are None if the
    graph breaks its contract: then it fails everywhere without a run. `torch_again` has torch's outputs on copies of
    cases for which more draws of its error were needed (posexport.verify.rounding), `moved` has the reference on
    copies. `no_copies` says, by runtime and case, why a runtime has no outputs on copies of the case. `too_costly` says
    what the cases don't reach. `memory` is about how many bytes all `runs` may take.
    """

    artifact: LoadedArtifact
    pool: Pool
    runtimes: Mapping[str, Runtime]
    overrides: VerifyOverrides
    cases: list[Case]
    notes: tuple[str, ...]
    too_costly: tuple[str, ...] = ()
    given: bool = False
    original: Original | None = None
    property_runs: PropertyRuns | None = None
    run_torch: Rerun | None = None
    run_reference: Rerun | None = None
    reference: Future[Answer] | None = None
    by_torch: TorchOutputs | None = None
    torch_again: dict[int, Draws] = attrs.field(factory=dict)
    moved: dict[int, Draws] = attrs.field(factory=dict)
    no_copies: dict[tuple[str, int], Reason] = attrs.field(factory=dict)
    runs: dict[str, Run] = attrs.field(factory=dict)
    skipped: dict[str, Reason] = attrs.field(factory=dict)
    memory: int = 0
    graphs: Graphs | str | None = None  # those of the artifact and of a fresh export, once they are needed

    @property
    def path(self) -> Path:
        """The file that is verified."""
        return self.artifact.path

    @property
    def held(self) -> int:
        """About how many bytes inputs and outputs take: a cache is both, in float64 and twice in the dtype."""
        return 5 * sum(array.nbytes for case in self.cases for array in case.arrays.values())

    def verdicts(self, step: Progress = silent) -> list[Verdict]:
        """Wait for the runs, and judge them; RequestError if the artifact can't be read."""
        artifact = self.artifact
        failing = artifact.contract_violation is not None
        verdicts = []
        for name, row in self.runtimes.items():
            if name in self.runs or name in self.skipped or (failing and artifact.required_runtime in (None, name)):
                step(f"running {self.path.name} on {name}")
                verdicts.append(self._verdict(row))
        if self.property_runs is not None:
            verdicts += self.property_runs.verdicts(str(artifact.path))
        weights, signature = artifact.weights, artifact.signature
        return [
            attrs.evolve(verdict, sha256=artifact.sha256, weights=weights, signature=signature) for verdict in verdicts
        ]

    def _verdict(self, row: Runtime) -> Verdict:
        path, name = str(self.artifact.path), row.name
        if name in self.skipped:
            return Verdict.of(path, name, NOT_RUN, self.skipped[name])
        if self.reference is None or self.by_torch is None:
            reason = Reason(CONTRACT, self.artifact.contract_violation or "its graph breaks the contract")
            return self._located(Verdict.of(path, name, FAILED, reason, notes=self.notes), row)
        reference, by_torch = result(self.reference), self.by_torch
        if reference.failure is not None and reference.failure.code in (INVALID, MISSING):
            raise RequestError(f"{path!r}: {reference.failure.text}")
        for who, failure in (("the float64 reference", reference.failure), (TORCH_EAGER, by_torch.failure)):
            if failure is not None:
                return self._without_reference(row, who, failure)
        ran = self.runs[name].where_memory_is_enough(self.pool, row, [case.arrays for case in self.cases])
        answer = ran.answer
        if answer.failure is not None:
            notes = self._notes(row)
            if answer.failure.code in NOTHING_SHOWN:
                return Verdict.of(path, name, NOT_RUN, answer.failure, notes=notes)
            if answer.failure.code == INVALID and self.artifact.plan is not None:
                raise RequestError(f"{path!r}: {answer.failure.text}")  # the runtime can't open this plan
            return self._located(Verdict.of(path, name, FAILED, answer.failure, notes=notes), row)
        return self._judged(row, reference, by_torch, ran)

    def _without_reference(self, row: Runtime, who: str, failure: Reason) -> Verdict:
        state: State = NOT_RUN if failure.code in NO_REFERENCE else FAILED
        reason = Reason(REFERENCE_FAILED, f"{who} could not be computed: {failure}")
        return Verdict.of(str(self.artifact.path), row.name, state, reason, notes=self.notes)

    def _judged(self, row: Runtime, reference: Answer, by_torch: TorchOutputs, ran: Ran) -> Verdict:
        """The verdict on a runtime's outputs."""
        path, spec = str(self.artifact.path), self.artifact.spec
        indices, answer, notes = ran.indices, ran.answer, self._notes(row)
        comparisons = self._comparisons(row, indices, reference, by_torch, answer)
        if isinstance(comparisons, Reason):
            return self._without_reference(row, TORCH_EAGER, comparisons)
        unclear, hidden = tuple[str, ...](), None
        if not self.given:
            comparisons, unclear = set_aside(comparisons, {case.name: self._on(row, case.name) for case in self.cases})
            hidden = self._hidden(row, comparisons)
        undecided = hidden or self._undecided(row, comparisons)
        if undecided is not None:
            return Verdict.of(path, row.name, NOT_RUN, undecided, notes=notes, describe=answer.describe)
        cases = [self.cases[index] for index in indices]
        left_out = [*self._not_computed(row, indices, reference, by_torch, answer)]
        left_out += lost_in_layers(spec, [reference.outputs[index] for index in indices])
        fields = {"notes": notes, "describe": answer.describe, "not_shown": (*ran.left_out, *unclear, *left_out)}
        verdict = judge(path, row.name, comparisons, len(indices), self.given, reach=reached(cases), **fields)
        worst = verdict.worst
        tolerance = TOLERANCES[spec.dtype] if worst is None else self._on(row, worst.case)
        tried = verdict.state != NOT_RUN
        beyond = (*not_shown(spec, cases, self.artifact.bounds), *self.too_costly) if tried else ()
        verdict = attrs.evolve(verdict, tolerance=tolerance, not_shown=(*verdict.not_shown, *beyond))
        if verdict.state != FAILED or worst is None:
            return verdict
        inconclusive = inconclusive_reason(worst, tolerance)
        if inconclusive is not None:
            verdict = attrs.evolve(verdict, reason_code=INCONCLUSIVE)
        return self._located(verdict, row, self.cases[self._index_of(worst)], inconclusive)

    def _notes(self, row: Runtime) -> tuple[str, ...]:
        """What the runs on a runtime could not show."""
        notes, count = list(self.notes), len(self.runs[row.name].indices)
        if count < len(self.cases):
            share, limit = f"{count} of {len(self.cases)} sets of inputs", eligibility.WORK[row.name]
            notes.append(f"slow, so only {share}: at most {limit:.0e} multiply-adds")
        return tuple(notes if row.note is None else [*notes, row.note])

    def _comparisons(
        self, row: Runtime, indices: list[int], reference: Answer, by_torch: TorchOutputs, answer: Answer
    ) -> list[Comparison] | Reason:
        """The comparisons of these cases; or why torch failed, if it failed on a case that needed it."""
        outputs = dict(zip(indices, answer.outputs, strict=True))

        def compared(index: int, own: Arrays) -> list[Comparison]:
            return self._compared(row, index, reference.outputs[index], own, outputs[index])

        def within(index: int, shares: Mapping[str, float]) -> list[Comparison] | None:
            case = self.cases[index]
            exact, tolerance = reference.outputs[index], self._on(row, case.name)
            return within_usual(case, exact, outputs[index], self._dtypes, tolerance, shares)

        firsts = by_torch.compared(indices, compared, within)
        if isinstance(firsts, Reason):
            return firsts
        known, comparisons = by_torch.known(), list[Comparison]()
        for index, first in firsts.items():
            if any(map(is_near, first)):
                first = self._compared_again(row, index, reference.outputs[index], known[index], outputs[index], first)
            comparisons += first
        return comparisons

    def _compared(
        self,
        row: Runtime,
        index: int,
        reference: Arrays,
        by_torch: Arrays,
        outputs: Arrays,
        again: Arrays | None = None,
    ) -> list[Comparison]:
        case, dtypes = self.cases[index], self._dtypes
        tolerance = self._on(row, case.name)
        return compare(case.name, reference, by_torch, outputs, dtypes, tolerance, case.far_out, self.given, again)

    def _compared_again(
        self, row: Runtime, index: int, reference: Arrays, by_torch: Arrays, outputs: Arrays, first: list[Comparison]
    ) -> list[Comparison]:
        """Comparisons of a case with the largest of several of torch's errors. If torch is then near its ceiling, the
        median error of each token is judged, with the runtime's outputs on copies."""
        draws, tolerance = self._torch_again(index, reference, by_torch), self._on(row, self.cases[index].name)
        near = [each.output for each in first if is_near(each)]
        farthest, usual = ({name: arrays[name] for name in near} for arrays in (draws.outputs, draws.usual))
        comparisons = self._compared(row, index, reference, by_torch | farthest, outputs, usual)
        if self.given or not any(each.state == FAILED and is_unclear(each, tolerance) for each in comparisons):
            return comparisons
        copies = self._on_copies(row, index)
        return comparisons if copies is None else medians(comparisons, reference, [outputs, *copies], draws, tolerance)

    def _undecided(self, row: Runtime, comparisons: Sequence[Comparison]) -> Reason | None:
        """Why failed comparisons say nothing, if each may have failed only because copies of its case are missing."""
        missing = [self._missing(row, each) for each in comparisons if each.state == FAILED]
        return without_copies(missing[0]) if missing and missing[0] is not None and None not in missing else None

    def _index_of(self, each: Comparison) -> int:
        return next(index for index, case in enumerate(self.cases) if case.name == each.case)

    def _missing(self, row: Runtime, each: Comparison) -> Reason | None:
        """Why copies are missing that a comparison is judged again with."""
        index = self._index_of(each)
        if is_unclear(each, self._on(row, each.case)) and (row.name, index) in self.no_copies:
            return self.no_copies[row.name, index]
        return self.torch_again[index].failure if is_near(each) and index in self.torch_again else None

    def _hidden(self, row: Runtime, comparisons: Sequence[Comparison]) -> Reason | None:
        """Why failed comparisons say nothing: the runtime is within its share of torch's error in each of them, and the
        exact result moves as far if inputs and weights differ in their last bits. None if that isn't so."""
        failed, moved = [each for each in comparisons if each.state == FAILED], dict[str, float]()
        if not failed or not all(is_unclear(each, self._on(row, each.case)) for each in failed):
            return None
        lost: Reason | None = None
        for each in failed:
            draws, exact = self._moved(each)
            moved[each.case] = float(abs(draws.outputs[each.output] - exact[each.output]).max(initial=0.0))
            tolerance = self._on(row, each.case)
            if tolerance.multiple * moved[each.case] <= tolerance.ceiling * (each.reference_rms or 0.0):
                if draws.failure is None:
                    return None
                lost = draws.failure
        if lost is not None:
            return without_copies(lost)
        worst = worst_of(failed)
        text = f"{INCONCLUSIVE}: where inputs and weights differ in their last bits, {worst.output!r} moves by "
        text += f"{moved[worst.case]:.3g} in float64, and the runtime is off by {worst.max_error:.3g}: rounding errors "
        return Reason(INCONCLUSIVE, f"{text}hide what the block computes (inputs: {worst.case})")

    def _moved(self, each: Comparison) -> tuple[Draws, Arrays]:
        """The reference on copies of a case, and on the case itself."""
        index = self._index_of(each)
        exact = result(self.reference).outputs[index] if self.reference is not None else {}
        if index not in self.moved:
            self.moved[index] = drawn(self.run_reference, self.cases[index].arrays, index, exact, exact, MOVES)
        return self.moved[index], exact

    def _on_copies(self, row: Runtime, index: int) -> list[Arrays] | None:
        """A runtime's outputs on copies of a case that differ in their last bits; None if it fails on one."""
        made = self.runs[row.name].on_copies(self.pool, row, self.cases[index].arrays, index)
        if not isinstance(made, Reason):
            return made
        if made.code in LOST:
            self.no_copies[row.name, index] = made
        return None

    def _torch_again(self, index: int, reference: Arrays, by_torch: Arrays) -> Draws:
        """Torch's results on a case and on copies of it that differ in their last bits."""
        if index not in self.torch_again:
            self.torch_again[index] = drawn(self.run_torch, self.cases[index].arrays, index, reference, by_torch, DRAWS)
        return self.torch_again[index]

    def expected(self, index: int) -> list[Expected]:
        """What each output must be on a case: the reference, and the farthest of several of torch's results."""
        if self.reference is None or self.by_torch is None:
            return []
        reference, by_torch = result(self.reference).outputs[index], self.by_torch.known()[index]
        farthest = self._torch_again(index, reference, by_torch).outputs
        return [
            Expected(
                name=name,
                exact=reference[name],
                own=[by_torch[name], *([] if farthest[name] is by_torch[name] else [farthest[name]])],
                select=None,
                dtype=dtype,
                tolerance=attrs.evolve(self._tolerances[self.cases[index].name], **self.overrides.tolerance),
            )
            for name, dtype in self._dtypes.items()
        ]

    def _not_computed(
        self, row: Runtime, indices: list[int], reference: Answer, by_torch: TorchOutputs, answer: Answer
    ) -> Iterator[str]:
        """What torch can't compute in the artifact's dtype, among the outputs on the user's inputs."""
        for index, outputs in zip(indices if self.given else (), answer.outputs, strict=False):
            case, dtype = self.cases[index], self.artifact.spec.dtype
            expected = (reference.outputs[index], by_torch.known()[index])
            yield from not_computed(case.name, *expected, outputs, dtype, self._on(row, case.name))

    @property
    def _dtypes(self) -> dict[str, str]:  # the dtypes that the graph declares, by output
        return {name: dtype for name, (_, dtype) in self.artifact.outputs.items()}

    @cached_property
    def _tolerances(self) -> dict[str, Tolerance]:
        """The tolerance of each case: that of the dtype, wider if runtimes round terms of the encoding differently."""
        outputs = () if self.reference is None else result(self.reference).outputs
        return tolerances_of(self.artifact.spec, self.cases, outputs)

    def _on(self, row: Runtime, case: str) -> Tolerance:  # the tolerance of a runtime on a case
        return self.overrides.on(row, self.artifact.spec.dtype, self._tolerances[case])

    def _located(
        self, verdict: Verdict, row: Runtime, case: Case | None = None, inconclusive: str | None = None
    ) -> Verdict:
        """A failed verdict with the place where the graph departs, as far as that can be found; never raises.

        `inconclusive` is why the case says nothing about the runtime: then values say nothing either.
        """
        from posexport.verify import locate

        try:
            if self.graphs is None:
                self.graphs = locate.load_graphs(self.artifact.source)
            if isinstance(self.graphs, str):
                return attrs.evolve(verdict, where="; ".join(filter(None, (inconclusive, self.graphs))))
            departure, otherwise = locate.structure(self.graphs), ""
            clauses = [departure, inconclusive]
            if case is not None and inconclusive is None:
                # a plan, and torch, can't run a graph with other outputs: onnx's evaluator runs it instead
                runs_graphs = row.name != TORCH_WORKER and self.artifact.plan is None
                evaluator = RUNTIMES["onnx-reference"]
                runs = [
                    partial(self._run, runner, case.arrays) for runner in (row if runs_graphs else evaluator, evaluator)
                ]
                with temporary.folder(self.pool.folder) as folder:
                    clause, otherwise = locate.values(self.graphs, folder, *runs)
                clauses.append(clause)
            where = "; ".join(filter(None, clauses))
            if not where and case is not None:
                where = f"the graph is that of a fresh export; {otherwise}"
            return attrs.evolve(verdict, where=where or None, departure=departure)
        except Exception as error:  # a damaged graph may break any tool that looks into it
            text = f"could not be found ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            return attrs.evolve(verdict, where=text)

    def _run(self, row: Runtime, arrays: Arrays, path: Path) -> Arrays | str:
        """The outputs of another graph on a case, with the options of the artifact's own run, or why there are none."""
        options = self.runs[row.name].options if row.name in self.runs else {}
        answer = result(self.pool.submit(row, path, [arrays], options))
        return answer.outputs[0] if answer.failure is None else answer.failure.text
