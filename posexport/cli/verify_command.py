"""`posexport verify`: artifacts against the float64 reference, on every runtime that is there; without files, those of
the project, which must be up to date and within their budget too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.project_options import project_option
from posexport.cli.verify_tables import missing_sentence, report_path, show_report, show_warnings
from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES, runtime
from posexport.verify.result import VerifyOptions, unreadable_report

if TYPE_CHECKING:
    from posexport.verify.result import Report
    from posexport.workflows.project.file import Project


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
    junit: str | None,
    markdown: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Prove that artifacts (.onnx, .plan, or folders of them) compute what the torch block of their spec computes.

    Without FILES, those of the project (posexport.toml, or [tool.posexport] of a pyproject.toml), on the runtimes and
    with the tolerances that it states; they must be up to date and within their budget too.

    Exits 0 where all that ran passed, 1 where something failed, 2 where an artifact can't be read, 3 where a required
    runtime, or every runtime, was not run.
    """
    settings = VerifyOptions(**{name: value for name, value in options.items() if value is not None})
    named = tuple(runtime(name).name for name in dict.fromkeys((*runtimes, *required)))
    reports = {"junit": report_path("junit", junit), "markdown": report_path("markdown", markdown)}
    if paths and project_file is not None:
        raise RequestError("both files and --project were given: without files the project's are meant; drop one.")
    if inputs is not None and not paths:
        raise RequestError("--inputs was given without files: they are one artifact's, so give that artifact too.")
    title, identity = "Parity with torch in float64", {}
    if paths:
        report = _verify_files([Path(path) for path in paths], named if runtimes else (), inputs, settings)
        code = report.exit_code(required)
    else:
        from posexport.workflows.project.products import open_project

        project = open_project(project_file)
        required = (*required, *(name for name in project.require if name not in required))
        title, identity = f"Project {project.file}: parity with torch in float64", {"project": str(project.file)}
        report, code = _verify_project(project, named if runtimes else (), required, settings)
    from posexport.report.verdicts import write_reports

    write_reports(report, **reports)
    if as_json:
        console.show_json({**report.to_dict(required), **identity, "exit_code": code})
    elif report.verdicts:
        show_report(report, title)
    show_warnings(report, code)
    return console.fail(missing_sentence(report, required), code) if code == 3 else code


def _verify_files(paths: list[Path], runtimes: Sequence[str], inputs: str | None, settings: VerifyOptions) -> Report:
    report = unreadable_report(paths, settings.seed)
    if report is not None:
        return report
    with console.steps("loading torch", total=len(paths)) as progress:
        from posexport.verify.verifier import verify as run

        return run(
            paths,
            runtimes={name: row for name, row in RUNTIMES.items() if not runtimes or name in runtimes},
            inputs=None if inputs is None else Path(inputs),
            advance=lambda name, total: progress.update(f"verified {name}", advance=1, total=total),
            **attrs.asdict(settings),
        )


def _verify_project(
    project: Project, runtimes: Sequence[str], required: Sequence[str], settings: VerifyOptions
) -> tuple[Report, int]:
    with console.steps("loading torch") as progress:
        from posexport.workflows.project.verify import verify_project

        return verify_project(
            project,
            runtimes=runtimes,
            required=required,
            advance=lambda name, total: progress.update(f"verified {name}", advance=1, total=total),
            **attrs.asdict(settings),
        )
