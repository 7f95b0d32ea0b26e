"""What runs for one artifact: its cases, the float64 reference, torch eager, and each runtime that can take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.authenticity import AS_ORIGINAL
from posexport.errors import MismatchError, Reason, located
from posexport.runtimes import RUNTIMES, TENSORRT, TORCH, TORCH_WORKER, Runtime
from posexport.runtimes.pool import result
from posexport.verify import eligibility
from posexport.verify.aligned import directions_of
from posexport.verify.cases import Case, make_cases
from posexport.verify.coverage import too_costly
from posexport.verify.first_positions import NOTE
from posexport.verify.judge import ArtifactJob
from posexport.verify.reach import SEQ, reach_of
from posexport.verify.runs import Run
from posexport.verify.torch_outputs import TorchOutputs
from posexport.verify.user_inputs import fit_inputs

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.original import Original
    from posexport.runtimes.base import Arrays


def held_against(artifact: LoadedArtifact, original: Original) -> LoadedArtifact:
    """The artifact, marked as an export of the original; MismatchError if it is not one."""
    reason = original.mismatch(artifact.spec, artifact.source.weights())
    if reason is None:
        return attrs.evolve(artifact, weights=Reason(AS_ORIGINAL, f"those of {original}"))
    source = None if artifact.manifest is None else artifact.manifest.weights
    if source is not None:
        reason = Reason(reason.code, f"{reason.text}; by its manifest its weights are from: {source}")
    advice = "export it again, or give the original that it was made from"
    raise MismatchError(artifact.path, reason, advice, sha256=artifact.sha256, runtime=artifact.required_runtime)


def submit(job: ArtifactJob, missing: Mapping[str, Reason | None]) -> None:
    """Submit a run on each runtime that can take the artifact, then the float64 reference and torch eager.

    The torch worker takes longest to load.
    """
    artifact, by_torch = job.artifact, list[int]()
    for name, row in job.runtimes.items():
        if artifact.required_runtime not in (None, name):
            if len(job.runtimes) < len(RUNTIMES):  # the runtime was named, so it gets a verdict
                text = f"a plan built by {artifact.required_runtime} runs on nothing else"
                job.skipped[name] = Reason(eligibility.OTHER_BUILDER, text)
            continue
        needed = eligibility.weight_bytes(artifact, row)
        if eligibility.memory_shortfall(needed, job.memory):  # not together with the other runs, but perhaps after them
            for run in job.runs.values():
                result(run.answer)
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
        elif name == TORCH_WORKER:
            by_torch = indices
        elif artifact.contract_violation is None:
            _submit_runs(job, row, indices)
            job.memory += needed
    if artifact.contract_violation is None:
        _submit_references(job, by_torch)


def _submit_references(job: ArtifactJob, by_torch: Sequence[int]) -> None:
    """Submit the float64 reference and torch eager. Torch is also a runtime if it has cases with these indices."""
    spec, path, row, pool = job.artifact.spec, job.artifact.source.path, RUNTIMES[TORCH_WORKER], job.pool
    products = any(layer.encoding.uses_fp32_products() for layer in spec.distinct_layers())
    original = {} if job.original is None else {"original": job.original.to_options()}
    options = {**eligibility.OPTIONS[TORCH], **original}
    of_reference = {**options, "dtype": "fp64", "fp32_angles": products and spec.angles == "parity"}
    # a job that its own functions refer to would stay in memory, with all its arrays
    job.run_reference = lambda inputs, more: pool.submit(row, path, inputs, of_reference | more)
    job.run_torch = lambda inputs, more: pool.submit(row, path, inputs, options | more)
    job.reference = job.run_reference([case.arrays for case in job.cases], {})
    job.by_torch = TorchOutputs.submitted(job.run_torch, job.cases, on_all=bool(by_torch) or job.given)
    if by_torch:
        job.runs[TORCH_WORKER] = Run(job.by_torch.answer, list(by_torch), path, options)


def _submit_runs(job: ArtifactJob, row: Runtime, indices: list[int]) -> None:
    """Submit the cases with these indices to a runtime, and the runs of properties."""
    artifact, tried = job.artifact, job.property_runs
    sizes = [job.cases[index].sizes for index in indices] + ([] if tried is None else tried.sizes())
    options = run_options(artifact, row, sizes)
    arrays = [job.cases[index].arrays for index in indices]
    answer = job.pool.submit(row, artifact.path, arrays, options)
    job.runs[row.name] = Run(answer, indices, artifact.path, options)
    if tried is not None:
        affordable = eligibility.is_affordable(artifact.spec, {"batch": 1, "seq": tried.tokens()}, row)
        tried.submit(row.name, partial(job.pool.submit, row, artifact.path, options=options) if affordable else None)


@attrs.frozen
class Drawn:
    """The cases of an artifact, notes on them, and what they don't show because it costs too much, in clauses."""

    cases: list[Case]
    notes: tuple[str, ...] = ()
    too_costly: tuple[str, ...] = ()


def draw_cases(
    artifact: LoadedArtifact, inputs: Path | None, arrays: Arrays | None, seed: int, sizes: Mapping[str, int], more: int
) -> Drawn:
    """The cases of an artifact; none if its graph breaks the contract, so that it fails without a run."""
    if artifact.contract_violation is not None:
        return Drawn([])
    form, spec, bounds = artifact.source.form, artifact.spec, artifact.bounds
    if inputs is None or arrays is None:
        reach = reach_of(spec, sizes)
        directions = directions_of(spec, artifact.source.array)
        cases = make_cases(spec, seed, bounds, form, reach=reach, more=more, directions=directions)
        promised = (NOTE,) if spec.consecutive and spec.position_axes else ()
        costly = () if reach.given else too_costly(spec, cases, min(reach.seq, SEQ), bounds)
        return Drawn(cases, promised, costly)
    with located(repr(str(artifact.path))):
        case, notes = fit_inputs(inputs, arrays, spec, artifact.inputs, bounds, form)
    return Drawn([case], notes)


def run_options(artifact: LoadedArtifact, row: Runtime, sizes: Sequence[Mapping[str, int]]) -> Mapping[str, Any]:
    """The options of a run.

    Torch loads one layer at a time. A plan is opened only if it is the one that was checked. A plan that is built for
    the run takes the cases' shapes, whatever the defaults of `posexport compile` are.
    """
    if row.module != TENSORRT:
        return eligibility.OPTIONS.get(row.module, {})
    if artifact.plan is not None:
        return {"sha256": artifact.sha256}
    return {"profile": artifact.profile_requests(sizes)}
