"""What people see of a benchmark and of its gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from posexport.cli import console

if TYPE_CHECKING:
    from posexport.bench.result import Benchmark, Change, Gate, Shape, Timing
    from posexport.bench.statistics import Ratio

_COLUMNS = ("runtime", "median ms", "p10 - p90", "x lower bound", "x torch eager", "tokens/s", "memory", "state")
_OTHERS = {"torch-compile": "x torch.compile", "torch-onnx": "x torch's export", "ort-optimizer": "x ORT's optimizer"}
_GATED = ("runtime", "at", "change", "99 % interval", "by", "before", "now", "state")


def show_benchmark(found: Benchmark, peers: bool) -> None:
    """A table for each shape, then what is to be said of some of it."""
    for shape in found.shapes:
        title = f"{found.file}: {found.encoding}, {found.form}, {found.dtype}, {_shape(shape)}, {shape.rounds} rounds"
        if found.processes > 1:
            title += f" in {found.processes} processes"
        console.show_table(title, _COLUMNS, [_row(each) for each in shape.results], right=_COLUMNS[1:-1])
        if peers:
            right = tuple(_OTHERS.values())
            rows = [_others(each) for each in shape.results if each.seconds is not None]
            console.show_table("beside other ways to run it", ("runtime", *_OTHERS.values()), rows, right)
    results = found.timings
    said = dict.fromkeys(f"{each.runtime}: {text}" for each in results if (text := each.reason or each.note))
    said |= dict.fromkeys(f"{each.scenario}: left out, {each.reason}" for each in found.left_out)
    for line in said:
        click.echo(line)
    _say_if_short(found)


def _say_if_short(found: Benchmark) -> None:
    from posexport.bench.result import HIGH_MACHINE_LOAD

    short = [shape for shape in found.shapes if 0 < shape.rounds < found.rounds]
    for shape in short:
        click.echo(f"{_shape(shape)}: {shape.rounds} of {found.rounds} rounds, for lack of time (--seconds).")
    if found.machine_load > HIGH_MACHINE_LOAD:
        click.echo(
            f"The machine was busy (other work took {found.machine_load:.0%} of the CPU): time it again at rest."
        )


def show_gate(gate: Gate) -> None:
    """The changes, those that got slower first, and what makes them less sure."""
    order = ("slower", "inconclusive", "not run", "fine")
    changes = sorted(gate.changes, key=lambda change: order.index(change.state))
    title = f"got slower by more than {gate.limit:.1%}?"
    console.show_table(title, _GATED, [_change(change) for change in changes], right=_GATED[2:4] + _GATED[5:7])
    for line in dict.fromkeys(f"{each.runtime} at {each.shape}: {each.reason}" for each in changes if each.reason):
        click.echo(line)
    for note in gate.notes:
        click.echo(note)
    slower, unsure = (sum(change.state == state for change in changes) for state in ("slower", "inconclusive"))
    if slower:
        click.echo(f"{slower} of {len(changes)} got slower.")
    elif unsure:
        click.echo(f"Nothing surely got slower; {unsure} of {len(changes)} can't be told at this noise.")
    elif all(change.state == "not run" for change in changes):
        click.echo("Nothing was compared.")
    else:
        click.echo("Nothing got slower.")


def _shape(shape: Shape) -> str:
    return f"{', '.join(shape.scenarios)} ({shape.sizes})" if shape.scenario else str(shape.sizes)


def _row(result: Timing) -> tuple[str, ...]:
    if result.seconds is None:
        return (result.runtime, *["-"] * 6, result.state)
    seconds = result.seconds
    bound = result.ratios.get("lower_bound")
    return (
        result.runtime,
        f"{seconds.median * 1e3:.3f}",
        f"{seconds.p10 * 1e3:.3f} - {seconds.p90 * 1e3:.3f}",
        "-" if bound is None else _times(bound.median),
        _with_interval(result.ratios.get("torch")),
        _rate(result.tokens_per_second or 0),
        _memory(result),
        result.state,
    )


def _rate(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _memory(result: Timing) -> str:
    if result.memory is None:
        return "-"
    told = f"{result.memory / 1e6:.0f} MB"
    return told if result.gpu_memory is None else f"{told} + {result.gpu_memory / 1e6:.0f} MB GPU"


def _with_interval(ratio: Ratio | None) -> str:
    from posexport.bench.statistics import CONFIDENCE

    if ratio is None:
        return "-"
    sure = f"{_times(ratio.low)} to {_times(ratio.high)}" if ratio.confidence >= CONFIDENCE else "few rounds"
    return f"{_times(ratio.median)} ({sure})"


def _times(ratio: float) -> str:
    """A ratio in few digits, whatever its size."""
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.0f}"


def _others(result: Timing) -> tuple[str, ...]:
    return (result.runtime, *(_with_interval(result.ratios.get(role)) for role in _OTHERS))


def _change(change: Change) -> tuple[str, ...]:
    known = change.change is not None and change.low is not None and change.high is not None
    return (
        change.runtime,
        change.shape,
        f"{change.change - 1:+.1%}" if change.change is not None else "-",
        f"{change.low - 1:+.1%} to {change.high - 1:+.1%}" if known and change.low and change.high else "-",
        change.reference or "-",
        "-" if change.before is None else f"{change.before:.3f}",
        "-" if change.now is None else f"{change.now:.3f}",
        change.state,
    )
