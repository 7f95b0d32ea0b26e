"""Verifying a project: each file exists, is up to date and within its budget, and its parity is verified.

Each check other than parity gives a verdict whose "runtime" is `project`, so that reports show it like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import attrs

from posexport.artifact.manifest import PlanKernels, PlanManifest, read_manifest_of
from posexport.artifact.signing import TrustedKey
from posexport.errors import RequestError
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt.api import can_build
from posexport.verify.result import (
    FAILED,
    NOT_RUN,
    PASSED,
    PROJECT,
    Report,
    State,
    Verdict,
    VerifyOptions,
    VerifyOverrides,
)
from posexport.verify.verifier import Advance, verify
from posexport.workflows.project.file import Project
from posexport.workflows.project.limits import exact_size
from posexport.workflows.project.products import Product, out_of_date, products

UP_TO_DATE = "up to date"


def verify_project(
    project: Project,
    options: VerifyOptions,
    *,
    runtimes: Sequence[str],
    required: Sequence[str],
    advance: Advance,
    trusted: Sequence[TrustedKey] = (),
    step: Progress = silent,
) -> Report:
    """The report on a project's files.

    Parity is verified on `runtimes` (empty: those that the project states) and the `required` ones. One of the
    `trusted` keys must have signed each file.
    """
    files = products(project)
    checked = {product.path: check(product) for product in files}
    overrides = {
        product.path: terms_of(product, [*runtimes, *required] if runtimes else [])
        for product in files
        if product.path.is_file() and not (product.plan and is_stale(checked[product.path]))
    }
    overrides = {path: settings for path, settings in overrides.items() if settings.runtimes}
    names = {name for settings in overrides.values() for name in settings.runtimes or ()}
    report = Report(verdicts=(), unreadable=(), seed=options.seed)
    if names:
        report = verify(
            list(overrides),
            runtimes={name: row for name, row in RUNTIMES.items() if name in names},
            overrides=overrides,
            trusted=trusted,
            advance=advance,
            step=step,
            **attrs.asdict(options),
        )
    verdicts = (*chain(*checked.values()), *report.verdicts, *without_parity(files, overrides, checked, report))
    order = list(map(str, checked))
    return attrs.evolve(report, verdicts=tuple(sorted(verdicts, key=lambda verdict: order.index(verdict.artifact))))


def terms_of(product: Product, chosen: Sequence[str]) -> VerifyOverrides:
    """The terms of a file's parity: its runtimes among the `chosen` (empty: all), the entry's tolerance, and what it
    must be an export of.

    A plan is checked on the runtime that builds it.
    """
    entry = product.entry
    asked = (product.plan.runtime,) if product.plan else entry.runtimes or tuple(RUNTIMES)
    runtimes = tuple(name for name in asked if not chosen or name in chosen)
    tolerance = {name: value for name, value in attrs.asdict(entry.tolerance).items() if value is not None}
    original = None
    if product.original is not None:
        from posexport.artifact.original import Original

        original = Original(**product.original)
    return VerifyOverrides(runtimes=runtimes, tolerance=tolerance, original=original)


def check(product: Product) -> list[Verdict]:
    """The verdicts on one file, except parity."""
    plan = product.plan
    if plan and not product.path.is_file() and (missing := can_build(plan.runtime)) is not None:
        reason = f"{plan.runtime} can't build it here, {missing}"
        return [_verdict(product, UP_TO_DATE, reason, NOT_RUN)]
    problem = out_of_date(product)
    text, code = (None, None) if problem is None else (f"{problem}: run 'posexport build'", problem.code)
    verdicts = [attrs.evolve(_verdict(product, UP_TO_DATE, text), reason_code=code)]
    if product.path.is_file():
        verdicts += _budget(product)
    return verdicts


def _budget(product: Product) -> Iterator[Verdict]:
    """The verdicts on the file's size and, for a plan, its kernels. Those without a limit are left out."""
    budget = product.entry.budget
    size_limit = budget.plan_size if product.plan else budget.size
    if size_limit is not None:
        size = product.bytes()
        yield _limited(product, "size", size <= size_limit, exact_size(size), exact_size(size_limit))
    if not product.plan:
        return
    kernels = PlanKernels.unlisted(0, "its manifest has no kernels")
    with suppress(RequestError):  # out_of_date reports it
        if (manifest := read_manifest_of(PlanManifest, product.path)) is not None:
            kernels = manifest.kernels
    unknown = f"unknown: {kernels.unknown}"
    if budget.kernels is not None:
        fits = None if kernels.count is None else kernels.count <= budget.kernels
        yield _limited(product, "kernels", fits, f"{kernels.count} kernels", str(budget.kernels), unknown)
    if budget.fused_attention:
        fused, limit = kernels.fused_attention, "one kernel in each layer"
        yield _limited(product, "fused attention", fused, limit if fused else f"not {limit}", limit, unknown)


def _limited(product: Product, name: str, passed: bool | None, measured: str, limit: str, unknown: str = "") -> Verdict:
    """The verdict on what has a limit. If it is not known (`passed` is None), `unknown` says why."""
    if passed is None:
        return _verdict(product, name, unknown)
    verdict = _verdict(product, name, None if passed else f"{measured}, limit {limit}")
    return attrs.evolve(verdict, measured=measured, limit_text=limit)


def _verdict(product: Product, name: str, reason: str | None, state: State = FAILED) -> Verdict:
    """The verdict of a check. It passed if there is no reason, otherwise `state` is its outcome."""
    state = PASSED if reason is None else state
    return Verdict(artifact=str(product.path), runtime=PROJECT, state=state, reason=reason, check=name)


def is_stale(verdicts: Sequence[Verdict]) -> bool:
    """Whether the verdicts on a file say that it is out of date."""
    return any(verdict.check == UP_TO_DATE and verdict.state == FAILED for verdict in verdicts)


def without_parity(
    files: Sequence[Product],
    terms: Mapping[Path, VerifyOverrides],
    checks: Mapping[Path, Sequence[Verdict]],
    ran: Report,
) -> list[Verdict]:
    """A verdict "not run" for each runtime of each existing file without a verdict of parity."""
    reported = {verdict.artifact for verdict in ran.verdicts} | {file.artifact for file in ran.unreadable}
    verdicts = []
    for product in files:
        path = str(product.path)
        if path in reported or not product.path.is_file():
            continue
        if product.path in terms:
            names = terms[product.path].runtimes
            same = next((other for other in terms if other != product.path and other.samefile(product.path)), None)
            reason = f"it is the same file as {same}" if same else "the runtime took no part"
        else:
            stale = product.plan and is_stale(checks[product.path])
            names = terms_of(product, ()).runtimes
            reason = "it is out of date" if stale else "the runtime was not asked for"
        verdicts += [Verdict(artifact=path, runtime=name, state=NOT_RUN, reason=reason) for name in names or ()]
    return verdicts
