"""The verify stage: artifacts against the float64 reference on every runtime that is there, each in a child process.

Importing this loads no engine and no numpy: they load inside `verify`, while the workers load theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posexport.artifact.paths import find_artifacts
from posexport.errors import MismatchError, PosexportError
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES, TORCH_WORKER, Runtime
from posexport.runtimes.pool import Pool
from posexport.verify.result import Report, Unreadable, Verdict, VerifyOverrides

if TYPE_CHECKING:
    from posexport.artifact.original import Original
    from posexport.artifact.signing import TrustedKey
    from posexport.verify.judge import ArtifactJob, MismatchedJob

TIME_LIMIT = 300.0
"""Seconds that one runtime may take for one artifact, its loading included."""

MAX_QUEUED = 8
"""Artifacts whose runs are submitted before the first of them is judged."""

HELD = 2**31
"""Bytes of inputs and outputs beyond which only one artifact has runs under way."""

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
    step: Progress = silent,
) -> Report:
    """Verify the artifacts that `paths` name (files, or folders of them) on each of `runtimes`.

    An artifact that is not what its manifest says fails on all of them without a run, as does one that is no export of
    the `original`, and one that none of the `trusted` keys signed.
    `inputs` is a .npz file of the user; without it cases are made from `seed`. With `properties`, those of the encoding
    are tried too, on each runtime that runs. `reach` and `cases` say how far and how many inputs go, and with `strict`
    an inconclusive verdict is no pass (posexport.verify.result.VerifyOptions). `overrides` are settings of single
    artifacts; `step` is told what is done next. Raises RequestError where `paths` name no artifact, or where `inputs`
    or the original can't be read; inputs that don't fit an artifact make it unreadable.
    """
    if original is not None:
        original.check()
    missing = {name: row.missing() for name, row in runtimes.items()}
    with Pool(time_limit) as pool:
        for row in {TORCH_WORKER: RUNTIMES[TORCH_WORKER], **runtimes}.values():
            if missing.get(row.name) is None:
                pool.start(row)
        # while the workers load their engines
        from posexport.artifact.loaded import load_artifact
        from posexport.verify import eligibility, submission
        from posexport.verify.judge import ArtifactJob, MismatchedJob
        from posexport.verify.property_runs import PropertyRuns
        from posexport.verify.user_inputs import read_arrays

        arrays = None if inputs is None else read_arrays(inputs)
        files = find_artifacts(paths)
        queue: deque[ArtifactJob | MismatchedJob] = deque()
        verdicts: list[Verdict] = []
        unreadable: list[Unreadable] = []

        def judge_first() -> None:
            job = queue.popleft()
            try:
                verdicts.extend(job.verdicts(step))
            except PosexportError as error:
                unreadable.append(Unreadable(str(job.path), str(error)))
            advance(job.path.name, len(files))

        for file in files:
            settings = (overrides or {}).get(file, VerifyOverrides())
            step(f"drawing inputs for {file.name}")
            try:
                artifact = load_artifact(file, trusted)
                if original is not None:
                    artifact = submission.held_against(artifact, original)
                drawn = submission.draw_cases(artifact, inputs, arrays, seed, reach or {}, cases)
                tried = properties and artifact.contract_violation is None
                job = ArtifactJob(
                    artifact=artifact,
                    pool=pool,
                    runtimes=settings.among(runtimes),
                    overrides=settings,
                    cases=drawn.cases,
                    notes=drawn.notes,
                    too_costly=drawn.too_costly,
                    given=inputs is not None,
                    original=original,
                    property_runs=PropertyRuns.of(artifact, seed) if tried else None,
                )
                needed = max((eligibility.weight_bytes(artifact, row) for row in job.runtimes.values()), default=0)
                while queue and (
                    eligibility.memory_shortfall(needed, sum(waiting.memory for waiting in queue))
                    or job.held + sum(waiting.held for waiting in queue) > HELD
                ):
                    judge_first()
                submission.submit(job, missing)
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
