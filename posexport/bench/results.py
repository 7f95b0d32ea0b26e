"""Result files, and how those of one sweep or one project belong together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar

import attrs

from posexport.artifact.folders import files_below
from posexport.artifact.manifest import manifest_path, read_manifest
from posexport.artifact.paths import SUFFIXES
from posexport.bench.result import Benchmark, ProjectBenchmark
from posexport.bench.tune.result import Result as Tuning
from posexport.errors import RequestError
from posexport.jsondata import DataError, clean, read_json, structure
from posexport.verify.matrix.table import Matrix
from posexport.verify.result import FAILED, Report

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Result(Generic[T]):
    """One result file. `name` is its name in reports."""

    name: str
    data: T
    path: Path = Path()


@attrs.frozen(kw_only=True)
class JobFile:
    """An artifact that a job was given."""

    name: str
    sha256: str


@attrs.frozen(kw_only=True)
class Job:
    """One job of a sweep. `shown` is set if its result was read too and has the same state."""

    id: str
    kind: str
    label: str | None = None
    state: str | None = None
    reason: str | None = None
    result: str | None = None
    files: tuple[JobFile, ...] = ()
    shown: bool = False


@attrs.frozen(kw_only=True)
class Sweep:
    """What reports read from a sweep.json.

    `refused` are combinations without a job, each with its `reason`. If their target is in `matrices`, they are cells
    of a matrix that was read too.
    """

    jobs: tuple[Job, ...]
    refused: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()


def _superseded(files: Sequence[Path]) -> set[Path]:
    """The files in `results/` of sweeps that no job names. An earlier sweep of the folder left them."""
    old = set()
    for sweep in (file for file in files if file.name == "sweep.json"):
        try:
            named = {PurePath(job["result"]).name for job in read_json(sweep)["jobs"] if job.get("result")}
        except (OSError, DataError, TypeError, KeyError, AttributeError):
            continue  # reading it as a result reports the error
        inside = (file for file in files if file.parent == sweep.parent / "results")
        old |= {file for file in inside if file.suffix == ".json" and file.name not in named}
    return old


def linked(results: Sequence[Result[Any]]) -> list[Result[Any]]:
    """Link results that refer to each other. The benchmarks of a project's files become results of their own too."""
    every = [part for result in results for part in (result, *_of_project(result))]
    by_path = {result.path.absolute(): result for result in every}
    for at, result in enumerate(every):
        if isinstance(result.data, Sweep):
            every[at] = attrs.evolve(result, data=_linked_sweep(result.data, result.path.absolute().parent, by_path))
    return [by_path[result.path.absolute()] if isinstance(result.data, Report) else result for result in every]


def _linked_sweep(sweep: Sweep, folder: Path, by_path: dict[Path, Result[Any]]) -> Sweep:
    """The sweep with its results found. Verdicts without their artifact's sha256 get that of the job."""
    jobs = []
    for job in sweep.jobs:
        path = folder / (job.result or "")
        data = by_path[path].data if path in by_path else None
        jobs.append(attrs.evolve(job, shown=job.state in _states(data)))
        if isinstance(data, Report):
            hashes = {file.name: file.sha256 for file in job.files}
            verdicts = tuple(
                attrs.evolve(verdict, sha256=verdict.sha256 or hashes.get(PurePath(verdict.artifact).name))
                for verdict in data.verdicts
            )
            by_path[path] = attrs.evolve(by_path[path], data=attrs.evolve(data, verdicts=verdicts))
    beside = [result.data for path, result in by_path.items() if path.parent == folder]
    matrices = tuple(data.target for data in beside if isinstance(data, Matrix))
    return attrs.evolve(sweep, jobs=tuple(jobs), matrices=matrices)


def _states(data: Any) -> set[str]:
    """Every state in a result. An unreadable artifact counts as failed, and so does one that got slower."""
    match data:
        case Report():
            return {verdict.state for verdict in data.verdicts} | ({FAILED} if data.unreadable else set())
        case Matrix():
            return {cell.state for cell in data.cells.values()}
        case Benchmark():
            slower = data.gate is not None and data.gate.exit_code(strict=False)
            return {timing.state for timing in data.timings} | ({FAILED} if slower else set())
        case Tuning():
            return {row.state for row in data.candidates}
    return set()


def _of_project(result: Result[Any]) -> Iterator[Result[Benchmark]]:
    """The benchmarks of a project's files, each with the limits that it was checked against."""
    if isinstance(result.data, ProjectBenchmark):
        for file in result.data.files:
            if file.result is not None:
                data = attrs.evolve(file.result, limits=file.limits)
                yield Result(name=f"{result.name}: {PurePath(file.file).name}", data=data)


def tuning_in_manifest(path: Path, name: str, tunings: Sequence[Result[Tuning]]) -> Iterator[Result[Tuning]]:
    """The tuning in an artifact's manifest, unless a result file contains it too."""
    beside, manifest = manifest_path(path), read_manifest(path)
    if manifest is None or manifest.tune is None:
        return
    sha256 = manifest.sha256
    try:
        tuning = structure(clean(manifest.tune), Tuning)
    except DataError as error:
        raise RequestError(f"the manifest {str(beside)!r} is damaged ({error}): tune again.") from None
    if tuning.winner is not None:
        tuning = attrs.evolve(tuning, winner=attrs.evolve(tuning.winner, file=path.name, sha256=sha256))
    if all(other.data.winner is None or other.data.winner.sha256 != sha256 for other in tunings):
        yield Result(name=f"{name}.json", data=tuning, path=beside)


def source_files(paths: Sequence[Path]) -> dict[Path, bool]:
    """Every result and artifact once, and whether it was named itself, not found in a folder."""
    files: dict[str, tuple[Path, bool]] = {}
    for path in paths:
        inside = [file for file in files_below(path) if _is_source(file, path)] if path.is_dir() else [path]
        old = _superseded(inside) if path.is_dir() else set()
        for file in inside:
            if file not in old:
                real = os.path.realpath(file)
                files[real] = (file, not path.is_dir() or (real in files and files[real][1]))
    return dict(files.values())


def _is_source(file: Path, folder: Path) -> bool:
    """Whether a file in a folder may be read. Hidden files and manifests beside their artifacts may not."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    manifest = file.suffix == ".json" and file.with_suffix("").suffix in SUFFIXES and file.with_suffix("").is_file()
    return file.suffix in (".json", *SUFFIXES) and not hidden and not manifest and file.is_file()
