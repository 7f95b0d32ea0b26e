"""`python scripts/benchmarks/tuning.py`: does tune find what timing everything finds, and at what share of its cost?

For each encoding, one after the other in one run: `posexport.tune` of a block, and then every distinct program under
every combination of options at full rounds (tuning_full). Tune's pick is right where it is no slower than the
best of all, within the interval over fresh processes. Writes docs/results/tuning.json and tuning.md, and exits 1
where a pick is slower, or costs more than its share.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import attrs
import click
from tools import machine_line, versions
from tuning_full import FRESH, SURE, full

from posexport.bench.scenarios import Scenario
from posexport.bench.tune.halving import MAX_ROUNDS, NEAR
from posexport.bench.tune.search import Block, Limits, Request, Store, tune
from posexport.cli import console
from posexport.errors import RequestError
from posexport.files import json_bytes, staged
from posexport.models import ENCODINGS, read_spec
from posexport.models.weights import seeded_weights

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/results/tuning.json", ROOT / "docs/results/tuning.md"
SHARE = 0.4
"""The most that a tuning may cost of timing everything, in runs."""

SETS: dict[str, dict[str, Any]] = {
    "learned": {"max_positions": 1024},
    "swin": {"window_size": 32},
    "swinv2": {"window_size": 32},
}
"""Parameters of encodings whose defaults hold too few positions."""


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(ENCODINGS)), help="this encoding, repeatable")
@click.option("--hidden-size", default=512, help="width of the block  [default: 512]")
@click.option("--tokens", default=512, help="tokens of the prompt  [default: 512]")
@click.option(
    "--rounds", default=10, help=f"rounds of timing everything  [default: 10; tune itself has up to {MAX_ROUNDS}]"
)
@click.option("--dtype", "dtypes", multiple=True, default=("fp32",), help="repeatable  [default: fp32]")
@click.option("--form", "forms", multiple=True, help="only this form, repeatable  [default: all]")
@click.option("--dry", is_flag=True, help="write nothing")
def main(
    only: tuple[str, ...],
    hidden_size: int,
    tokens: int,
    rounds: int,
    dtypes: tuple[str, ...],
    forms: tuple[str, ...],
    dry: bool,
) -> None:
    """Tune and time everything, for every encoding; those left out keep their figures, if all else is the same."""
    found = {
        "kind": "tuning",
        "version": 1,
        "block": {"hidden_size": hidden_size, "tokens": tokens, "dtypes": list(dtypes), "rounds": rounds},
        "machine": machine_line(),
        "versions": versions(),
    }
    rows = {} if dry else _stored(found)
    failed = False
    with console.steps("tuning", total=len(only or ENCODINGS)) as progress:
        for name in only or ENCODINGS:
            row = rows[name] = _measure(name, hidden_size, tokens, rounds, dtypes, Limits(forms=forms))
            failed |= row["state"] == "failed"
            progress.update(advance=1)
            click.echo("  ".join(_cells(row)))
            if not dry:
                _write({**found, "rows": [rows[each] for each in ENCODINGS if each in rows]})
    raise SystemExit(int(failed))


def _stored(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that stand, by encoding, where they were measured with the same block, versions and rounds."""
    if not RESULTS.exists():
        return {}
    data = json.loads(RESULTS.read_bytes())
    same = all(data[key] == found[key] for key in ("block", "versions"))
    return {row["encoding"]: row for row in data["rows"]} if same else {}


def _write(found: dict[str, Any]) -> None:
    page = _page(found)
    with staged() as files:
        files.write(RESULTS, lambda file: file.write(json_bytes(found)))
        files.write(PAGE, lambda file: file.write(page.encode()))


def _measure(
    name: str, hidden: int, tokens: int, rounds: int, dtypes: tuple[str, ...], limits: Limits
) -> dict[str, Any]:
    block = _block(name, hidden, dtypes)
    limit = next(iter(block.specs.values())).token_limit()
    request = Request(scenario=Scenario("prefill", min(tokens, limit or tokens)), limits=limits)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        result = tune(block, request, folder / "winner.onnx", Store(folder / "tune"))
        if result.winner is None:
            return {"encoding": name, "state": "failed", "reason": "nothing verified"}
        every = full(block, request, result.winner["name"], Store(folder / "full"), rounds=rounds)
    share = result.runs / every.runs
    state = "passed" if every.fine and share <= SHARE else "failed"
    return {
        "encoding": name,
        "scenario": str(request.scenario),
        "pick": result.winner["name"],
        "best": every.best,
        "ratio": None if every.judged is None else attrs.asdict(every.judged),
        "candidates": len(every.ratios),
        "runs": result.runs,
        "everything_runs": every.runs,
        "share_of_runs": share,
        "seconds": result.seconds,
        "everything_seconds": every.seconds,
        "machine_load": max(result.machine_load, every.machine_load),
        "ratios": {each: attrs.asdict(ratio) for each, ratio in every.ratios.items()},
        "state": state,
    }


def _block(name: str, hidden: int, dtypes: tuple[str, ...]) -> Block:
    """A block with heads of 64; causal only where the encoding can't do without."""
    specs = {}
    for dtype in dtypes:
        data = {"encoding": {"name": name, **SETS.get(name, {})}, "hidden_size": hidden, "num_heads": hidden // 64}
        try:
            specs[dtype] = read_spec({**data, "dtype": dtype})
        except RequestError:
            specs[dtype] = read_spec({**data, "dtype": dtype, "causal": True})
    return Block(specs=specs, load=lambda dtype: (specs[dtype], seeded_weights(specs[dtype], 0)), source="seed 0")


COLUMNS = ("encoding", "tune's pick", "best of all", "pick / best", "candidates", "runs", "time", "state")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "pick" not in row:
        return (row["encoding"], *["-"] * 6, f"failed: {row['reason']}")
    ratio = row["ratio"]
    same = "the same" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return (
        row["encoding"],
        row["pick"],
        row["best"],
        same,
        str(row["candidates"]),
        f"{row['share_of_runs']:.0%}",
        f"{row['seconds'] / row['everything_seconds']:.0%}",
        row["state"],
    )


def _page(found: dict[str, Any]) -> str:
    block, rows = found["block"], found["rows"]
    passed = sum(row["state"] == "passed" for row in rows)
    busy = max(row.get("machine_load", 0) for row in rows)
    return "\n".join(
        [
            "# What tune finds, against timing everything",
            "",
            "    python scripts/benchmarks/tuning.py",
            "",
            f"Blocks of width {block['hidden_size']}, heads of 64, prompts of {block['tokens']} tokens (or all that",
            f"have positions), {' and '.join(block['dtypes'])}, ONNX Runtime on the CPU; other work took up to",
            f'{busy:.0%} of the CPU. "Best of all" is the fastest of every distinct program under every combination of',
            f"options, {block['rounds']} rounds each; the ratio is that of tune's pick to it, timed anew in {FRESH}",
            f"pairs of processes, with its {SURE:.1%} interval over them, so that all rows hold with 95 %: a pick",
            f"is right where that reaches 1. (Of programs within {NEAR:.0%} of each other tune takes the simplest.)",
            "",
            f'"Runs" and "time" are what tune took of timing everything at {MAX_ROUNDS} rounds: time with exports and',
            "opening of the programs, and for tune with verification and writing.",
            "",
            f"**{passed} of {len(rows)}** picks are no slower than the best, at {SHARE:.0%} of the runs or less.",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "| --- | --- | --- | --: | --: | --: | --: | --- |",
            *(f"| {' | '.join(_cells(row))} |" for row in rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
