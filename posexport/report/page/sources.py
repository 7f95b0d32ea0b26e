"""Reading what a report is made from: result files by their kind, artifacts, and folders that hold any of these."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.jsondata import unstructure
from posexport.report.page.check import CHART, SHAPES, Positive, complaint
from posexport.report.page.evidence import marked
from posexport.report.page.results import Result, linked, superseded
from posexport.report.page.scale import LINEAR, LOG

SIGNS = {
    "matrix": ("cells", "target"),
    "verify": ("verdicts",),
    "angles": ("positions", "engines", "rows"),
    "plot": ("file", "rows"),
    "bench": ("shapes", "rounds"),
    "tune": ("candidates", "winner"),
}
"""How a file that doesn't say its kind is told: by keys that only this kind has."""

COMMANDS = {
    "sweep": "posexport sweep",
    "verify": "posexport verify --json",
    "bench": "posexport bench --save",
    "bench-project": "posexport bench --json",
    "tune": "posexport tune",
    "matrix": "posexport matrix",
    "angles": "the measured errors of angles",
    "plot": "posexport plot --json",
}
VERSION = 1
"""Of the files that say their kind."""

ARTIFACTS = (".onnx", ".plan")
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


@attrs.define(kw_only=True)
class Sources:
    """Everything that was read. `artifacts` are paths with their names, `sha256` their hashes by name, `left` JSON in
    folders without results."""

    results: list[Result] = attrs.field(factory=list)
    artifacts: list[tuple[Path, str]] = attrs.field(factory=list)
    sha256: dict[str, str] = attrs.field(factory=dict)
    left: list[str] = attrs.field(factory=list)

    def of(self, kind: str) -> list[Result]:
        """The results of one kind, in the order in which they were given."""
        return [result for result in self.results if result.kind == kind]


def read_sources(paths: Sequence[Path], advance: Callable[[str], object] = lambda _: None) -> Sources:
    """Read files and folders, each file once; RequestError names the first that can't be used.

    In a folder, manifests go with their artifacts, and JSON of another kind is left out and listed.
    """
    given = _files(paths)
    names = _names([path for path, _ in given])
    sources = Sources()
    for (path, named), name in zip(given, names, strict=True):
        advance(name)
        if path.suffix in ARTIFACTS:
            sources.artifacts.append((path, name))
            sources.sha256[name] = _sha256(path)
            continue
        result = _result(path, name)
        if result is not None:
            sources.results.append(result)
        elif named:
            kinds = ", ".join(COMMANDS[kind] for kind in ("verify", "bench", "tune", "matrix"))
            raise RequestError(f"{str(path)!r} holds no results of posexport: give what {kinds} wrote.")
        else:
            sources.left.append(name)
    if not sources.results and not sources.artifacts:
        raise RequestError(
            f"{', '.join(repr(str(path)) for path in paths)} holds no results and no artifacts: give files that "
            "posexport wrote, or a folder of them."
        )
    tuned = [each for path, name in sources.artifacts for each in _tuned(path, name, sources.of("tune"))]
    sources.results = marked(linked([*sources.results, *tuned]), sources.sha256)
    return sources


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise RequestError(f"{str(path)!r} can't be read ({error.strerror}): give a file that can.") from None


def _tuned(path: Path, name: str, told: Sequence[Result]) -> Iterator[Result]:
    """The tuning that an artifact's manifest tells of, unless a file of its own does."""
    beside = path.with_name(f"{path.name}.json")
    if not beside.is_file():
        return
    from posexport.artifact.manifest import read_manifest

    manifest = clean(unstructure(read_manifest(path)) or {})
    if manifest.get("tune") is None:
        return
    wrong = complaint(manifest, {"sha256": str, "tune": SHAPES["tune"]})
    if wrong:
        raise RequestError(f"the manifest {str(beside)!r} is damaged ({wrong}): tune again.")
    winner = {**(manifest["tune"].get("winner") or {}), "file": path.name, "sha256": manifest["sha256"]}
    data = {**manifest["tune"], "winner": winner}
    if all((each.data.get("winner") or {}).get("sha256") != winner["sha256"] for each in told):
        yield Result(kind="tune", name=f"{name}.json", data=data, path=beside)


def _files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Every file once, and whether it was named itself rather than found in a folder."""
    found: dict[str, tuple[Path, bool]] = {}
    for path in paths:
        if not path.exists():
            raise RequestError(f"{str(path)!r} is not there: give result files, artifacts or a folder of them.")
        if path.is_dir():
            inside = sorted(
                file
                for file in path.rglob("*")
                if file.suffix in (".json", *ARTIFACTS)
                and file.is_file()
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
                and not _goes_with_artifact(file)
            )
            left = superseded(inside)
            inside = [file for file in inside if file not in left]
        elif path.suffix in (".json", *ARTIFACTS):
            inside = [path]
        else:
            raise RequestError(f"{str(path)!r} is neither .json nor .onnx nor .plan nor a folder: give one of these.")
        for file in inside:
            key = os.path.realpath(file)
            found[key] = (file, not path.is_dir() or found.get(key, (file, False))[1])
    return list(found.values())


def _goes_with_artifact(path: Path) -> bool:
    """Whether it is the manifest of an artifact that lies beside it."""
    return path.suffix == ".json" and path.with_suffix("").suffix in ARTIFACTS and path.with_suffix("").is_file()


def _names(paths: list[Path]) -> list[str]:
    """The names of files, with as much of their folders as keeps them apart; no page tells where a home is."""
    depth = dict.fromkeys(paths, 1)
    while True:
        names = ["/".join(path.absolute().parts[-depth[path] :]) for path in paths]
        twice = [path for path, name in zip(paths, names, strict=True) if names.count(name) > 1]
        growing = [path for path in twice if depth[path] < len(path.absolute().parts)]
        if not growing:
            return [clean(name) for name in names]
        for path in growing:
            depth[path] += 1


def _result(path: Path, name: str) -> Result | None:
    """The results in a file, or None where it holds something else; RequestError where it is broken."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestError(f"{str(path)!r} can't be read ({error.strerror}): give a file that can.") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{str(path)!r} is no whole JSON: write it again, or leave it out.") from None
    kind = _kind(data)
    if kind is None:
        return None
    data = clean(data)
    wrong = complaint(data, SHAPES[kind]) or _deeper(kind, data)
    if wrong:
        raise RequestError(f"{str(path)!r} is no sound result of {COMMANDS[kind]} ({wrong}): write it again.")
    return Result(kind=kind, name=name, data=data, path=path)


def _kind(data: Any) -> str | None:
    if not isinstance(data, dict):
        return None
    said = data.get("kind")
    if said is not None:
        return said if isinstance(said, str) and said in SHAPES else None
    return next((kind for kind, keys in SIGNS.items() if all(key in data for key in keys)), None)


def _deeper(kind: str, data: dict[str, Any]) -> str | None:
    """What a shape alone doesn't say."""
    if "kind" in data and data.get("version") != VERSION:
        return f"version is {data.get('version')!r}, this posexport reads {VERSION}"
    if kind == "angles":
        wrong = [row for row in data["rows"] if len(row["errors"]) != len(data["positions"])]
        return f"a row of {wrong[0]['encoding']} has not one error for each position" if wrong else None
    if kind == "bench-project":
        own = ({**each["result"], "limits": each.get("limits")} for each in data["files"] if each.get("result"))
        return next((text for each in own if (text := _deeper("bench", each))), None)
    if kind == "bench":
        bare_limit = next((each for each in data.get("limits") or () if _without_ratio(each)), None)
        if bare_limit:
            return f"a limit on {bare_limit['runtime']} is broken without a ratio"
        rows = (row for shape in data["shapes"] for row in shape["results"])
        bare = next((row for row in rows if row["state"] == "timed" and not row.get("seconds")), None)
        return f"{bare['runtime']} is timed without seconds" if bare else None
    if kind == "plot":
        charts = [panel for row in data["rows"] for panel in row if panel["kind"] == "chart"]
        return next((text for panel in charts if (text := complaint(panel, CHART, "panel") or _uneven(panel))), None)
    return None


def _without_ratio(limit: dict[str, Any]) -> bool:
    return limit["state"] == "slower" and limit.get("ratio") is None


def _uneven(panel: dict[str, Any]) -> str | None:
    for line in panel["lines"]:
        if len(line["x"]) != len(line["y"]) or complaint([y for y in line["y"] if y is not None], [float]):
            return f"line {line['label']!r} has not one number for each x"
        if line.get("look") is not None and (complaint(line["look"], [int]) or len(line["look"]) != 2):
            return f"line {line['label']!r} has a look that isn't two numbers"
    for each in panel["scales"]:
        if each not in (LINEAR, LOG) and complaint(each, Positive):
            return f"a scale is {each!r}, not linear, log or a number above 0"
    return None if len(panel["scales"]) == 2 else "a panel has not two scales"


def clean(value: Any) -> Any:
    """Data without the characters that XML or UTF-8 can't hold, which an engine's message or a file's name may."""
    if isinstance(value, str):
        return _UNWRITABLE.sub("?", value)
    if isinstance(value, list):
        return [clean(each) for each in value]
    if isinstance(value, dict):
        return {clean(key): clean(each) for key, each in value.items()}
    return value
