"""What result files say of each other: the jobs of a sweep, the files of a project."""

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

    Of a benchmark, `verdicts` are the states in which its artifact was found, by runtime, and `stale` says that it
    timed other bytes than those of the file on the page.
    """

    kind: str
    name: str
    data: dict[str, Any]
    path: Path = Path()
    verdicts: dict[str, str] = attrs.field(factory=dict)
    stale: bool = False


def superseded(inside: Sequence[Path]) -> set[Path]:
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
        folder = sweep.path.absolute().parent
        for job in sweep.data["jobs"]:
            told = by_path.get(folder / job["result"]) if job.get("result") else None
            job["told"] = told is not None and job.get("state") in _states(told.data)
            if told is not None and told.kind == "verify":
                _put_hashes(told.data["verdicts"], {file["name"]: file["sha256"] for file in job.get("files") or ()})
        matrices = {each.data["target"] for path, each in by_path.items()
                    if each.kind == "matrix" and path.parent == folder}  # fmt: skip
        for refused in sweep.data.get("refused") or ():  # the matrix of the sweep has these as cells
            refused["told"] = refused.get("target", "portable") in matrices
    return found


def _put_hashes(verdicts: Sequence[dict[str, Any]], known: dict[str, str]) -> None:
    """Give the verdicts that don't say the bytes of their artifact those that the job was given."""
    for each in verdicts:
        each["sha256"] = each.get("sha256") or known.get(PurePath(each["artifact"]).name)


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
