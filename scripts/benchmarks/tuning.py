"""Does tune find the same choice as timing everything, and at what share of the cost?

For each encoding, this runs `posexport.tune` on a block and then times every distinct program with every combination of
options. Tune's choice is right if it is not slower than the best of all, within the interval over new processes.
Results: docs/results/tuning.json and tuning.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from results import Row, counted, machine_line, record, table, write_results
from timing import block_spec

from posexport import temporary
from posexport.bench import statistics
from posexport.bench.scenarios import Scenario
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import GROUP, MAX_ROUNDS, Halving
from posexport.bench.tune.measure import WARMUP
from posexport.bench.tune.programs import Block
from posexport.bench.tune.result import Row as Candidate
from posexport.bench.tune.search import Tuning, tune
from posexport.bench.tune.space import Program, Request, options_of, other_opsets, plain_options, programs
from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.models.weights import seeded_weights

HIDDEN, TOKENS, ROUNDS = 512, 512, 10
SHARE = 0.4
"""The largest share of the runs of timing everything that a tuning may cost."""

PROCESSES, TURNS = 7, 3
"""The number of pairs of new processes that judge a choice, and the rounds of each pair."""

CONFIDENCE = 0.998
"""The confidence of each judgement. 24 judgements then hold together with 95 %."""

COLUMNS = ("encoding", "tune's choice", "best of all", "choice / best", "candidates", "runs", "time", "state")


def measure(quick: bool) -> list[Row]:
    """The number of choices of tune that are slower than the best, or that cost more than SHARE."""
    rows = []
    for name in ["rope"] if quick else ENCODINGS:
        rows.append(_measure(name))
        click.echo("  ".join(_cells(rows[-1])))
    if not quick:
        block = {"hidden_size": HIDDEN, "tokens": TOKENS, "dtypes": ["fp32"], "rounds": ROUNDS}
        data = {"kind": "tuning", "version": 1, "block": block, **record(), "rows": rows}
        write_results("tuning", data, figures(data))
    failed = [row["encoding"] for row in rows if row["state"] == "failed"]
    return [counted("choices of tune that are slower than the best, or cost too much", len(failed), 0, "encodings")]


def figures(data: dict[str, Any]) -> list[str]:
    """The lines of the page for the data of the results file."""
    rows = data["rows"]
    passed, load = sum(row["state"] == "passed" for row in rows), max(row.get("machine_load", 0) for row in rows)
    measured = f"{machine_line(data['machine'])}; other work took up to {load:.0%} of the CPU."
    right = f"**{passed} of {len(rows)}** choices are no slower than the best, at {SHARE:.0%} of the runs or less."
    return [measured, "", right, "", *table(COLUMNS, map(_cells, rows), left=COLUMNS[1:3])]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "pick" not in row:
        return (row["encoding"], *["-"] * 6, f"failed: {row['reason']}")
    ratio, times = row["ratio"], row["seconds"] / row["everything_seconds"]
    same = "the same" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    shares = (str(row["candidates"]), f"{row['share_of_runs']:.0%}", f"{times:.0%}")
    return (row["encoding"], row["pick"], row["best"], same, *shares, row["state"])


def _measure(name: str) -> dict[str, Any]:
    """Tune and time everything for one encoding. The block is causal only if the encoding requires it."""
    try:
        spec = block_spec(name, HIDDEN, HIDDEN // 64)
    except RequestError:
        spec = block_spec(name, HIDDEN, HIDDEN // 64, causal=True)
    block = Block(specs={"fp32": spec}, load=lambda dtype: (spec, seeded_weights(spec, 0)), source="seed 0")
    request = Request(scenario=Scenario("prefill", min(TOKENS, spec.token_limit() or TOKENS)))
    with temporary.folder() as folder:
        result = tune(block, request, Path(folder, "winner.onnx"), Store(Path(folder, "tune")))
        if result.winner is None:
            return {"encoding": name, "state": "failed", "reason": "nothing verified"}
        pick = result.winner.name
        everything = time_everything(block, request, pick, Store(Path(folder, "everything")), ROUNDS)
    share, ratio = result.cost.timed_runs / everything["everything_runs"], everything["ratio"]
    return {
        "encoding": name,
        "scenario": str(request.scenario),
        "pick": pick,
        "candidates": len(everything["ratios"]),
        "runs": result.cost.timed_runs,
        "share_of_runs": share,
        "seconds": result.cost.seconds,
        **everything,
        "machine_load": max(result.machine_load, everything["machine_load"]),
        "state": "passed" if (ratio is None or ratio["low"] <= 1) and share <= SHARE else "failed",
    }


def winning_program(winner: str, distinct: Sequence[Program]) -> Program:
    """The program with the winner's form, dtype and target."""
    form, dtype, _, *target = winner.split()[0].split("/")
    key = (form, dtype, target[0] if target else "portable")
    return next(program for program in distinct if (program.form, program.dtype, program.target) == key)


def time_everything(
    block: Block, request: Request, winner: str, store: Store, rounds: int = MAX_ROUNDS
) -> dict[str, Any]:
    """Time every distinct program with every combination of options against `winner`, the name of a candidate.

    `ratios` contains the time of every candidate over that of the winner. `best` has the smallest ratio. `ratio` is the
    winner's time over the best's, measured again in new processes, because the smallest of many noisy ratios is too
    small; it is None if both are the same candidate. `everything_runs` and `everything_seconds` are the cost of timing
    each candidate once at full rounds; the repeated timing of the winner in every group is not counted. The opsets are
    those of the first search, and all opsets for the winner's form and target. `store` should be empty: results in it
    are not measured again.
    """
    start = time.perf_counter()
    with Tuning(block, request, store, lambda step: None) as tuning:
        distinct = tuning.distinct(programs(request.runtime, block.specs, request.limits))
        distinct += tuning.distinct(other_opsets(winning_program(winner, distinct), request.limits))
        names: list[str] = []
        for program in distinct:
            levels: dict[str, str | None] = {}  # the first level that produces a graph
            for options in (*options_of(request.runtime, gpu=True), plain_options(request.runtime)):
                level = options.get("graph_level")
                identity, error = tuning.programs.identity(program, level)
                candidate = Candidate.of(program, options)
                if error is None and levels.setdefault(identity, level) == level and candidate.name not in names:
                    tuning.timer.candidates[candidate.name] = candidate
                    names.append(candidate.name)
        search, others = Halving(), [name for name in names if name != winner]
        timer, runs, timing_seconds = tuning.timer, 0.0, 0.0
        for at in range(0, max(len(others), 1), GROUP - 1):
            group = [winner, *others[at : at + GROUP - 1]]
            runs_before, seconds_before = timer.runs, timer.seconds
            timed, failed = timer.time_rounds(group, rounds, at)
            search.rounds += timed
            search.failed |= failed
            share = (len(group) - (at > 0)) / len(group)  # the winner counts only once
            warmups = WARMUP * len(group)
            runs += (warmups + (timer.runs - runs_before - warmups) * MAX_ROUNDS / rounds) * share
            timing_seconds += (timer.seconds - seconds_before) * share
        ratios = {name: ratio for name in names if (ratio := search.ratio(name, winner)) is not None}
        best = min(ratios, key=lambda name: ratios[name].median)
        seconds = time.perf_counter() - start - timer.seconds + timing_seconds * MAX_ROUNDS / rounds
        judged = None if best == winner else attrs.asdict(_judged(tuning, winner, best, len(names)))
        costs = {"everything_runs": round(runs), "everything_seconds": seconds}
        plain = {name: attrs.asdict(ratio) for name, ratio in ratios.items()}
        return {"best": best, "ratio": judged, "ratios": plain, **costs, "machine_load": timer.machine_load}


def _judged(tuning: Tuning, winner: str, best: str, seed: int) -> statistics.Ratio:
    """The ratio of the two candidates, with its interval over processes."""
    series: dict[str, list[list[float]]] = {winner: [], best: []}
    for number in range(PROCESSES):
        timed, failed = tuning.timer.time_rounds([winner, best], TURNS, seed + number)
        if failed:
            raise RuntimeError(f"{winner} or {best} failed when they were timed again: {failed}")
        for name, values in series.items():
            values.append([seconds[name] for seconds in timed])
    return statistics.ratio_of_processes(series[winner], series[best], CONFIDENCE)[0]
