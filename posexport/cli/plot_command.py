"""`posexport plot`: draws a picture of one or more encodings from what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from posexport.cli import console
from posexport.cli.options import field_options, input_roles, roles_option
from posexport.errors import RequestError
from posexport.report.plots.panels import WHAT
from posexport.report.plots.request import FIELDS, PlotOptions, PlotRow, check_output, draw_plot, read_row
from posexport.runtimes import RUNTIMES, runtime
from posexport.spec.fields import stated

_KINDS = "\n".join(["\b", "Kinds:", *(f"  {name:<11} {summary}" for name, summary in WHAT.items())])


@click.command(epilog=_KINDS)
@click.argument("encodings", metavar="ENCODING...", nargs=-1, required=True)
@click.option("--what", metavar="KIND", help="one of the kinds below  [default: the encoding itself, and its decay]")
@field_options(FIELDS)
@click.option(
    "--seq", metavar="N", help="number of tokens; for a grid, along each side  [default: depends on the kind]"
)
@click.option("--seed", metavar="N", help="seed of random weights  [default: 0]")
@roles_option
@click.option(
    "--runtime",
    "runtimes",
    metavar="NAME",
    multiple=True,
    help="use only this one, for errors; repeatable  [default: all]",
)
@click.option("--output", "-o", metavar="FILE", help="a .png or .svg file  [default: <encodings>.png]")
@click.option("--json", "as_json", is_flag=True, help="print the plotted numbers as JSON")
def plot(
    encodings: tuple[str, ...],
    what: str | None,
    parameters: tuple[str, ...],
    roles: tuple[str, ...],
    runtimes: tuple[str, ...],
    output: str | None,
    as_json: bool,
    seq: Any,
    seed: Any,
    **block: Any,
) -> int:
    """Draw encodings, one per row: NAME, or NAME:key=value:key=value with parameters and options of its own.

    FILE.onnx stands for the encodings of a file: those of its spec, or those recognised in its attention.

    The values are computed by the block itself. Weights that models train are random. The exit code is 1 if a runtime
    whose errors are drawn fails.
    """
    options = PlotOptions(**stated({"seq": seq, "seed": seed}))
    if parameters and len(encodings) > 1:
        raise RequestError("--set was given with several encodings: write them as NAME:key=value:key=value.")
    if runtimes and what != "error":
        raise RequestError("--runtime was given without --what error: no other kind runs a runtime, so drop it.")
    chosen = {name: runtime(name) for name in runtimes} or RUNTIMES
    _check_files(encodings, parameters, roles, block)
    if output is not None:
        check_output(Path(output))
    rows: list[PlotRow] = []
    left: dict[str, str] = {}
    with console.steps("loading torch") as progress:
        for text in encodings:
            if not _is_file(text):
                rows.append(read_row(text, parameters, block))
                continue
            from posexport.report.plots.file_rows import rows_of_file

            found = rows_of_file(Path(text), input_roles(roles), progress)
            rows, left = rows + found.rows, left | found.left
        path = Path(output or "-".join(dict.fromkeys(row.spec.encoding.name for row in rows)) + ".png")
        drawn = draw_plot(rows, what, path, options, chosen, progress)
    if as_json:
        console.show_json({"file": str(path), "rows": [[panel.to_dict() for panel in row] for row in drawn]})
    else:
        titles = [(panel.title, panel.note.replace("\n", ", ")) for row in drawn for panel in row]
        console.show_facts(f"wrote {path}", titles)
        for name, why in left.items():
            console.write(f"not drawn: {name} ({why})")
    absent = [missing for row in drawn for panel in row for missing in getattr(panel, "absent", ())]
    for name, missing in {missing.name: missing for missing in absent}.items():
        if not as_json:
            console.write(f"{'failed' if missing.failed else 'not run'}: {name} ({missing.reason})")
    return int(any(missing.failed for missing in absent))


def _is_file(text: str) -> bool:
    return text.endswith(".onnx")


def _check_files(
    encodings: Sequence[str], parameters: Sequence[str], roles: Sequence[str], block: Mapping[str, Any]
) -> None:
    """RequestError for options of a block together with a file, which has its own, and for roles of inputs without a
    file."""
    files = [text for text in encodings if _is_file(text)]
    if roles and not files:
        raise RequestError("--input was given without a file: it is about an ONNX file, so give that too.")
    given = list(stated(block))
    if files and (parameters or given):
        option = "--set" if parameters else f"--{given[0].replace('_', '-')}"
        raise RequestError(
            f"{option} was given with the file {files[0]!r}, which says its own: drop it, or write it behind a name, "
            "as NAME:key=value."
        )
