"""What result files say of each other: the jobs of a sweep, the files of a project, verdicts on what was timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import attrs

SWEEP = "sweep.json"


@attrs.frozen(kw_only=True)
class Result:
    """One result file: `name` is what the page calls it.

    `sha256` are those of the artifacts that it is about, by name, where a sweep says them; `failed` are the runtimes
    that a verdict in another file failed on.
    """

    kind: str
    name: str
    data: dict[str, Any]
    path: Path = Path()
    sha256: dict[str, str] = attrs.field(factory=dict)
    failed: frozenset[str] = frozenset()


def stale(inside: Sequence[Path]) -> set[Path]:
    """The files in `results/` of sweeps that none of their jobs names: an earlier sweep of the folder left them."""
    found = set()
    for file in inside:
        jobs = _jobs(file) if file.name == SWEEP else None
        if jobs is not None:
            named = {PurePath(job["result"]).name for job in jobs if isinstance(job.get("result"), str)}
            own = (each for each in inside if each.parent == file.parent / "results")
            found |= {each for each in own if each.suffix == ".json" and each.name not in named}
    return found


def _jobs(path: Path) -> list[dict[str, Any]] | None:
    try:
        data = json.loads(path.read_bytes())
        sound = data["kind"] == "sweep" and all(isinstance(job, dict) for job in data["jobs"])
        return list(data["jobs"]) if sound else None
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None  # whoever reads it as a result says so


def linked(results: Sequence[Result]) -> list[Result]:
    """The results, each with what the others say of it; the benchmarks inside a project's stand as their own too."""
    found = [each for result in results for each in (result, *_of_project(result))]
    by_path = {result.path.absolute(): result for result in found}
    for sweep in (result for result in found if result.kind == "sweep"):
        for job in sweep.data["jobs"]:
            told = by_path.get(sweep.path.absolute().parent / job["result"]) if job.get("result") else None
            job["told"] = told is not None and job.get("state") in _states(told.data)
            if told is not None:
                told.sha256.update({file["name"]: file["sha256"] for file in job.get("files") or ()})
    return [attrs.evolve(each, failed=_failed(each, found)) if each.kind == "bench" else each for each in found]


def _states(value: Any) -> set[str]:
    """Every state in a result, at any depth; what can't be read has failed, and what got slower too."""
    if isinstance(value, list):
        return {state for each in value for state in _states(each)}
    if not isinstance(value, dict):
        return set()
    own = {"failed" if value.get("state") == "slower" else str(value.get("state"))}
    own |= {"failed"} if value.get("unreadable") else set()
    return own.union(*map(_states, value.values()))


def _of_project(result: Result) -> Iterator[Result]:
    """The benchmarks of a project's files, each with the limits that it was held to."""
    if result.kind == "bench-project":
        for file in result.data["files"]:
            if file.get("result"):
                data = {**file["result"], "limits": file.get("limits")}
                yield Result(kind="bench", name=f"{result.name}: {PurePath(file['file']).name}", data=data)


def _failed(bench: Result, results: Sequence[Result]) -> frozenset[str]:
    """The runtimes on which the timed file failed, as far as names and known hashes tell that it is the same."""
    name, known = PurePath(bench.data["file"]).name, bench.data.get("sha256")
    found = set()
    for result in results:
        for each in result.data["verdicts"] if result.kind == "verify" else ():
            file = PurePath(each["artifact"]).name
            same = file == name and (known is None or result.sha256.get(file, known) == known)
            if same and each["state"] == "failed":
                found.add(each["runtime"])
    return frozenset(found)
