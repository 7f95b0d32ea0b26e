"""The verify stage: artifacts against the float64 reference on every runtime that is there, each in a child process.

Importing this loads no engine; torch and onnx load inside `verify`, while the workers load theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.authenticity import AS_ORIGINAL
from posexport.artifact.paths import find_artifacts
from posexport.errors import MismatchError, PosexportError, Reason, located
from posexport.runtimes import RUNTIMES, TENSORRT, TORCH, Runtime
from posexport.runtimes.pool import Pool, result
from posexport.verify import eligibility
from posexport.verify.cases import Case, make_cases
from posexport.verify.judge import TORCH_WORKER, ArtifactJob, MismatchedJob
from posexport.verify.property_runs import PropertyRuns
from posexport.verify.reach import reach_of
from posexport.verify.result import Report, Unreadable, Verdict, VerifyOverrides
from posexport.verify.user_inputs import fit_inputs, read_arrays

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.original import Original
    from posexport.artifact.signing import TrustedKey
    from posexport.runtimes.base import Arrays

TIME_LIMIT = 300.0
"""Seconds that one runtime may take for one artifact, its loading included."""

MAX_QUEUED = 8
"""Artifacts whose runs are submitted before the first of them is judged."""

Advance = Callable[[str, int], object]
"""Called after the verdicts on an artifact, with its file's name and the number of artifacts."""


def verify(
    paths: Sequence[Path],
    *,
    runtimes: Mapping[str, Runtime] = RUNTIMES,
    inputs: Path | None = None,
    seed: int = 0,
    time_limit: float = TIME_LIMIT,
    properties: bool = False,
    reach: Mapping[str, int] | None = None,
    cases: int = 0,
    strict: bool = False,
    overrides: Mapping[Path, VerifyOverrides] | None = None,
    original: Original | None = None,
    trusted: Sequence[TrustedKey] = (),
    advance: Advance = lambda name, total: None,
) -> Report:
    """Verify the artifacts that `paths` name (files, or folders of them) on each of `runtimes`.

    An artifact that is not what its manifest says fails on all of them without a run, as does one that is no export of
    the `original`, and one that none of the `trusted` keys signed.
    `inputs` is a .npz file of the user; without it cases are made from `seed`. With `properties`, those of the encoding
    are tried too, on each runtime that runs. `reach` and `cases` say how far and how many inputs go, and with `strict`
    an inconclusive verdict is no pass (posexport.verify.result.VerifyOptions). `overrides` are settings of single
    artifacts. Raises RequestError where `paths` name no artifact, or where `inputs` or the original can't be read;
    inputs that don't fit an artifact make it unreadable.
    """
    if original is not None:
        original.check()
    arrays = None if inputs is None else read_arrays(inputs)
    missing = {name: row.missing() for name, row in runtimes.items()}
    with Pool(time_limit) as pool:
        for row in {TORCH_WORKER: RUNTIMES[TORCH_WORKER], **runtimes}.values():
            if missing.get(row.name) is None:
                pool.start(row)
        from posexport.artifact.loaded import load_artifact

        files = find_artifacts(paths)
        queue: deque[ArtifactJob | MismatchedJob] = deque()
        verdicts: list[Verdict] = []
        unreadable: list[Unreadable] = []

        def judge_first() -> None:
            job = queue.popleft()
            try:
                verdicts.extend(job.verdicts())
            except PosexportError as error:
                unreadable.append(Unreadable(str(job.path), str(error)))
            advance(job.path.name, len(files))

        for file in files:
            settings = (overrides or {}).get(file, VerifyOverrides())
            try:
                artifact = load_artifact(file, trusted)
                if original is not None:
                    artifact = _held_against(artifact, original)
                drawn, notes = _cases(artifact, inputs, arrays, seed, reach or {}, cases)
                tried = properties and artifact.contract_violation is None
                job = ArtifactJob(
                    artifact=artifact,
                    pool=pool,
                    runtimes=settings.among(runtimes),
                    overrides=settings,
                    cases=drawn,
                    notes=notes,
                    given=inputs is not None,
                    original=original,
                    property_runs=PropertyRuns.of(artifact, seed) if tried else None,
                )
                needed = max((eligibility.weight_bytes(artifact, row) for row in job.runtimes.values()), default=0)
                while queue and eligibility.memory_shortfall(needed, sum(waiting.memory for waiting in queue)):
                    judge_first()
                _submit(job, missing)
                queue.append(job)
            except MismatchError as error:
                queue.append(MismatchedJob(path=file, runtimes=settings.among(runtimes), error=error))
            except PosexportError as error:
                unreadable.append(Unreadable(str(file), str(error)))
                advance(file.name, len(files))
            if len(queue) > MAX_QUEUED:
                judge_first()
        while queue:
            judge_first()
    return Report(verdicts=tuple(verdicts), unreadable=tuple(unreadable), seed=seed, strict=strict)


def _held_against(artifact: LoadedArtifact, original: Original) -> LoadedArtifact:
    """The artifact once it was found to be an export of the original; MismatchError where it is not."""
    reason = original.mismatch(artifact.spec, artifact.source.weights())
    if reason is None:
        return attrs.evolve(artifact, weights=Reason(AS_ORIGINAL, f"those of {original}"))
    source = None if artifact.manifest is None else artifact.manifest.weights
    if source is not None:
        reason = Reason(reason.code, f"{reason.text}; by its manifest its weights are from: {source}")
    advice = "export it again, or give the original that it was made from"
    raise MismatchError(artifact.path, reason, advice, sha256=artifact.sha256, runtime=artifact.required_runtime)


def _submit(job: ArtifactJob, missing: Mapping[str, Reason | None]) -> None:
    """Submit the float64 reference, torch eager, and a run on each runtime that can take the artifact."""
    artifact, arrays = job.artifact, [case.arrays for case in job.cases]
    if artifact.contract_violation is None:
        row, source = RUNTIMES[TORCH_WORKER], artifact.source.path
        spec = artifact.spec
        products = any(layer.encoding.uses_fp32_products() for layer in spec.distinct_layers())
        options = {"streamed": True, **({} if job.original is None else {"original": job.original.to_options()})}
        of_reference = {"dtype": "fp64", "fp32_angles": products and spec.angles == "parity"}
        job.reference = job.pool.submit(row, source, arrays, options | of_reference)
        job.by_torch = job.pool.submit(row, source, arrays, options)
    for name, row in job.runtimes.items():
        if artifact.required_runtime not in (None, name):
            if len(job.runtimes) < len(RUNTIMES):  # the runtime was named, so it gets a verdict
                text = f"a plan built by {artifact.required_runtime} runs on nothing else"
                job.skipped[name] = Reason(eligibility.OTHER_BUILDER, text)
            continue
        needed = eligibility.weight_bytes(artifact, row)
        if eligibility.memory_shortfall(needed, job.memory):  # not beside its other runs, but perhaps after them
            for future, _ in job.runs.values():
                result(future)
            job.memory = 0
        indices = [
            index for index, case in enumerate(job.cases) if eligibility.is_affordable(artifact.spec, case.sizes, row)
        ]
        reason = (
            eligibility.unsupported_reason(artifact.source, row)
            or missing[name]
            or eligibility.memory_shortfall(needed)
            or (eligibility.slow_reason(row) if job.cases and not indices else None)
        )
        if reason is not None:
            job.skipped[name] = reason
        elif name == TORCH_WORKER and job.by_torch is not None:
            job.runs[name] = (job.by_torch, indices)
        elif artifact.contract_violation is None:
            _submit_runs(job, row, indices)
            job.memory += needed


def _submit_runs(job: ArtifactJob, row: Runtime, indices: list[int]) -> None:
    """Submit the cases with these indices to a runtime, and the runs of properties."""
    artifact, tried = job.artifact, job.property_runs
    sizes = [job.cases[index].sizes for index in indices] + ([] if tried is None else tried.sizes())
    options = _options(artifact, row, sizes)
    arrays = [job.cases[index].arrays for index in indices]
    job.runs[row.name] = (job.pool.submit(row, artifact.path, arrays, options), indices)
    if tried is not None:
        affordable = eligibility.is_affordable(artifact.spec, {"batch": 1, "seq": tried.tokens()}, row)
        tried.submit(row.name, partial(job.pool.submit, row, artifact.path, options=options) if affordable else None)


def _cases(
    artifact: LoadedArtifact, inputs: Path | None, arrays: Arrays | None, seed: int, sizes: Mapping[str, int], more: int
) -> tuple[list[Case], tuple[str, ...]]:
    """The cases of an artifact, and notes on them; none where its graph breaks the contract, so that it fails unrun."""
    if artifact.contract_violation is not None:
        return [], ()
    form = artifact.source.form
    if inputs is None or arrays is None:
        reach = reach_of(artifact.spec, sizes)
        return make_cases(artifact.spec, seed, artifact.bounds, form, reach=reach, more=more), ()
    with located(repr(str(artifact.path))):
        case, notes = fit_inputs(inputs, arrays, artifact.spec, artifact.inputs, artifact.bounds, form)
    return [case], notes


def _options(artifact: LoadedArtifact, row: Runtime, sizes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Options of a run: torch holds one layer at a time; a plan is opened only if it is the one that was checked; one
    that is built for the run takes the cases' shapes, whatever the defaults of `posexport compile` are."""
    if row.module == TORCH:
        return {"streamed": True}
    if row.module != TENSORRT:
        return {}
    if artifact.plan is not None:
        return {"sha256": artifact.sha256}
    return {"profile": artifact.profile_requests(sizes)}
