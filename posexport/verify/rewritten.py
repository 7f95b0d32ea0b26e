"""Rewrites a file and verifies the whole new file on every installed runtime, before it gets its name.

The truth is the original in float64. If the new file fails on a runtime on which the original doesn't, it is not
written. If the original fails too, the fault is not that of the rewriting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.manifest import OnnxManifest
from posexport.errors import Reason
from posexport.progress import Progress, silent
from posexport.rewrite.draft import Draft, draft
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import KEPT, RewriteResult
from posexport.runtimes import INTERPRETER, ORT, RUNTIMES, TENSORRT, TORCH, Runtime
from posexport.verify.eligibility import UNSUPPORTED
from posexport.verify.graph.subject import GraphSubject, read_file, read_subject
from posexport.verify.result import FAILED, INCONCLUSIVE, NOT_RUN, OVER_LIMIT, REFERENCE_FAILED, Verdict
from posexport.verify.side_by_side import SideBySide, side_by_side
from posexport.verify.verifier import TIME_LIMIT, verify

if TYPE_CHECKING:
    from posexport.artifact.signing import SigningKey

ORIGINAL_FAILS, UNREADABLE = "original-fails", "unreadable"
NO_ATTENTION, ATTENTION_LEFT, ANGLES_LEFT = "no-attention", "left", "angles-left"
QUANTISED = "quantised"
"""Codes of reasons.

They stand for: the original fails on a runtime too; verify can't take the file; `require_all` asks for more (no
attention was found, one is left, or its angles are left); a quantised file gives the same as the original on the same
runtime.
"""


_OF_NUMBERS = (OVER_LIMIT, INCONCLUSIVE)
QUANTISED_LIMIT = 1e-5
"""How far two quantised files that round alike may differ on most inputs, as a part of the largest value."""


@attrs.frozen(kw_only=True)
class RewrittenFile:
    """A rewriting with its verdicts by runtime; `manifest` is that of the new file, None if none was written.

    `refusal` says why none was.
    """

    result: RewriteResult
    verdicts: tuple[Verdict, ...] = ()
    manifest: OnnxManifest | None = None
    refusal: Reason | None = None


def rewrite_and_verify(
    path: Path,
    target: Path,
    options: RewriteOptions,
    *,
    runtimes: Mapping[str, Runtime] = RUNTIMES,
    key: SigningKey | None = None,
    progress: Progress = silent,
) -> RewrittenFile:
    """Rewrite the ONNX file at `path` to `target`, and try both on each of `runtimes` except torch.

    Nothing is written if an attention is left that `require_all` asks for, or if the new file fails on a runtime.
    RequestError as `posexport.rewrite.draft.draft` raises it.
    """
    with draft(path, target, options, progress) as made:
        result = made.result
        if options.require_all and not result.is_complete:
            return RewrittenFile(result=result, refusal=_left(result))
        verdicts = _verdicts(path, made, runtimes, progress) if result.changed else ()
        failed = next((verdict for verdict in verdicts if verdict.state == FAILED), None)
        if failed is not None:
            reason = Reason(str(failed.reason_code), f"the new file fails on {failed.runtime}: {failed.reason}")
            return RewrittenFile(result=result, verdicts=verdicts, refusal=reason)
        return RewrittenFile(result=result, verdicts=verdicts, manifest=made.publish(key))


def _left(result: RewriteResult) -> Reason:
    if not result.attentions:
        return Reason(NO_ATTENTION, "no attention was found")
    count, total, first = len(result.left), len(result.attentions), result.left[0]
    if first["state"] != KEPT:  # its angles are left
        text = f"the angles of {count} of {total} attentions are left as they were"
        return Reason(ANGLES_LEFT, f"{text}, {first['name']}: {first['angles']['reason']['text']}")
    reason = (first["reason"] or {}).get("text")
    return Reason(ATTENTION_LEFT, f"{count} of {total} attentions are left as they were, {first['name']}: {reason}")


def _verdicts(path: Path, made: Draft, runtimes: Mapping[str, Runtime], progress: Progress) -> tuple[Verdict, ...]:
    """The verdicts on the rewritten file by runtime; "not run" if the original fails too.

    If caches became buffers, the inputs differ from the original's. With exact angles, the function is another one at
    far positions. In both cases the truth is the new file itself in float64. It was compared before with the original,
    or with the original with exact angles.
    """
    target, options = str(made.target), made.options
    rows = {name: row for name, row in runtimes.items() if row.module != TORCH}
    alone = [name for name, row in rows.items() if options.target == "ort" and row.module in (TENSORRT, INTERPRETER)]
    settings: dict[str, Any] = {"roles": options.roles, "seed": options.seed, "step": progress}
    against = path if options.kv_cache is None and options.angles is None else None
    tried = {name: row for name, row in rows.items() if name not in alone}
    report = verify([made.path], runtimes=tried, against=against, **settings)
    verdicts = {verdict.runtime: _named(verdict, made) for verdict in report.verdicts}
    for file in report.unreadable:
        reason = Reason(UNREADABLE, file.error.rstrip("."))
        verdicts |= {name: _named(Verdict.of(target, name, NOT_RUN, reason), made) for name in tried}
    reason = Reason(UNSUPPORTED, "the target is ort: the new file is for ONNX Runtime only")
    verdicts |= {name: Verdict.of(target, name, NOT_RUN, reason) for name in alone}
    if against is not None:
        verdicts = _beside_the_original(path, made, rows, verdicts)
    failing = {name: rows[name] for name, verdict in verdicts.items() if verdict.state == FAILED}
    originals = verify([path], runtimes=failing, **settings).verdicts if failing else ()
    for original in originals:
        if original.state == FAILED and _is_no_worse(verdicts[original.runtime], original):
            reason = Reason(ORIGINAL_FAILS, f"the original fails on it too: {original.reason}")
            verdicts[original.runtime] = Verdict.of(target, original.runtime, NOT_RUN, reason)
    return tuple(verdicts[name] for name in rows if name in verdicts)


def _beside_the_original(
    path: Path, made: Draft, rows: Mapping[str, Runtime], verdicts: Mapping[str, Verdict]
) -> dict[str, Verdict]:
    """The verdicts, corrected by runs of both files on the same runtime.

    These runs are made if float64 has no value, and if the numbers of a quantised file fail.
    """
    unknown = [
        name for name, one in verdicts.items() if one.reason_code == REFERENCE_FAILED and rows[name].module == ORT
    ]
    failing = [name for name, one in verdicts.items() if one.state == FAILED and one.reason_code in _OF_NUMBERS]
    settled = dict(verdicts)
    if unknown or failing:
        original = read_subject(read_file(path))
        for name in unknown:
            found = _side_by_side(original, made, rows[name])
            settled[name] = _with_difference(verdicts[name], found)
        on_cpu = next((row for row in rows.values() if row.module == ORT and not row.needs_gpu), None)
        if failing and on_cpu is not None and original.is_quantised:
            found = _side_by_side(original, made, on_cpu)
            settled |= {name: _excused_by_quantisation(verdicts[name], found, on_cpu.name) for name in failing}
    return settled


def _side_by_side(original: GraphSubject, made: Draft, row: Runtime) -> SideBySide:
    return side_by_side(original, made.path, row, TIME_LIMIT, made.options.roles, made.options.seed)


def _with_difference(verdict: Verdict, found: SideBySide) -> Verdict:
    """The verdict for a file that float64 can't evaluate."""
    if found.problem is not None:
        return attrs.evolve(verdict, state=FAILED, reason=str(found.problem), reason_code=found.problem.code)
    text = f"beside the original, on {found.cases} sets of inputs, it differs by {found.error:.1e} of the largest value"
    return attrs.evolve(verdict, reason=f"{str(verdict.reason).rstrip('.')}; {text}") if found.cases else verdict


def _excused_by_quantisation(verdict: Verdict, found: SideBySide, runtime: str) -> Verdict:
    """ "Not run" instead of a failure, if both files give the same on one runtime.

    The last digit of a float decides between whole numbers, and a runtime and float64 may decide differently.
    """
    if found.problem is not None or not found.cases or found.median > QUANTISED_LIMIT:
        return verdict
    text = f"the file is quantised, so its last digits decide between whole numbers: {verdict.reason}"
    beside = (
        f"beside the original {runtime} gives the same to {found.error:.1e}, and on half of {found.cases} sets of "
        f"inputs to {found.median:.1e}"
    )
    return attrs.evolve(verdict, state=NOT_RUN, reason=f"{text.rstrip('.')}; {beside}", reason_code=QUANTISED)


def _is_no_worse(new: Verdict, original: Verdict) -> bool:
    """Whether the new file fails as the original does: for the same reason, and by at most twice as much."""
    errors = [verdict.worst.max_error if verdict.worst is not None else None for verdict in (new, original)]
    if new.reason_code != original.reason_code or (errors[0] is None) != (errors[1] is None):
        return False
    return errors[0] is None or errors[1] is None or errors[0] <= 2 * errors[1]


def _named(verdict: Verdict, made: Draft) -> Verdict:
    """The verdict on the draft, with the name that the file will get."""

    def named(text: str | None) -> str | None:
        return None if text is None else text.replace(str(made.path), str(made.target))

    return attrs.evolve(
        verdict,
        artifact=str(made.target),
        reason=named(verdict.reason),
        where=named(verdict.where),
        departure=named(verdict.departure),
    )
