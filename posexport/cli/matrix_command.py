"""`posexport matrix`: measures what works where, and writes matrix.json, matrix.md and matrix.png."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.errors import RequestError, check_known
from posexport.files import check_writable, renewed
from posexport.spec.fields import integer, positive
from posexport.spec.forms import TARGETS
from posexport.verify.matrix.table import MODES

if TYPE_CHECKING:
    from posexport.verify.matrix.table import Cell, Matrix


@attrs.frozen(kw_only=True)
class MatrixOptions:
    """The numeric options, validated."""

    jobs: int | None = integer(None, "entries measured side by side")
    minutes: float | None = positive(None, "minutes after which nothing more is begun")


@click.command()
@click.option("--encoding", metavar="NAME", multiple=True, help="use only this one; repeatable  [default: all]")
@click.option("--form", metavar="NAME", multiple=True, help="use only this one; repeatable  [default: all]")
@click.option("--dtype", metavar="NAME", multiple=True, help="use only this one; repeatable  [default: all]")
@click.option(
    "--mode", metavar="NAME", multiple=True, help=f"only this mode, of {', '.join(MODES)}; repeatable  [default: all]"
)
@click.option(
    "--runtime",
    metavar="NAME",
    multiple=True,
    help="use only this one, or 'build' for TensorRT's plans; repeatable  [default: all]",
)
@click.option("--target", metavar="NAME", default="portable", help=f"one of: {', '.join(TARGETS)}  [default: portable]")
@click.option("--jobs", metavar="N", help="number of parallel jobs  [default: one per core, if memory allows]")
@click.option(
    "--minutes",
    metavar="M",
    help="start nothing new after this time; run the command again to continue  [default: no limit]",
)
@click.option("--output", "-o", metavar="FOLDER", default="matrix", help="folder to write to  [default: ./matrix]")
@click.option(
    "--resume/--no-resume", default=True, help="keep results in FOLDER that are from the same versions  [default: yes]"
)
@click.option("--picture/--no-picture", default=True, help="draw matrix.png  [default: yes]")
@click.option("--json", "as_json", is_flag=True, help="print matrix.json")
def matrix(
    target: str,
    jobs: Any,
    minutes: Any,
    output: str,
    resume: bool,
    picture: bool,
    as_json: bool,
    **names: tuple[str, ...],
) -> int:
    """Measure what works where: every encoding in every form, dtype and mode, on every installed runtime.

    Writes matrix.json, matrix.md and matrix.png to a folder. After an interruption, the same command continues: it
    keeps results and repeats failures.

    Exit codes: 0 if everything that ran passed, 1 if something failed, 3 if nothing could be run.
    """
    options = MatrixOptions(jobs=jobs, minutes=minutes)
    check_known("target", target, TARGETS)
    folder = _folder(output)
    with console.steps("looking at what is here") as progress:
        from posexport.verify.matrix.run import default_jobs, measure, steps
        from posexport.verify.matrix.schedule import Selection, columns_here, settle
        from posexport.verify.matrix.table import read

        if picture:
            import posexport.report.matrix_picture  # noqa: F401  (hours before it draws, it says what keeps it from that)
        chosen = Selection(**names)
        file = folder / "matrix.json"
        with renewed():
            old = read(file) if resume and file.exists() else None
        here = columns_here()
        table, todo = settle(old, chosen, here, target)
        folder.mkdir(exist_ok=True)
        progress.update("measuring", total=steps(todo), completed=0)
        try:
            measure(
                table,
                todo,
                here,
                jobs=options.jobs or default_jobs(),
                save=lambda so_far: so_far.write(file),
                advance=lambda what, number: progress.update(what, advance=number),
                minutes=options.minutes,
            )
            progress.update("drawing")
            _write(table, folder, picture)
        except KeyboardInterrupt:
            left = sum((entry, column) not in table.cells for entry, columns in todo.items() for column in columns)
            return console.fail(f"interrupted: {left} cells are left, so run it again to go on from {file}.", 130)
    asked = [table.cells[key] for key in chosen.cells()]
    if as_json:
        console.show_json(table.to_dict())
    else:
        _show(asked, folder)
    states = {cell.state for cell in asked}
    return 1 if "failed" in states else 3 if states == {"not run"} else 0


def _folder(output: str) -> Path:
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise RequestError(f"output {output!r} is a file: give a folder, which is made if need be.")
    if not path.parent.is_dir():
        raise RequestError(f"output {output!r} can't be made: its own folder isn't there, so make that first.")
    check_writable(path / "matrix.json" if path.is_dir() else path)
    return path


def _write(table: Matrix, folder: Path, drawn: bool) -> None:
    """Write the matrix, its Markdown and, with `drawn`, its picture; otherwise an old picture is removed."""
    from posexport.files import staged
    from posexport.report.matrix_markdown import to_markdown
    from posexport.report.matrix_picture import draw

    files = {"matrix.json": table.to_bytes(), "matrix.md": to_markdown(table).encode()}
    if drawn:
        files["matrix.png"] = draw(table)
    with staged() as stage:
        for name, content in files.items():
            stage.write(folder / name, methodcaller("write", content))
    if not drawn:
        (folder / "matrix.png").unlink(missing_ok=True)  # it would show other numbers


def _show(asked: list[Cell], folder: Path) -> None:
    from posexport.verify.matrix.table import TOTALS, idle, summary, totals

    if shown := totals(asked):
        console.show_table("What works where", TOTALS, shown, right=TOTALS[1:])
    for name, reason in idle(asked).items():
        console.write(f"not run: {name} ({reason})")
    for reason in dict.fromkeys(cell.reason or "" for cell in asked if cell.state == "refused"):
        console.write(f"refused: {reason}")
    for cell in asked:
        if cell.state == "failed":
            console.write(f"failed: {cell.entry.name} on {cell.column}: {cell.reason}")
    console.write(f"{summary(asked)}; the whole table is in {folder / 'matrix.md'}")
