"""Timing that ends in a judgement, or is kept for one: as many processes as it takes to tell what got slower."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from posexport.bench.benchmark import PROCESSES, bench
from posexport.bench.candidates import CANDIDATES
from posexport.bench.regression import MOST_PROCESSES, compare, compare_earlier, is_steady, notes_on
from posexport.bench.result import TIMED, Benchmark, Gate
from posexport.machine import differences, machine

GATE_TIMEOUT = 300.0
"""Seconds after the first judgement in which more processes may be opened to settle it."""


def bench_to_keep(path: Path, *, processes: int | None = None, **options: Any) -> Benchmark:
    """Time the artifact at `path` to compare later runs with: in so many processes, or as many as make it steady.

    `options` are those of `bench`. RequestError as `bench` raises it.
    """
    if processes is not None:
        return bench(path, processes=processes, **options)
    return bench(path, processes=PROCESSES, most_processes=MOST_PROCESSES, enough=_in_time(None, True), **options)


def bench_gated(
    path: Path,
    *,
    baseline: Benchmark | None = None,
    against: Path | None = None,
    allowed: float,
    processes: int | None = None,
    keep: bool = False,
    tell: Callable[[str], object] = lambda note: None,
    **options: Any,
) -> Benchmark:
    """Time the artifact at `path`, with a gate by the saved result `baseline` or the earlier artifact `against`.

    `options` are those of `bench`; what isn't given of scenarios, shapes, runtimes, threads and CUDA graphs is as
    in the baseline. `allowed` is a share: 0.05 lets it be 5 % slower. With `keep` it goes on until the result is steady
    too: one that stopped where it looked fast is no baseline. `tell` hears what makes the comparison less sure
    before anything is timed. RequestError as `bench` raises it, and for a baseline of something else.
    """
    options |= {"processes": processes or PROCESSES, "most_processes": max(processes or 0, MOST_PROCESSES)}
    if baseline is None:
        named = (*options.get("runtimes", ()), *options.get("also", ()))

        def judge(found: Benchmark) -> Gate:
            return compare_earlier(found, allowed, named)

        found = bench(path, against=against, enough=_in_time(judge, keep), **options)
        return attrs.evolve(found, gate=judge(found))
    base = baseline  # no longer None, also inside what follows

    def check(head: Benchmark) -> None:
        for note in notes_on(base, head):
            tell(note)

    found = bench(
        path,
        check=check,
        enough=_in_time(lambda found: compare(found, base, allowed), keep),
        methods={} if differences(dict(base.machine), machine()) else base.bound_methods(),
        **_as_in(base, options),
    )
    return attrs.evolve(found, gate=compare(found, base, allowed))


def _in_time(judge: Callable[[Benchmark], Gate] | None, keep: bool) -> Callable[[Benchmark], bool]:
    """What says whether a result is settled, and steady where it is kept; or took all the patience there is."""
    first: list[float] = []

    def enough(found: Benchmark) -> bool:
        first.append(time.monotonic())
        done = (judge is None or judge(found).settled) and (not keep or is_steady(found))
        return done or first[-1] - first[0] > GATE_TIMEOUT

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
