"""Timing one file of a project, and the exit code of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.progress import Progress

if TYPE_CHECKING:
    from posexport.bench.regression import Gate
    from posexport.bench.result import Benchmark
    from posexport.workflows.project.latency import LimitResult
    from posexport.workflows.project.products import Product


@attrs.define(kw_only=True)
class Timed:
    """One file: its result, unless it was not run for a reason, and what was judged of it."""

    product: Product
    reason: str = ""
    found: Benchmark | None = None
    gate: Gate | None = None
    limits: Sequence[LimitResult] = ()
    saved: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `result` is what `posexport bench FILE --save` writes."""
        return {
            "file": str(self.product.path),
            "artifact": self.product.entry.name,
            "state": "not run" if self.found is None else "timed",
            "reason": self.reason,
            "limits": [attrs.asdict(each) for each in self.limits],
            "result": self.result(),
        }

    def result(self) -> dict[str, Any] | None:
        """The result with its limits and its gate."""
        if self.found is None:
            return None
        limits = {"limits": [attrs.asdict(each) for each in self.limits]} if self.limits else {}
        return self.found.to_dict() | limits | ({} if self.gate is None else {"gate": self.gate.to_dict()})


def results_folder(save: str | None) -> Path | None:
    """The folder that gets a result for each file; RequestError where it can't be one."""
    if save is None:
        return None
    path = Path(save)
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        raise RequestError(f"--save is {save!r}: for a project give a folder, which gets a result for each file.")
    there = next((folder for folder in path.parents if folder.exists()), path)
    if there != path and not there.is_dir():
        raise RequestError(f"--save is {save!r}, below a file: give a folder, which gets a result for each.")
    return path


def time_file(
    product: Product,
    base: Path | None,
    allowed: float,
    processes: int | None,
    keep: bool,
    asked: dict[str, Any],
    progress: Progress,
    warn: Callable[[str], object],
) -> Timed:
    """Time one file, beside its baseline where it has one."""
    name = product.path.name
    progress(f"reading {name}")
    from posexport.bench.benchmark import PROCESSES, bench
    from posexport.bench.gate import bench_gated, bench_to_keep
    from posexport.bench.result import read_benchmark

    def step(text: str) -> None:
        progress(f"{name}: {text}")

    if base is not None:
        found, gate = bench_gated(
            product.path,
            baseline=read_benchmark(base),
            allowed=allowed,
            processes=processes,
            keep=keep,
            tell=lambda note: warn(f"{name}: {note}"),
            progress=step,
            **asked,
        )
        return Timed(product=product, found=found, gate=gate)
    if product.entry.baseline is not None:
        found = bench_to_keep(product.path, processes=processes, progress=step, **asked)
    else:
        count = processes or (PROCESSES if product.entry.budget.latency else 1)
        found = bench(product.path, processes=count, progress=step, **asked)
    return Timed(product=product, found=found)


def exit_code(done: Sequence[Timed], asked: Sequence[str], required: Sequence[str], strict: bool) -> tuple[int, str]:
    """The exit code, and a sentence without its full stop where it needs one; of peers, times are only what was `asked`
    for."""
    from posexport.bench.candidates import is_peer
    from posexport.bench.regression import SLOWER
    from posexport.bench.result import TIMED
    from posexport.workflows.project.latency import broken

    results = [result for each in done if each.found for shape in each.found.shapes for result in shape.results]
    failed = next((each for each in results if each.state == "failed" and not is_peer(each.runtime)), None)
    if failed is not None:
        return 1, f"{failed.runtime} failed: {failed.reason}"
    if any(broken(each.limits, strict) or (each.gate and each.gate.exit_code(strict)) for each in done):
        over = [
            f"{each.product.path.name} at {limit.scenario} on {limit.runtime}"
            for each in done
            for limit in each.limits
            if limit.state == SLOWER
        ]
        return 1, f"over the budget of time: {', '.join(over)}" if over else ""
    for name in required:
        states = [result.state for result in results if result.runtime == name]
        if not states or "not run" in states:
            why = next((result.reason for result in results if result.runtime == name), "no file is timed on it")
            return 3, f"required runtime {name} was not run: {why}"
    if not any(each.state == TIMED and (each.runtime in asked or not is_peer(each.runtime)) for each in results):
        return 3, "nothing was timed: see the reasons"
    return 0, ""
