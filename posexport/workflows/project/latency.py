"""What a project asks of time: which scenarios each file is timed at, on what, and whether it keeps its budget.

A limit is a ratio to a peer in the same rounds, judged with its interval: kept where the whole interval lies at or
below it, broken where all of it lies above, and not told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posexport.bench.candidates import CANDIDATES, EXPORTED, is_peer
from posexport.bench.regression import ours
from posexport.bench.result import (
    FINE,
    HIGH_MACHINE_LOAD,
    INCONCLUSIVE,
    NOT_RUN,
    SLOWER,
    TIMED,
    Benchmark,
    Judgement,
    LimitResult,
)
from posexport.bench.statistics import CONFIDENCE, ENOUGH_PROCESSES
from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES
from posexport.workflows.project.file import Project
from posexport.workflows.project.limits import Latency
from posexport.workflows.project.products import Product


def timed_on(product: Product, chosen: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The runtimes that a file is timed on (none: all), and why it can't be timed here, or None."""
    entry = product.entry
    if product.plan:
        assert entry.compile is not None
        name = entry.compile.runtime
        if chosen and name not in chosen:
            return (name,), f"{name} was not asked for"
        missing = RUNTIMES[name].missing()
        return (name,), None if missing is None else missing.text
    if entry.runtimes is None:
        return tuple(chosen), None
    names = [name for name in entry.runtimes if name in CANDIDATES and not CANDIDATES[name].role]
    names = [name for name in names if not chosen or name in chosen]
    return tuple(names), None if names else "none of its runtimes is one to be timed"


def asked_of(product: Product) -> dict[str, Any]:
    """The scenarios of a file's budget, each once, and whether torch.compile and the exported peers are needed."""
    latency = product.entry.budget.latency
    return {
        "scenarios": tuple(dict.fromkeys(each.scenario for each in latency)),
        "peers": any(peer in EXPORTED for each in latency for peer in each.limits()),
        "compiled": any("torch-compile" in each.limits() for each in latency),
    }


def baseline_of(project: Project, product: Product, saved: Path | None) -> Path | None:
    """The saved result that a file is compared with; None without one, or where this run is to make it.

    RequestError where it isn't there and this run won't make it, or is there and `saved` would replace it.
    """
    given = product.entry.baseline
    if given is None:
        return None
    path = project.root / given
    path = path if given.endswith(".json") else path / result_name(product)
    if saved is not None and saved.resolve() == path.resolve():
        if path.exists():
            raise RequestError(
                f"--save and the baseline of artifact {product.entry.name!r} are both {str(path)!r}: save the new "
                "results in another folder, or delete the old ones to make a baseline anew."
            )
        return None
    if not path.is_file():
        make = f"--save {path.parent}"
        if given.endswith(".json") or any(path.parent.glob("*.json")):  # of one file, at what the project asks for
            named = [f"--runtime {name}" for name in timed_on(product, ())[0]]
            at = [f"--scenario {scenario}" for scenario in asked_of(product)["scenarios"]]
            make = " ".join([str(product.path), *named, *at, f"--save {path}"])
        raise RequestError(
            f"{project.file}, artifact {product.entry.name!r}: its baseline {str(path)!r} is not there: make it with "
            f"'posexport bench {make}'."
        )
    return path


def result_name(product: Product) -> str:
    """The name of the file that the result of a file's benchmark is saved in."""
    return f"{product.path.stem}{'.plan' if product.plan else ''}.json"


def baseline_problems(found: Benchmark, limits: Sequence[LimitResult]) -> list[str]:
    """Why a result is no fit baseline for later runs, in words; nothing where it is one."""
    faults = {
        "nothing that runs the file was timed": not ours(found),
        "it is over its budget of time": any(each.state == SLOWER for each in limits),
        f"it has {found.processes} of the {ENOUGH_PROCESSES} processes that it takes to tell changes": (
            found.processes < ENOUGH_PROCESSES
        ),
        f"other work took {found.machine_load:.0%} of the CPU (time it at rest)": found.machine_load
        > HIGH_MACHINE_LOAD,
    }
    return [fault for fault, there in faults.items() if there]


def judge(product: Product, found: Benchmark | None, names: Sequence[str] = (), reason: str = "") -> list[LimitResult]:
    """Every limit of a file's budget on every runtime that it holds for; `names` are those it was timed on (none: all),
    and where it was not timed (`found` is None), `reason` says why."""
    plan = product.entry.compile.runtime if product.plan and product.entry.compile else None
    own = (plan,) if plan else product.entry.runtimes or tuple(CANDIDATES)
    judged = []
    for latency in product.entry.budget.latency:
        meant = [name for name in own if not is_peer(name) and latency.runtime in (None, name)]
        if meant:  # others hold for the plan, or for the ONNX file, alone
            asked = [name for name in meant if not names or name in names]
            judged += _judge(latency, found, asked, reason if asked else "it was not asked for")
    return judged


def _judge(latency: Latency, found: Benchmark | None, asked: Sequence[str], reason: str) -> list[LimitResult]:
    shapes = () if found is None else found.shapes
    results = [each for shape in shapes if latency.scenario in shape.scenarios for each in shape.results]
    meant = [each for each in results if each.runtime in asked]
    timed = [each for each in meant if each.state == TIMED]
    judged = []
    for peer, limit in latency.limits().items():
        told: dict[str, Any] = {"scenario": latency.scenario, "reference": peer, "limit": limit}
        for result in timed:
            told["runtime"] = result.runtime
            ratio = result.ratios.get(peer)
            if ratio is None:
                other = CANDIDATES[result.runtime].peers[peer] if result.runtime in CANDIDATES else peer
                why = next((f": {each.reason}" for each in results if each.runtime == other and each.reason), "")
                judged.append(
                    LimitResult(**told, state=NOT_RUN, reason=f"{peer} was not timed beside it{why}", there=True)
                )
                continue
            state: Judgement = FINE if ratio.high <= limit else SLOWER if ratio.low > limit else INCONCLUSIVE
            why = ""
            if ratio.confidence < CONFIDENCE:
                state, why = (
                    INCONCLUSIVE,
                    f"few rounds: its interval holds with {ratio.confidence:.0%}, not {CONFIDENCE:.0%}",
                )
            judged.append(
                LimitResult(**told, state=state, reason=why, ratio=ratio.median, low=ratio.low, high=ratio.high)
            )
        if not timed:
            told["runtime"] = latency.runtime or (asked[0] if len(asked) == 1 else "any runtime")
            why = reason or next((each.reason for each in meant if each.reason), "it was not timed at this scenario")
            there = found is not None and any(CANDIDATES[name].runtime.missing() is None for name in asked)
            judged.append(LimitResult(**told, state=NOT_RUN, reason=why, there=there))
    return judged


def broken(limits: Sequence[LimitResult], strict: bool) -> bool:
    """Whether a limit is broken, or was not measured though its runtime is there; with `strict` also where it can't be
    told, or was not run."""
    bad = (SLOWER, INCONCLUSIVE, NOT_RUN) if strict else (SLOWER,)
    return any(each.state in bad or each.there for each in limits)


def stale_files(files: Sequence[Product], sources: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """The files that are not what the project asks for, with why; times of these would be of something else."""
    from posexport.workflows.project.products import out_of_date

    found = {product.path: out_of_date(product, sources[product.path]) for product in files}
    return {path: reason for path, reason in found.items() if reason is not None}
