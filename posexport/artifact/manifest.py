"""The manifest `<file>.json` beside an artifact: where it is, what it holds, and whether it belongs to the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posexport.errors import RequestError
from posexport.files import sha256_of


def manifest_path(path: Path) -> Path:
    """`<file>.json` of an artifact."""
    return path.with_name(path.name + ".json")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the artifact at `path`, or None where there is none; RequestError where it is no JSON object."""
    beside = manifest_path(path)
    if not beside.exists():
        return None
    try:
        data = json.loads(beside.read_bytes())
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise RequestError(f"the manifest {str(beside)!r} can't be read as a JSON object: make the artifact again.")
    return data


def external_of(path: Path) -> dict[str, str]:
    """The sha256 of each file of external data that the manifest of the artifact at `path` names, by file name; none
    where the manifest isn't there or can't be read."""
    try:
        data = (read_manifest(path) or {}).get("external_data")
    except RequestError:
        data = None
    found = data if isinstance(data, dict) else {}
    return {name: sha256 for name, sha256 in found.items() if Path(name).name == name}


def matches_manifest(path: Path, external: bool = True) -> bool | None:
    """Whether the bytes of the file, and of its external data unless they are left out, are those that its manifest
    names; None without one."""
    manifest = read_manifest(path)
    if manifest is None:
        return None
    data = manifest.get("external_data", {}) if external else {}
    hashes = {path.name: manifest.get("sha256"), **(data if isinstance(data, dict) else {})}
    files = {name: path.with_name(name) for name in hashes if Path(name).name == name}
    return hashes.keys() == files.keys() and all(
        file.is_file() and sha256_of(file) == hashes[name] for name, file in files.items()
    )
