"""The gate: what got slower since a saved result, or than an earlier artifact timed in the same rounds.

Two runs are compared by the ratio of a candidate's time to that of a reference in the same rounds (the lower bound,
or torch eager), so that a slower machine is no regression. The change is r' / r; with d the mean of log r' less that of
log r over the processes of each run,

    var(d) = v' + v + 2 DRIFT^2,   d +- t sqrt(var(d))

where means are trimmed and v are their variances (Yuen, 1974), with Student's t at `CONFIDENCE` and Welch's degrees of
freedom. DRIFT stands for what two runs on one machine differ by
though their processes agree. A change is slower where its whole interval lies above what is allowed, fine where all of
it lies at or below, and can't be told otherwise: then more processes are timed, up to a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posexport.bench.candidates import AGAINST, is_peer
from posexport.bench.result import (
    FINE,
    HIGH_MACHINE_LOAD,
    INCONCLUSIVE,
    NOT_RUN,
    SLOWER,
    TIMED,
    Benchmark,
    Change,
    Gate,
    Judgement,
    Shape,
    Timing,
    differing,
)
from posexport.bench.statistics import ENOUGH_PROCESSES, Trimmed, student, trimmed
from posexport.errors import RequestError
from posexport.machine import differences

CONFIDENCE = 0.99
DRIFT = 0.01
"""The standard deviation of the logarithm of a ratio between runs of one build, beyond that between processes."""

_LEAST_SHARE = 0.2
"""Of the variance of a change: where this run's processes make no more of it, more of them narrow nothing."""

STEADY = 0.02
"""The standard error of a ratio (of its logarithm) up to which a result is known well enough for a baseline."""

REFERENCES = ("lower_bound", "torch")
MOST_PROCESSES = 20


def read_allowed(text: str) -> float:
    """The largest allowed change as a share, from `5%` or `0.05`; RequestError for anything else."""
    percent = text.strip().endswith("%")
    try:
        value = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 10:
        raise RequestError(f"--max-regression is {text!r}: it must be a share from 0 to 10, such as 5% or 0.05.")
    if value >= 1 and not percent:
        raise RequestError(
            f"--max-regression is {text!r}, which is {value:.0%}: write {text.strip()}%, or {value:.0%} if you mean it."
        )
    return value


def ours(found: Benchmark) -> list[tuple[Timing, Shape]]:
    """Whatever ran the artifact and was timed, peers left out, with the shape at which it was."""
    both = [(each, shape) for shape in found.shapes for each in shape.results]
    return [(each, shape) for each, shape in both if each.state == TIMED and not is_peer(each.runtime)]


def notes_on(base: Benchmark, found: Benchmark) -> tuple[str, ...]:
    """Sentences on what else differs; RequestError where a baseline is of something else."""
    for name in ("file", "encoding", "dtype"):
        now, before = getattr(found, name), getattr(base, name)
        if now != before:
            raise RequestError(f"the baseline is of {name} {before!r}, this run of {now!r}: save one of {now!r}.")
    if base.spec != found.spec:
        names = ", ".join(differing(base.spec, found.spec))
        raise RequestError(f"the baseline is of another block ({names} differ): save one of this block.")
    sizes, before = ({str(shape.sizes) for shape in each.shapes} for each in (found, base))
    if sizes != before:
        odd = sorted(sizes ^ before)[0]
        where = "this run" if odd in sizes else "the baseline"
        raise RequestError(f"{odd} is in {where} only: time the same scenarios and shapes in both.")
    if base.threads != found.threads:
        theirs_, ours_ = (each.threads or "each runtime's own" for each in (base, found))
        raise RequestError(f"the threads of the baseline are {theirs_}, those of this run {ours_}: give the same.")
    if base.cuda_graph != found.cuda_graph:
        with_, without = ("baseline", "run") if base.cuda_graph else ("run", "baseline")
        raise RequestError(f"the {with_} has --cuda-graph, the {without} has not: time both with it or both without.")
    if not ours(base):
        raise RequestError(
            "the baseline timed nothing that runs the artifact, so nothing can be compared: save one of a runtime that "
            "is here."
        )
    notes = [
        f"The baseline's {name} is {getattr(base, name)}, this one's {getattr(found, name)}."
        for name in ("form", "opset")
        if getattr(base, name) != getattr(found, name)
    ]
    if base.processes < ENOUGH_PROCESSES:
        several = "processes" if base.processes > 1 else "process"
        notes.append(f"The baseline has {base.processes} {several} per runtime, too few to tell changes by.")
    elif not is_steady(base):
        notes.append(
            f"The baseline's ratios are known to {unsteadiness(base):.1%} (standard error; {STEADY:.0%} is steady), so "
            "changes are told roughly: save it anew at rest, or with more --processes."
        )
    if base.machine_load > HIGH_MACHINE_LOAD:
        notes.append(
            f"The baseline was saved on a busy machine (other work took {base.machine_load:.0%} of the CPU), so "
            "changes may not be told from it: save it anew at rest."
        )
    unlike = differences(dict(base.machine), dict(found.machine))
    if unlike:
        notes.append(
            f"The baseline is of another machine or other software ({', '.join(unlike)} differ): ratios carry over "
            "roughly at best."
        )
    return tuple(notes)


def check_named(base: Benchmark, runtimes: Sequence[str]) -> None:
    """RequestError where none of the runtimes, all of them if none is named, was timed in a baseline."""
    timed = dict.fromkeys(each.runtime for each, _ in ours(base))
    if timed and runtimes and not set(runtimes) & set(timed):
        raise RequestError(
            f"--runtime is {', '.join(runtimes)}, and the baseline has {', '.join(timed)}: name one of those, or none."
        )


def compare(found: Benchmark, base: Benchmark, allowed: float) -> Gate:
    """Every runtime that the baseline timed, at every shape; RequestError for a baseline that doesn't fit."""
    notes = notes_on(base, found)
    shapes = {str(shape.sizes): shape for shape in found.shapes}
    methods, earlier = found.bound_methods(), base.bound_methods()
    unlike = {sizes for (name, sizes), method in earlier.items() if methods.get((name, sizes), method) != method}
    changes = [
        _changed(before, shapes[str(shape.sizes)], allowed, ("lower_bound",) if str(shape.sizes) in unlike else ())
        for before, shape in ours(base)
    ]
    return Gate(limit=allowed, confidence=CONFIDENCE, changes=tuple(changes), notes=notes)


def compare_earlier(found: Benchmark, allowed: float, named: Sequence[str] = ()) -> Gate:
    """Every runtime against the earlier artifact in the same rounds; what ran neither is left out where something else
    did, unless it is among `named`."""
    both = [(each, shape) for shape in found.shapes for each in shape.results if not is_peer(each.runtime)]
    ran = [(each, shape) for each, shape in both if each.runtime in named or not _ran_neither(each, shape)]
    changes = [_beside(result, shape, allowed) for result, shape in ran or both]
    return Gate(limit=allowed, confidence=CONFIDENCE, changes=tuple(changes))


def _ran_neither(result: Timing, shape: Shape) -> bool:
    """Whether a runtime is not here, or takes neither artifact."""
    old = shape.timing(f"{AGAINST}:{result.runtime}")
    return result.state == NOT_RUN and (old is None or old.state == NOT_RUN)


def _changed(before: Timing, shape: Shape, allowed: float, unlike: Sequence[str]) -> Change:
    """`unlike` names references that are not the same in both runs."""
    now = shape.timing(before.runtime)
    whole: dict[str, Any] = {"runtime": before.runtime, "shape": shape.title}
    if now is None or now.state != TIMED:
        why = "it is not among the runtimes of this run" if now is None else f"{now.state}: {now.reason}"
        return Change(**whole, state=NOT_RUN, reason=why)
    by = _steadier(before, now, unlike)
    if by is None:
        why = "neither torch nor the same lower bound was timed beside it in both runs"
        return Change(**whole, state=NOT_RUN, reason=why)
    old, new = before.processes[by], now.processes[by]
    told: dict[str, Any] = {"reference": by, "before": _middle(old), "now": _middle(new)}
    if min(len(old), len(new)) < ENOUGH_PROCESSES:
        why = f"it needs {ENOUGH_PROCESSES} processes of each, there are {len(old)} and {len(new)}"
        return Change(**whole, **told, state=INCONCLUSIVE, reason=why, more=len(old) >= ENOUGH_PROCESSES)
    return _judged(whole | told, _logs(old), _logs(new), allowed)


def _beside(result: Timing, shape: Shape, allowed: float) -> Change:
    whole: dict[str, Any] = {"runtime": result.runtime, "shape": shape.title}
    parts = result.processes.get(AGAINST, ())
    if result.state != TIMED or not parts:
        return Change(**whole, state=NOT_RUN, reason=result.reason or "the earlier artifact was not timed")
    told: dict[str, Any] = {"reference": "the earlier artifact", "before": 1.0, "now": _middle(parts)}
    if len(parts) < ENOUGH_PROCESSES:
        why = f"it needs {ENOUGH_PROCESSES} processes, there are {len(parts)}"
        return Change(**whole, **told, state=INCONCLUSIVE, reason=why, more=True)
    return _judged(whole | told, None, _logs(parts), allowed)


def _judged(told: dict[str, Any], old: Sequence[float] | None, new: Sequence[float], allowed: float) -> Change:
    """The change from logarithms of ratios; without `old`, of those to the earlier artifact itself."""
    now, before = trimmed(new), Trimmed(0.0, 0.0, 1) if old is None else trimmed(old)
    drift = 0.0 if old is None else 2 * DRIFT**2
    whole = now.variance + before.variance + drift
    middle = now.middle - before.middle
    reach = 0.0
    if whole:
        spread = sum(each.variance**2 / each.freedom for each in (now, before))
        reach = student(CONFIDENCE, round(whole**2 / spread, 1) if spread else math.inf) * math.sqrt(whole)
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    state: Judgement = SLOWER if low > 1 + allowed else FINE if high <= 1 + allowed else INCONCLUSIVE
    more = now.variance > _LEAST_SHARE * whole
    return Change(**told, state=state, change=math.exp(middle), low=low, high=high, more=more)


def unsteadiness(found: Benchmark) -> float:
    """The largest standard error of a runtime's ratio to a reference. Both count: by which of them a later run is
    compared depends on that run too."""
    known = [_variance(each, by) for each, _ in ours(found) for by in REFERENCES if each.processes.get(by)]
    return math.sqrt(max(known, default=0.0))


def is_steady(found: Benchmark) -> bool:
    """Whether every ratio is known well enough to compare later runs with."""
    return unsteadiness(found) <= STEADY


def _steadier(before: Timing, now: Timing, unlike: Sequence[str]) -> str | None:
    """The reference by which the change is known best: that of the smaller variance over both runs."""
    both = [by for by in REFERENCES if before.processes.get(by) and now.processes.get(by)]
    there = [by for by in both if by not in unlike]
    return min(there, key=lambda by: _variance(before, by) + _variance(now, by), default=None)


def _variance(timing: Timing, by: str) -> float:
    parts = _logs(timing.processes[by])
    return trimmed(parts).variance if len(parts) > 1 else math.inf


def _logs(parts: Sequence[float]) -> list[float]:
    return [math.log(part) for part in parts]


def _middle(parts: Sequence[float]) -> float:
    return math.exp(trimmed(_logs(parts)).middle if len(parts) > 1 else math.log(parts[0]))
