"""The gate: what got slower since a saved result, or than an earlier artifact timed in the same rounds.

Two runs are compared by the ratio r of a candidate's time to that of a reference in the same rounds (the lower bound,
or torch eager). A slower machine is therefore not a regression. The change is r' / r. Let d be the mean of log r' less
that of log r over the processes of each run. Then

    var(d) = v' + v + 2 DRIFT^2,   d +- t sqrt(var(d))

Means are trimmed and v are their variances (Yuen, 1974). t is Student's t at `CONFIDENCE`, with Welch's degrees of
freedom. DRIFT is how much two runs on one machine differ although their processes agree. A change is slower if its
whole interval is above the limit, and fine if none of it is. Otherwise it is inconclusive, and up to MOST_PROCESSES
run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from posexport.bench.candidates import EAGER, LOWER_BOUND, PREVIOUS_ARTIFACT, is_reference
from posexport.bench.result import (
    FINE,
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
from posexport.bench.statistics import ENOUGH_PROCESSES, Trimmed, exponential, log_mean, student
from posexport.errors import RequestError
from posexport.machine import differences

CONFIDENCE = 0.99
DRIFT = 0.01
"""The standard deviation of the logarithm of a ratio between runs of one build, beyond that between processes."""

_MIN_SHARE = 0.2
"""If this run's processes cause a smaller share of a change's variance, more of them don't narrow its interval."""

STEADY = 0.02
"""The largest standard error of a ratio (of its logarithm) in a steady result. Only these are good baselines."""

REFERENCES = (LOWER_BOUND, EAGER)
MOST_PROCESSES = 20
DEFAULT_LIMIT = "5%"


def read_limit(text: str) -> float:
    """The largest change that is not a regression, from `5%` or `0.05`. RequestError for anything else."""
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


def timings_of_artifact(result: Benchmark) -> list[tuple[Timing, Shape]]:
    """The timings of whatever ran the artifact, with their shapes."""
    return [
        (timing, shape)
        for shape in result.shapes
        for timing in shape.results
        if timing.state == TIMED and not is_reference(timing.runtime)
    ]


def notes_on(baseline: Benchmark, result: Benchmark) -> tuple[str, ...]:
    """Sentences about other differences. RequestError if the baseline is of something else or can't be compared."""
    for name in ("file", "encoding", "dtype"):
        now, before = getattr(result, name), getattr(baseline, name)
        if now != before:
            raise RequestError(f"the baseline is of {name} {before!r}, this run of {now!r}: save one of {now!r}.")
    if baseline.spec != result.spec:
        names = ", ".join(differing(baseline.spec, result.spec))
        raise RequestError(f"the baseline is of another block ({names} differ): save one of this block.")
    sizes, known_sizes = ({str(shape.sizes) for shape in run.shapes} for run in (result, baseline))
    if sizes != known_sizes:
        odd = sorted(sizes ^ known_sizes)[0]
        where = "this run" if odd in sizes else "the baseline"
        raise RequestError(f"{odd} is in {where} only: time the same scenarios and shapes in both.")
    if baseline.threads != result.threads:
        before, now = (run.threads or "each runtime's own" for run in (baseline, result))
        raise RequestError(f"the threads of the baseline are {before}, those of this run {now}: give the same.")
    if baseline.cuda_graph != result.cuda_graph:
        with_, without = ("baseline", "run") if baseline.cuda_graph else ("run", "baseline")
        raise RequestError(f"the {with_} has --cuda-graph, the {without} has not: time both with it or both without.")
    if not timings_of_artifact(baseline):
        raise RequestError(
            "the baseline timed nothing that runs the artifact, so nothing can be compared: save one of a runtime that "
            "is here."
        )
    if baseline.no_torch and not any(
        timing.processes.get(name) for timing, _ in timings_of_artifact(baseline) for name in REFERENCES
    ):
        raise RequestError(
            f"the baseline has no ratios to compare: the lower bound is not known, nor torch ({baseline.no_torch}): "
            "keep the earlier file and give it with --against."
        )
    few, several = baseline.processes < ENOUGH_PROCESSES, "processes" if baseline.processes > 1 else "process"
    unlike = differences(dict(baseline.machine), dict(result.machine))
    notes = {
        f"The baseline's {name} is {getattr(baseline, name)}, this one's {getattr(result, name)}.": (
            getattr(baseline, name) != getattr(result, name)
        )
        for name in ("form", "opset")
    }
    notes |= {
        f"The baseline has {baseline.processes} {several} per runtime, too few to tell changes by.": few,
        f"The baseline's ratios are known to {unsteadiness(baseline):.1%} (standard error; {STEADY:.0%} is steady), so "
        "changes are inexact: save it anew at rest, or with more --processes.": not few and not is_steady(baseline),
        f"The baseline was saved on a busy machine (other work took {baseline.machine_load:.0%} of the CPU), so "
        "changes may be inconclusive: save it anew at rest.": baseline.busy,
        f"The baseline is of another machine or other software ({', '.join(unlike)} differ): ratios carry over roughly "
        "at best.": bool(unlike),
    }
    return tuple(note for note, applies in notes.items() if applies)


def check_named(baseline: Benchmark, runtimes: Sequence[str]) -> None:
    """RequestError if the baseline timed none of these runtimes. Without names, all are meant."""
    timed = dict.fromkeys(timing.runtime for timing, _ in timings_of_artifact(baseline))
    if timed and runtimes and not set(runtimes) & set(timed):
        raise RequestError(
            f"--runtime is {', '.join(runtimes)}, and the baseline has {', '.join(timed)}: name one of those, or none."
        )


def compare(result: Benchmark, baseline: Benchmark, limit: float) -> Gate:
    """Compare every runtime that the baseline timed, at every shape. RequestError for a baseline that doesn't fit."""
    notes = notes_on(baseline, result)
    shapes = {str(shape.sizes): shape for shape in result.shapes}
    methods = result.bound_methods()
    unlike = {
        at for (name, at), method in baseline.bound_methods().items() if methods.get((name, at), method) != method
    }
    changes = []
    for before, shape in timings_of_artifact(baseline):
        sizes = str(shape.sizes)
        references = tuple(name for name in REFERENCES if name != LOWER_BOUND or sizes not in unlike)
        changes.append(_change_since(before, shapes[sizes], references, limit))
    return Gate(limit=limit, confidence=CONFIDENCE, changes=tuple(changes), notes=notes)


def compare_previous(result: Benchmark, limit: float, named: Sequence[str] = ()) -> Gate:
    """Compare every runtime with the previous artifact in the same rounds.

    A runtime that ran neither artifact is left out if another one ran, unless it is among `named`.
    """
    every = [(timing, shape) for shape in result.shapes for timing in shape.results if not is_reference(timing.runtime)]
    ran = [(timing, shape) for timing, shape in every if timing.runtime in named or not _ran_neither(timing, shape)]
    changes = tuple(_change_to_previous(timing, shape, limit) for timing, shape in ran or every)
    return Gate(limit=limit, confidence=CONFIDENCE, changes=changes)


def _ran_neither(timing: Timing, shape: Shape) -> bool:
    """Whether a runtime is not here, or runs neither artifact."""
    previous = shape.timing(f"{PREVIOUS_ARTIFACT}:{timing.runtime}")
    return timing.state == NOT_RUN and (previous is None or previous.state == NOT_RUN)


def _change_since(before: Timing, shape: Shape, references: Sequence[str], limit: float) -> Change:
    """The change relative to one of the `references` that are the same in both runs."""
    now = shape.timing(before.runtime)
    change = Change(runtime=before.runtime, shape=shape.title, state=NOT_RUN)
    if now is None or now.state != TIMED:
        why = "it is not among the runtimes of this run" if now is None else f"{now.state}: {now.reason}"
        return attrs.evolve(change, reason=why)
    shared = [name for name in references if before.processes.get(name) and now.processes.get(name)]
    if not shared:
        return attrs.evolve(change, reason="neither torch nor the same lower bound was timed beside it in both runs")
    means = {name: [log_mean(run.processes[name]) for run in (before, now)] for name in shared}
    reference = min(shared, key=lambda name: sum(mean.variance for mean in means[name]))
    old, new = means[reference]
    change = attrs.evolve(change, reference=reference, before=exponential(old.middle), now=exponential(new.middle))
    counts = [len(run.processes[reference]) for run in (before, now)]
    if min(counts) < ENOUGH_PROCESSES:
        why = f"it needs {ENOUGH_PROCESSES} processes of each, there are {counts[0]} and {counts[1]}"
        return attrs.evolve(change, state=INCONCLUSIVE, reason=why, more=counts[0] >= ENOUGH_PROCESSES)
    return _judged(change, old, new, limit, 2 * DRIFT**2)


def _change_to_previous(timing: Timing, shape: Shape, limit: float) -> Change:
    """The change relative to the previous artifact in the same rounds."""
    change = Change(runtime=timing.runtime, shape=shape.title, state=NOT_RUN)
    ratios = timing.processes.get(PREVIOUS_ARTIFACT, ())
    if timing.state != TIMED or not ratios:
        return attrs.evolve(change, reason=timing.reason or "the earlier artifact was not timed")
    mean = log_mean(ratios)
    change = attrs.evolve(change, reference="the earlier artifact", before=1.0, now=exponential(mean.middle))
    if len(ratios) < ENOUGH_PROCESSES:
        why = f"it needs {ENOUGH_PROCESSES} processes, there are {len(ratios)}"
        return attrs.evolve(change, state=INCONCLUSIVE, reason=why, more=True)
    return _judged(change, Trimmed(0.0, 0.0, 1), mean, limit)


def _judged(change: Change, before: Trimmed, now: Trimmed, limit: float, drift: float = 0.0) -> Change:
    """The change from means of logarithms of ratios. `drift` is a variance that is added to theirs."""
    variance = now.variance + before.variance + drift
    middle = now.middle - before.middle
    reach = 0.0
    if variance:
        spread = sum(mean.variance**2 / mean.freedom for mean in (now, before))
        reach = student(CONFIDENCE, round(variance**2 / spread, 1) if spread else math.inf) * math.sqrt(variance)
    low, high = exponential(middle - reach), exponential(middle + reach)
    state: Judgement = SLOWER if low > 1 + limit else FINE if high <= 1 + limit else INCONCLUSIVE
    more = now.variance > _MIN_SHARE * variance
    return attrs.evolve(change, state=state, change=exponential(middle), low=low, high=high, more=more)


def unsteadiness(result: Benchmark) -> float:
    """The largest standard error of any ratio to any reference. A later run decides which reference counts."""
    variances = [
        log_mean(timing.processes[name]).variance
        for timing, _ in timings_of_artifact(result)
        for name in REFERENCES
        if timing.processes.get(name)
    ]
    return math.sqrt(max(variances, default=0.0))


def is_steady(result: Benchmark) -> bool:
    """Whether every ratio is known well enough to compare later runs with it."""
    return unsteadiness(result) <= STEADY
