"""The job of one file under verification: one of posexport's own artifacts, or any other ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport.artifact.loaded import load_artifact
from posexport.artifact.onnx_artifact import ForeignFileError, is_whole_model
from posexport.errors import Reason, RequestError
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Pool
from posexport.verify import eligibility, submission
from posexport.verify.judge import ArtifactJob
from posexport.verify.property_runs import PropertyRuns
from posexport.verify.result import VerifyOverrides

if TYPE_CHECKING:
    from posexport.artifact.original import Original
    from posexport.artifact.signing import TrustedKey
    from posexport.verify.graph.job import GraphJob


@attrs.frozen(kw_only=True)
class JobMaker:
    """The options of a request, for all files (posexport.verify.verifier.verify)."""

    pool: Pool
    runtimes: Mapping[str, Runtime]
    inputs: Path | None
    arrays: Arrays | None
    seed: int
    properties: bool
    reach: Mapping[str, int]
    more: int
    original: Original | None
    against: Path | None
    module: str | None
    roles: Mapping[str, str]
    trusted: Sequence[TrustedKey]

    def make(self, file: Path, settings: VerifyOverrides) -> ArtifactJob | GraphJob:
        """The job of a file; RequestError if it can't be verified, MismatchError if it isn't what it must be."""
        if self.against is not None or self.module is not None:
            return self._of_graph(file, settings)
        try:
            artifact = load_artifact(file, self.trusted)
        except ForeignFileError as error:
            if error.is_graph:
                return self._of_graph(file, settings)
            raise
        if self.roles:
            raise RequestError(f"{str(file)!r} is posexport's own, so the roles of its inputs are known: drop --input.")
        original = self.original or settings.original
        if original is not None:
            original.check()
            artifact = submission.held_against(artifact, original)
        drawn = submission.draw_cases(artifact, self.inputs, self.arrays, self.seed, self.reach, self.more)
        tried = self.properties and artifact.contract_violation is None
        return ArtifactJob(
            artifact=artifact,
            pool=self.pool,
            runtimes=settings.among(self.runtimes),
            overrides=settings,
            cases=drawn.cases,
            notes=(*drawn.notes, *settings.notes()),
            too_costly=drawn.too_costly,
            given=self.inputs is not None,
            original=original,
            property_runs=PropertyRuns.of(artifact, self.seed) if tried else None,
        )

    def _of_graph(self, file: Path, settings: VerifyOverrides) -> GraphJob:
        # imported late: modules that read any graph take half a second to load, and posexport's own artifacts don't
        # need them
        from posexport.verify.graph.subject import read_file
        from posexport.verify.graph.submission import GraphRequest, make_graph_job

        graph = read_file(file, self.trusted)  # without its weights
        module, original = self.module, self.original
        if original is not None and original.checkpoint is not None and is_whole_model(graph):
            if original.layer or original.prefix_tokens is not None:
                option = "--layer" if original.layer else "--prefix-tokens"
                raise RequestError(f"{str(graph.path)!r} is a whole model, which has no {option}: drop {option}.")
            if not original.checkpoint.is_dir():
                raise RequestError(f"{str(original.checkpoint)!r} is no folder: give that of a checkpoint.")
            module, original = str(original.checkpoint), None
        for option, given in (("--properties", self.properties), ("--weights or --from", original is not None)):
            if given:
                raise RequestError(
                    f"{str(graph.path)!r} is verified without a spec, and {option} needs one: drop it, or give an "
                    "artifact of posexport alone."
                )
        request = GraphRequest(
            against=self.against,
            module=module,
            roles=self.roles,
            inputs=self.inputs,
            arrays=self.arrays,
            seed=self.seed,
            reach=self.reach,
            more=self.more,
        )
        return make_graph_job(graph, request, self.pool, settings.among(self.runtimes), settings, self.trusted)


def weight_bytes(job: ArtifactJob | GraphJob, row: Runtime) -> int:
    """About how many bytes of memory a runtime needs for a file's weights."""
    return eligibility.weight_bytes(job.artifact, row) if isinstance(job, ArtifactJob) else job.weight_bytes(row)


def submit(job: ArtifactJob | GraphJob, missing: Mapping[str, Reason | None]) -> None:
    """Submit the references, and a run on each runtime that can take the file."""
    if isinstance(job, ArtifactJob):
        submission.submit(job, missing)
    else:
        job.submit(missing)
