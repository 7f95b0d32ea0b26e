"""The verify stage: artifacts are held against the truth on every runtime that is there, each in a child process.

Importing this loads no engine; torch and onnx load inside `verify`, while the workers load theirs.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport import verify_limits as limits
from posexport.errors import PosexportError
from posexport.files import sha256_of
from posexport.inputs import Case, make_cases
from posexport.parity import (
    FAILED,
    NOT_RUN,
    PARITY,
    TOLERANCES,
    Tolerance,
    Verdict,
    blurred,
    compare,
    judge,
    tolerance_at,
)
from posexport.property_trials import Trials
from posexport.runtimes import RUNTIMES, Runtime
from posexport.runtimes.pool import Answer, Pool, result
from posexport.user_inputs import fit_inputs, read_arrays
from posexport.verify_notes import notes_on

if TYPE_CHECKING:
    from posexport.runtimes.base import Arrays
    from posexport.spec import Spec
    from posexport.subjects import Subject

TIME_LIMIT = 300.0
"""Seconds that one runtime may take for one artifact, its loading included."""

AHEAD = 8
"""Artifacts whose runs are asked for before the first of them is judged."""

_TORCH = "torch"  # the worker that gives truth and yardstick too


@attrs.frozen(kw_only=True)
class Report:
    """All verdicts, in the order of artifacts and runtimes, the artifacts that could not be read, with why, and those
    whose manifest is not of them (`doubts`), with what is wrong."""

    verdicts: tuple[Verdict, ...]
    broken: tuple[tuple[str, str], ...]
    doubts: tuple[tuple[str, str], ...] = ()
    seed: int

    def exit_code(self, required: Sequence[str] = ()) -> int:
        """2 where an artifact can't be read, else 1 where a verdict failed, else 3 where what was required, or
        everything, was not run, else 0."""
        if self.broken:
            return 2
        states = {verdict.state for verdict in self.verdicts}
        if FAILED in states:
            return 1
        for name in required:
            of_it = [each.state for each in self.verdicts if each.runtime == name and each.check == PARITY]
            if not of_it or NOT_RUN in of_it:
                return 3
        return 0 if states - {NOT_RUN} else 3


@attrs.frozen(kw_only=True)
class Terms:
    """What is asked of one artifact alone: the runtimes that it is checked on (None: all), and numbers of Tolerance
    that stand in place of posexport's own."""

    runtimes: tuple[str, ...] | None = None
    tolerance: Mapping[str, float] = attrs.field(factory=dict)

    def among(self, runtimes: Mapping[str, Runtime]) -> Mapping[str, Runtime]:
        """Those of `runtimes` that are asked for."""
        return {name: row for name, row in runtimes.items() if self.runtimes is None or name in self.runtimes}


_ANY = Terms()


@attrs.define(kw_only=True)
class _Job:
    """One artifact under way."""

    subject: Subject
    sha256: str
    terms: Terms = _ANY
    cases: list[Case]
    notes: tuple[str, ...]
    truth: Future[Answer] | None = None  # None where nothing need be run to know that it failed
    eager: Future[Answer] | None = None
    runs: dict[str, tuple[Future[Answer], list[int]]] = attrs.field(factory=dict)
    skipped: dict[str, str] = attrs.field(factory=dict)
    trials: Trials | None = None
    graphs: Any = None
    held: int = 0  # bytes that the engines of its runs may hold


def verify(
    paths: Sequence[Path],
    *,
    runtimes: Mapping[str, Runtime] = RUNTIMES,
    inputs: Path | None = None,
    seed: int = 0,
    time_limit: float = TIME_LIMIT,
    properties: bool = False,
    terms: Mapping[Path, Terms] | None = None,
    advance: Callable[[str, int], object] = lambda name, total: None,
) -> Report:
    """Verify the artifacts that `paths` name (files, or folders of them) on each of `runtimes`.

    `inputs` is a .npz of the user's own; without it cases are made from `seed`. `properties` asks for those of the
    encoding too, on each runtime that runs; `terms` are those of single artifacts. `advance` is told after each verdict
    of an artifact, with the number of artifacts. Raises RequestError where `paths` name no artifact, or where `inputs`
    can't be read; inputs that don't fit an artifact are told in its place.
    """
    given = None if inputs is None else read_arrays(inputs)
    there = {name: row.missing() for name, row in runtimes.items()}
    with Pool(time_limit) as pool:
        for name in (_TORCH, *(name for name, why in there.items() if why is None and name != _TORCH)):
            pool.start(name)
        from posexport.subjects import find_artifacts, read_subject

        files = find_artifacts(paths)
        waiting: deque[_Job] = deque()
        verdicts: list[Verdict] = []
        broken: list[tuple[str, str]] = []
        doubts: list[tuple[str, str]] = []

        def judge_first() -> None:
            job = waiting.popleft()
            try:
                verdicts.extend(_judge_all(job, pool, job.terms.among(runtimes)))
            except PosexportError as error:
                broken.append((str(job.subject.path), _about(job.subject.path, str(error))))
            advance(job.subject.path.name, len(files))

        for file in files:
            try:
                subject = read_subject(file)
                doubts.extend((str(file), note) for note in subject.notes)
                found = Trials.of(subject, seed) if properties and subject.broken is None else None
                asked = (terms or {}).get(file, _ANY)
                cases = _cases(subject, inputs, given, seed)
                needed = max((limits.held(subject, row) for row in asked.among(runtimes).values()), default=0)
                while waiting and limits.no_room(needed, sum(job.held for job in waiting)):
                    judge_first()
                waiting.append(_start(subject, pool, asked.among(runtimes), there, cases, found))
                waiting[-1].terms = asked
            except PosexportError as error:
                broken.append((str(file), _about(file, str(error))))
                advance(file.name, len(files))
            if len(waiting) > AHEAD:
                judge_first()
        while waiting:
            judge_first()
    return Report(verdicts=tuple(verdicts), broken=tuple(broken), doubts=tuple(doubts), seed=seed)


def _start(
    subject: Subject,
    pool: Pool,
    runtimes: Mapping[str, Runtime],
    there: Mapping[str, str | None],
    cases_and_notes: tuple[list[Case], tuple[str, ...]],
    trials: Trials | None = None,
) -> _Job:
    """Ask for the truth, for eager, and for a run on each runtime that can take the artifact."""
    cases, notes = cases_and_notes
    job = _Job(subject=subject, sha256=sha256_of(subject.path), cases=cases, notes=notes, trials=trials)
    arrays = [case.arrays for case in cases]
    if subject.broken is None:
        torch_row, source = RUNTIMES[_TORCH], subject.source.path
        job.truth = pool.submit(torch_row, source, arrays, {"dtype": "fp64", "streamed": True})
        job.eager = pool.submit(torch_row, source, arrays, {"streamed": True})
    for name, row in runtimes.items():
        needed = limits.held(subject, row)
        if limits.no_room(needed, job.held):  # not beside its other runs, but perhaps behind them
            for future, _ in job.runs.values():
                result(future)
            job.held = 0
        why = limits.not_for(subject, row) or there[name] or limits.no_room(needed)
        if subject.only is not None and subject.only != name:
            if len(runtimes) < len(RUNTIMES):  # asked for by name: then it gets its answer
                job.skipped[name] = f"a plan built by {subject.only} runs on nothing else"
        elif why is not None:
            job.skipped[name] = why
        elif name == _TORCH and job.eager is not None:
            job.runs[name] = (job.eager, list(range(len(cases))))
        elif subject.broken is None:
            most = limits.WORK.get(name)
            chosen = [
                index
                for index, case in enumerate(cases)
                if most is None or limits.work(subject.spec, case.sizes) <= most
            ]
            if chosen:
                sizes = [cases[index].sizes for index in chosen] + ([] if trials is None else trials.sizes())
                options, job.held = _options(subject, row, sizes), job.held + needed
                job.runs[name] = (pool.submit(row, subject.path, [arrays[index] for index in chosen], options), chosen)
                if trials is not None:
                    slow = most is not None and limits.work(subject.spec, {"batch": 1, "seq": trials.tokens()}) > most
                    trials.submit(name, None if slow else partial(pool.submit, row, subject.path, options=options))
            else:
                job.skipped[name] = f"it is slow and takes only inputs of at most {most:.0e} multiply-adds"
    return job


def _cases(
    subject: Subject, inputs: Path | None, given: Arrays | None, seed: int
) -> tuple[list[Case], tuple[str, ...]]:
    """What the artifact is run on, and notes on it; nothing where its graph alone tells that it fails."""
    notes = subject.notes
    if subject.broken is not None:
        return [], notes
    if inputs is None or given is None:
        cases = make_cases(subject.spec, seed, subject.bounds, subject.source.form)
    else:
        case, more = fit_inputs(inputs, given, subject.spec, subject.inputs, subject.bounds, subject.source.form)
        cases, notes = [case], (*notes, *more)
    return cases, notes


def _tolerance(spec: Spec, case: Case) -> Tolerance:
    """That of the dtype, wider where angles of far positions are computed as PyTorch models do."""
    products = spec.angles == "parity" and any(kind.encoding.products() for kind in spec.kinds())
    position_ids = case.arrays.get("position_ids")
    far = int(abs(position_ids).max()) if products and position_ids is not None and position_ids.size else 0
    return tolerance_at(spec.dtype, far)


def _options(subject: Subject, row: Runtime, sizes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Torch holds one layer at a time; a plan built on the fly takes the shapes of the cases, whatever the defaults of
    `posexport compile` are."""
    if row.home == "torch_eager":
        return {"streamed": True}
    if row.home != "trt" or subject.path.suffix != ".onnx":
        return {}
    fixed = {dim for dim, (low, high) in subject.bounds.items() if low == high}
    spans = {dim: [each[dim] for each in sizes] for dim in subject.bounds if dim not in fixed}
    return {"profile": [f"{dim}={min(span)}:{max(span)}:{max(span)}" for dim, span in spans.items()]}


def _about(path: Path, error: str) -> str:
    """The error, which names the artifact: among many, a person must see which one it is."""
    return error if str(path) in error else f"{str(path)!r}: {error}"


def _judge_all(job: _Job, pool: Pool, runtimes: Mapping[str, Runtime]) -> list[Verdict]:
    nothing = Answer()
    truth = nothing if job.truth is None else result(job.truth)
    eager = nothing if job.eager is None else result(job.eager)
    if truth.kind is not None:
        raise _error(truth)
    found = [_judge_one(job, name, pool, runtimes[name], truth, eager) for name in runtimes if _concerns(job, name)]
    found += [] if job.trials is None else job.trials.verdicts(str(job.subject.path))
    return [attrs.evolve(verdict, sha256=job.sha256) for verdict in found]


def _concerns(job: _Job, name: str) -> bool:
    """Whether the artifact gets a verdict of that runtime; one whose graph breaks the contract fails without a run."""
    told = job.subject.broken is not None and job.subject.only in (None, name)
    return told or name in job.runs or name in job.skipped


def _error(answer: Answer) -> PosexportError:
    from posexport.errors import RequestError

    return RequestError(answer.error or "the truth could not be computed.")


def _judge_one(job: _Job, name: str, pool: Pool, row: Runtime, truth: Answer, eager: Answer) -> Verdict:
    artifact, subject = str(job.subject.path), job.subject

    def verdict(state: str, reason: str | None, **rest: Any) -> Verdict:
        return Verdict(artifact=artifact, runtime=name, state=state, reason=reason, **rest)

    if name in job.skipped:
        return verdict(NOT_RUN, job.skipped[name])
    if subject.broken is not None:
        return verdict(FAILED, subject.broken, notes=job.notes, where=_where(job, name, pool, row, None))
    for who, answer in (("the truth", truth), ("torch eager", eager)):
        if answer.error is not None:
            return verdict(FAILED, f"{who} could not be computed: {answer.error}", notes=job.notes)
    future, chosen = job.runs[name]
    answer, notes = result(future), job.notes
    if len(chosen) < len(job.cases):
        some, most = f"{len(chosen)} of {len(job.cases)} sets of inputs", limits.WORK[name]
        notes = (*notes, f"slow, so only {some}: at most {most:.0e} multiply-adds")
    told = notes_on(subject.spec, [job.cases[index] for index in chosen], [truth.outputs[index] for index in chosen])
    notes = (*notes, *told, *([] if row.note is None else [row.note]))
    if answer.kind == "RuntimeMissingError":
        return verdict(NOT_RUN, answer.error, notes=notes)
    if answer.kind == "RequestError" and subject.only is not None:
        raise _error(answer)  # a plan that is not this runtime's to open
    if answer.error is not None:
        return verdict(FAILED, answer.error, notes=notes, where=_where(job, name, pool, row, None))
    own = job.terms.tolerance
    tolerances = {case.name: attrs.evolve(_tolerance(subject.spec, case), **own) for case in job.cases}
    comparisons = [
        each
        for index, got in zip(chosen, answer.outputs, strict=True)
        for each in compare(
            job.cases[index].name,
            truth.outputs[index],
            eager.outputs[index],
            got,
            subject.dtypes,
            subject.spec.dtype,
            tolerances[job.cases[index].name],
        )
    ]
    found = judge(artifact, name, comparisons, len(chosen), notes=notes, describe=answer.describe)
    stated = TOLERANCES[subject.spec.dtype] if found.worst is None else tolerances[found.worst.case]
    found = attrs.evolve(found, tolerance=stated)
    if found.state != FAILED or found.worst is None:
        return found
    case = next(case for case in job.cases if case.name == found.worst.case)
    return attrs.evolve(found, where=_where(job, name, pool, row, case, blurred(found.worst, stated)))


def _where(job: _Job, name: str, pool: Pool, row: Runtime, case: Case | None, vain: str | None = None) -> str | None:
    """Where the graph departs, as far as it can be found; never the end of a report. `vain` is why the case tells
    nothing of the runtime: then values don't either."""
    from posexport import locate

    try:
        if job.graphs is None:
            job.graphs = locate.load_graphs(job.subject.source)
        if isinstance(job.graphs, str):
            return job.graphs if vain is None else f"{vain}; {job.graphs}"
        found, rest = [locate.structure(job.graphs), vain], ""
        if case is not None and vain is None:
            graph_runs = name != _TORCH and job.subject.path.suffix == ".onnx"
            first = row if graph_runs else RUNTIMES["onnx-reference"]

            def run(by: Runtime) -> locate.Run:
                def once(path: Path) -> Any:
                    answer = result(pool.submit(by, path, [case.arrays]))
                    return answer.error if answer.error is not None else answer.outputs[0]

                return once

            with tempfile.TemporaryDirectory(dir=pool.folder) as folder:
                reference = run(RUNTIMES["onnx-reference"])
                departs, rest = locate.values(job.graphs, Path(folder), run(first), reference)
                found.append(departs)
        told = [each for each in found if each is not None]
        if case is None:  # nothing was compared, so there is no more to say of its values
            return "; ".join(told) or None
        return "; ".join(told) or f"the graph is that of a fresh export; {rest}"
    except Exception as error:  # a damaged graph may break any tool that looks into it
        return f"could not be found ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
