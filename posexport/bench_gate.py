"""Timing that ends in a judgement, or is kept for one: as many processes as it takes to tell what got slower."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posexport.baseline import MOST_PROCESSES, Gate, compare, compare_earlier, is_steady, notes_on
from posexport.bench import PROCESSES, bench
from posexport.bench_candidates import CANDIDATES
from posexport.bench_result import TIMED, Benchmark, read_benchmark
from posexport.machine import differences, machine

PATIENCE = 300.0
"""Seconds after the first judgement in which more processes may be opened to settle it."""


def bench_to_keep(path: Path, *, processes: int | None = None, **options: Any) -> Benchmark:
    """Time the artifact at `path` to compare later runs with: in so many processes, or as many as make it steady.

    `options` are those of `bench`. RequestError as `bench` raises it.
    """
    if processes is not None:
        return bench(path, processes=processes, **options)
    enough = _settled(is_steady)
    return bench(path, processes=PROCESSES, most_processes=MOST_PROCESSES, enough=enough, **options)


def bench_gated(
    path: Path,
    *,
    baseline: Path | None = None,
    against: Path | None = None,
    allowed: float,
    processes: int | None = None,
    tell: Callable[[str], object] = lambda note: None,
    **options: Any,
) -> tuple[Benchmark, Gate]:
    """Time the artifact at `path` and judge it by the saved result at `baseline`, or by the earlier artifact `against`.

    `options` are those of `bench`; what isn't given of scenarios, shapes, runtimes, threads and CUDA graphs is as
    in the baseline. `allowed` is a share: 0.05 lets it be 5 % slower. `tell` hears what makes the comparison less sure
    before anything is timed. RequestError as `bench` raises it, and for a baseline of something else.
    """
    options |= {"processes": processes or PROCESSES, "most_processes": max(processes or 0, MOST_PROCESSES)}
    if baseline is None:
        named = (*options.get("runtimes", ()), *options.get("also", ()))
        enough = _settled(lambda found: compare_earlier(found, allowed, named).settled)
        found = bench(path, against=against, enough=enough, **options)
        return found, compare_earlier(found, allowed, named)
    base = read_benchmark(baseline)

    def check(head: Benchmark) -> None:
        for note in notes_on(base, head):
            tell(note)

    found = bench(
        path,
        check=check,
        enough=_settled(lambda found: compare(found, base, allowed).settled),
        ways={} if differences(dict(base.machine), machine()) else base.floor_ways(),
        **_as_in(base, options),
    )
    return found, compare(found, base, allowed)


def _settled(judge: Callable[[Benchmark], bool]) -> Callable[[Benchmark], bool]:
    """Whether a result is settled, or took all the patience there is."""
    first: list[float] = []

    def enough(found: Benchmark) -> bool:
        first.append(time.monotonic())
        return judge(found) or first[-1] - first[0] > PATIENCE

    return enough


def _as_in(base: Benchmark, options: dict[str, Any]) -> dict[str, Any]:
    """Options with what wasn't given taken from the baseline."""
    filled = dict(options)
    if not options.get("scenarios") and not options.get("shapes"):
        filled["scenarios"] = [name for shape in base.shapes for name in shape.scenarios]
        filled["shapes"] = [str(shape.sizes) for shape in base.shapes if shape.scenario is None]
    if not options.get("runtimes"):
        timed = {result.runtime for shape in base.shapes for result in shape.results if result.state == TIMED}
        filled["runtimes"] = [name for name, each in CANDIDATES.items() if name in timed and not each.role]
    if options.get("threads") is None:
        filled["threads"] = base.threads
    filled["cuda_graph"] = base.cuda_graph or options.get("cuda_graph", False)
    return filled
