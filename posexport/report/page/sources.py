"""Reading what a report is made from: result files by their kind, artifacts, and folders that hold any of these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from posexport.artifact.manifest import manifest_path, read_manifest
from posexport.artifact.paths import SUFFIXES
from posexport.bench.result import Benchmark, ProjectBenchmark
from posexport.bench.tune.result import Result as Tuning
from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.jsondata import DataError, read_json, structure
from posexport.report.page.angles import Angles
from posexport.report.page.results import Result, Sweep, linked, superseded
from posexport.report.paths import check_paths, no_results
from posexport.report.plots.panels import Plot, plot_from
from posexport.report.text import writable
from posexport.verify.matrix.table import Matrix, matrix_from
from posexport.verify.result import Report

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of result file: the command that writes it, its class, and how a file that names no kind is known."""

    command: str
    schema: type
    keys: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None


KINDS = {
    "sweep": Kind(command="posexport sweep", schema=Sweep),
    "matrix": Kind(command="posexport matrix", schema=Matrix, keys=("cells", "target"), read=matrix_from),
    "verify": Kind(command="posexport verify --json", schema=Report, keys=("verdicts",)),
    "angles": Kind(command="the measured errors of angles", schema=Angles, keys=("positions", "engines", "rows")),
    "plot": Kind(command="posexport plot --json", schema=Plot, keys=("file", "rows"), read=plot_from),
    "bench": Kind(command="posexport bench --save", schema=Benchmark, keys=("shapes", "rounds")),
    "bench-project": Kind(command="posexport bench --json", schema=ProjectBenchmark),
    "tune": Kind(command="posexport tune", schema=Tuning, keys=("candidates", "winner")),
}
VERSION = 1
"""Of the files that name their kind."""


@attrs.define(kw_only=True)
class Sources:
    """Everything that was read. `artifacts` are paths with their names, `sha256` their hashes by name, `left` JSON in
    folders without results."""

    results: list[Result[Any]] = attrs.field(factory=list)
    artifacts: list[tuple[Path, str]] = attrs.field(factory=list)
    sha256: dict[str, str] = attrs.field(factory=dict)
    left: list[str] = attrs.field(factory=list)

    def of(self, schema: type[T]) -> list[Result[T]]:
        """The results of one class, in the order in which they were given."""
        return [result for result in self.results if isinstance(result.data, schema)]


def read_sources(paths: Sequence[Path], advance: Callable[[str], object] = lambda _: None) -> Sources:
    """Read files and folders, each file once; RequestError names the first that can't be used.

    In a folder, manifests go with their artifacts, and JSON of another kind is left out and listed.
    """
    check_paths(paths)
    files, sources = _files(paths), Sources()
    for path, name in zip(files, _names(list(files)), strict=True):
        advance(name)
        if path.suffix in SUFFIXES:
            sources.artifacts.append((path, name))
            sources.sha256[name] = _readable(path, sha256_of)
            continue
        data = _readable(path, read_json)
        if (kind := kind_of(data)) is not None:
            sources.results.append(Result(name=name, data=_result(path, kind, data), path=path))
        elif files[path]:
            kinds = ", ".join(KINDS[kind].command for kind in ("verify", "bench", "tune", "matrix"))
            raise RequestError(f"{str(path)!r} holds no results of posexport: give what {kinds} wrote.")
        else:
            sources.left.append(name)
    if not sources.results and not sources.artifacts:
        raise no_results(paths)
    tuned = [tuning for path, name in sources.artifacts for tuning in _tuning(path, name, sources.of(Tuning))]
    sources.results = linked([*sources.results, *tuned])
    return sources


def _readable(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise RequestError(f"{str(path)!r} can't be read ({error.strerror}): give a file that can.") from None
    except DataError:
        raise RequestError(f"{str(path)!r} is no whole JSON: write it again, or leave it out.") from None


def kind_of(data: Any) -> str | None:
    """The kind of result that JSON data holds, or None."""
    if not isinstance(data, dict):
        return None
    if (name := data.get("kind")) is not None:
        return name if isinstance(name, str) and name in KINDS else None
    return next((name for name, kind in KINDS.items() if kind.keys and all(key in data for key in kind.keys)), None)


def _result(path: Path, name: str, data: Any) -> Any:
    kind = KINDS[name]
    try:
        if "kind" in data and data.get("version") != VERSION:
            raise DataError(f"version is {data.get('version')!r}, this posexport reads {VERSION}")
        return kind.read(clean(data)) if kind.read else structure(clean(data), kind.schema)
    except DataError as error:
        raise RequestError(f"{str(path)!r} is no sound result of {kind.command} ({error}): write it again.") from None


def _tuning(path: Path, name: str, tunings: Sequence[Result[Tuning]]) -> Iterator[Result[Tuning]]:
    """The tuning in an artifact's manifest, unless a result file has it too."""
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


def _files(paths: Sequence[Path]) -> dict[Path, bool]:
    """Every file once, and whether it was named itself rather than found in a folder."""
    files: dict[str, tuple[Path, bool]] = {}
    for path in paths:
        inside = [file for file in sorted(path.rglob("*")) if _is_source(file, path)] if path.is_dir() else [path]
        old = superseded(inside) if path.is_dir() else set()
        for file in inside:
            if file not in old:
                real = os.path.realpath(file)
                files[real] = (file, not path.is_dir() or (real in files and files[real][1]))
    return dict(files.values())


def _is_source(file: Path, folder: Path) -> bool:
    """Whether a file in a folder may be read: not hidden, and no manifest of an artifact beside it."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    manifest = file.suffix == ".json" and file.with_suffix("").suffix in SUFFIXES and file.with_suffix("").is_file()
    return file.suffix in (".json", *SUFFIXES) and not hidden and not manifest and file.is_file()


def _names(paths: list[Path]) -> list[str]:
    """The names of files with as much of their folders as sets them apart, so that no page shows a home."""
    depth = dict.fromkeys(paths, 1)
    while True:
        names = ["/".join(path.absolute().parts[-depth[path] :]) for path in paths]
        twice = [path for path, name in zip(paths, names, strict=True) if names.count(name) > 1]
        growing = [path for path in twice if depth[path] < len(path.absolute().parts)]
        if not growing:
            return [writable(name) for name in names]
        for path in growing:
            depth[path] += 1


def clean(value: Any) -> Any:
    """Data with `writable` texts only, which an engine's message or a file's name may not be."""
    match value:
        case str():
            return writable(value)
        case list():
            return [clean(item) for item in value]
        case dict():
            return {clean(key): clean(item) for key, item in value.items()}
    return value
