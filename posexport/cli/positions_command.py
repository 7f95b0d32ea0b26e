"""`posexport positions`: writes the positions of a grid of patches as a .npz file with `position_ids`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import attrs
import click

from posexport.cli import console
from posexport.errors import RequestError
from posexport.files import check_output, staged
from posexport.spec.fields import integer, stated


@attrs.frozen(kw_only=True)
class PositionsOptions:
    """The numeric options, validated."""

    frames: int | None = integer(None, "number of frames")
    prefix_tokens: int = integer(0, "tokens in front of the grid", at_least=0)
    batch: int = integer(1, "rows of the batch")


@click.command()
@click.option("--grid", metavar="ROWSxCOLUMNS", required=True, help="patches along each axis, such as 14x14")
@click.option(
    "--frames", metavar="N", help="number of frames of a video, for positions with a third axis  [default: an image]"
)
@click.option(
    "--prefix-tokens",
    metavar="N",
    help="number of class and register tokens before the grid, at position 0  [default: 0]",
)
@click.option("--batch", metavar="N", help="number of equal rows  [default: 1]")
@click.option("--output", "-o", metavar="FILE", default="positions.npz", show_default=True, help="the file to write")
@click.option("--json", "as_json", is_flag=True, help="print the shape and the file as JSON")
def positions(grid: str, output: str, as_json: bool, **given: Any) -> None:
    """Write the `position_ids` of a grid, row by row: [batch, tokens, 2 or 3] with x = column, y = row, t = frame."""
    options = PositionsOptions(**stated(given))
    rows, cross, columns = grid.lower().partition("x")
    if not cross or not all(size.isascii() and size.isdecimal() and len(size) < 10 for size in (rows, columns)):
        raise RequestError(f"grid is {grid!r}: write ROWSxCOLUMNS, such as 14x14.")
    path = Path(output)
    check_output(path, ".npz")
    import numpy as np

    from posexport.spec.positions import grid_positions

    positions = grid_positions(
        int(rows), int(columns), options.frames, prefix_tokens=options.prefix_tokens, batch=options.batch
    )
    packed = io.BytesIO()
    np.savez_compressed(packed, position_ids=positions)
    with staged() as files:
        files.write(path, lambda file: file.write(packed.getvalue()))
    if as_json:
        tensor = {"shape": list(positions.shape), "dtype": str(positions.dtype)}
        console.show_json({"file": str(path), "position_ids": tensor})
        return
    axes = "x, y" if options.frames is None else "x, y, t"
    console.show_facts(f"wrote {path}", [("position_ids", f"int64 {list(positions.shape)}, {axes}")])
