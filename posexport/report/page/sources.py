"""Reading what a report is made from: result files by their kind, artifacts, and folders that contain any of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from posexport.artifact.paths import SUFFIXES, short_names
from posexport.bench.result import Benchmark, ProjectBenchmark
from posexport.bench.results import Result, Sweep, linked, source_files, tuning_in_manifest
from posexport.bench.tune.result import Result as Tuning
from posexport.errors import RequestError, shown
from posexport.files import sha256_of
from posexport.jsondata import DataError, clean, read_json, structure, writable
from posexport.report.page.limits import beyond
from posexport.report.paths import check_paths, no_results
from posexport.report.plots.panels import Plot, plot_from
from posexport.verify.matrix.table import Matrix, matrix_from
from posexport.verify.result import AngleErrors, Report

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of result file: the command that writes it, its class, and the keys of a file that names no kind."""

    command: str
    schema: type
    keys: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None


KINDS = {
    "sweep": Kind(command="posexport sweep", schema=Sweep),
    "matrix": Kind(command="posexport matrix", schema=Matrix, keys=("cells", "target"), read=matrix_from),
    "verify": Kind(command="posexport verify --json", schema=Report, keys=("verdicts",)),
    "angles": Kind(command="the measured errors of angles", schema=AngleErrors, keys=("positions", "engines", "rows")),
    "plot": Kind(command="posexport plot --json", schema=Plot, keys=("file", "rows"), read=plot_from),
    "bench": Kind(command="posexport bench --save", schema=Benchmark, keys=("shapes", "rounds")),
    "bench-project": Kind(command="posexport bench --json", schema=ProjectBenchmark),
    "tune": Kind(command="posexport tune", schema=Tuning, keys=("candidates", "winner")),
}
VERSION = 1
"""The version of files that name their kind."""


@attrs.define(kw_only=True)
class Sources:
    """What was read. `artifacts` are paths with names, `sha256` is by name, `left` is other JSON in folders."""

    results: list[Result[Any]] = attrs.field(factory=list)
    artifacts: list[tuple[Path, str]] = attrs.field(factory=list)
    sha256: dict[str, str] = attrs.field(factory=dict)
    left: list[str] = attrs.field(factory=list)

    def of(self, schema: type[T]) -> list[Result[T]]:
        """The results of one class, in the order in which they were given."""
        return [result for result in self.results if isinstance(result.data, schema)]


def read_sources(paths: Sequence[Path], advance: Callable[[str], object] = lambda _: None) -> Sources:
    """Read files and folders, each file once. RequestError names the first that can't be used.

    In a folder, manifests belong to their artifacts, and JSON of another kind is left out and listed.
    """
    check_paths(paths)
    files, sources = source_files(paths), Sources()
    for path, name in zip(files, map(writable, short_names(list(files))), strict=True):
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
    known = sources.of(Tuning)
    tuned = [tuning for path, name in sources.artifacts for tuning in tuning_in_manifest(path, name, known)]
    sources.results = linked([*sources.results, *tuned])
    return sources


def _readable(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise RequestError(f"{str(path)!r} can't be read ({error.strerror}): give a file that can.") from None
    except DataError as error:
        raise RequestError(f"{str(path)!r} is no whole JSON ({error}): write it again, or leave it out.") from None


def kind_of(data: Any) -> str | None:
    """The kind of result in JSON data, or None."""
    if not isinstance(data, dict):
        return None
    if (name := data.get("kind")) is not None:
        return name if isinstance(name, str) and name in KINDS else None
    return next((name for name, kind in KINDS.items() if kind.keys and all(key in data for key in kind.keys)), None)


def _result(path: Path, name: str, data: Any) -> Any:
    kind = KINDS[name]
    try:
        if "kind" in data and data.get("version") != VERSION:
            raise DataError(f"version is {shown(data.get('version'))}, this posexport reads {VERSION}")
        result = kind.read(clean(data)) if kind.read else structure(clean(data), kind.schema)
    except DataError as error:
        raise RequestError(f"{str(path)!r} is no sound result of {kind.command} ({error}): write it again.") from None
    if (problem := beyond(result)) is not None:
        raise RequestError(f"{str(path)!r} is too large for a page ({problem}): leave it out, or split it.")
    return result
