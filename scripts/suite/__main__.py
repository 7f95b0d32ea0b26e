"""`scripts/rewrite_results`: what `posexport rewrite` makes of other tools' graphs, compared with other optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import fused
import judge_near_misses
import score
import speed
from rewrite_data import publish

FOLDER: Any = click.Path(path_type=Path, file_okay=False)


@click.group()
def main() -> None:
    """Measure parts of docs/results/rewrite.json and write them there. Parts that are not measured stay as they are.

    SUITE is a folder that scripts/suite/generate.py made. Long work keeps its records in WORK and continues from them
    when it is started again.
    """


@main.command("suite")
@click.argument("suite", type=FOLDER)
@click.argument("work", type=FOLDER)
@click.option("--only", "names", multiple=True, help="a file, by its name without .onnx; repeatable; writes no results")
@click.option("--tool", "tools", multiple=True, help="only this tool; repeatable  [default: all]")
@click.option("--again", is_flag=True, help="repeat files that have a record")
def suite_command(suite: Path, work: Path, names: tuple[str, ...], tools: tuple[str, ...], again: bool) -> None:
    """Run every tool on every file of SUITE (hours)."""
    score.run(suite, work, names, tools, again)
    if not names:
        publish(suite=score.results(suite, work))


@main.command("near-misses")
@click.argument("suite", type=FOLDER)
@click.argument("work", type=FOLDER)
@click.option("--again", is_flag=True, help="repeat files that have a record")
def near_misses_command(suite: Path, work: Path, again: bool) -> None:
    """Run posexport on every near miss in SUITE, which draw_near_misses.py made (hours)."""
    publish(near_misses=judge_near_misses.run(suite, work, again))


@main.command("speed")
@click.option("--layers", default=speed.SIZES["num_hidden_layers"], show_default=True, type=click.IntRange(1))
@click.option("--hidden", default=speed.SIZES["hidden_size"], show_default=True, type=click.IntRange(192))
@click.option("--quick", is_flag=True, help="only two rounds, to test that it works; writes no results")
def speed_command(layers: int, hidden: int, quick: bool) -> None:
    """Time a decoder with caches before and after, on ONNX Runtime's CPU (ten minutes on an idle machine)."""
    result = speed.measure(layers, hidden, quick)
    for cell in result["cells"]:
        click.echo(f"{cell['scenario']} {cell['file']}: {cell['ms']} ms, {cell['ratio']['median']} of the original's")
    if not quick:
        publish(speed=result)


@main.command("tensorrt")
@click.argument("work", type=FOLDER)
@click.option(
    "--only",
    "names",
    multiple=True,
    type=click.Choice(fused.NAMES),
    help="only this file, repeatable; writes no results",
)
def tensorrt_command(work: Path, names: tuple[str, ...]) -> None:
    """Count kernels that TensorRT for RTX chooses for architectures of the suite in fp16 (half an hour)."""
    rows = fused.measure(work, names)
    if not names:
        publish(tensorrt=rows)


@main.command("page")
def page_command() -> None:
    """Write the page again from the results."""
    publish()


if __name__ == "__main__":
    main()
