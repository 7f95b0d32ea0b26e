"""`posexport build`: the artifacts that a project ships, made where they are out of date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.export_command import write
from posexport.cli.project_options import chosen_names, open_project, project_option, wanted
from posexport.errors import PosexportError, RequestError
from posexport.trt_api import can_build

if TYPE_CHECKING:
    from posexport.project.files import Product

FRESH, MADE, STALE, NOT_RUN = "up to date", "made", "out of date", "not run"


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one file, and why."""

    file: str
    artifact: str
    state: str
    reason: str = ""
    sha256: str | None = None
    size: int | None = None


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
    with console.progress("loading torch"):
        from posexport.project.files import out_of_date, products
    files = products(project, chosen)
    sources, requests = wanted(project, files)
    stale: set[Path] = set()
    found = []
    for product in files:
        reason = "it is made anew with --force" if force else out_of_date(product, sources[product.path])
        if product.plan and product.source in stale:
            reason = reason or f"{product.source.name} is out of date"
        if reason is None:
            found.append(_outcome(product, FRESH, ""))
        elif check:
            stale.add(product.path)
            found.append(_outcome(product, STALE, reason))
        else:
            found.append(_make(product, requests.get(product.path), sources[product.path], reason))
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


def _outcome(product: Product, state: str, reason: str) -> Outcome:
    from posexport.artifact import read_manifest

    file, name = str(product.path), product.entry.name
    if state not in (FRESH, MADE):
        return Outcome(file=file, artifact=name, state=state, reason=reason)
    manifest = read_manifest(product.path) or {}
    return Outcome(
        file=file, artifact=name, state=state, reason=reason, sha256=manifest.get("sha256"), size=product.bytes()
    )


def _make(product: Product, request: Any, source: dict[str, Any], reason: str) -> Outcome:
    from posexport.project.files import stamp

    missing = can_build(source["runtime"]) if product.plan else None
    if missing is not None:
        return _outcome(product, NOT_RUN, f"{source['runtime']} can't build a plan here, {missing}")
    folder = product.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"the folder {str(folder)!r} of the project can't be made ({error.strerror}): name another."
        ) from None
    try:
        if product.plan:
            _compile(product, source)
        else:
            write(request, product.path)
        stamp(product.path, source)
    except PosexportError as error:
        told = str(error)
        raise type(error)(told if str(product.path) in told else f"{str(product.path)!r}: {told}") from None
    return _outcome(product, MADE, reason)


def _compile(product: Product, source: dict[str, Any]) -> None:
    name = source["runtime"]
    with console.progress(f"loading {name}") as (bar, task):
        from posexport.compile import BuildOptions, compile_plan

        compile_plan(
            product.source,
            product.path,
            BuildOptions(
                runtime=name,
                profile=tuple(source["profile"]),
                capabilities=tuple(source["compute_capability"]),
                memory_limit=source["memory_limit"],
                tf32=source["tf32"],
            ),
            lambda phase: bar.update(task, description=f"{product.path.name}: {phase}"),
        )


def _show(title: str, found: list[Outcome]) -> None:
    rows = [
        (each.file, each.state, "-" if each.size is None else console.megabytes(each.size), each.reason)
        for each in found
    ]
    console.show_table(title, ("file", "state", "size", "why"), rows, right=("size",))
    counts = {state: sum(each.state == state for each in found) for state in (MADE, FRESH, STALE, NOT_RUN)}
    click.echo(", ".join(f"{count} {state}" for state, count in counts.items() if count))
