"""`posexport verify`: compares artifacts, or those of a project, with the float64 reference on each installed
runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.options import (
    check_no_project,
    input_roles,
    project_options,
    report_file,
    roles_option,
    trust_option,
    trusted_keys,
)
from posexport.errors import RequestError
from posexport.files import check_writable
from posexport.runtimes import RUNTIMES, runtime
from posexport.spec.fields import stated
from posexport.verify.result import (
    GENERATION,
    NOT_RUN,
    PARITY,
    PASSED,
    PROJECT,
    Report,
    VerifyOptions,
    unreadable_report,
)
from posexport.workflows.project.file import find_project

if TYPE_CHECKING:
    from posexport.artifact.original import Original


_NEEDS_FILES = {
    "--inputs": "they belong to one artifact, so give that artifact too",
    **dict.fromkeys(("--against", "--module", "--input"), "it is about ONNX files, so give those too"),
    "--weights or --from": "each artifact of a project names what it is made from, so give the files too",
}
"""Why options need files, and what to do."""


@click.command()
@click.argument("paths", metavar="[FILES_OR_FOLDERS]...", nargs=-1)
@project_options
@click.option(
    "--runtime", "runtimes", metavar="NAME", multiple=True, help="use only this one; repeatable  [default: all]"
)
@click.option("--require", "required", metavar="NAME", multiple=True, help="exit with 3 if this runtime is not run")
@click.option(
    "--inputs", type=Path, metavar="FILE", help="your own inputs in an .npz file  [default: inputs drawn from --seed]"
)
@roles_option
@click.option(
    "--against", type=Path, metavar="FILE", help="compare files with this .onnx file in float64, not with themselves"
)
@click.option("--module", metavar="FILE.py:NAME", help="compare files with this torch module; its file is executed")
@click.option("--seed", metavar="N", help="seed of the inputs  [default: 0]")
@click.option(
    "--reach",
    metavar="SIZES",
    help="sizes that inputs must reach, such as seq=4096,batch=8  [default: depends on the block]",
)
@click.option("--cases", metavar="N", help="number of additional sets of inputs  [default: 0]")
@click.option(
    "--strict",
    is_flag=True,
    help="exit with 1 if a verdict is inconclusive, such as when no input reached a window or a table",
)
@click.option("--properties", is_flag=True, help="also test properties of the encoding, such as shifted positions")
@click.option("--time-limit", metavar="SECONDS", help="time limit for one artifact on one runtime  [default: 300]")
@click.option("--weights", metavar="FILE", help="compare the files' weights with this .safetensors file")
@click.option(
    "--from", "checkpoint", metavar="PATH", help="compare files with the configuration and weights of this checkpoint"
)
@click.option("--layer", metavar="N", help="with --from, the first layer that was exported  [default: 0]")
@click.option("--prefix-tokens", metavar="N", help="with --from, the value that was given to 'posexport export'")
@trust_option
@click.option("--junit", metavar="FILE", help="write a JUnit XML report")
@click.option("--markdown", metavar="FILE", help="write a Markdown report, for example for the summary of a CI job")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def verify(
    paths: tuple[str, ...],
    project_file: str | None,
    allow_outside: bool,
    runtimes: tuple[str, ...],
    required: tuple[str, ...],
    inputs: Path | None,
    roles: tuple[str, ...],
    against: Path | None,
    module: str | None,
    weights: str | None,
    checkpoint: str | None,
    layer: str | None,
    prefix_tokens: str | None,
    trust: tuple[str, ...],
    junit: str | None,
    markdown: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare artifacts (.onnx, .plan, or folders) on each runtime with the torch block of their spec in float64.

    An .onnx file that posexport did not write is compared with itself in float64. If the name of an input does not tell
    its role, give the role with --input. With --against, files are compared with another file, and with --module with
    a torch module.

    Without FILES, the artifacts of the project are verified (posexport.toml, or [tool.posexport] of a pyproject.toml),
    on the project's runtimes and with its tolerances. They must also be up to date and within their budgets.

    A file that contradicts its manifest fails. --weights and --from give the source that a file must have been exported
    from, and --trust gives the keys that must have signed it.

    Exit codes: 0 if everything that ran passed, 1 if something failed, 2 if an artifact can't be read, 3 if a required
    runtime was not run or no runtime was.
    """
    settings = VerifyOptions(**stated(options))
    named = tuple(runtime(name).name for name in dict.fromkeys((*runtimes, *required)))
    if paths:
        check_no_project("files", project_file, allow_outside)
    _check_together(
        {"--against": against, "--module": module, "--weights": weights, "--from": checkpoint},
        {} if inputs is None else {"--reach": options["reach"], "--cases": options["cases"]},
    )
    original = _original(weights=weights, checkpoint=checkpoint, layer=layer, prefix_tokens=prefix_tokens)
    given = {"--inputs": inputs, "--against": against, "--module": module, "--input": roles or None}
    for option, value in (given | {"--weights or --from": original}).items():
        if value is not None and not paths:
            raise RequestError(f"{option} was given without files: {_NEEDS_FILES[option]}.")
    trusted = trusted_keys(trust)
    files = [Path(path) for path in paths]
    project = None if files else find_project(project_file, allow_outside)
    if project is not None:
        required = (*required, *(name for name in project.require if name not in required))
    report = unreadable_report(files, settings.seed) if files else None
    reports = {name: _report_path(name, text) for name, text in (("junit", junit), ("markdown", markdown))}
    check_writable(*reports.values())
    if report is None:
        with console.steps("starting", total=len(files) or None) as progress:

            def advance(name: str, total: int) -> None:
                progress.update(f"verified {name}", advance=1, total=total)

            asked = named if runtimes else ()
            if project is not None:
                from posexport.workflows.project.verify import verify_project

                report = verify_project(
                    project,
                    settings,
                    runtimes=asked,
                    required=required,
                    trusted=trusted,
                    advance=advance,
                    step=progress,
                )
            else:
                from posexport.verify.verifier import verify as verify_files

                chosen = {name: row for name, row in RUNTIMES.items() if not asked or name in asked}
                report = verify_files(
                    files,
                    runtimes=chosen,
                    inputs=inputs,
                    original=original,
                    against=against,
                    module=module,
                    roles=input_roles(roles),
                    trusted=trusted,
                    advance=advance,
                    step=progress,
                    **attrs.asdict(settings),
                )
    code = report.exit_code(required)
    from posexport.report.verdicts import write_reports

    write_reports(report, **reports)
    if as_json:
        identity = {} if project is None else {"project": str(project.file)}
        console.show_json({**report.to_dict(required), **identity})
    elif report.verdicts:
        _show_report(report, ("Parity" if project is None else f"Project {project.file}: parity") + _truth(report))
    _show_errors(report, code)
    return console.fail(_missing_sentence(report, required), code) if code == 3 else code


def _check_together(truths: Mapping[str, object], of_drawn: Mapping[str, object]) -> None:
    """RequestError if two options say what files are compared with, or if the user's own inputs are given with an
    option that is about drawn ones."""
    known = [option for option, value in truths.items() if value is not None]
    if len(known) > 1:
        raise RequestError(
            f"both {known[0]} and {known[1]} were given: files are compared with one of them, so drop one."
        )
    for option, value in of_drawn.items():
        if value is not None:
            raise RequestError(f"{option} was given with --inputs: it is about inputs that are drawn, so drop one.")


def _original(**given: str | None) -> Original | None:
    """The original that `--weights`, or `--from` with its own options, compare the files with."""
    options = stated(given)
    for name in ("layer", "prefix_tokens"):
        if name in options and "checkpoint" not in options:
            option = f"--{name.replace('_', '-')}"
            raise RequestError(f"{option} was given without --from: give the folder of its checkpoint, or drop it.")
    if not options:
        return None
    from posexport.artifact.original import Original

    return Original(**options)


def _show_report(report: Report, head: str) -> None:
    """Show a table of verdicts with a title that begins with `head`, runtimes that ran nothing for one reason, and the
    counts."""
    from posexport.report.verdicts import COLUMNS, rows, summary

    idle = _idle_runtimes(report)
    table = rows([verdict for verdict in report.verdicts if verdict.check != PARITY or verdict.runtime not in idle])
    if table:
        checks = {verdict.check for verdict in report.verdicts if verdict.runtime != PROJECT}
        tokens, properties = GENERATION in checks, bool(checks - {PARITY, GENERATION})
        title = f"{head} in float64{', and tokens' if tokens else ''}{', and properties' if properties else ''}"
        console.show_table(title, COLUMNS, table, right=("error", "torch error", "limit"))
    for name, reason in idle.items():
        console.write(f"not run: {name} ({reason})")
    console.write(summary(report))


def _truth(report: Report) -> str:
    """Whose float64 values the verdicts compare with."""
    references = {verdict.reference or "torch" for verdict in report.verdicts if verdict.runtime != PROJECT}
    return f" with {references.pop()}" if len(references) == 1 else " with the reference of each"


def _show_errors(report: Report, code: int) -> None:
    for file in report.unreadable:
        console.fail(file.error, code)


def _missing_sentence(report: Report, required: Sequence[str]) -> str:
    """Which required runtime was not run and why, or why no runtime was run."""
    for verdict in report.verdicts:
        if verdict.check == PARITY and verdict.runtime in required and verdict.state == NOT_RUN:
            return f"required runtime {verdict.runtime} was not run: {verdict.reason}."
    missing = [name for name in required if all(verdict.runtime != name for verdict in report.verdicts)]
    if missing:
        return f"required runtime {missing[0]} was not run: no artifact here is for it."
    if any(verdict.check == PARITY and verdict.state == PASSED for verdict in report.verdicts):
        return (
            "nothing was verified: no runtime ran the graph of a file, see their reasons, and torch only computes the "
            "block of a file's spec."
        )
    reasons = list(dict.fromkeys(f"{verdict.runtime} was not run: {verdict.reason}" for verdict in report.verdicts))
    return f"nothing was verified: {reasons[0] if len(reasons) == 1 else 'no runtime was run, see their reasons'}."


def _idle_runtimes(report: Report) -> dict[str, str]:
    """The runtimes on which no artifact was run, all for the same reason, with that reason."""
    ends: dict[str, set[tuple[str, str]]] = {}
    for verdict in report.verdicts:
        if verdict.check == PARITY:
            ends.setdefault(verdict.runtime, set()).add((verdict.state, verdict.reason or ""))
    return {name: reason for name, ((state, reason), *others) in ends.items() if state == NOT_RUN and not others}


def _report_path(name: str, text: str | None) -> Path | None:
    """The path of a report to write, or None if none was given; RequestError if it can't be written."""
    if text is None:
        return None
    return report_file(f"--{name}", text, (".onnx", ".plan", ".npz", ".data"))
