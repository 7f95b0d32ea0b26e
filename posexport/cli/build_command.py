"""`posexport build`: makes the artifacts of a project that are out of date."""

from __future__ import annotations

from typing import get_args

import click

from posexport.cli import console
from posexport.cli.options import project_options, sign_option, signing_key
from posexport.machine import size_text
from posexport.workflows.project.build import BuildResult, State, build_project
from posexport.workflows.project.file import find_project


@click.command()
@click.argument("names", metavar="[NAMES]...", nargs=-1)
@project_options
@click.option("--check", is_flag=True, help="write nothing; exit with 1 if something is out of date")
@click.option("--force", is_flag=True, help="also make files that are up to date")
@sign_option
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def build(
    names: tuple[str, ...],
    project_file: str | None,
    allow_outside: bool,
    check: bool,
    force: bool,
    sign: str | None,
    as_json: bool,
) -> int:
    """Make the artifacts of a project that are missing or out of date.

    The project is a posexport.toml, or [tool.posexport] of a pyproject.toml. NAMES are artifacts of the project; if
    none is given, all are made.

    Exit codes: 0 if everything is up to date, 1 if something is out of date with --check, 2 if an artifact can't be
    made, 3 if no installed runtime can build a plan.
    """
    key = signing_key(sign)
    with console.steps("reading the project") as progress:
        project = find_project(project_file, allow_outside)
        result = build_project(project, names, check=check, force=force, progress=progress, key=key)
    if as_json:
        console.show_json(result.to_dict())
    else:
        _show(result)
    missing = next((outcome for outcome in result.files if outcome.state == "not run"), None)
    if missing is not None:
        return console.fail(f"{missing.file} was not built: {missing.reason}.", 3)
    return int(any(outcome.state == "out of date" for outcome in result.files))


def _show(result: BuildResult) -> None:
    rows = [
        (outcome.file, outcome.state, "-" if outcome.size is None else size_text(outcome.size), outcome.reason)
        for outcome in result.files
    ]
    console.show_table(f"Artifacts of {result.project}", ("file", "state", "size", "why"), rows, right=("size",))
    states = [outcome.state for outcome in result.files]
    console.write(", ".join(f"{states.count(state)} {state}" for state in get_args(State) if state in states))
