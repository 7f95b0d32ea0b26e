"""The latency budget of a project: scenarios and runtimes of each file, and whether it keeps its limits.

A limit is a ratio to a reference in the same rounds, judged with its interval. It is fine if the whole interval is at
or below it, slower if the whole interval is above it, and inconclusive otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from posexport.bench.candidates import ALTERNATIVES, CANDIDATES, COMPILED, is_reference
from posexport.bench.options import BenchOptions
from posexport.bench.regression import timings_of_artifact
from posexport.bench.result import FINE, INCONCLUSIVE, NOT_RUN, SLOWER, TIMED, Benchmark, LimitResult, Timing
from posexport.bench.statistics import CONFIDENCE, ENOUGH_PROCESSES
from posexport.errors import RequestError
from posexport.files import real_path
from posexport.runtimes import RUNTIMES
from posexport.workflows.project.file import Project
from posexport.workflows.project.limits import Latency
from posexport.workflows.project.products import Product


def timed_on(product: Product, chosen: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The runtimes on which a file is timed (empty: all), and why it can't be timed here, or None."""
    runtimes = product.entry.runtimes
    if product.plan is not None:
        name = product.plan.runtime
        missing = RUNTIMES[name].missing()
        text = None if missing is None else missing.text
        return (name,), f"{name} was not asked for" if chosen and name not in chosen else text
    if runtimes is None:
        return tuple(chosen), None
    names = [name for name in runtimes if name in CANDIDATES and not CANDIDATES[name].role]
    names = [name for name in names if not chosen or name in chosen]
    return tuple(names), None if names else "none of its runtimes is one to be timed"


def options_for(product: Product, runtimes: Sequence[str], options: BenchOptions) -> BenchOptions:
    """The options with a file's runtimes, the scenarios of its budget, and the references that its limits need."""
    references = {name for latency in product.entry.budget.latency for name in latency.limits()}
    return attrs.evolve(
        options,
        runtimes=tuple(runtimes),
        required=(),
        scenarios=_scenarios(product),
        alternatives=options.alternatives or not references.isdisjoint(ALTERNATIVES),
        torch_compile=COMPILED in references,
    )


def _scenarios(product: Product) -> tuple[str, ...]:
    return tuple(dict.fromkeys(latency.scenario for latency in product.entry.budget.latency))


def baseline_of(project: Project, product: Product, saved: Path | None) -> Path | None:
    """The saved result with which a file is compared. None without one, or if this run makes it.

    RequestError if it doesn't exist and this run won't make it, or if it exists and `saved` would replace it.
    """
    given = product.entry.baseline
    if given is None:
        return None
    path = project.root / given
    path = path if given.endswith(".json") else path / result_name(product)
    if saved is not None and real_path(saved) == real_path(path):
        if path.exists():
            raise RequestError(
                f"--save and the baseline of artifact {product.entry.name!r} are both {str(path)!r}: save the new "
                "results in another folder, or delete the old ones to make a baseline anew."
            )
        return None
    if not path.is_file():
        make = f"--save {path.parent}"
        if given.endswith(".json") or any(path.parent.glob("*.json")):  # for one file, with what the project asks for
            named = [f"--runtime {name}" for name in timed_on(product, ())[0]]
            at = [f"--scenario {scenario}" for scenario in _scenarios(product)]
            make = " ".join([str(product.path), *named, *at, f"--save {path}"])
        raise RequestError(
            f"{project.file}, artifact {product.entry.name!r}: its baseline {str(path)!r} is not there: make it with "
            f"'posexport bench {make}'."
        )
    return path


def result_name(product: Product) -> str:
    """The name of the file in which the result of a file's benchmark is saved."""
    return f"{product.path.stem}{'.plan' if product.plan else ''}.json"


def baseline_problems(result: Benchmark) -> list[str]:
    """Why a result, with its limits, is not a good baseline for later runs. Empty if it is one."""
    problems = {
        "nothing that runs the file was timed": not timings_of_artifact(result),
        "it is over its budget of time": any(limit.state == SLOWER for limit in result.limits),
        f"it has {result.processes} of the {ENOUGH_PROCESSES} processes that it takes to tell changes": (
            result.processes < ENOUGH_PROCESSES
        ),
        f"other work took {result.machine_load:.0%} of the CPU (time it at rest)": result.busy,
    }
    return [problem for problem, applies in problems.items() if applies]


def judge(product: Product, result: Benchmark | None, names: Sequence[str] = (), reason: str = "") -> list[LimitResult]:
    """Every limit of a file's budget on every runtime that it applies to. If none is named, on those that were timed.

    `names` are the runtimes on which it was timed (empty: all). If it was not timed (`result` is None), `reason` says
    why.
    """
    runtimes = (product.plan.runtime,) if product.plan else product.entry.runtimes or tuple(CANDIDATES)
    judged = []
    for latency in product.entry.budget.latency:
        held = [name for name in runtimes if not is_reference(name) and latency.runtime in (None, name)]
        if held:  # other limits apply only to the plan, or only to the ONNX file
            chosen = [name for name in held if not names or name in names]
            named = product.plan or product.entry.runtimes or latency.runtime
            for those in [[name] for name in chosen] if named and chosen else [chosen]:
                judged += _judge(latency, result, those, reason if chosen else "it was not asked for")
    return judged


def _judge(latency: Latency, result: Benchmark | None, chosen: Sequence[str], reason: str) -> list[LimitResult]:
    shapes = () if result is None else result.shapes
    timings = [timing for shape in shapes if latency.scenario in shape.scenarios for timing in shape.results]
    of_chosen = [timing for timing in timings if timing.runtime in chosen]
    timed = [timing for timing in of_chosen if timing.state == TIMED]
    why = reason or next((timing.reason for timing in of_chosen if timing.reason), "it was not timed at this scenario")
    judged = []
    for reference, limit in latency.limits().items():
        untimed = LimitResult(
            runtime=latency.runtime or (chosen[0] if len(chosen) == 1 else "any runtime"),
            scenario=latency.scenario,
            reference=reference,
            limit=limit,
            state=NOT_RUN,
            reason=why,
            there=result is not None and any(CANDIDATES[name].runtime.missing() is None for name in chosen),
        )
        judged += [_judge_one(untimed, timing, timings) for timing in timed] or [untimed]
    return judged


def _judge_one(untimed: LimitResult, timing: Timing, timings: Sequence[Timing]) -> LimitResult:
    """Judge a limit on one runtime that was timed. `timings` are all of its scenario."""
    reference, limit, ratio = untimed.reference, untimed.limit, timing.ratios.get(untimed.reference)
    judged = attrs.evolve(untimed, runtime=timing.runtime, reason="", there=ratio is None)
    if ratio is None:
        candidate = CANDIDATES.get(timing.runtime)
        name = reference if candidate is None else candidate.references[reference]
        why = next((f": {other.reason}" for other in timings if other.runtime == name and other.reason), "")
        return attrs.evolve(judged, reason=f"{reference} was not timed beside it{why}")
    judged = attrs.evolve(judged, ratio=ratio.median, low=ratio.low, high=ratio.high)
    if ratio.confidence < CONFIDENCE:
        why = f"few rounds: its interval holds with {ratio.confidence:.0%}, not {CONFIDENCE:.0%}"
        return attrs.evolve(judged, state=INCONCLUSIVE, reason=why)
    return attrs.evolve(judged, state=FINE if ratio.high <= limit else SLOWER if ratio.low > limit else INCONCLUSIVE)


def is_exceeded(limit: LimitResult, strict: bool) -> bool:
    """Whether a limit is exceeded, or was not measured although its runtime is available.

    With `strict`, also if it is inconclusive, or was not run.
    """
    bad = (SLOWER, INCONCLUSIVE, NOT_RUN) if strict else (SLOWER,)
    return limit.state in bad or limit.there
