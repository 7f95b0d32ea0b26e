"""The verify stage: artifacts against the float64 reference on every installed runtime, each in a child process.

Importing this module loads no engine and no numpy: they are loaded inside `verify`, while the workers load theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport.artifact.paths import find_artifacts
from posexport.errors import MismatchError, PosexportError, Reason
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES, TORCH_WORKER, Runtime
from posexport.runtimes.module_reference import module_parts
from posexport.runtimes.numpy_threads import one_thread
from posexport.runtimes.pool import Pool
from posexport.verify.result import Report, Unreadable, Verdict, VerifyOverrides

if TYPE_CHECKING:
    from posexport.artifact.original import Original
    from posexport.artifact.signing import TrustedKey
    from posexport.verify.graph.job import GraphJob
    from posexport.verify.judge import ArtifactJob
    from posexport.verify.mismatched import MismatchedJob

TIME_LIMIT = 300.0
"""Seconds that one runtime may take for one artifact, including loading."""

MAX_QUEUED = 8
"""The artifacts whose runs are submitted before the first of them is judged."""

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
    against: Path | None = None,
    module: str | None = None,
    roles: Mapping[str, str] | None = None,
    trusted: Sequence[TrustedKey] = (),
    advance: Advance = lambda name, total: None,
    step: Progress = silent,
) -> Report:
    """Verify the files that `paths` name (files, or folders of them) on each of `runtimes`.

    Artifacts of posexport are compared with the torch block of their spec. Any other ONNX file is compared with itself
    in float64, with inputs drawn by role; `roles` gives some of the roles by name. All of them are compared with
    another ONNX file if `against` names one, or with the user's torch module if `module` does (FILE.py:NAME, which is
    run).

    An artifact fails on all runtimes without a run if it is not what its manifest says, if it is not an export of the
    `original`, or if none of the `trusted` keys signed it.

    `inputs` is a .npz file of the user; without it, cases are made from `seed`. With `properties`, those of the
    encoding are tried too, on each runtime that runs. `reach` and `cases` say how far and how many inputs go, and with
    `strict` an inconclusive verdict does not pass (posexport.verify.result.VerifyOptions). `overrides` are settings of
    single artifacts; `step` is told what is done next. Raises RequestError if `paths` name no artifact, or if `inputs`
    or the original can't be read. Inputs that don't fit an artifact make it unreadable.
    """
    if original is not None and original.weights is not None:
        original.check()
    if module is not None:
        module_parts(module)
    missing = {name: row.missing() for name, row in runtimes.items()}
    with Pool(time_limit) as pool:
        for row in {TORCH_WORKER: RUNTIMES[TORCH_WORKER], **runtimes}.values():
            if missing.get(row.name) is None:
                pool.start(row)
        # while the workers load their engines, which then need the cores
        with one_thread():
            from posexport.runtimes.npz import read_arrays
        from posexport.verify.jobs import JobMaker
        from posexport.verify.mismatched import MismatchedJob

        files = find_artifacts(paths)
        maker = JobMaker(
            pool=pool,
            runtimes=runtimes,
            inputs=inputs,
            arrays=None if inputs is None else read_arrays(inputs),
            seed=seed,
            properties=properties,
            reach=reach or {},
            more=cases,
            original=original,
            against=against,
            module=module,
            roles=roles or {},
            trusted=trusted,
        )
        under_way = _UnderWay(missing=missing, step=step, advance=lambda name: advance(name, len(files)))
        for file in files:
            settings = (overrides or {}).get(file, VerifyOverrides())
            step(f"drawing inputs for {file.name}")
            try:
                under_way.add(maker.make(file, settings))
            except MismatchError as error:
                under_way.queue.append(MismatchedJob(path=file, runtimes=settings.among(runtimes), error=error))
            except PosexportError as error:
                under_way.leave(file, error)
            if len(under_way.queue) > MAX_QUEUED:
                under_way.judge_first()
        while under_way.queue:
            under_way.judge_first()
    return Report(verdicts=tuple(under_way.verdicts), unreadable=tuple(under_way.unreadable), seed=seed, strict=strict)


@attrs.define(kw_only=True)
class _UnderWay:
    """The files whose runs are under way, the verdicts on those before them, and the files that can't be read.

    `missing` says by runtime why it is not installed.
    """

    missing: Mapping[str, Reason | None]
    step: Progress
    advance: Callable[[str], object]
    queue: deque[ArtifactJob | GraphJob | MismatchedJob] = attrs.field(factory=deque)
    verdicts: list[Verdict] = attrs.field(factory=list)
    unreadable: list[Unreadable] = attrs.field(factory=list)

    def add(self, job: ArtifactJob | GraphJob) -> None:
        """Submit the runs of a file, as soon as there is room for its weights and arrays."""
        from posexport.verify import eligibility
        from posexport.verify.jobs import submit, weight_bytes

        needed = max((weight_bytes(job, row) for row in job.runtimes.values()), default=0)
        while self.queue and (
            eligibility.memory_shortfall(needed, sum(waiting.memory for waiting in self.queue))
            or job.held + sum(waiting.held for waiting in self.queue) > HELD
        ):
            self.judge_first()
        submit(job, self.missing)
        self.queue.append(job)

    def judge_first(self) -> None:
        """Wait for the runs of the first file, and judge them."""
        job = self.queue.popleft()
        try:
            self.verdicts += job.verdicts(self.step)
        except PosexportError as error:
            self.leave(job.path, error)
        else:
            self.advance(job.path.name)

    def leave(self, file: Path, error: PosexportError) -> None:
        """Note that a file can't be read."""
        self.unreadable.append(Unreadable(str(file), str(error)))
        self.advance(file.name)
