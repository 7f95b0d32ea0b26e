"""Timings that can be compared: all candidates of one block, machine and scenario, from any results.

Two timings can be compared if block, machine and settings are the same. Form, dtype and opset may differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from posexport.bench.candidates import EAGER, LOWER_BOUND, PREVIOUS_ARTIFACT, ROLES
from posexport.bench.result import TIMED, Benchmark, Shape, Timing
from posexport.bench.results import Result
from posexport.bench.scenarios import SWEEPS
from posexport.bench.statistics import CONFIDENCE, Ratio, Summary
from posexport.machine import SAME

_MOST_DIGITS = 15  # of a size in a scenario's name
_ENOUGH_RUNS = 6  # the fewest runs whose range contains the median with a probability of 95 %
_NEVER = Summary(median=math.inf, p10=math.inf, p90=math.inf, p99=math.inf, count=0)


@attrs.frozen(kw_only=True)
class Row:
    """One candidate at one shape. `source` is the result file and `benchmark` is its run."""

    source: str
    benchmark: Benchmark
    shape: Shape
    timing: Timing
    seconds: Summary

    @property
    def runtime(self) -> str:
        """The name of the candidate."""
        return self.timing.runtime

    @property
    def role(self) -> str:
        """The role of a reference. Empty for a runtime that runs the artifact."""
        name = self.runtime.removesuffix("-cuda")
        return name if name in ROLES else PREVIOUS_ARTIFACT if name.startswith(f"{PREVIOUS_ARTIFACT}:") else ""

    @property
    def gpu(self) -> bool:
        """Whether it ran on a GPU. Ratios are to the references on the same device."""
        name = self.runtime.removeprefix(f"{PREVIOUS_ARTIFACT}:")
        return name.endswith("-cuda") or name.startswith(("tensorrt", "trt"))

    @property
    def timed(self) -> bool:
        """Whether it has times."""
        return self.timing.state == TIMED

    @property
    def median(self) -> float:
        """Its median time. Infinite if it was not timed."""
        return self.seconds.median

    def ratio(self, role: str) -> Ratio | None:
        """The ratio of its time to that of a reference."""
        return self.timing.ratios.get(role)


@attrs.frozen(kw_only=True)
class Comparison:
    """All candidates of one block on one machine in one scenario.

    Comparisons with the same `key` may be compared. `apart` contains the facts in which its block and machine differ
    from others of its encoding and size. `benchmarks` contains each artifact of the block once.
    """

    key: str
    apart: Mapping[str, Any]
    benchmarks: tuple[Benchmark, ...]
    scenario: str
    rows: tuple[Row, ...]

    @property
    def kind(self) -> str:
        """The kind of the scenario: prefill, decode, ..."""
        return self.scenario.partition(":")[0]

    @property
    def size(self) -> int | None:
        """The size that the scenario's name has, if any."""
        text = self.scenario.partition(":")[2]
        return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None

    @property
    def ranked(self) -> list[Row]:
        """The timed candidates without the lower bound, fastest first.

        Separate runs, one for each file, differ more than their candidates do. If every run timed torch on the same
        device, candidates are ranked by their ratio to torch, times torch's time in the fastest run.
        """
        timed = [row for row in self.rows if row.timed and row.role != LOWER_BOUND]
        scales: dict[bool, float] = {}
        for gpu in (False, True):
            runs = {id(row.benchmark) for row in timed if row.gpu == gpu}
            torch = {id(row.benchmark): row.median for row in timed if row.gpu == gpu and row.role == EAGER}
            if len(runs) > 1 and len(torch) == len(runs):
                scales[gpu] = min(torch.values())

        def scaled(row: Row) -> float:
            ratio = row.ratio(EAGER) if row.gpu in scales else None
            return row.median if ratio is None else ratio.median * scales[row.gpu]

        return sorted(timed, key=scaled)


def rows_of(source: str, benchmark: Benchmark) -> Iterator[Row]:
    """Every candidate at every shape of a result."""
    for shape in benchmark.shapes:
        for timing in shape.results:
            seconds = timing.seconds or _NEVER
            yield Row(source=source, benchmark=benchmark, shape=shape, timing=timing, seconds=seconds)


def compare(results: Iterable[Result[Benchmark]]) -> list[Comparison]:
    """The candidates of all results by block and scenario, in the order of the results."""
    groups: dict[tuple[str, str], list[Row]] = {}
    benchmarks: dict[str, dict[tuple[str, str], Benchmark]] = {}
    for result in results:
        benchmark = result.data
        key = json.dumps(_facts(benchmark), sort_keys=True)
        for row in rows_of(result.name, benchmark):
            benchmarks.setdefault(key, {})[benchmark.sha256, benchmark.file] = benchmark
            for scenario in (title_of(row.shape), *row.shape.also):  # all scenarios with these sizes
                groups.setdefault((key, scenario), []).append(row)
    made = {key: tuple(files.values()) for key, files in benchmarks.items()}
    apart = _apart({key: files[0] for key, files in made.items()})
    return [
        Comparison(key=key, apart=apart[key], benchmarks=made[key], scenario=scenario, rows=tuple(rows))
        for (key, scenario), rows in groups.items()
    ]


def by_size(compared: Iterable[Comparison]) -> list[list[Comparison]]:
    """The scenarios of one kind by block, such as prefill at several lengths, sorted by size."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in compared:
        if comparison.kind in SWEEPS and comparison.size is not None:
            groups.setdefault((comparison.key, comparison.kind), []).append(comparison)
    return [sorted(group, key=lambda comparison: comparison.size or 0) for group in groups.values()]


def title_of(shape: Shape) -> str:
    """The name of the scenario, or the sizes if it has none."""
    return shape.scenario or ", ".join(f"{name} {size}" for name, size in shape.sizes.to_dict().items())


def _facts(benchmark: Benchmark) -> dict[str, Any]:
    """Everything that a time depends on except the artifact's form, dtype and opset, by dotted name."""
    spec = {name: value for name, value in benchmark.spec.items() if name != "dtype"}
    machine = {name: benchmark.machine.get(name) for name in SAME} | {"threads": benchmark.threads}
    facts = {"encoding": benchmark.encoding, **_flat("", spec), **_flat("machine", machine)}
    if benchmark.encoding is None:  # only its origin says what a graph computes
        facts["graph"] = benchmark.origin or benchmark.sha256
    return {**facts, "cuda_graph": benchmark.cuda_graph}


def _flat(path: str, value: Any) -> dict[str, Any]:
    """Nested facts under dotted names. Unknown facts are left out."""
    if not isinstance(value, Mapping):
        return {} if value is None else {path: value}
    inner = (_flat(f"{path}.{name}" if path else name, item) for name, item in value.items())
    return {name: item for facts in inner for name, item in facts.items()}


def block_of(benchmark: Benchmark) -> tuple[str, Any, int]:
    """The encoding (the file name if a graph has none), the hidden size and the number of layers."""
    return benchmark.encoding or benchmark.file, benchmark.spec.get("hidden_size"), benchmark.spec.get("layers") or 1


def _apart(benchmarks: Mapping[str, Benchmark]) -> dict[str, dict[str, Any]]:
    """By key, the facts in which a benchmark differs from others of its block."""
    facts = {key: _facts(benchmark) for key, benchmark in benchmarks.items()}
    apart = {}
    for key, benchmark in benchmarks.items():
        alike = [facts[other] for other in benchmarks if block_of(benchmarks[other]) == block_of(benchmark)]
        names = dict.fromkeys(name for other in alike for name in other)
        differ = [name for name in names if any(other.get(name) != alike[0].get(name) for other in alike)]
        apart[key] = {name: facts[key].get(name) for name in differ}
    return apart


Order = Literal["faster", "tie", "too few rounds", "inconclusive"]


def _is_reference_of(row: Row, other: Row) -> bool:
    """Whether the ratio of `row` to the role of `other` is a ratio to `other` itself.

    Both then ran in the same rounds on the same device. Each runtime has its own previous artifact.
    """
    same = other.role != PREVIOUS_ARTIFACT or other.runtime == f"{PREVIOUS_ARTIFACT}:{row.runtime}"
    return bool(other.role) and same and row.benchmark is other.benchmark


def order(first: Row, other: Row) -> Order:
    """Whether the first is faster than the other, by the whole interval of their ratio.

    This is the ratio in the same rounds if both ran in one run. Otherwise it is the two ratios to torch on the same
    device, or else the middle 80 % of their times. It is a tie only if the intervals allow equal times.
    """
    if first.gpu == other.gpu:
        direct = first.ratio(other.role) if _is_reference_of(first, other) else None
        if direct is not None:
            return order_of(direct)
        one, two = first.ratio(EAGER), other.ratio(EAGER)
        if one is not None and two is not None:
            if one.low > two.high:
                return "inconclusive"
            enough = min(one.confidence, two.confidence) >= CONFIDENCE
            return "tie" if one.high >= two.low else "faster" if enough else "too few rounds"
    if first.seconds.p90 >= other.seconds.p10:
        return "tie"
    return "faster" if min(first.seconds.count, other.seconds.count) >= _ENOUGH_RUNS else "too few rounds"


def order_of(ratio: Ratio, inverted: bool = False) -> Order:
    """The order from the ratio of the first candidate's time to the other's, or from the `inverted` ratio."""
    if ratio.low <= 1 <= ratio.high:
        return "tie"
    if ratio.confidence < CONFIDENCE:
        return "too few rounds"
    return "faster" if (ratio.low > 1) is inverted else "inconclusive"


def only_beside(first: Row, others: Sequence[Row]) -> list[Row]:
    """The rows to compare the first with. If an alternative ran beside it, only those rounds count."""
    beside = {row.runtime for row in others if row.benchmark is first.benchmark}
    return [row for row in others if row.benchmark is first.benchmark or not row.role or row.runtime not in beside]
