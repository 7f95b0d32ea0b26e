"""Plans on disk: what must hold before one is opened. Imports no engine.

A plan is code that the engine runs, so one whose manifest `<file>.plan.json` is missing, or doesn't fit it, is never
handed to an engine. The manifest holds what an ONNX manifest holds, and

    onnx      {file, sha256[, external_data]}   what it was built from; weights and truth come from there
    runtime   {name, version}                   who built it, and alone can open it
    profiles  {input: {min, opt, max}}          the shapes it takes, for every input
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.models import read_spec
from posexport.spec.contract import smallest
from posexport.spec.forms import FORMS

MOMENTS = ("min", "opt", "max")
"""The three shapes of a profile: smallest, tuned for, largest."""


def check_plan(path: Path) -> dict[str, Any]:
    """The manifest of the plan at `path`, once it is sure that it is this file's and complete.

    Raises RequestError as `plan_manifest` does, and where the file's sha256 is not the one in the manifest.
    """
    manifest = plan_manifest(path)
    if manifest["sha256"] != sha256_of(path):
        raise RequestError(
            f"{str(path)!r} is not the file that its manifest {path.name}.json describes (their sha256 differ), so it "
            "is not opened (a plan is code): build it again with 'posexport compile'."
        )
    return manifest


def plan_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the plan at `path`, complete, but perhaps of other bytes than the file's.

    Raises RequestError where the plan or its manifest is not there, can't be read, or lacks something.
    """
    beside = path.with_name(path.name + ".json")
    if not path.is_file():
        raise RequestError(f"{str(path)!r} is not there: build it with 'posexport compile'.")
    if not beside.is_file():
        raise RequestError(
            f"{str(path)!r} has no manifest {beside.name}, so it is not opened (a plan is code): "
            "build it with 'posexport compile'."
        )
    try:
        manifest = json.loads(beside.read_bytes())
    except (OSError, ValueError, RecursionError):  # the last for brackets nested without end
        manifest = None
    wrong = _lacking(manifest)
    if wrong is not None:
        raise RequestError(f"the manifest {str(beside)!r} {wrong}: build the plan again with 'posexport compile'.")
    assert isinstance(manifest, dict)
    return manifest


def check_builder(path: Path, manifest: Mapping[str, Any], name: str, version: str | None = None) -> None:
    """RequestError unless the runtime `name` (in this `version`, where given) built the plan: no other can open it."""
    built = manifest["runtime"]
    if built["name"] != name or version not in (None, built["version"]):
        here = name if version is None else f"{name} {version}"
        raise RequestError(
            f"{str(path)!r} was built by {built['name']} {built['version']} and runs on nothing else, not on {here}: "
            f"build it again with 'posexport compile --runtime {name}'."
        )


def onnx_of(path: Path, manifest: Mapping[str, Any]) -> Path:
    """The ONNX file that the plan was built from: it lies beside the plan under the name that the manifest gives.

    Raises RequestError where it isn't there or has changed since.
    """
    source = manifest["onnx"]
    found = path.with_name(source["file"])
    for name, sha256 in {source["file"]: source["sha256"], **source.get("external_data", {})}.items():
        file = path.with_name(name)
        if not file.is_file():
            raise RequestError(f"{str(path)!r} was built from {name}, which is not beside it: put it there.")
        if sha256_of(file) != sha256:
            raise RequestError(
                f"{str(file)!r} is not what {path.name} was built from (their sha256 differ): compile it again."
            )
    return found


def _lacking(manifest: Any) -> str | None:
    """What keeps a manifest from being that of a plan, or None."""
    if not isinstance(manifest, dict):
        return "is no JSON object"
    for key, fits in _FIELDS.items():
        if key not in manifest:
            return f"lacks {key!r}"
        if not fits(manifest[key]):
            return f"has a {key!r} that can't be used"
    ranks = {entry["name"]: {len(entry["shape"])} for entry in manifest["inputs"]}
    if {name: set(map(len, shapes.values())) for name, shapes in manifest["profiles"].items()} != ranks:
        return "has profiles that are not those of its inputs"
    if any(
        size < smallest(dim)
        for entry in manifest["inputs"]
        for sizes in manifest["profiles"][entry["name"]].values()
        for dim, size in zip(entry["shape"], sizes, strict=True)
    ):
        return "has a 'profiles' that can't be used"
    return None


def _name(value: Any) -> bool:
    """A file's bare name, so that nothing outside the plan's folder can be meant."""
    return isinstance(value, str) and value not in ("", ".", "..") and not set("/\\:") & set(value)


def _source(value: Any) -> bool:
    if not isinstance(value, dict) or not _name(value.get("file")) or not isinstance(value.get("sha256"), str):
        return False
    data = value.get("external_data", {})
    return isinstance(data, dict) and all(_name(name) and isinstance(data[name], str) for name in data)


def _runtime(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "version"))


def _values(value: Any) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("dtype"), str)
            and isinstance(entry.get("shape"), list)
            and all(type(dim) in (int, str) for dim in entry["shape"])
            for entry in value
        )
    )


def _profiles(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(shapes, dict)
        and list(shapes) == list(MOMENTS)
        and all(
            isinstance(dims, list) and all(type(dim) is int and dim >= 0 for dim in dims) for dims in shapes.values()
        )
        for shapes in value.values()
    )


def _spec(value: Any) -> bool:
    try:
        return isinstance(value, dict) and read_spec(value) is not None
    except RequestError:
        return False


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "sha256": lambda value: isinstance(value, str),
    "form": lambda value: isinstance(value, str) and value in FORMS,
    "spec": _spec,
    "inputs": _values,
    "outputs": _values,
    "onnx": _source,
    "runtime": _runtime,
    "profiles": _profiles,
}
