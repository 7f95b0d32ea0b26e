"""`scripts/whole_models`: whole checkpoints of many architectures in every form, dtype and kind of cache."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from whole_data import Cell, cells, publish, read
from whole_rows import ROWS
from whole_run import run

FOLDER: Any = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option(
    "--only", "names", multiple=True, type=click.Choice(sorted(ROWS)), metavar="NAME", help="only this one; repeatable"
)
@click.option(
    "--cell", "chosen", multiple=True, metavar="FORM/DTYPE[/CACHES]", help="only this cell; repeatable  [default: all]"
)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="cells to run at the same time")
@click.option("--again", is_flag=True, help="repeat cells that have a result")
@click.option("--state", "states", multiple=True, metavar="STATE", help="repeat cells with such a result; repeatable")
@click.option("--work", type=FOLDER, help="keep the checkpoints here")
@click.option("--fault", is_flag=True, help="change a weight of every file: all results must differ; writes no results")
@click.option("--page", is_flag=True, help="write the page again from the results, and nothing else")
def main(
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    jobs: int,
    again: bool,
    states: tuple[str, ...],
    work: Path | None,
    fault: bool,
    page: bool,
) -> None:
    """Export, verify and generate the cells that have no result in docs/results/models.json.

    Each result is written there as soon as it is made, so an interrupted run can continue. A full run takes hours.
    """
    if page:
        publish([])
        return
    known = {one.key: one for one in read().cells}
    todo = [one for one in cells(names or tuple(ROWS)) if not chosen or one.column in chosen]
    if not (again or fault):
        todo = [one for one in todo if one.key not in known or known[one.key].state in states]
    lock = threading.Lock()
    missed = 0

    def make(one: Cell) -> None:
        nonlocal missed
        result = run(one, folder, fault)
        with lock:
            click.echo(f"{one.key}: {result.state} {result.reason}".rstrip())
            if fault:
                missed += result.state != "different"
            else:
                publish([result])

    with tempfile.TemporaryDirectory() as own:
        folder = (work or Path(own)).resolve()
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(make, todo))
    if missed:
        raise click.ClickException(f"{missed} of {len(todo)} faults were not seen.")


if __name__ == "__main__":
    main()
