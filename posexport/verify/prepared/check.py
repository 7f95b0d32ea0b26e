"""Verifies a prepared file: runs its inputs on runtimes, and judges outputs and tokens by the references beside it.

Nothing is exported, drawn or evaluated in float64 here. A file that is not as it was prepared fails without a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from posexport.errors import PosexportError, Reason
from posexport.files import sha256_of
from posexport.processes import NOTHING_SHOWN
from posexport.runtimes import ORT, Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, Pool, result
from posexport.runtimes.tensors import load_arrays
from posexport.runtimes.wide_outputs import columns_of
from posexport.spec.arrays import Array
from posexport.verify.graph.judge_tokens import judge_tokens
from posexport.verify.graph.parity import Expected, compare
from posexport.verify.parity import inconclusive_reason, judge, set_aside
from posexport.verify.prepared.data import ARRAYS, PreparedCase, PreparedFile, PreparedTokens
from posexport.verify.result import (
    FAILED,
    GENERATION,
    INCONCLUSIVE,
    NO_LOOP,
    NOT_RUN,
    OTHER_TOKENS,
    Comparison,
    State,
    Verdict,
)
from posexport.verify.rounding import is_near

DAMAGED = "damaged"
"""The code of a file that is not the one that was prepared."""

TOO_OLD = "too-old"
"""The code of an engine that is older than posexport needs and can't open the file."""

LONGEST = 400
"""The most characters of a reason: engines write errors of any length."""


def damage(prepared: PreparedFile, folder: Path) -> Reason | None:
    """How the files in a folder differ from those that were prepared; None if they don't."""
    for name, expected in prepared.sha256.items():
        try:
            actual = sha256_of(folder / name)
        except OSError as error:
            return Reason(DAMAGED, f"{name!r} can't be read ({error.strerror}): copy it again")
        if actual != expected:
            return Reason(DAMAGED, f"{name!r} is not the file that was prepared, its sha256 differs: copy it again")
    return None


def check_file(
    prepared: PreparedFile,
    folder: Path,
    pool: Pool,
    runtimes: Mapping[str, Runtime],
    missing: Mapping[str, Reason | None],
) -> Iterator[Verdict]:
    """The verdicts on each runtime, one after the other: on parity, and on generation if there are tokens."""
    reason = damage(prepared, folder)
    arrays = {} if reason is not None else load_arrays(folder / ARRAYS)
    for name, row in runtimes.items():
        if reason is not None:
            yield Verdict.of(prepared.model, name, FAILED, reason)
            continue
        parity = _parity(prepared, folder, pool, row, missing[name], arrays)
        yield parity
        if prepared.tokens is not None and parity.state != NOT_RUN:
            yield _generation(prepared.tokens, folder / prepared.model, row, arrays)


def _parity(
    prepared: PreparedFile, folder: Path, pool: Pool, row: Runtime, missing: Reason | None, arrays: Arrays
) -> Verdict:
    run, model = prepared.runs[row.name], prepared.model
    fields: dict[str, Any] = {
        "sha256": prepared.sha256[model],
        "reference": prepared.reference,
        "notes": () if row.note is None else (row.note,),
    }
    if (unable := run.refused or missing) is not None:
        return Verdict.of(model, row.name, NOT_RUN, unable, **fields)
    cases = [(number, prepared.cases[number]) for number in run.cases]
    inputs = [{name: arrays[f"{number}/input/{name}"] for name in case.inputs} for number, case in cases]
    answer = result(pool.submit(row, folder / model, inputs, run.options, wide=prepared.wide))
    fields["describe"] = answer.describe
    if answer.failure is not None:
        failure = Reason(answer.failure.code, answer.failure.text.replace(f"{folder.absolute()}/", "")[:LONGEST])
        nothing = run.excused or failure.code in NOTHING_SHOWN
        if row.module == ORT and (old := _too_old(pool, row, folder / model, run.options)) is not None:
            nothing, failure = True, Reason(TOO_OLD, f"{old}: {failure.text}")
        state: State = NOT_RUN if nothing else FAILED
        return Verdict.of(model, row.name, state, failure, **fields)
    return _judged(prepared, row.name, cases, answer, arrays, fields)


def _too_old(pool: Pool, row: Runtime, path: Path, options: Mapping[str, Any]) -> str | None:
    """Why a failure says nothing about the file: ONNX Runtime is older than posexport needs and can't even open the
    file."""
    from posexport.runtimes.ort import OLDEST, is_too_old

    if not is_too_old() or result(pool.submit(row, path, [], options)).failure is None:
        return None
    return f"this onnxruntime is older than {OLDEST} and can't open the file"


def _judged(
    prepared: PreparedFile,
    runtime: str,
    cases: Sequence[tuple[int, PreparedCase]],
    answer: Answer,
    arrays: Arrays,
    fields: dict[str, Any],
) -> Verdict:
    comparisons, left, model = list[Comparison](), list[str](), prepared.model
    tolerances = {}
    for (number, case), outputs in zip(cases, answer.outputs, strict=True):
        tolerances[case.name] = max((each.tolerance for each in case.outputs), key=lambda one: one.ceiling)
        expected = _expected(number, case, arrays, prepared.wide)
        if not _is_as_prepared(case, expected):
            reason = Reason(DAMAGED, f"the reference of {case.name} is not the one that was prepared: copy it again")
            return Verdict.of(model, runtime, FAILED, reason, **fields)
        first = [attrs.evolve(each, own=each.own[:1]) for each in expected]
        found, clauses = compare(case.name, first, outputs, case.far_out)
        if any(map(is_near, found)):
            found, clauses = compare(case.name, expected, outputs, case.far_out)
        comparisons += found
        left += clauses
    comparisons, unclear = set_aside(comparisons, tolerances)
    verdict = judge(model, runtime, comparisons, len(cases), not_shown=(*unclear, *left), **fields)
    if verdict.state == FAILED and verdict.worst is not None:
        inconclusive = inconclusive_reason(verdict.worst, tolerances[verdict.worst.case])
        if inconclusive is not None:
            return Verdict.of(model, runtime, FAILED, Reason(INCONCLUSIVE, inconclusive), worst=verdict.worst, **fields)
    return verdict


def largest_error(array: Array, each: Expected) -> float:
    """The largest error of an honest evaluation among the values that mean something, without NaN and infinity."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(np.asarray(array).astype(np.float64) - np.asarray(each.exact).astype(np.float64))
    errors = errors if each.select is None else errors[each.select]
    return float(np.where(np.isfinite(errors), errors, 0.0).max(initial=0.0))


def _is_as_prepared(case: PreparedCase, expected: Sequence[Expected]) -> bool:
    """Whether honest evaluations are as near to the reference as they were when it was made."""
    return all(
        max((largest_error(array, each) for array in each.own), default=0.0) <= known.error
        for known, each in zip(case.outputs, expected, strict=True)
    )


def _expected(number: int, case: PreparedCase, arrays: Arrays, wide: Mapping[str, int]) -> list[Expected]:
    """What the outputs of a case must be."""
    return [
        Expected(
            name=each.name,
            exact=arrays[f"{number}/exact/{each.name}"],
            own=[arrays[f"{number}/own{at}/{each.name}"] for at in range(each.evaluations)],
            select=arrays[f"{number}/select/{each.name}"] if each.selected else None,
            dtype=each.dtype,
            tolerance=each.tolerance,
            least_scale=each.least_scale,
            columns=columns_of(arrays[f"{number}/exact/{each.name}"].shape, wide.get(each.name)),
        )
        for each in case.outputs
    ]


def _generation(tokens: PreparedTokens, path: Path, row: Runtime, arrays: Arrays) -> Verdict:
    """Whether a runtime makes the same tokens.

    If it takes another token that is right too, nothing is known about the rest of the row: the logits are those after
    the prepared tokens.
    """
    if row.module != ORT:
        reason = Reason(NO_LOOP, "tokens are made one after the other in ONNX Runtime only")
        return Verdict.of(path.name, row.name, NOT_RUN, reason, check=GENERATION)
    from posexport.runtimes.generation import GenerationOptions
    from posexport.runtimes.generation_process import generate_in_child

    prompts, expected = [list(row) for row in tokens.prompts], np.array(tokens.tokens)
    try:
        options = GenerationOptions(max_new_tokens=expected.shape[1])
        generated = generate_in_child(path, row.options, prompts, options)
    except PosexportError as error:
        failure = Reason(OTHER_TOKENS, str(error).rstrip("."))
        return Verdict.of(path.name, row.name, FAILED, failure, check=GENERATION)
    made = np.array(generated.tokens)
    known = np.cumprod(np.hstack((np.ones((len(made), 1), bool), made == expected))[:, :-1], axis=1).astype(bool)
    exact, own = arrays["tokens/exact"], arrays["tokens/own"]
    verdict = judge_tokens(path.name, row.name, made, exact, own, tokens.tolerance, known)
    speed = f"{1 / np.median(generated.step_seconds):,.0f} tokens per second of each row" if made.shape[1] > 1 else ""
    return attrs.evolve(verdict, notes=(*verdict.notes, *([speed] if speed else [])))
