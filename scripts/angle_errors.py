"""`scripts/angle_errors`: the largest error of cosines and sines in exported graphs, on every runtime of this
machine."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from results import record, table, write_results

from posexport.cli import console
from posexport.errors import RequestError
from posexport.machine import describe_cpu
from posexport.models import read_spec
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import ANGLES, DTYPES, Spec
from posexport.verify.angles import POSITIONS, Measured, measure

MACHINE = ("cpu", "vendor", "cores", "instruction_sets", "os")
SIZES = {"hidden_size": 768, "num_heads": 12}

_LONGER: dict[str, Any] = {"factor": 4, "original_max_position_embeddings": 4096}
_FACTORS = {"short_factor": [1 + at / 100 for at in range(32)], "long_factor": [1 + at / 10 for at in range(32)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "dynamic": _LONGER,
    "yarn": _LONGER,
    "longrope": {**_LONGER, **_FACTORS},
    "llama3": {"theta": 500_000, "factor": 8, "original_max_position_embeddings": 8192},
    "proportional": {"partial_rotary_factor": 0.25},
}
"""The scalings of rope, with their parameters."""

CASES = ["sinusoidal", "relative", "rope", *(f"rope {scaling}" for scaling in SCALINGS)]
CASES += ["rope2d", "rope3d", "mrope", "rope-vjepa2", "rope-dinov3", "xpos"]
"""The measured cases: an encoding, followed by a scaling if it has one."""


def spec_of(case: str, angles: str, dtype: str) -> Spec:
    """The spec of one of CASES. Raises RequestError if the encoding does not support these angles."""
    name, _, scaling = case.partition(" ")
    encoding = {"name": name, **({"scaling": scaling, **SCALINGS[scaling]} if scaling else {})}
    return read_spec({"encoding": encoding, **SIZES, "causal": True, "angles": angles, "dtype": dtype})


def specs() -> tuple[dict[Spec, str], dict[str, str]]:
    """Every spec with the name of its case, and the reason for each case that has no exact angles."""
    cases: dict[Spec, str] = {}
    refused: dict[str, str] = {}
    for case, dtype, angles in itertools.product(CASES, DTYPES, ANGLES):
        try:
            cases[spec_of(case, angles, dtype)] = case
        except RequestError as error:
            refused[case] = str(error)
    return cases, refused


def row(case: str, measured: Measured) -> dict[str, Any]:
    """One row of the data. Numbers have three digits."""
    spec = measured.spec
    name = {"encoding": case, "angles": spec.angles, "dtype": spec.dtype, "runtime": measured.runtime}
    return {**name, "errors": [float(f"{error:.2e}") for error in measured.errors]}


def figures(data: dict[str, Any]) -> list[str]:
    """The lines of the page: a table for each dtype. Runtimes that agree to two digits share a line."""
    columns = ("encoding", "angles", *(f"{position:,}" for position in data["positions"]), "runtimes")
    lines: list[str] = []
    for dtype in DTYPES:
        agreeing: dict[tuple[str, ...], list[str]] = {}
        for entry in data["rows"]:
            if entry["dtype"] == dtype:
                numbers = (f"{error:.1e}" if error else "0" for error in entry["errors"])
                agreeing.setdefault((entry["encoding"], entry["angles"], *numbers), []).append(entry["runtime"])
        rows = [(*cells, ", ".join(runtimes)) for cells, runtimes in agreeing.items()]
        lines += [f"## {dtype}", "", *table(columns, rows, left=("angles",)), ""]
    for title, reasons in (("Without exact angles", data["refused"]), ("Not run", data["not_run"])):
        lines += [f"## {title}", "", *(f"- {name}: {why}" for name, why in reasons.items()), ""]
    engines = ", ".join(f"{runtime} is {engine}" for runtime, engine in data["engines"].items())
    return [*lines, f"Measured on {describe_cpu(data['machine'])}; {engines}."]


@click.command()
def main() -> None:
    """Measure, and write docs/results/angles.json and docs/results/angles.md. Exits 1 if a runtime failed."""
    cases, refused = specs()
    with console.steps("measuring", total=len(cases)) as progress:
        measured = list(measure(cases, RUNTIMES, advance=lambda what: progress.update(what, advance=1)))
    failed = [result for result in measured if result.failed]
    for wrong in failed:
        click.echo(f"failed: {cases[wrong.spec]}, {wrong.spec.angles}, on {wrong.runtime}: {wrong.reason}", err=True)
    facts = record()["machine"]
    data = {
        "positions": POSITIONS,
        "sizes": SIZES,
        "machine": {name: facts[name] for name in MACHINE},
        "engines": {result.runtime: result.engine for result in measured if result.engine is not None},
        "refused": refused,
        "not_run": {result.runtime: result.reason for result in measured if result.reason and not result.failed},
        "rows": [row(cases[result.spec], result) for result in measured if result.errors],
    }
    write_results("angles", data, figures(data))
    raise SystemExit(int(bool(failed)))


if __name__ == "__main__":
    main()
