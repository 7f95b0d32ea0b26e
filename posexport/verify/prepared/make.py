"""Prepares a file: draws inputs, evaluates them in float64 and in the file's dtypes, and writes both beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.runtimes import RUNTIMES, Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.generation import GenerationOptions
from posexport.runtimes.generation_process import generate_in_child
from posexport.runtimes.pool import Pool, result
from posexport.runtimes.tensors import save_arrays
from posexport.verify import eligibility, submission
from posexport.verify.cases import Case
from posexport.verify.graph import eligible
from posexport.verify.graph.cases import GraphCase
from posexport.verify.graph.greedy import GreedyCheck
from posexport.verify.graph.job import GraphJob
from posexport.verify.graph.parity import Expected
from posexport.verify.jobs import JobMaker, submit
from posexport.verify.judge import ArtifactJob
from posexport.verify.prepared.check import largest_error
from posexport.verify.prepared.data import (
    ARRAYS,
    PreparedCase,
    PreparedFile,
    PreparedOutput,
    PreparedRun,
    PreparedTokens,
)
from posexport.verify.result import VerifyOverrides

AnyCase = TypeVar("AnyCase", Case, GraphCase)

KEYS = 160
"""The number of keys that inputs reach. References of long inputs would be most of the data that must be copied."""


def prepare_file(
    path: Path, pool: Pool, *, checkpoint: Path | None = None, most_bytes: int = 2**20, seed: int = 0
) -> PreparedFile:
    """Prepare the ONNX file at `path`, which is alone in its folder.

    The truth is the torch block of its spec, or the `checkpoint` if that is given; the file is then its whole model.
    Inputs take about `most_bytes`, references several times as much. Adds a file of arrays to the folder. RequestError
    if the file can't be verified at all.
    """
    maker = JobMaker(
        pool=pool,
        runtimes={},
        inputs=None,
        arrays=None,
        seed=seed,
        properties=False,
        reach={"seq": KEYS},
        more=0,
        original=None,
        against=None,
        module=None if checkpoint is None else str(checkpoint),
        roles={},
        trusted=(),
    )
    job = maker.make(path, VerifyOverrides())
    arrays: Arrays = {}
    if isinstance(job, GraphJob):
        job.cases = chosen(job.cases, most_bytes)
        submit(job, {})
        expected = _expected_of_graph(job)
    else:
        job.cases = chosen(job.cases, most_bytes)
        submit(job, {})
        expected = _expected_of_artifact(job)
    cases = tuple(
        _prepared(number, job.cases[index], one, arrays) for number, (index, one) in enumerate(expected.items())
    )
    kept = [job.cases[index] for index in expected]
    tokens = None
    if isinstance(job, GraphJob) and job.greedy is not None:
        tokens = _tokens(job.greedy, path, arrays)
    save_arrays(path.parent / ARRAYS, arrays)
    return PreparedFile(
        model=path.name,
        sha256={file.name: sha256_of(file) for file in sorted(path.parent.iterdir())},
        reference="the torch block in float64" if checkpoint is None else "transformers in float64",
        cases=cases,
        runs={name: _run(job, kept, row) for name, row in RUNTIMES.items()},
        wide=job.subject.wide if isinstance(job, GraphJob) else {},
        tokens=tokens,
    )


MOST_CASES = 12
"""The most sets of inputs of one file: outputs of a whole model may be far larger than its inputs."""


def chosen(cases: Sequence[AnyCase], most_bytes: int) -> list[AnyCase]:
    """At most MOST_CASES cases with about `most_bytes` together, none of which takes a quarter by itself.

    They are spread over the list, since neighbours are alike.
    """
    sizes = [sum(array.nbytes for array in case.arrays.values()) for case in cases]
    small = [index for index, size in enumerate(sizes) if size <= most_bytes // 4]
    step = max(1, -(-sum(sizes[index] for index in small) // most_bytes), -(-len(small) // MOST_CASES))
    return [cases[index] for index in small[::step]] or [min(cases, key=lambda case: sizes[cases.index(case)])]


def _expected_of_graph(job: GraphJob) -> dict[int, list[Expected]]:
    truth = job.truth
    if truth is None:
        raise RequestError(f"{str(job.path)!r} is not what it is held against: {job.mismatch}.")
    if not truth.tried:
        raise RequestError(f"{next(iter(truth.untried.values())).text.rstrip('.')}.")
    for index in truth.tried:
        truth.draw_again(index)
    return {index: truth.expected(index) for index in truth.tried}


def _expected_of_artifact(job: ArtifactJob) -> dict[int, list[Expected]]:
    if job.reference is None or job.by_torch is None:
        raise RequestError(f"{str(job.path)!r} breaks its contract: {job.artifact.contract_violation}.")
    indices = range(len(job.cases))
    failure = result(job.reference).failure or job.by_torch.failure or job.by_torch.ask(indices)
    if failure is not None:
        raise RequestError(f"{str(job.path)!r} has no reference: {failure.text.rstrip('.')}.")
    return {index: job.expected(index) for index in indices}


def _prepared(number: int, case: Case | GraphCase, expected: Sequence[Expected], arrays: Arrays) -> PreparedCase:
    """The case as data; its arrays are added to `arrays`.

    If there are several honest evaluations, the first and the farthest are kept: no other one can have the largest
    error.
    """
    arrays.update({f"{number}/input/{name}": array for name, array in case.arrays.items()})
    outputs = []
    for each in expected:
        own = each.own[:1]
        if len(each.own) > 1 and np.asarray(each.exact).dtype.kind == "f":
            own = [each.own[0], max(each.own, key=lambda array: largest_error(array, each))]
        elif len(each.own) > 1:
            own = list(each.own)
        arrays[f"{number}/exact/{each.name}"] = np.asarray(each.exact)
        arrays.update({f"{number}/own{at}/{each.name}": np.asarray(array) for at, array in enumerate(own)})
        if each.select is not None:
            arrays[f"{number}/select/{each.name}"] = np.ascontiguousarray(each.select)
        outputs.append(
            PreparedOutput(
                name=each.name,
                error=max((largest_error(array, each) for array in own), default=0.0),
                dtype=each.dtype,
                tolerance=each.tolerance,
                least_scale=each.least_scale,
                evaluations=len(own),
                selected=each.select is not None,
            )
        )
    return PreparedCase(name=case.name, far_out=case.far_out, inputs=tuple(case.arrays), outputs=tuple(outputs))


def _run(job: ArtifactJob | GraphJob, cases: Sequence[Case | GraphCase], row: Runtime) -> PreparedRun:
    if isinstance(job, GraphJob):
        graph_cases = [case for case in cases if isinstance(case, GraphCase)]
        refused, indices = (
            eligible.unsupported_reason(job.subject, row),
            eligible.affordable(job.subject, graph_cases, row),
        )
        options = eligible.run_options([graph_cases[index] for index in indices], row)
        excused = eligible.is_excused(job.subject, row)
    else:
        artifact = job.artifact
        refused, excused = eligibility.unsupported_reason(artifact.source, row), False
        indices = [at for at, case in enumerate(cases) if eligibility.is_affordable(artifact.spec, case.sizes, row)]
        options = submission.run_options(artifact, row, [cases[index].sizes for index in indices])
    if refused is None and not indices:
        refused = eligibility.slow_reason(row)
    return PreparedRun(cases=tuple(indices), options=options, refused=refused, excused=excused)


def _tokens(check: GreedyCheck, path: Path, arrays: Arrays) -> PreparedTokens:
    """The tokens that ONNX Runtime makes on the CPU, with the logits of float64 before each of them."""
    prompts, row = check.prompts(), RUNTIMES["ort-cpu"]
    made = generate_in_child(path, row.options, prompts, GenerationOptions(max_new_tokens=check.count)).tokens
    evaluation = check.evaluated(prompts, made)
    if evaluation.failure is not None:
        raise RequestError(f"{str(path)!r} has no reference for tokens: {evaluation.failure.text.rstrip('.')}.")
    arrays["tokens/exact"], arrays["tokens/own"] = evaluation.exact["logits"], evaluation.own[0]["logits"]
    return PreparedTokens(
        prompts=tuple(map(tuple, prompts)), tokens=tuple(map(tuple, made)), tolerance=check.tolerance_of_logits()
    )
