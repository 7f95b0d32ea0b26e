"""Verifying a project: every file is checked, and parity is verified for those that are there and up to date."""

from __future__ import annotations

from collections.abc import Sequence

from posexport.runtimes import RUNTIMES
from posexport.verify.result import Report
from posexport.verify.verifier import Advance, verify
from posexport.workflows.project import checks
from posexport.workflows.project.file import Project
from posexport.workflows.project.products import products
from posexport.workflows.project.requests import read_requests


def verify_project(
    project: Project,
    *,
    runtimes: Sequence[str],
    required: Sequence[str],
    seed: int,
    properties: bool,
    time_limit: float,
    advance: Advance = lambda name, total: None,
) -> tuple[Report, int]:
    """The report on a project's files, and its exit code; parity on `runtimes` (none: those that the project states)
    and on the `required` ones. The other arguments are those of `verify`."""
    files = products(project)
    sources, _ = read_requests(project, files)
    checked = {product.path: checks.check(product, sources[product.path]) for product in files}
    overrides = {
        product.path: checks.terms_of(product, [*runtimes, *required] if runtimes else [])
        for product in files
        if product.path.is_file() and not (product.plan and checks.is_stale(checked[product.path]))
    }
    overrides = {path: settings for path, settings in overrides.items() if settings.runtimes}
    names = {name for settings in overrides.values() for name in settings.runtimes or ()}
    report = None
    if names:
        report = verify(
            list(overrides),
            runtimes={name: row for name, row in RUNTIMES.items() if name in names},
            seed=seed,
            properties=properties,
            time_limit=time_limit,
            overrides=overrides,
            advance=advance,
        )
    missing = checks.without_parity(files, overrides, checked, report)
    report = checks.joined(checked, report, missing, seed)
    return report, checks.exit_code(report, required)
