"""`scripts/angle_errors`: the largest error of cosines and sines, measured in exported graphs on every runtime here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from posexport.cli import console
from posexport.errors import RequestError
from posexport.files import json_bytes, staged
from posexport.machine import describe_cpu, machine
from posexport.models import read_spec
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import ANGLES, DTYPES, Spec
from posexport.verify.angles import EXACT, POSITIONS, Measured, measure

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "docs/results/angles.json", ROOT / "docs/results/angles.md"
MACHINE = ("cpu", "vendor", "cores", "instruction_sets", "os")
SIZES = {"hidden_size": 768, "num_heads": 12}
_LONGER: dict[str, Any] = {"factor": 4, "original_max_position_embeddings": 4096}

CASES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "relative": {},
    "rope": {},
    "rope linear": {"scaling": "linear", "factor": 4},
    "rope ntk": {"scaling": "ntk", "factor": 4},
    "rope dynamic": {"scaling": "dynamic", **_LONGER},
    "rope yarn": {"scaling": "yarn", **_LONGER},
    "rope longrope": {
        "scaling": "longrope",
        **_LONGER,
        "short_factor": [1 + pair / 100 for pair in range(32)],
        "long_factor": [1 + pair / 10 for pair in range(32)],
    },
    "rope llama3": {"scaling": "llama3", "theta": 500_000, "factor": 8, "original_max_position_embeddings": 8192},
    "rope proportional": {"scaling": "proportional", "partial_rotary_factor": 0.25},
    "rope2d": {},
    "rope3d": {},
    "mrope": {},
    "rope-vjepa2": {},
    "rope-dinov3": {},
    "xpos": {},
}
"""What is measured: an encoding, and a scaling where there is one, with its parameters."""

_HOW = """\
# How exact angles are

Written by `./scripts/angle_errors`; all numbers are in [angles.json](angles.json). Each number is the largest
error, over all pairs of features, of a cosine or a sine at one position, compared with float64.

**How to read it.** A row is an encoding with one kind of angles, on the runtimes that agree to two digits. A column
is a position. With `--angles parity`, the default, an angle is the fp32 product of the position and an fp32
frequency, as in PyTorch models. That frequency is off by up to 6e-8 of itself, so the error grows with the
position: about 1e-5 at 256, a few hundredths at a million. This is the model's own error, the same on every
runtime. With `--angles exact`, the angle is reduced in integers first. What is left is the rounding of an fp32
cosine, below {exact:g} at any position up to 2^24. In fp16 and bf16, angles are fp32 too, and cosines and sines are
rounded once, last: by up to 2.4e-4 and 2e-3, half a unit in the last place of a number near 1 (twice that where an
attention factor makes it larger than 1). Parity's own error is larger than fp16's rounding before position 65,535,
and larger than bf16's before a million.

Sizes: {sizes}. Positions are the same along every axis. Frequencies that depend on the length (dynamic, longrope)
are those of {length:,} tokens. `rope-dinov3` has angles of places in a grid from -1 to 1, here the last cell of a
grid as large as the position says, so its error hardly grows."""


def spec_of(case: str, angles: str, dtype: str) -> Spec:
    """The spec of one of CASES; RequestError where it has no such angles."""
    encoding = {"name": case.split()[0], **CASES[case]}
    return read_spec({"encoding": encoding, **SIZES, "causal": True, "angles": angles, "dtype": dtype})


def specs() -> tuple[dict[Spec, str], dict[str, str]]:
    """Every spec with the name of its case, and the sentence for each case that has no exact angles."""
    cases: dict[Spec, str] = {}
    refused: dict[str, str] = {}
    for case in CASES:
        for dtype in DTYPES:
            for angles in ANGLES:
                try:
                    cases[spec_of(case, angles, dtype)] = case
                except RequestError as error:
                    refused[case] = str(error)
    return cases, refused


def row(case: str, measured: Measured) -> dict[str, Any]:
    """One row of the data, numbers to three digits."""
    spec = measured.spec
    name = {"encoding": case, "angles": spec.angles, "dtype": spec.dtype, "runtime": measured.runtime}
    return {**name, "errors": [float(f"{error:.2e}") for error in measured.errors]}


def page(data: dict[str, Any]) -> bytes:
    """The data for people: a table for each dtype, a line for runtimes that agree to two digits."""
    sizes = ", ".join(f"{name} {size}" for name, size in data["sizes"].items())
    lines = [_HOW.format(exact=EXACT, sizes=sizes, length=POSITIONS[-1] + 1)]
    heads = ["encoding", "angles", *(f"{position:,}" for position in data["positions"]), "runtimes"]
    for dtype in DTYPES:
        lines += ["", f"## {dtype}", "", _line(heads), _line(["---", "---", *["--:"] * len(POSITIONS), "---"])]
        agreeing: dict[tuple[str, ...], list[str]] = {}
        for entry in data["rows"]:
            if entry["dtype"] == dtype:
                numbers = (f"{error:.1e}" if error else "0" for error in entry["errors"])
                agreeing.setdefault((entry["encoding"], entry["angles"], *numbers), []).append(entry["runtime"])
        lines += [_line([*cells, ", ".join(runtimes)]) for cells, runtimes in agreeing.items()]
    lines += ["", "## Without exact angles", "", *(f"- {case}: {why}" for case, why in data["refused"].items())]
    lines += ["", "## Not run", "", *(f"- {name}: {why}" for name, why in data["not_run"].items())]
    engines = ", ".join(f"{runtime} is {engine}" for runtime, engine in data["engines"].items())
    last = f"Measured on {describe_cpu(data['machine'])}; {engines}."
    return ("\n".join([*lines, "", last, ""])).encode()


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


@click.command()
def main() -> None:
    """Measure, and write docs/results/angles.json and docs/results/angles.md; exits 1 where a runtime failed."""
    cases, refused = specs()
    with console.steps("measuring", total=len(cases)) as progress:
        measured = list(measure(cases, RUNTIMES, advance=lambda what: progress.update(what, advance=1)))
    failed = [result for result in measured if result.failed]
    for result in failed:
        spec = result.spec
        click.echo(f"failed: {cases[spec]}, {spec.angles}, on {result.runtime}: {result.reason}", err=True)
    facts = machine()
    not_run = [result for result in measured if result.reason is not None and not result.failed]
    data = {
        "positions": POSITIONS,
        "sizes": SIZES,
        "machine": {name: facts[name] for name in MACHINE},
        "engines": {result.runtime: result.engine for result in measured if result.engine is not None},
        "refused": refused,
        "not_run": {result.runtime: result.reason for result in not_run},
        "rows": [row(cases[result.spec], result) for result in measured if result.errors],
    }
    with staged() as files:
        files.write(DATA, lambda file: file.write(json_bytes(data)))
        files.write(PAGE, lambda file: file.write(page(data)))
    raise SystemExit(int(bool(failed)))


if __name__ == "__main__":
    main()
