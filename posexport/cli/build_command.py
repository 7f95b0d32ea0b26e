"""`posexport build`: the artifacts that a project ships, made where they are out of date."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from posexport.cli import console
from posexport.cli.project_options import project_option
from posexport.errors import RequestError
from posexport.workflows.project.build import FRESH, MADE, NOT_RUN, STALE, Outcome, make, outcome
from posexport.workflows.project.requests import chosen_names, open_project, wanted


@click.command()
@click.argument("names", metavar="[NAMES]...", nargs=-1)
@project_option
@click.option("--check", is_flag=True, help="write nothing; exit 1 where something is out of date")
@click.option("--force", is_flag=True, help="make what is up to date too")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def build(names: tuple[str, ...], project_file: str | None, check: bool, force: bool, as_json: bool) -> int:
    """Make the artifacts of a project (posexport.toml, or [tool.posexport] of a pyproject.toml) that are out of date.

    NAMES are artifacts of the project; without any, all are meant. Exits 1 with --check where something is out of date,
    2 where an artifact can't be made, 3 where what builds a plan is not there.
    """
    if check and force:
        raise RequestError("both --check and --force were given: the one writes nothing, the other all; drop one.")
    project = open_project(project_file)
    chosen = chosen_names(project, names)
    with console.steps("loading torch"):
        from posexport.workflows.project.products import out_of_date, products
    files = products(project, chosen)
    sources, requests = wanted(project, files)
    stale: set[Path] = set()
    found = []
    for product in files:
        reason = "it is made anew with --force" if force else out_of_date(product, sources[product.path])
        if product.plan and product.source in stale:
            reason = reason or f"{product.source.name} is out of date"
        if reason is None:
            found.append(outcome(product, FRESH, ""))
        elif check:
            stale.add(product.path)
            found.append(outcome(product, STALE, reason))
        else:
            with console.steps(f"making {product.path.name}") as progress:
                found.append(make(product, requests.get(product.path), sources[product.path], reason, progress))
    if as_json:
        rows = [attrs.asdict(each) for each in found]
        console.show_json({"kind": "build", "version": 1, "project": str(project.file), "files": rows})
    else:
        _show(f"Artifacts of {project.file}", found)
    missing = next((each for each in found if each.state == NOT_RUN), None)
    if missing is not None:
        click.echo(f"Error: {missing.file} was not built: {missing.reason}.", err=True)
        return 3
    return int(any(each.state == STALE for each in found))


def _show(title: str, found: list[Outcome]) -> None:
    rows = [
        (each.file, each.state, "-" if each.size is None else console.megabytes(each.size), each.reason)
        for each in found
    ]
    console.show_table(title, ("file", "state", "size", "why"), rows, right=("size",))
    counts = {state: sum(each.state == state for each in found) for state in (MADE, FRESH, STALE, NOT_RUN)}
    click.echo(", ".join(f"{count} {state}" for state, count in counts.items() if count))
