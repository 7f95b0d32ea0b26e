"""The verify stage: artifacts are held against the truth on every runtime that is there, each in a child process.

Importing this loads no engine; torch and onnx load inside `verify`, while the workers load theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport.errors import PosexportError
from posexport.files import sha256_of
from posexport.runtimes import RUNTIMES, TENSORRT, TORCH, Runtime
from posexport.runtimes.pool import Pool, result
from posexport.verify import eligibility as limits
from posexport.verify.cases import Case, make_cases
from posexport.verify.judge import _TORCH, _Job, _judge_all
from posexport.verify.property_runs import Trials
from posexport.verify.result import _ANY, Report, Unreadable, Verdict, VerifyOverrides
from posexport.verify.user_inputs import fit_inputs, read_arrays

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.runtimes.base import Arrays

TIME_LIMIT = 300.0
"""Seconds that one runtime may take for one artifact, its loading included."""

MAX_QUEUED = 8
"""Artifacts whose runs are asked for before the first of them is judged."""


def verify(
    paths: Sequence[Path],
    *,
    runtimes: Mapping[str, Runtime] = RUNTIMES,
    inputs: Path | None = None,
    seed: int = 0,
    time_limit: float = TIME_LIMIT,
    properties: bool = False,
    terms: Mapping[Path, VerifyOverrides] | None = None,
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
        from posexport.artifact.loaded import find_artifacts, load_artifact

        files = find_artifacts(paths)
        waiting: deque[_Job] = deque()
        verdicts: list[Verdict] = []
        broken: list[Unreadable] = []
        manifest_warnings: list[tuple[str, str]] = []

        def judge_first() -> None:
            job = waiting.popleft()
            try:
                verdicts.extend(_judge_all(job, pool, job.terms.among(runtimes)))
            except PosexportError as error:
                broken.append(Unreadable(str(job.subject.path), _about(job.subject.path, str(error))))
            advance(job.subject.path.name, len(files))

        for file in files:
            try:
                subject = load_artifact(file)
                manifest_warnings.extend((str(file), note) for note in subject.manifest_warnings)
                found = Trials.of(subject, seed) if properties and subject.contract_violation is None else None
                asked = (terms or {}).get(file, _ANY)
                cases = _cases(subject, inputs, given, seed)
                needed = max((limits.held(subject, row) for row in asked.among(runtimes).values()), default=0)
                while waiting and limits.memory_shortfall(needed, sum(job.held for job in waiting)):
                    judge_first()
                waiting.append(_start(subject, pool, asked.among(runtimes), there, cases, found))
                waiting[-1].terms = asked
            except PosexportError as error:
                broken.append(Unreadable(str(file), _about(file, str(error))))
                advance(file.name, len(files))
            if len(waiting) > MAX_QUEUED:
                judge_first()
        while waiting:
            judge_first()
    return Report(
        verdicts=tuple(verdicts), unreadable=tuple(broken), manifest_warnings=tuple(manifest_warnings), seed=seed
    )


def _start(
    subject: LoadedArtifact,
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
    if subject.contract_violation is None:
        torch_row, source = RUNTIMES[_TORCH], subject.source.path
        job.truth = pool.submit(torch_row, source, arrays, {"dtype": "fp64", "streamed": True})
        job.eager = pool.submit(torch_row, source, arrays, {"streamed": True})
    for name, row in runtimes.items():
        needed = limits.held(subject, row)
        if limits.memory_shortfall(needed, job.held):  # not beside its other runs, but perhaps behind them
            for future, _ in job.runs.values():
                result(future)
            job.held = 0
        why = limits.unsupported_reason(subject, row) or there[name] or limits.memory_shortfall(needed)
        if subject.required_runtime is not None and subject.required_runtime != name:
            if len(runtimes) < len(RUNTIMES):  # asked for by name: then it gets its answer
                job.skipped[name] = f"a plan built by {subject.required_runtime} runs on nothing else"
        elif why is not None:
            job.skipped[name] = why
        elif name == _TORCH and job.eager is not None:
            job.runs[name] = (job.eager, list(range(len(cases))))
        elif subject.contract_violation is None:
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
    subject: LoadedArtifact, inputs: Path | None, given: Arrays | None, seed: int
) -> tuple[list[Case], tuple[str, ...]]:
    """What the artifact is run on, and notes on it; nothing where its graph alone tells that it fails."""
    notes = subject.manifest_warnings
    if subject.contract_violation is not None:
        return [], notes
    if inputs is None or given is None:
        cases = make_cases(subject.spec, seed, subject.bounds, subject.source.form)
    else:
        case, more = fit_inputs(inputs, given, subject.spec, subject.inputs, subject.bounds, subject.source.form)
        cases, notes = [case], (*notes, *more)
    return cases, notes


def _options(subject: LoadedArtifact, row: Runtime, sizes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Torch holds one layer at a time; a plan built on the fly takes the shapes of the cases, whatever the defaults of
    `posexport compile` are."""
    if row.module == TORCH:
        return {"streamed": True}
    if row.module != TENSORRT or subject.path.suffix != ".onnx":
        return {}
    fixed = {dim for dim, (low, high) in subject.bounds.items() if low == high}
    spans = {dim: [each[dim] for each in sizes] for dim in subject.bounds if dim not in fixed}
    return {"profile": [f"{dim}={min(span)}:{max(span)}:{max(span)}" for dim, span in spans.items()]}


def _about(path: Path, error: str) -> str:
    """The error, which names the artifact: among many, a person must see which one it is."""
    return error if str(path) in error else f"{str(path)!r}: {error}"
