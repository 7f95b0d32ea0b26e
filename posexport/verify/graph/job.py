"""The verification of one ONNX file that anyone wrote: its runs on every runtime, and the verdict on each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import Reason, RequestError
from posexport.graphs.load import model_at
from posexport.graphs.roles import Role
from posexport.processes import MISSING, NOTHING_SHOWN
from posexport.progress import Progress, silent
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.pool import Answer, Pool, result
from posexport.verify import eligibility
from posexport.verify.graph import eligible, layers, locate
from posexport.verify.graph.cases import GraphCase, drawn_cases, lay_on_disk, reached
from posexport.verify.graph.clauses import not_compared, some, unexplained, zeros
from posexport.verify.graph.greedy import GreedyCheck
from posexport.verify.graph.parity import compare
from posexport.verify.graph.subject import GraphSubject
from posexport.verify.graph.trained import Trained
from posexport.verify.graph.truth import Truth
from posexport.verify.parity import inconclusive_reason, set_aside, worst_of
from posexport.verify.result import (
    FAILED,
    INCONCLUSIVE,
    INPUTS_REFUSED,
    NOT_RUN,
    NOTHING_COMPARED,
    PASSED,
    REFERENCE_FAILED,
    Comparison,
    State,
    Tolerance,
    Verdict,
    VerifyOverrides,
)
from posexport.verify.rounding import is_near
from posexport.verify.runs import OUT_OF_MEMORY, Run


@attrs.frozen
class _Outcome:
    """A runtime's outputs by the number of the case; why it failed; and the cases on which a failure says nothing."""

    outputs: Mapping[int, Arrays]
    failure: Reason | None = None
    passed_over: Mapping[int, Reason] = attrs.field(factory=dict)

    def reasons(self, out_of_memory: bool) -> list[str]:
        """Why cases were passed over: because memory ran out, or for other reasons."""
        return [str(each) for each in self.passed_over.values() if (each.code in OUT_OF_MEMORY) == out_of_memory]


@attrs.define(kw_only=True)
class GraphJob:
    """One file with its runs under way.

    The truth is the file `against`, or `module`, the user's torch module; without both, it is the file itself.
    `mismatch` says how the inputs and outputs of the two differ: then the file fails everywhere without a run.
    `reference` names the truth if that isn't the path of `against`. `given` says that the cases are the user's own
    inputs. `other_roles` are the roles for sizes that the graph may have been made for, if it takes no others. `greedy`
    also checks the tokens that a decoder makes. `trained` is what a checkpoint says about its model; the inputs of
    `tables` are looked up in tables of the model, and `lengths` are the rows of tables that are read by the number of
    tokens.
    """

    subject: GraphSubject
    pool: Pool
    runtimes: Mapping[str, Runtime]
    overrides: VerifyOverrides
    cases: list[GraphCase]
    against: GraphSubject | None = None
    module: str | None = None
    mismatch: Reason | None = None
    reference: str | None = None
    given: bool = False
    seed: int = 0
    other_roles: Iterable[Mapping[str, Role]] = ()
    greedy: GreedyCheck | None = None
    trained: Trained = attrs.field(factory=Trained)
    tables: Mapping[str, Role] = attrs.field(factory=dict)
    lengths: Collection[int] = ()
    truth: Truth | None = None
    runs: dict[str, Run] = attrs.field(factory=dict)
    skipped: dict[str, Reason] = attrs.field(factory=dict)
    memory: int = 0

    @property
    def path(self) -> Path:
        """The file that is verified."""
        return self.subject.path

    @property
    def held(self) -> int:
        """About how many bytes inputs and outputs take."""
        return 5 * sum(array.nbytes for case in self.cases for array in case.arrays.values())

    def weight_bytes(self, row: Runtime) -> int:
        """About how many bytes of memory a runtime needs: the weights, and a second copy that it packs."""
        return 0 if row.needs_gpu else 2 * self.subject.weight_bytes

    def submit(self, missing: Mapping[str, Reason | None]) -> None:
        """Submit the evaluations, and a run on each runtime that can take the file."""
        if self.mismatch is not None:
            return
        if self.subject.is_large:
            self.pool.one_at_a_time()
            lay_on_disk(self.cases, self.pool.folder)
        self.truth = self._truth(self.cases)
        self._submit_runs(missing)

    def _truth(self, cases: list[GraphCase]) -> Truth:
        return Truth(self.pool, self.subject, cases, self.against, self.module)

    def _submit_runs(self, missing: Mapping[str, Reason | None]) -> None:
        self.memory = 2 * self.subject.weight_bytes
        for name, row in self.runtimes.items():
            needed, indices = self.weight_bytes(row), eligible.affordable(self.subject, self.cases, row)
            reason = (
                eligible.unsupported_reason(self.subject, row)
                or missing[name]
                or eligibility.memory_shortfall(needed, self.memory)
                or (None if indices else eligibility.slow_reason(row))
            )
            if reason is not None:
                self.skipped[name] = reason
                continue
            options = eligible.run_options([self.cases[index] for index in indices], row)
            self.runs[name] = Run(self._submitted(row, indices, options), indices, self.path, options)
            self.memory += needed

    def _submitted(self, row: Runtime, indices: Sequence[int], options: Mapping[str, Any]) -> Future[Answer]:
        arrays = [self.cases[index].arrays for index in indices]
        return self.pool.submit(row, self.path, arrays, options, wide=self.subject.wide)

    def verdicts(self, step: Progress = silent) -> list[Verdict]:
        """Wait for the evaluations and the runs, and judge them."""
        against = "the file itself" if self.against is None else str(self.against.path)
        reference = self.reference or self.module or against
        step(f"evaluating {self.path.name} in float64")
        self._try_other_sizes()
        if self.module is not None and self.truth is not None and not self.truth.tried:
            raise RequestError(f"{next(iter(self.truth.untried.values())).text.rstrip('.')}.")
        if self.given and self.truth is not None and not self.truth.tried:
            index, why = next(iter(self.truth.untried.items()))
            raise RequestError(
                f"{str(self.path)!r} can't be evaluated on the inputs {self.cases[index].name!r} "
                f"({why.text.rstrip('.')}): give inputs that it takes."
            )
        known: dict[str, Any] = {"sha256": self.subject.graph.sha256, "reference": reference}
        known |= {"weights": self.subject.weights, "signature": self.subject.signature}
        verdicts = []
        for name, row in self.runtimes.items():
            step(f"running {self.path.name} on {name}")
            verdict = self._verdict(row)
            verdicts.append(verdict)
            if self.greedy is not None and verdict.state != NOT_RUN:
                step(f"making tokens with {self.path.name} on {name}")
                verdicts.append(self.greedy.verdict(row, verdict.state))
        return [attrs.evolve(verdict, **known) for verdict in verdicts]

    def _try_other_sizes(self) -> None:
        """If the graph takes none of the drawn sizes, though its inputs may vary, use the first sizes that work of
        those that it may have been made for."""
        if self.truth is None or self.given or self.truth.tried:
            return
        for roles in self.other_roles:
            cases = drawn_cases(roles, self.seed)
            if self._truth(cases[:1]).agrees:
                self.cases = cases
                self.truth = self._truth(cases)
                self._submit_runs({name: self.skipped.get(name) for name in self.runtimes})
                return

    def _verdict(self, row: Runtime) -> Verdict:
        path, name, truth = str(self.path), row.name, self.truth
        if truth is None:
            return Verdict.of(path, name, FAILED, self.mismatch)
        if name in self.skipped:
            return Verdict.of(path, name, NOT_RUN, self.skipped[name])
        if not truth.tried:
            text = (
                "no set of inputs could be evaluated in float64, give --inputs: "
                f"{next(iter(truth.untried.values())).text.rstrip('.')}"
            )
            return Verdict.of(path, name, NOT_RUN, Reason(REFERENCE_FAILED, text))
        if truth.refused:
            index, why = next(iter(truth.refused.items()))
            text = f"it doesn't take inputs that {self._other} takes, {why} (inputs: {self.cases[index].name})"
            return Verdict.of(path, name, FAILED, Reason(INPUTS_REFUSED, text))
        outcome = self._outputs(row)
        outputs, failure = outcome.outputs, outcome.failure
        notes = (*self.overrides.notes(), *self._notes(truth, row, outcome), *([row.note] if row.note else []))
        describe = result(self.runs[name].answer).describe
        if failure is not None:
            nothing = failure.code in NOTHING_SHOWN or eligible.is_excused(self.subject, row)
            state: State = NOT_RUN if nothing else FAILED
            return Verdict.of(path, name, state, failure, notes=notes, describe=describe, cases=len(outputs))
        comparisons, left = self._comparisons(truth, outputs)
        tolerances = {each.case: self._tolerance(truth, each) for each in comparisons}
        unclear: tuple[str, ...] = ()
        if not self.given:
            comparisons, unclear = set_aside(comparisons, tolerances, self.subject.is_routed)
        fields = {
            "notes": notes,
            "not_shown": (
                *(*some(outcome.reasons(out_of_memory=True)), *unclear, *some(left)),
                *(*zeros(comparisons), *not_compared(comparisons)),
            ),
            "describe": describe,
            "cases": len(outputs),
            "reach": reached([self.cases[index] for index in outputs]),
        }
        verdict = self._judged(row, comparisons, tolerances, fields)
        if verdict.state == PASSED:
            tried = [self.cases[index] for index in outcome.outputs]
            left_open, known = [*self._taken_alone(truth), *unexplained(truth)], list[str]()
            if not self.given:
                unread, known = self._unread(tried)
                left_open += [*unread, *self.trained.windows_not_shown(tried), *self.trained.angles_not_shown(tried)]
                left_open += self.trained.lengths_not_shown(self.lengths, tried)
            verdict = attrs.evolve(verdict, not_shown=(*verdict.not_shown, *left_open), notes=(*verdict.notes, *known))
        return verdict

    def _unread(self, tried: Sequence[GraphCase]) -> tuple[list[str], list[str]]:
        """Which rows of tables the cases did not read, and for which of them it is known that they are right."""
        left, known = list[str](), list[str]()
        for name, text in self.trained.unread(self.tables, tried).items():
            tensor = self._checkpoint_tables.get(name)
            if tensor is None:
                left.append(text)
            else:
                known.append(f"{text}, but their table is the checkpoint's {tensor}")
        return left, known

    @cached_property
    def _checkpoint_tables(self) -> Mapping[str, str]:
        """The tensors of the checkpoint that are tables of the file, by the inputs that are looked up in them."""
        from posexport.verify.graph.lookups import checkpoint_tables  # which needs torch

        folder = checkpoint_of(self.module)
        return {} if folder is None else checkpoint_tables(model_at(self.path), self.tables, folder)

    @property
    def _other(self) -> str:
        """What the file is compared with, in a sentence."""
        return "the other file" if self.module is None else "the module"

    def _taken_alone(self, truth: Truth) -> Iterator[str]:
        """A clause if the other file or the module doesn't take all inputs that the file takes."""
        if truth.taken_alone:
            index = next(iter(truth.taken_alone))
            yield (
                f"{self._other} doesn't take {len(truth.taken_alone)} of {len(self.cases)} sets of inputs that the "
                f"file takes, such as {self.cases[index].name}"
            )

    def _judged(
        self, row: Runtime, comparisons: list[Comparison], tolerances: Mapping[str, Tolerance], fields: dict[str, Any]
    ) -> Verdict:
        """The verdict on comparisons; a failed one names the first node that departs."""
        path, name = str(self.path), row.name
        if not any(each.max_error is not None or each.state == FAILED for each in comparisons):
            text = "no output has a value that could be compared: give other inputs with --inputs"
            return Verdict.of(path, name, NOT_RUN, Reason(NOTHING_COMPARED, text), **fields)
        worst = worst_of(comparisons)
        usual = [each for each in comparisons if not each.far_out]
        fields |= {"worst": worst, "worst_usual": worst_of(usual) if usual else None}
        fields |= {"tolerance": tolerances[worst.case]}
        if worst.state == PASSED:
            return Verdict.of(path, name, PASSED, **fields)
        inconclusive = inconclusive_reason(worst, tolerances[worst.case])
        code = INCONCLUSIVE if inconclusive is not None else str(worst.reason_code)
        reason = Reason(code, f"{worst.reason} (inputs: {worst.case})")
        index = next(at for at, case in enumerate(self.cases) if case.name == worst.case)
        where = inconclusive or self._other_function(index) or locate.departure(self, row, index)
        return Verdict.of(path, name, FAILED, reason, where=where, **fields)

    def _other_function(self, index: int) -> str | None:
        """A clause if the file and the module are different functions, with the layer from which on they differ: nodes
        of different functions can't be compared."""
        difference = None if self.module is None or self.truth is None else self.truth.difference
        if difference is None or difference.of_rounding <= 1:
            return None
        text = "the file and the module are different functions in float64, so the graph is wrong, not the runtime"
        place = layers.departure(self, index)
        if place is None and self.truth is not None and (layer := self.truth.first_layer) is not None:
            place = f"the first cache that differs is that of layer {layer}"
        return text if place is None else f"{text}; {place}"

    def _outputs(self, row: Runtime) -> _Outcome:
        """A runtime's outputs on the cases that float64 can evaluate.

        If the run of all cases failed, each case is run by itself: one that the graph can't take may be the cause, and
        a failure must name its inputs. A case on which a failure says nothing about the file is passed over.
        """
        run, truth = self.runs[row.name], self.truth
        tried = [index for index in run.indices if truth is not None and index in truth.tried]
        answer = result(run.answer)
        if answer.failure is None:
            outputs = dict(zip(run.indices, answer.outputs, strict=True))
            return _Outcome({index: outputs[index] for index in tried})
        opened = result(self._submitted(row, [], run.options)).failure
        if opened is not None:
            return _Outcome({}, Reason(opened.code, f"{row.name} can't open the file: {opened.text.rstrip('.')}"))
        found, passed_over = dict[int, Arrays](), dict[int, Reason]()
        for index in tried:
            answer = result(self._submitted(row, [index], run.options))
            if answer.failure is None:
                found[index] = answer.outputs[0]
                continue
            text = f"{answer.failure.text.rstrip('.')} (inputs: {self.cases[index].name})"
            failure = Reason(answer.failure.code, text)
            if failure.code not in (MISSING, *OUT_OF_MEMORY) and not eligible.is_excused(self.subject, row):
                return _Outcome(found, failure)
            passed_over[index] = failure
        return _Outcome(found, None if found else next(iter(passed_over.values()), None), passed_over)

    def _comparisons(self, truth: Truth, outputs: Mapping[int, Arrays]) -> tuple[list[Comparison], list[str]]:
        """The comparisons of all cases, and what they leave open. If a runtime is near the limit, more draws of the
        honest evaluation's errors are taken."""
        comparisons, left = list[Comparison](), list[str]()
        for index, arrays in outputs.items():
            case = self.cases[index]
            found, clauses = compare(case.name, self._expected(truth, index), arrays, case.far_out)
            # a value that rounds to another whole number changes everything that depends on it
            if any(is_near(one) or (self.subject.is_quantised and one.state == FAILED) for one in found):
                truth.draw_again(index)
                found, clauses = compare(case.name, self._expected(truth, index), arrays, case.far_out)
            comparisons += found
            left += clauses
        return comparisons, left

    def _expected(self, truth: Truth, index: int) -> list[Any]:
        return [
            attrs.evolve(each, tolerance=attrs.evolve(each.tolerance, **self.overrides.tolerance))
            for each in truth.expected(index)
        ]

    def _tolerance(self, truth: Truth, each: Comparison) -> Tolerance:
        return attrs.evolve(truth.tolerance(each.output), **self.overrides.tolerance)

    def _notes(self, truth: Truth, row: Runtime, outcome: _Outcome) -> Iterator[str]:
        """What the cases could not show."""
        indices = self.runs[row.name].indices
        if len(indices) < len(self.cases):
            yield f"slow, so only {len(indices)} of {len(self.cases)} sets of inputs"
        untried = [f"{self.cases[index].name} ({truth.untried[index]})" for index in indices if index in truth.untried]
        yield from (f"not tried: {clause}" for clause in some(untried))
        if outcome.failure is None:
            yield from (f"not run: {clause}" for clause in some(outcome.reasons(out_of_memory=False)))
        decided = [self.cases[index].name for index in truth.decided if index in outcome.outputs]
        if decided:
            yield (
                f"on {len(decided)} sets of inputs, such as {decided[0]}, whole numbers in float64 differ from those "
                "in the file's own dtypes: the latter count"
            )
        yield from truth.left_out()
        if truth.padded:
            yield "outputs at padding were not compared"
        if truth.difference is not None:
            yield str(truth.difference)
