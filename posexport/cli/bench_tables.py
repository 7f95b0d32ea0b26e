"""Tables of benchmarks for people: of one file, of its gate, and of a project."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from posexport.bench.candidates import COMPILED, EAGER, EXPORTED, LOWER_BOUND, OPTIMIZED
from posexport.bench.result import OUT_OF_DATE, Benchmark, Change, Gate, LimitResult, ProjectBenchmark, Shape, Timing
from posexport.bench.statistics import CONFIDENCE, Ratio
from posexport.cli import console
from posexport.jsondata import unstructure
from posexport.machine import describe_cpu

COLUMNS = ("runtime", "median ms", "p10 - p90", "x lower bound", "x torch eager", "tokens/s", "memory", "state")
RATIOS = {"x lower bound": LOWER_BOUND, "x torch eager": EAGER}
_OTHERS = {COMPILED: "x torch.compile", EXPORTED: "x torch's export", OPTIMIZED: "x ORT's optimizer"}
_BUDGET = ("file", "runtime", "at", "times", "of", "95 % interval", "limit", "state")
_GATED = ("runtime", "at", "change", "99 % interval", "by", "before", "now", "state")


def show_benchmark(result: Benchmark, alternatives: bool) -> None:
    """Show a table for each shape, then remarks, and the gate."""
    timed = {timing.runtime for timing in result.timings if timing.seconds is not None}
    unknown = {*RATIOS.values()} - timed if result.no_torch else set()
    for shape in result.shapes:
        block = ", ".join(filter(None, (result.encoding, result.form, result.dtype)))
        rounds = f"{shape.rounds} rounds" + (f" in {result.processes} processes" if result.processes > 1 else "")
        title = f"{result.file}: {block}, {_shape(shape)}, {rounds}; {describe_cpu(result.machine)}"
        left_out = tuple(name for name, role in RATIOS.items() if role in unknown)
        columns = tuple(name for name in COLUMNS if name not in left_out)
        rows = [_row(timing, left_out) for timing in shape.results]
        console.show_table(title, columns, rows, right=columns[1:-1])
        if alternatives:
            right = tuple(_OTHERS.values())
            rows = [
                (timing.runtime, *(_with_interval(timing.ratios.get(role)) for role in _OTHERS))
                for timing in shape.results
                if timing.seconds is not None
            ]
            console.show_table("beside other ways to run it", ("runtime", *_OTHERS.values()), rows, right)
    if EAGER in unknown:
        console.write(f"torch is not known: {result.no_torch}.")
    lines = [f"{timing.runtime}: {text}" for timing in result.timings if (text := timing.reason or timing.note)]
    lines += [f"{point.scenario}: left out, {point.reason}" for point in result.left_out]
    for line in dict.fromkeys(lines):
        console.write(line)
    for shape in result.shapes:
        if 0 < shape.rounds < result.rounds:
            console.write(f"{_shape(shape)}: {shape.rounds} of {result.rounds} rounds, for lack of time (--seconds).")
    if result.busy:
        load = f"other work took {result.machine_load:.0%} of the CPU"
        console.write(f"The machine was busy ({load}): time it again at rest.")
    if result.gate is not None:
        _show_gate(result.gate)


def _show_gate(gate: Gate) -> None:
    order = ("slower", "inconclusive", "not run", "fine")
    changes = sorted(gate.changes, key=lambda change: order.index(change.state))
    title = f"got slower by more than {gate.limit:.1%}?"
    console.show_table(title, _GATED, [_change(change) for change in changes], right=_GATED[2:4] + _GATED[5:7])
    reasons = [f"{change.runtime} at {change.shape}: {change.reason}" for change in changes if change.reason]
    for line in (*dict.fromkeys(reasons), *gate.notes):
        console.write(line)
    slower, inconclusive = (sum(change.state == state for change in changes) for state in ("slower", "inconclusive"))
    if slower:
        console.write(f"{slower} of {len(changes)} got slower.")
    elif inconclusive:
        console.write(f"Nothing clearly got slower; {inconclusive} of {len(changes)} are inconclusive at this noise.")
    elif all(change.state == "not run" for change in changes):
        console.write("Nothing was compared.")
    else:
        console.write("Nothing got slower.")


def show_project(result: ProjectBenchmark, alternatives: bool, as_json: bool) -> None:
    """Show every file with its gate and its limits, or why none was timed."""
    if as_json:
        console.show_json(unstructure(result))
    elif any(file.state == OUT_OF_DATE for file in result.files):
        rows = [(file.file, file.state, file.reason) for file in result.files]
        console.show_table(f"Files of {result.project}", ("file", "state", "why"), rows)
    else:
        _show_files(result, alternatives)
    for file in result.files:
        for warning in file.result.manifest_warnings if file.result is not None else ():
            console.warn(f"{warning}.")


def _show_files(result: ProjectBenchmark, alternatives: bool) -> None:
    for file in result.files:
        if file.result is not None:
            show_benchmark(file.result, alternatives)
    rows = [_limit(PurePath(file.file).name, limit) for file in result.files for limit in file.limits]
    if rows:
        console.show_table(f"Budget of {result.project}", _BUDGET, rows, right=("times", "limit"))
    for file in result.files:
        name = PurePath(file.file).name
        for limit in file.limits:
            if limit.reason and limit.reason != file.reason:
                console.write(f"{name}, {limit.scenario} on {limit.runtime}: {limit.reason}")
        if file.reason:
            console.write(f"not run: {name} ({file.reason})")


def _shape(shape: Shape) -> str:
    return f"{', '.join(shape.scenarios)} ({shape.sizes})" if shape.scenario else str(shape.sizes)


def _row(result: Timing, left_out: Sequence[str] = ()) -> tuple[str, ...]:
    cells = dict.fromkeys(COLUMNS, "-") | {"runtime": result.runtime, "state": result.state}
    if result.seconds is not None:
        seconds, rate, bound = result.seconds, result.tokens_per_second, result.ratios.get(LOWER_BOUND)
        cells["median ms"] = f"{seconds.median * 1e3:.3f}"
        cells["p10 - p90"] = f"{seconds.p10 * 1e3:.3f} - {seconds.p90 * 1e3:.3f}"
        cells["x lower bound"] = "-" if bound is None else _times(bound.median)
        cells["x torch eager"] = _with_interval(result.ratios.get(EAGER))
        cells["tokens/s"] = "-" if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
        cells["memory"] = _memory(result)
    return tuple(cell for name, cell in cells.items() if name not in left_out)


def _memory(result: Timing) -> str:
    if result.memory is None:
        return "-"
    text = f"{result.memory / 1e6:.0f} MB"
    return text if result.gpu_memory is None else f"{text} + {result.gpu_memory / 1e6:.0f} MB GPU"


def _with_interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    interval = f"{_times(ratio.low)} to {_times(ratio.high)}" if ratio.confidence >= CONFIDENCE else "few rounds"
    return f"{_times(ratio.median)} ({interval})"


def _times(ratio: float) -> str:
    """A ratio with few digits, whatever its size."""
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.0f}"


def _change(change: Change) -> tuple[str, ...]:
    return (
        change.runtime,
        change.shape,
        f"{change.change - 1:+.1%}" if change.change is not None else "-",
        f"{change.low - 1:+.1%} to {change.high - 1:+.1%}" if change.low and change.high else "-",
        change.reference or "-",
        "-" if change.before is None else f"{change.before:.3f}",
        "-" if change.now is None else f"{change.now:.3f}",
        change.state,
    )


def _limit(file: str, limit: LimitResult) -> tuple[str, ...]:
    known = limit.ratio is not None
    interval = f"{limit.low:.2f} to {limit.high:.2f}" if known else "-"
    ratio = f"{limit.ratio:.2f}" if known else "-"
    return (file, limit.runtime, limit.scenario, ratio, limit.reference, interval, f"{limit.limit:g}", limit.state)
