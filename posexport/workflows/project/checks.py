"""What a project's files must keep beside parity: to be there and up to date, and within their budget.

Each check gives a verdict of the "runtime" `project`, so that reports hold it like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.manifest import read_plan_manifest
from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt.api import can_build
from posexport.verify.result import FAILED, NOT_RUN, PARITY, PASSED, PROJECT, Report, State, Verdict, VerifyOverrides
from posexport.workflows.project.limits import size_text
from posexport.workflows.project.products import Product, out_of_date

UP_TO_DATE = "up to date"


def terms_of(product: Product, chosen: Sequence[str]) -> VerifyOverrides:
    """On which of the `chosen` runtimes (none: all) parity is checked, with which numbers; a plan's is its builder."""
    entry = product.entry
    asked = (entry.compile.runtime,) if product.plan and entry.compile else entry.runtimes or tuple(RUNTIMES)
    runtimes = tuple(name for name in asked if not chosen or name in chosen)
    return VerifyOverrides(runtimes=runtimes, tolerance=entry.tolerance.given())


def check(product: Product, source: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts on one file; `source` is what it is to be made from."""
    if product.plan and not product.path.is_file() and (missing := can_build(source["runtime"])) is not None:
        return [_verdict(product, UP_TO_DATE, NOT_RUN, f"{source['runtime']} can't build it here, {missing}")]
    reason = out_of_date(product, source)
    told = None if reason is None else f"{reason}: run 'posexport build'"
    found = [_verdict(product, UP_TO_DATE, PASSED if told is None else FAILED, told)]
    if product.path.is_file():
        found += _budget(product)
    return found


def _budget(product: Product) -> Iterator[Verdict]:
    """The verdicts on the file's size and, for a plan, its kernels; those without a limit are left out."""
    budget = product.entry.budget
    size_limit = budget.plan_size if product.plan else budget.size
    if size_limit is not None:
        size = product.bytes()
        yield _limited(product, "size", size <= size_limit, size_text(size), size_text(size_limit))
    if not product.plan:
        return
    try:
        manifest = read_plan_manifest(product.path)
    except RequestError:  # out_of_date reports it
        manifest = None
    kernels = None if manifest is None else manifest.kernels
    unknown = f"unknown: {'its manifest has no kernels' if kernels is None else kernels.unknown}"
    if budget.kernels is not None:
        count = None if kernels is None else kernels.count
        if count is not None:
            yield _limited(product, "kernels", count <= budget.kernels, f"{count} kernels", str(budget.kernels))
        else:
            yield _verdict(product, "kernels", FAILED, unknown)
    if budget.fused_attention:
        fused = None if kernels is None else kernels.fused_attention
        if fused is None:
            yield _verdict(product, "fused attention", FAILED, unknown)
        else:
            measured = "one kernel in each layer" if fused else "not one kernel in each layer"
            yield _limited(product, "fused attention", fused is True, measured, "one kernel in each layer")


def _limited(product: Product, name: str, passed: bool, measured: str, limit: str) -> Verdict:
    reason = None if passed else f"{measured}, limit {limit}"
    verdict = _verdict(product, name, PASSED if passed else FAILED, reason)
    return attrs.evolve(verdict, measured=measured, limit_text=limit)


def _verdict(product: Product, name: str, state: State, reason: str | None) -> Verdict:
    return Verdict(artifact=str(product.path), runtime=PROJECT, state=state, reason=reason, check=name)


def is_stale(verdicts: Sequence[Verdict]) -> bool:
    """Whether a file is not what the project asks for."""
    return any(each.check == UP_TO_DATE and each.state == FAILED for each in verdicts)


def without_parity(
    files: Sequence[Product],
    terms: Mapping[Path, VerifyOverrides],
    checks: Mapping[Path, Sequence[Verdict]],
    ran: Report | None,
) -> list[Verdict]:
    """A verdict "not run" for each runtime of each file that is there but that parity was not told of."""
    told = {each.artifact for each in ran.verdicts} | {file.artifact for file in ran.unreadable} if ran else set()
    found = []
    for product in files:
        if str(product.path) in told or not product.path.is_file():
            continue
        names = terms[product.path].runtimes if product.path in terms else None
        if names:
            same = next((other for other in terms if other != product.path and other.samefile(product.path)), None)
            reason = f"it is the same file as {same}" if same else "the runtime took no part"
        else:
            stale = product.plan and is_stale(checks[product.path])
            names = terms_of(product, ()).runtimes
            reason = "it is out of date" if stale else "the runtime was not asked for"
        path = str(product.path)
        found += [Verdict(artifact=path, runtime=name, state=NOT_RUN, reason=reason) for name in names or ()]
    return found


def exit_code(report: Report, required: Sequence[str]) -> int:
    """As a report's own, but nothing is proved where no runtime ran, whatever the files look like."""
    code = report.exit_code(required)
    ran = any(each.check == PARITY and each.state != NOT_RUN for each in report.verdicts)
    return 3 if code == 0 and not ran else code


def joined(
    checks: Mapping[Path, Sequence[Verdict]], report: Report | None, unrun: Sequence[Verdict], seed: int
) -> Report:
    """One report of all, file by file; `report` is None where no file was there to be run."""
    verdicts = {path: list(found) for path, found in checks.items()}
    for verdict in (*(report.verdicts if report else ()), *unrun):
        verdicts[Path(verdict.artifact)].append(verdict)
    return Report(
        verdicts=tuple(verdict for found in verdicts.values() for verdict in found),
        unreadable=report.unreadable if report else (),
        manifest_warnings=report.manifest_warnings if report else (),
        seed=seed,
    )
