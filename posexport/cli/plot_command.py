"""`posexport plot`: a picture of one or more encodings, drawn from what they compute."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.spec_options import field_options
from posexport.errors import RequestError
from posexport.export.block_options import spec_of
from posexport.export.layer_pattern import parameters_of
from posexport.report.plots.panels import WHAT
from posexport.runtimes import RUNTIMES, runtime
from posexport.spec.fields import integer
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.report.plots.panels import Panel

_KINDS = "\n".join(["\b", "Kinds:", *(f"  {name:<11} {summary}" for name, summary in WHAT.items())])
_LONGEST = 45  # letters of a parameter that a picture shows

FIELDS = (
    "hidden_size",
    "num_heads",
    "head_dim",
    "scale",
    "causal",
    "window",
    "attention_chunk_size",
    "angles",
    "prefix_tokens",
)
"""The fields of a spec that show in a picture."""


@attrs.frozen(kw_only=True)
class PlotOptions:
    """The numbers among the options, validated."""

    seq: int | None = integer(None, "tokens that are drawn", at_least=2, at_most=1024, optional=True)
    seed: int = integer(0, "seed of the weights", at_least=0)


def _block_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return field_options(command, FIELDS)


@click.command(epilog=_KINDS)
@click.argument("encodings", metavar="ENCODING...", nargs=-1, required=True)
@click.option("--what", metavar="KIND", help="one of those below  [default: what it looks like, and its decay]")
@_block_options
@click.option("--seq", metavar="N", help="tokens drawn, of a grid along each side  [default: what suits]")
@click.option("--seed", metavar="N", help="seed of weights that are trained in models  [default: 0]")
@click.option(
    "--runtime", "runtimes", metavar="NAME", multiple=True, help="only this one, for errors, repeatable  [default: all]"
)
@click.option("--output", "-o", metavar="FILE", help="a .png or .svg  [default: <encodings>.png]")
@click.option("--json", "as_json", is_flag=True, help="print the numbers that are drawn as JSON")
def plot(
    encodings: tuple[str, ...],
    what: str | None,
    parameters: tuple[str, ...],
    runtimes: tuple[str, ...],
    output: str | None,
    as_json: bool,
    seq: Any,
    seed: Any,
    **block: Any,
) -> int:
    """Draw encodings, a row each: NAME, or NAME:key=value:key=value with parameters and options of its own.

    Everything is what the block itself computes; weights that are trained in models are random. Exits 1 where a runtime
    whose errors are drawn fails.
    """
    options = PlotOptions(**{name: value for name, value in (("seq", seq), ("seed", seed)) if value is not None})
    if parameters and len(encodings) > 1:
        raise RequestError("--set was given with several encodings: write them as NAME:key=value:key=value.")
    if runtimes and what != "error":
        raise RequestError("--runtime was given without --what error: nothing else runs anywhere, so drop it.")
    rows = {name: runtime(name) for name in runtimes} or RUNTIMES
    given = [_read(text, parameters, block) for text in encodings]
    path = Path(output or "-".join(dict.fromkeys(spec.encoding.name for spec, _ in given)) + ".png")
    with console.steps("loading torch") as progress:
        from posexport.files import check_writable, staged
        from posexport.report.plots.picture import check_suffix, draw

        check_suffix(str(path), path.suffix)
        if not path.parent.is_dir():
            raise RequestError(f"output folder {str(path.parent)!r} is not there: make it first, or give another.")
        check_writable(path)

        from posexport.report.plots.kinds import panels
        from posexport.report.plots.probe import ProbeTarget

        def advance(text: str) -> None:
            progress.update(f"measuring {text}")

        common = {**attrs.asdict(options), "runtimes": rows, "advance": advance}
        progress.update("asking the encodings")
        made = panels([ProbeTarget(spec=spec, given=said, **common) for spec, said in given], what)
        progress.update("drawing")
        picture = draw(made, path.suffix)
        with staged() as files:
            files.write(path, methodcaller("write", picture))
    if as_json:
        console.show_json({"file": str(path), "rows": [[panel.to_dict() for panel in row] for row in made]})
    else:
        _show(made, path)
    return int(any(each.failed for row in made for panel in row for each in getattr(panel, "absent", ())))


def _read(text: str, parameters: tuple[str, ...], block: dict[str, Any]) -> tuple[Spec, str]:
    """The spec that an argument describes, and what it says beside the encoding's name."""
    name, *pairs = text.split(":")
    if not name or not all("=" in pair for pair in pairs):
        raise RequestError(f"{text!r} is no encoding: write NAME, or NAME:key=value:key=value.")
    given = parameters_of((*pairs, *parameters))
    own = {key: given.pop(key) for key in FIELDS if key in given}
    said = " ".join(pair if len(pair) <= _LONGEST else f"{pair[:_LONGEST]}…" for pair in (*pairs, *parameters))
    return spec_of({**block, **own, "encoding": name}, given), said


def _show(rows: list[list[Panel]], path: Path) -> None:
    drawn = [(panel.title, panel.note.replace("\n", ", ")) for row in rows for panel in row]
    console.show_facts(f"wrote {path}", drawn)
    absent = {each.name: each for row in rows for panel in row for each in getattr(panel, "absent", ())}
    for name, each in absent.items():
        click.echo(f"{'failed' if each.failed else 'not run'}: {name} ({each.reason})")
