"""Timing one file of a project, and the exit code of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.bench.result import FileResult
from posexport.errors import RequestError
from posexport.progress import Progress

if TYPE_CHECKING:
    from posexport.bench.result import Benchmark, LimitResult
    from posexport.workflows.project.products import Product


@attrs.define(kw_only=True)
class Timed:
    """One file: its result with its gate and limits, unless it was not run for a reason."""

    product: Product
    reason: str = ""
    limits: Sequence[LimitResult] = ()
    found: Benchmark | None = None
    saved: Path | None = None

    def result(self) -> FileResult:
        """As it stands in the result of the project."""
        return FileResult(
            file=str(self.product.path),
            artifact=self.product.entry.name,
            state="not run" if self.found is None else "timed",
            reason=self.reason,
            limits=tuple(self.limits),
            result=self.found,
        )


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
        found = bench_gated(
            product.path,
            baseline=read_benchmark(base),
            allowed=allowed,
            processes=processes,
            keep=keep,
            tell=lambda note: warn(f"{name}: {note}"),
            progress=step,
            **asked,
        )
        return Timed(product=product, found=found)
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
    from posexport.bench.result import SLOWER, TIMED
    from posexport.workflows.project.latency import broken

    results = [timing for each in done if each.found for timing in each.found.timings]
    failed = next((each for each in results if each.state == "failed" and not is_peer(each.runtime)), None)
    if failed is not None:
        return 1, f"{failed.runtime} failed: {failed.reason}"
    if any(
        broken(each.limits, strict) or (each.found and each.found.gate and each.found.gate.exit_code(strict))
        for each in done
    ):
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
