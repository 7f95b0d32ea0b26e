"""Compares blocks that take positions as data with those that an earlier commit of posexport wrote: is any of them
slower?

    python scripts/benchmarks/before.py CHECKOUT

CHECKOUT is a checkout of the earlier commit. Its code writes the files of every encoding in a process of its own. The
fastest of these files is timed beside the fastest of the present files. Sessions and rounds are those of `positions`,
and denormal numbers are treated as zeros. If the fastest earlier file is identical to one of the present files, nothing
is timed. Results: docs/results/positions-before.json and positions-before.md.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import onnx
import positions
import timing
from positions import CONFIDENCE, FORMS, PREFILL, SIZES, rounds_of
from results import made_on, record, rounded, table, with_interval, write_results
from timing import Contender, check_equal, decodes

from posexport import temporary
from posexport.bench import statistics
from posexport.models import ENCODINGS

WRITE = """
import json, pathlib, sys, timing
name, causal, cache, folder, *forms = sys.argv[1:]
spec = timing.block_spec(name, 768, 12, causal=causal == "True", kv_cache=cache or None)
files, _ = timing.write_forms(spec, pathlib.Path(folder), forms)
print(json.dumps({form: str(path) for form, path in files.items()}))
"""
"""What the earlier code runs: it writes all files of an encoding, with a kind of cache or without one."""


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--encoding", multiple=True, type=click.Choice(list(ENCODINGS)), help="only this one, repeatable; writes nothing"
)
def main(checkout: Path, encoding: tuple[str, ...]) -> None:
    """Time every encoding's fastest file beside the fastest that the code in CHECKOUT writes."""
    warnings.simplefilter("ignore")
    timing.prepare_process()
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "--short=8", "HEAD"], capture_output=True, check=True)
    cells = []
    for name, scenario in itertools.product(encoding or ENCODINGS, SIZES):
        if scenario == PREFILL or decodes(name):
            with temporary.folder() as folder:
                cells.append(compare(name, scenario, checkout.resolve(), folder))
                click.echo(f"{scenario}: {' '.join(_row(cells[-1]))}")
    if not encoding:
        data = rounded({**record(), "before": commit.stdout.decode().strip(), "cells": cells})
        write_results("positions-before", data, figures(data))


def compare(encoding: str, scenario: str, checkout: Path, folder: Path) -> dict[str, Any]:
    """The fastest file of each side, and the ratio of the present time to the earlier one; None if the files are the
    same."""
    files: dict[str, dict[str, Path]] = {"now": {}, "before": {}}
    contenders = dict[str, Contender]()
    for cache in positions.caches(scenario):
        spec = positions.spec_of(encoding, "data", cache)
        inputs = positions.inputs_of(spec, scenario)
        written = {"now": timing.write_forms(spec, _made(folder, "now", cache), FORMS)[0]}
        written["before"] = _write_before(checkout, encoding, cache, _made(folder, "before", cache))
        for side, paths in written.items():
            files[side] |= {positions.named(form, cache): path for form, path in paths.items()}
            contenders |= {
                f"{side}: {positions.named(form, cache)}": timing.of_file(path, inputs, **timing.FLUSHED)
                for form, path in paths.items()
            }
    check_equal(contenders, f"{encoding}, {scenario}")
    best = positions.fastest(contenders, files, scenario)
    cell = {"encoding": encoding, "scenario": scenario, **{side: best[side].partition(": ")[2] for side in files}}
    if _graph(files["before"][cell["before"]]) in map(_graph, files["now"].values()):
        return {**cell, "ratio": None}
    series = positions.seconds_of({side: contenders[best[side]] for side in files}, rounds_of, scenario)
    return {**cell, "ratio": attrs.asdict(statistics.ratio(series["now"], series["before"], CONFIDENCE))}


def _made(folder: Path, side: str, cache: str | None) -> Path:
    made = folder / f"{side}-{cache}"
    made.mkdir()
    return made


def _write_before(checkout: Path, encoding: str, cache: str | None, folder: Path) -> dict[str, Path]:
    """The files that the code of a checkout writes, by form."""
    arguments = (encoding, str(decodes(encoding)), cache or "", folder, *FORMS)
    code = os.pathsep.join(map(str, (checkout, checkout / "scripts" / "benchmarks")))
    command = [sys.executable, "-P", "-c", WRITE, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": code})
    return {form: Path(path) for form, path in json.loads(done.stdout.splitlines()[-1]).items()}


def _graph(path: Path) -> bytes:
    """The graph and functions of a file, without metadata."""
    model = onnx.load(path)
    return b"".join(part.SerializeToString(deterministic=True) for part in (model.graph, *model.functions))


def figures(data: Mapping[str, Any]) -> list[str]:
    """The lines of the page for the data of the results file."""
    lines = [made_on(data, end=f" Before: commit {data['before']}.")]
    for scenario in SIZES:
        rows = [_row(cell) for cell in data["cells"] if cell["scenario"] == scenario]
        lines += [
            "",
            f"### `{scenario}`",
            "",
            *table(("encoding", "before", "now", "× before"), rows, ("before", "now")),
        ]
    return lines


def _row(cell: Mapping[str, Any]) -> tuple[str, str, str, str]:
    ratio = with_interval(cell["ratio"]) if cell["ratio"] else "the same file"
    return cell["encoding"], cell["before"], cell["now"], ratio


if __name__ == "__main__":
    main()
