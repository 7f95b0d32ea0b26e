"""Timings as the page compares them: all candidates of one block, machine and scenario, from whichever files.

Two timings are compared where everything but form, dtype and opset is the same: block, machine and settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from posexport.bench.candidates import PREVIOUS_ARTIFACT
from posexport.bench.result import TIMED, Benchmark, Shape, Timing
from posexport.bench.statistics import CONFIDENCE, Ratio, Summary
from posexport.machine import SAME
from posexport.report.page.blocks import fact, listed, plural
from posexport.report.page.results import Result

LOWER_BOUND, TORCH = "lower_bound", "torch"
ALTERNATIVES = {
    LOWER_BOUND: "lower bound: bare matrix products",
    TORCH: "torch eager",
    "torch-compile": "torch.compile",
    "torch-onnx": "torch.onnx.export",
    "ort-optimizer": "ORT's optimizer",
}
"""The names of other ways to run a block, by the role under which ratios are taken to them."""

_LONG, _NAMED_FACTS = 32, 4
_ENOUGH_RUNS = 6  # the fewest whose range holds the median with a probability of 95 %


@attrs.frozen(kw_only=True)
class Row:
    """One candidate at one shape; `source` is the result file and `benchmark` the run that it comes from."""

    source: str
    benchmark: Benchmark
    shape: Shape
    timing: Timing
    seconds: Summary

    @property
    def runtime(self) -> str:
        return self.timing.runtime

    @property
    def role(self) -> str:
        """The role of an alternative; empty for a runtime that runs the artifact."""
        name = self.runtime.removesuffix("-cuda")
        return name if name in ALTERNATIVES else PREVIOUS_ARTIFACT if name.startswith(f"{PREVIOUS_ARTIFACT}:") else ""

    @property
    def gpu(self) -> bool:
        """Whether it ran on a GPU; ratios are to the alternatives on the same device."""
        return self.runtime.endswith("-cuda") or self.runtime.startswith(("tensorrt", "trt"))

    @property
    def timed(self) -> bool:
        return self.timing.state == TIMED

    @property
    def median(self) -> float:
        return self.seconds.median

    def ratio(self, role: str) -> Ratio | None:
        """Its time over that of an alternative."""
        return self.timing.ratios.get(role)


@attrs.frozen(kw_only=True)
class Comparison:
    """All candidates of one block on one machine in one scenario.

    `key` is the same for what may be compared; `block` names it. `benchmarks` has each artifact of the block once, so
    that a candidate has the same name in every scenario. `sizes` are the scenario in words.
    """

    key: str
    block: str
    benchmarks: tuple[Benchmark, ...]
    scenario: str
    sizes: str
    rows: tuple[Row, ...]

    @property
    def ranked(self) -> list[Row]:
        """The timed candidates without the lower bound, the fastest first.

        Separate runs, one per file, differ by more than their candidates do: where each timed torch on the same
        device, candidates rank by their ratio to it, times its time in the fastest of the runs.
        """
        timed = [row for row in self.rows if row.timed and row.role != LOWER_BOUND]
        scales: dict[bool, float] = {}
        for gpu in (False, True):
            runs = {id(row.benchmark) for row in timed if row.gpu == gpu}
            torch = {id(row.benchmark): row.median for row in timed if row.gpu == gpu and row.role == TORCH}
            if len(runs) > 1 and len(torch) == len(runs):
                scales[gpu] = min(torch.values())

        def scaled(row: Row) -> float:
            ratio = row.ratio(TORCH) if row.gpu in scales else None
            return row.median if ratio is None else ratio.median * scales[row.gpu]

        return sorted(timed, key=scaled)

    def name(self, row: Row, with_file: bool = True) -> str:
        """The name of a candidate: its runtime, and what sets its file apart from the others of the block."""
        made, dtypes = row.benchmark, len({other.dtype for other in self.benchmarks}) > 1
        if row.role in ALTERNATIVES:
            device = " on CUDA" if row.runtime.endswith("-cuda") else ""
            return f"{ALTERNATIVES[row.role]}{device}" + (f" · {made.dtype}" if dtypes else "")
        alike = [other for other in self.benchmarks if (other.form, other.dtype) == (made.form, made.dtype)]
        twins = [other for other in alike if other.opset == made.opset]
        parts = [row.runtime, made.form, *([made.dtype] if dtypes else [])]
        parts += [f"opset {made.opset}"] if len(twins) < len(alike) else []
        if with_file and len(twins) > 1:
            parts.append(made.file if len({other.file for other in twins}) == len(twins) else row.source)
        return " · ".join(parts)


_NEVER = Summary(median=math.inf, p10=math.inf, p90=math.inf, p99=math.inf, count=0)


def rows_of(results: Sequence[Result[Benchmark]]) -> Iterator[Row]:
    """Every candidate at every shape of every file."""
    for result in results:
        for shape in result.data.shapes:
            for timing in shape.results:
                seconds = timing.seconds or _NEVER
                yield Row(source=result.name, benchmark=result.data, shape=shape, timing=timing, seconds=seconds)


def comparisons(results: Sequence[Result[Benchmark]]) -> list[Comparison]:
    """The rows by block and scenario, in the order in which they come."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows_of(results):
        for scenario in (title_of(row.shape), *row.shape.also):  # scenarios of the same sizes
            groups.setdefault((key(row.benchmark), scenario), []).append(row)
    benchmarks: dict[str, dict[tuple[str, str], Benchmark]] = {}
    for (block, _), rows in groups.items():
        benchmarks.setdefault(block, {}).update(
            {(row.benchmark.sha256, row.benchmark.file): row.benchmark for row in rows}
        )
    names = labels([result.data for result in results])
    return [
        Comparison(
            key=block, block=names[block], benchmarks=tuple(benchmarks[block].values()), scenario=scenario,
            sizes=_sizes(rows[0].shape), rows=tuple(rows),
        )
        for (block, scenario), rows in groups.items()
    ]  # fmt: skip


def title_of(shape: Shape) -> str:
    """The scenario, or the sizes."""
    return shape.scenario or ", ".join(f"{name} {size}" for name, size in shape.sizes.to_dict().items())


def _sizes(shape: Shape) -> str:
    past = shape.past_seq or 0
    tokens = plural(shape.seq, "new token" if past else "token")
    text = f"{tokens} behind {past:,} in the cache" if past else f"{tokens} at once"
    return text if shape.batch == 1 else f"{shape.batch:,} × {text}"


Order = Literal["faster", "tie", "too few rounds", "inconclusive"]


def order(first: Row, other: Row) -> Order:
    """Whether the first is faster than the other, by the whole interval of their ratio.

    That is the ratio in the same rounds where they ran in one run, else the two ratios to torch on the same device,
    else the middle 80 % of their times. It is a tie only where the intervals allow equal times.
    """
    if first.gpu == other.gpu:
        direct = first.ratio(other.role) if first.benchmark is other.benchmark and other.role else None
        if direct is not None:
            return order_of(direct)
        pair = first.ratio(TORCH), other.ratio(TORCH)
        if pair[0] is not None and pair[1] is not None:
            if pair[0].low > pair[1].high:
                return "inconclusive"
            enough = min(ratio.confidence for ratio in pair if ratio is not None) >= CONFIDENCE
            return "tie" if pair[0].high >= pair[1].low else "faster" if enough else "too few rounds"
    if first.seconds.p90 >= other.seconds.p10:
        return "tie"
    return "faster" if min(first.seconds.count, other.seconds.count) >= _ENOUGH_RUNS else "too few rounds"


def order_of(ratio: Ratio, inverted: bool = False) -> Order:
    """The same from the ratio of the first candidate's time to the other's, or `inverted`."""
    if ratio.low <= 1 <= ratio.high:
        return "tie"
    if ratio.confidence < CONFIDENCE:
        return "too few rounds"
    return "faster" if (ratio.low > 1) is inverted else "inconclusive"


def confidence(orders: Mapping[Order, Sequence[str]], doubtful: bool, separate: bool = False) -> str:
    """How certain it is that a winner is the fastest.

    `orders` has the other candidates, with their figures, by how the winner compares with them. `doubtful` is set for
    other doubts, such as a busy machine, and `separate` for ties across separate runs.
    """
    starts: dict[Order, str] = {
        "tie": "too close to call against" if separate else "tie with",
        "inconclusive": "inconclusive against",
        "too few rounds": "too few rounds to rank it against",
    }
    texts = [f"{start} {listed(orders[order], 2)}" for order, start in starts.items() if orders.get(order)]
    return "; ".join(texts) or ("likely the fastest" if doubtful else "clearly the fastest")


def key(benchmark: Benchmark) -> str:
    """A text that is the same for what may be compared."""
    return json.dumps(_facts(benchmark), sort_keys=True)


def labels(benchmarks: Sequence[Benchmark]) -> dict[str, str]:
    """The name of each block by its key: its size, and whatever sets it apart from the others of that name."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for benchmark in benchmarks:
        groups.setdefault(_block(benchmark), {}).setdefault(key(benchmark), _facts(benchmark))
    names = {}
    for name, blocks in groups.items():
        paths = dict.fromkeys(path for facts in blocks.values() for path in facts)
        differ = [path for path in paths if len({json.dumps(facts.get(path)) for facts in blocks.values()}) > 1]
        for block, facts in blocks.items():
            texts = [_fact(path, facts.get(path)) for path in differ]
            names[block] = ", ".join([name, *([listed(texts, _NAMED_FACTS)] if texts else [])])
    return names


def _facts(benchmark: Benchmark) -> dict[str, Any]:
    """Everything that a time depends on beside the artifact's form, dtype and opset, by dotted name."""
    spec = {name: value for name, value in benchmark.spec.items() if name != "dtype"}
    machine = {name: benchmark.machine.get(name) for name in SAME} | {"threads": benchmark.threads}
    return {
        "encoding": benchmark.encoding, **_flat("", spec), **_flat("machine", machine),
        "cuda_graph": benchmark.cuda_graph,
    }  # fmt: skip


def _flat(path: str, value: Any) -> dict[str, Any]:
    """Facts inside objects under dotted names, without unknown ones."""
    if not isinstance(value, Mapping):
        return {} if value is None else {path: value}
    inner = (_flat(f"{path}.{name}" if path else name, item) for name, item in value.items())
    return {name: item for facts in inner for name, item in facts.items()}


def _fact(path: str, value: Any) -> str:
    text = fact(value)
    text = text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"
    if path == "machine.cpu":
        return f"on {text or 'an unknown CPU'}"
    return (
        f"{path.rpartition('.')[2].replace('_', ' ')} {text or ('unknown' if path.startswith('machine.') else 'none')}"
    )


def _block(benchmark: Benchmark) -> str:
    size, layers = benchmark.spec.get("hidden_size"), benchmark.spec.get("layers") or 1
    parts = [benchmark.encoding, *([f"hidden {size}"] if size else []), *([f"{layers} layers"] if layers != 1 else [])]
    return ", ".join(parts)
