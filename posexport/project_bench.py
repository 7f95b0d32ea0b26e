"""What a project asks of time: which scenarios each file is timed at, on what, and whether it keeps its budget.

A limit is a ratio to a peer in the same rounds, judged with its interval: kept where the whole interval lies at or
below it, broken where all of it lies above, and not told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.baseline import FINE, NOT_RUN, SLOWER, UNSURE
from posexport.bench_candidates import CANDIDATES, EXPORTED
from posexport.bench_result import TIMED, Benchmark
from posexport.errors import RequestError
from posexport.project import Project
from posexport.project_files import Product
from posexport.project_terms import Latency
from posexport.runtimes import RUNTIMES


@attrs.frozen(kw_only=True)
class Kept:
    """One limit on one runtime: its state, and the ratio to the peer with its interval."""

    runtime: str
    scenario: str
    peer: str
    limit: float
    state: str
    reason: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def timed_on(product: Product, chosen: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The runtimes that a file is timed on (none: all), and why it can't be timed here, or None."""
    entry = product.entry
    if product.plan:
        assert entry.compile is not None
        name = entry.compile.runtime
        if chosen and name not in chosen:
            return (name,), f"{name} was not asked for"
        return (name,), RUNTIMES[name].missing()
    if entry.runtimes is None:
        return tuple(chosen), None
    names = [name for name in entry.runtimes if name in CANDIDATES and not CANDIDATES[name].role]
    names = [name for name in names if not chosen or name in chosen]
    return tuple(names), None if names else "none of its runtimes is one to be timed"


def asked_of(product: Product) -> dict[str, Any]:
    """The scenarios of a file's budget, each once, and whether it needs the peers that are exports of their own."""
    latency = product.entry.budget.latency
    return {
        "scenarios": tuple(dict.fromkeys(each.scenario for each in latency)),
        "peers": any(peer in EXPORTED for each in latency for peer in each.limits()),
    }


def baseline_of(project: Project, product: Product, saved: Path | None) -> Path | None:
    """The saved result that a file is compared with; None without one, or where this run is to make it."""
    given = product.entry.baseline
    if given is None:
        return None
    path = project.root / given
    path = path if given.endswith(".json") else path / result_name(product)
    if saved is not None and saved.resolve() == path.resolve():
        return None
    if not path.is_file():
        raise RequestError(
            f"{project.file}, artifact {product.entry.name!r}: its baseline {str(path)!r} is not there: make it with "
            f"'posexport bench --save {path.parent}'."
        )
    return path


def result_name(product: Product) -> str:
    """The name of the file that the result of a file's benchmark is saved in."""
    return f"{product.path.stem}{'.plan' if product.plan else ''}.json"


def judge(product: Product, found: Benchmark) -> list[Kept]:
    """Every limit of a file's budget on every runtime that it holds for."""
    return [
        kept
        for latency in product.entry.budget.latency
        for kept in _judge(latency, found)
        if not product.plan or kept.runtime == found_runtime(product)
    ]


def found_runtime(product: Product) -> str | None:
    """The only runtime that a plan runs on."""
    return product.entry.compile.runtime if product.plan and product.entry.compile else None


def _judge(latency: Latency, found: Benchmark) -> list[Kept]:
    shape = next((each for each in found.shapes if each.scenario == latency.scenario), None)
    results = [] if shape is None else [each for each in shape.results if not _peer(each.runtime)]
    judged = []
    for peer, limit in latency.limits().items():
        told: dict[str, Any] = {"scenario": latency.scenario, "peer": peer, "limit": limit}
        meant = [each for each in results if latency.runtime in (None, each.runtime)]
        timed = [each for each in meant if each.state == TIMED]
        for result in timed:
            told["runtime"] = result.runtime
            ratio = result.ratios.get(peer)
            if ratio is None:
                judged.append(Kept(**told, state=NOT_RUN, reason=f"{peer} was not timed beside it"))
                continue
            state = FINE if ratio.high <= limit else SLOWER if ratio.low > limit else UNSURE
            judged.append(Kept(**told, state=state, ratio=ratio.median, low=ratio.low, high=ratio.high))
        if not timed:
            name = latency.runtime or "any runtime"
            reason = next((each.reason for each in meant if each.reason), "it was not timed at this scenario")
            judged.append(Kept(**{**told, "runtime": name}, state=NOT_RUN, reason=reason))
    return judged


def _peer(name: str) -> bool:
    return name not in CANDIDATES or bool(CANDIDATES[name].role)


def broken(limits: Sequence[Kept], strict: bool) -> bool:
    """Whether a limit is broken; with `strict` also where it can't be told, or was not run."""
    bad = (SLOWER, UNSURE, NOT_RUN) if strict else (SLOWER,)
    return any(each.state in bad for each in limits)


def stale_files(files: Sequence[Product], sources: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """The files that are not what the project asks for, with why; times of these would be of something else."""
    from posexport.project_files import out_of_date

    found = {product.path: out_of_date(product, sources[product.path]) for product in files}
    return {path: reason for path, reason in found.items() if reason is not None}
