"""`posexport verify`: artifacts against the float64 reference, on every runtime that is there; without files, those of
the project, which must be up to date and within their budget too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.project_options import project_option
from posexport.errors import RequestError
from posexport.files import check_writable
from posexport.runtimes import RUNTIMES, Runtime, runtime
from posexport.spec.fields import integer, positive
from posexport.workflows.project.requests import open_project, read_requests

if TYPE_CHECKING:
    from posexport.verify.result import Report
    from posexport.workflows.project.file import Project


@attrs.frozen(kw_only=True)
class VerifyOptions:
    """The numbers among the options, validated."""

    seed: int = integer(0, "seed of the inputs", at_least=0)
    time_limit: float = positive(300.0, "seconds that one runtime may take for one artifact")


@click.command()
@click.argument("paths", metavar="[FILES_OR_FOLDERS]...", nargs=-1)
@project_option
@click.option("--runtime", "runtimes", metavar="NAME", multiple=True, help="only this one, repeatable  [default: all]")
@click.option("--require", "required", metavar="NAME", multiple=True, help="exit 3 if this runtime is not run")
@click.option("--inputs", metavar="FILE", help="your own inputs, a .npz  [default: several cases from --seed]")
@click.option("--seed", metavar="N", help="seed of the inputs  [default: 0]")
@click.option("--properties", is_flag=True, help="also try what must hold of the encoding, such as shifts of positions")
@click.option("--time-limit", metavar="SECONDS", help="for one artifact on one runtime  [default: 300]")
@click.option("--junit", metavar="FILE", help="write a JUnit XML report")
@click.option("--markdown", metavar="FILE", help="write a Markdown report, such as a job's summary")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def verify(
    paths: tuple[str, ...],
    project_file: str | None,
    runtimes: tuple[str, ...],
    required: tuple[str, ...],
    inputs: str | None,
    properties: bool,
    junit: str | None,
    markdown: str | None,
    as_json: bool,
    **numbers: Any,
) -> int:
    """Prove that artifacts (.onnx, .plan, or folders of them) compute what the torch block of their spec computes.

    Without FILES, those of the project (posexport.toml, or [tool.posexport] of a pyproject.toml), on the runtimes and
    with the tolerances that it states; they must be up to date and within their budget too.

    Exits 0 where all that ran passed, 1 where something failed, 2 where an artifact can't be read, 3 where a required
    runtime, or every runtime, was not run.
    """
    options = VerifyOptions(**{name: value for name, value in numbers.items() if value is not None})
    chosen = [runtime(name).name for name in dict.fromkeys((*runtimes, *required))]
    outputs = {"junit": junit, "markdown": markdown}
    reports = {name: None if text is None else _report_path(name, text) for name, text in outputs.items()}
    asked = {
        "seed": options.seed,
        "properties": properties,
        "time_limit": options.time_limit,
    }
    title = "Parity with torch in float64"
    project = None
    if paths:
        if project_file is not None:
            raise RequestError("both files and --project were given: without files the project's are meant; drop one.")
        rows = {name: row for name, row in RUNTIMES.items() if not runtimes or name in chosen}
        report = _verify([Path(path) for path in paths], rows, inputs=inputs and Path(inputs), **asked)
        code = report.exit_code(required)
    else:
        if inputs is not None:
            raise RequestError("--inputs was given without files: they are one artifact's, so give that artifact too.")
        project = open_project(project_file)
        required = (*required, *(name for name in project.require if name not in required))
        title = f"Project {project.file}: parity with torch in float64"
        report, code = _verify_project(project, chosen if runtimes else [], required, asked)
    from posexport.report.verdicts import to_dict, write_reports

    write_reports(report, **reports)
    if as_json:
        told = {} if project is None else {"project": str(project.file)}
        console.show_json({**to_dict(report, required), **told, "exit_code": code})
    elif report.verdicts:
        _show(report, title)
    unreadable = {file.artifact for file in report.unreadable}
    for artifact, fault in report.manifest_warnings:
        if artifact not in unreadable:  # whose error says enough
            console.warn(f"{artifact}: {fault}.")
    for file in report.unreadable:
        console.fail(file.error, code)
    return console.fail(_not_there(report, required), code) if code == 3 else code


def _verify(paths: list[Path], rows: Mapping[str, Runtime], **asked: Any) -> Report:
    """Run the stage with a bar that counts artifacts."""
    with console.steps("loading torch", total=len(paths)) as progress:
        from posexport.verify.verifier import verify as run

        done = 0

        def advance(name: str, total: int) -> None:
            nonlocal done
            done += 1
            progress.update(f"verified {name}", completed=done, total=total)

        progress.update("verifying")
        return run(paths, runtimes=rows, advance=advance, **asked)


def _verify_project(
    project: Project, chosen: Sequence[str], required: Sequence[str], asked: dict[str, Any]
) -> tuple[Report, int]:
    """Every file of the project: what it must keep beside parity, then parity of those that are there."""
    with console.steps("loading torch"):
        from posexport.workflows.project import checks as project_checks
        from posexport.workflows.project.products import products
    files = products(project)
    sources, _ = read_requests(project, files)
    checks = {product.path: project_checks.check(product, sources[product.path]) for product in files}
    terms = {
        product.path: project_checks.terms_of(product, [*chosen, *required] if chosen else [])
        for product in files
        if product.path.is_file() and not (product.plan and project_checks.is_stale(checks[product.path]))
    }
    terms = {path: each for path, each in terms.items() if each.runtimes}
    names = {name for each in terms.values() for name in each.runtimes or ()}
    rows = {name: row for name, row in RUNTIMES.items() if name in names}
    ran = _verify(list(terms), rows, terms=terms, **asked) if rows else None
    unrun = project_checks.without_parity(files, terms, checks, ran)
    report = project_checks.joined(checks, ran, unrun, asked["seed"])
    return report, project_checks.exit_code(report, required)


def _report_path(name: str, text: str) -> Path:
    path = Path(text)
    if path.suffix in (".onnx", ".plan", ".npz", ".data"):
        raise RequestError(
            f"{name} {text!r} has the name of an artifact or of inputs: give another, not {path.suffix}."
        )
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"{name} {text!r} can't be written: give the name of a file in a folder that is there.")
    check_writable(path)
    return path


def _show(report: Report, title: str) -> None:
    from posexport.report.verdicts import COLUMNS, rows, summary

    table = rows(report)
    parity = [verdict for verdict in report.verdicts if verdict.label == verdict.runtime]
    nowhere = {  # a runtime that no artifact was run on, for one reason: a line instead of a row for each
        name: reasons.pop()
        for name in dict.fromkeys(verdict.runtime for verdict in parity)
        if not {each.state for each in parity if each.runtime == name} - {"not run"}
        and len(reasons := {each.reason or "" for each in parity if each.runtime == name}) == 1
    }
    shown = [row for row in table if row[1] not in nowhere]
    if shown:
        more = {verdict.runtime for verdict in report.verdicts if verdict.label != verdict.runtime} - {"project"}
        title += ", and properties" if more else ""
        console.show_table(title, COLUMNS, shown, right=("error", "eager's", "allowed"))
    for name, reason in nowhere.items():
        click.echo(f"not run: {name} ({reason})")
    click.echo(summary(report))


def _not_there(report: Report, required: tuple[str, ...]) -> str:
    for verdict in report.verdicts:
        if verdict.runtime in required and verdict.label == verdict.runtime and verdict.state == "not run":
            return f"required runtime {verdict.runtime} was not run: {verdict.reason}."
    missing = [name for name in required if all(verdict.runtime != name for verdict in report.verdicts)]
    if missing:
        return f"required runtime {missing[0]} was not run: no artifact here is for it."
    absent = dict.fromkeys(f"{each.runtime} was not run: {each.reason}" for each in report.verdicts)
    return (
        f"nothing was verified: {next(iter(absent)) if len(absent) == 1 else 'no runtime was run, see their reasons'}."
    )
