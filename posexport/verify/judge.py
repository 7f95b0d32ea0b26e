"""One artifact under verification: its runs on every runtime, and the verdict on each."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.processes import INVALID, MISSING
from posexport.runtimes import RUNTIMES, Runtime
from posexport.runtimes.pool import Answer, Pool, result
from posexport.verify import eligibility as limits
from posexport.verify.cases import Case
from posexport.verify.caveats import notes_on
from posexport.verify.parity import TOLERANCES, compare, inconclusive_reason, judge, tolerance_at
from posexport.verify.property_runs import Trials
from posexport.verify.result import _ANY, FAILED, NOT_RUN, State, Tolerance, Verdict, VerifyOverrides

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.spec.spec import Spec


_TORCH = "torch"  # the worker that gives truth and yardstick too


@attrs.define(kw_only=True)
class _Job:
    """One artifact under way."""

    subject: LoadedArtifact
    sha256: str
    terms: VerifyOverrides = _ANY
    cases: list[Case]
    notes: tuple[str, ...]
    truth: Future[Answer] | None = None  # None where nothing need be run to know that it failed
    eager: Future[Answer] | None = None
    runs: dict[str, tuple[Future[Answer], list[int]]] = attrs.field(factory=dict)
    skipped: dict[str, str] = attrs.field(factory=dict)
    trials: Trials | None = None
    graphs: Any = None
    held: int = 0  # bytes that the engines of its runs may hold


def _tolerance(spec: Spec, case: Case) -> Tolerance:
    """That of the dtype, wider where angles of far positions are computed as PyTorch models do."""
    products = spec.angles == "parity" and any(kind.encoding.uses_fp32_products() for kind in spec.distinct_layers())
    position_ids = case.arrays.get("position_ids")
    far = int(abs(position_ids).max()) if products and position_ids is not None and position_ids.size else 0
    return tolerance_at(spec.dtype, far)


def _judge_all(job: _Job, pool: Pool, runtimes: Mapping[str, Runtime]) -> list[Verdict]:
    nothing = Answer()
    truth = nothing if job.truth is None else result(job.truth)
    eager = nothing if job.eager is None else result(job.eager)
    if truth.failure is not None and truth.failure.code in (INVALID, MISSING):
        raise RequestError(truth.failure.text)
    found = [_judge_one(job, name, pool, runtimes[name], truth, eager) for name in runtimes if _concerns(job, name)]
    found += [] if job.trials is None else job.trials.verdicts(str(job.subject.path))
    return [attrs.evolve(verdict, sha256=job.sha256) for verdict in found]


def _concerns(job: _Job, name: str) -> bool:
    """Whether the artifact gets a verdict of that runtime; one whose graph breaks the contract fails without a run."""
    told = job.subject.contract_violation is not None and job.subject.required_runtime in (None, name)
    return told or name in job.runs or name in job.skipped


def _judge_one(job: _Job, name: str, pool: Pool, row: Runtime, truth: Answer, eager: Answer) -> Verdict:
    artifact, subject = str(job.subject.path), job.subject

    def verdict(state: State, reason: str | None, **rest: Any) -> Verdict:
        return Verdict(artifact=artifact, runtime=name, state=state, reason=reason, **rest)

    if name in job.skipped:
        return verdict(NOT_RUN, job.skipped[name])
    if subject.contract_violation is not None:
        where, departure = _where(job, name, pool, row, None)
        return verdict(FAILED, subject.contract_violation, notes=job.notes, where=where, departure=departure)
    for who, answer in (("the truth", truth), ("torch eager", eager)):
        if answer.failure is not None:
            return verdict(FAILED, f"{who} could not be computed: {answer.failure}", notes=job.notes)
    future, chosen = job.runs[name]
    answer, notes = result(future), job.notes
    if len(chosen) < len(job.cases):
        some, most = f"{len(chosen)} of {len(job.cases)} sets of inputs", limits.WORK[name]
        notes = (*notes, f"slow, so only {some}: at most {most:.0e} multiply-adds")
    told = notes_on(subject.spec, [job.cases[index] for index in chosen], [truth.outputs[index] for index in chosen])
    notes = (*notes, *told, *([] if row.note is None else [row.note]))
    if answer.failure is not None:
        if answer.failure.code == MISSING:
            return verdict(NOT_RUN, answer.failure.text, notes=notes)
        if answer.failure.code == INVALID and subject.required_runtime is not None:
            raise RequestError(answer.failure.text)  # a plan that is not this runtime's to open
        where, departure = _where(job, name, pool, row, None)
        return verdict(FAILED, answer.failure.text, notes=notes, where=where, departure=departure)
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
            {output: dtype for output, (_, dtype) in subject.outputs.items()},
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
    where, departure = _where(job, name, pool, row, case, inconclusive_reason(found.worst, stated))
    return attrs.evolve(found, where=where, departure=departure)


def _where(
    job: _Job, name: str, pool: Pool, row: Runtime, case: Case | None, inconclusive_reason: str | None = None
) -> tuple[str | None, str | None]:
    """Where the graph departs, as far as that can be found, and the first node that departs; never raises.

    `inconclusive_reason` is why the case tells nothing of the runtime: then values tell nothing either.
    """
    from posexport.verify import locate

    try:
        if job.graphs is None:
            job.graphs = locate.load_graphs(job.subject.source)
        if isinstance(job.graphs, str):
            return job.graphs if inconclusive_reason is None else f"{inconclusive_reason}; {job.graphs}", None
        departure = locate.structure(job.graphs)
        found, rest = [departure, inconclusive_reason], ""
        if case is not None and inconclusive_reason is None:
            graph_runs = name != _TORCH and job.subject.path.suffix == ".onnx"
            first = row if graph_runs else RUNTIMES["onnx-reference"]

            def run(by: Runtime) -> locate.Run:
                def once(path: Path) -> Any:
                    answer = result(pool.submit(by, path, [case.arrays]))
                    return answer.outputs[0] if answer.failure is None else answer.failure.text

                return once

            with tempfile.TemporaryDirectory(dir=pool.folder) as folder:
                reference = run(RUNTIMES["onnx-reference"])
                departs, rest = locate.values(job.graphs, Path(folder), run(first), reference)
                found.append(departs)
        told = [each for each in found if each is not None]
        if case is None:  # nothing was compared, so there is no more to say of its values
            return "; ".join(told) or None, departure
        return "; ".join(told) or f"the graph is that of a fresh export; {rest}", departure
    except Exception as error:  # a damaged graph may break any tool that looks into it
        return f"could not be found ({type(error).__name__}: {' '.join(str(error).split())[:200]})", None
