"""What people see of a tuning: every candidate that was timed, and the winner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from posexport.bench.tune.result import SAME_GRAPH
from posexport.cli import console
from posexport.machine import describe_cpu

if TYPE_CHECKING:
    from posexport.bench.tune.result import Result, Row

_TIMED = ("median ms", "to winner", "interval", "rounds")
_COUNTED = ("kernels", "attention")


def _timed(row: Row) -> tuple[str, ...]:
    ratio = row.ratio
    return (
        "-" if row.seconds is None else f"{row.seconds.median * 1e3:.3f}",
        "-" if ratio is None else f"{ratio.median:.2f}x",
        "-" if ratio is None else f"{ratio.low:.2f} to {ratio.high:.2f}",
        str(row.rounds) if row.rounds else "-",
    )


def _counted(row: Row) -> tuple[str, ...]:
    if row.kernels is None:
        return ("-", "-")
    fused = "fused" if row.kernels["fused_attention"] else "not fused"
    return (f"{row.kernels['count']}+{row.kernels['host_steps']}", fused)


def _space(row: Row, objective: str) -> str:
    """What it takes: memory, unless size is the objective; files may be too small for MB."""
    if objective == "size":
        return "-" if row.size is None else f"{row.size:,} B"
    return "-" if row.memory is None else console.megabytes(row.memory)


def show_tuning(result: Result, output: Path) -> None:
    """A table of the candidates, and what was written to `output`."""
    counted = any(row.kernels is not None for row in result.candidates)
    columns, cells = (_COUNTED, _counted) if counted else (_TIMED, _timed)
    rows = [
        (row.name, row.state, *cells(row), _space(row, result.objective), row.reason)
        for row in sorted(result.candidates, key=_order)
        if row.reason_code != SAME_GRAPH
    ]
    space = "size" if result.objective == "size" else "planned memory" if counted else "memory"
    same = len(result.candidates) - len(rows)
    title = f"{result.encoding} for {result.target}, {result.scenario}, {result.objective}: {result.method}"
    console.show_table(
        f"{title}; {describe_cpu(result.machine)}",
        ("candidate", "state", *columns, space, "why"),
        rows,
        right=[name for name in (*columns, space) if name not in ("attention", "interval")],
    )
    if same:
        click.echo(f"{same} more are the same graph as one of these, and were timed once; --json lists them\n")
    cost = result.cost
    share = f" ({cost.timed_runs / cost.everything_runs:.0%} of timing everything)" if cost.everything_runs else ""
    known = f"; {cost.known_before} facts were in the cache" if cost.known_before else ""
    took = f"{cost.seconds:.1f} s, {cost.timed_runs} runs{share}{known}"
    if result.winner is not None:
        ready = " ".join(f"{name}={value}" for name, value in (result.winner.settings or {}).items())
        console.show_facts(
            f"wrote {output}",
            [
                ("winner", result.winner.name),
                ("why", result.winner.reason),
                ("verified on", result.winner.verified or ""),
                ("run it with", ready),
                ("cost", took),
                ("manifest", f"{output}.json"),
            ],
        )
    if result.busy:
        click.echo(f"The machine was busy (other work took {result.machine_load:.0%} of the CPU): tune again at rest.")


def _order(row: Row) -> tuple[int, float]:
    states = ("won", "raced", "dropped", "failed", "refused", "not run")
    return states.index(row.state), row.ratio.median if row.ratio else 1e9
