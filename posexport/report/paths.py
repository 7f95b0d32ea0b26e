"""Checks of paths that people give for results, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posexport.artifact.folders import walk
from posexport.artifact.paths import SUFFIXES, check_artifact
from posexport.errors import RequestError
from posexport.files import is_there


def check_paths(paths: Sequence[Path]) -> None:
    """RequestError if a path is missing or of a wrong kind, or if only folders without such files are given."""
    for path in paths:
        if not is_there(path):
            raise RequestError(f"{str(path)!r} is not there: give result files, artifacts or a folder of them.")
        if path.suffix in SUFFIXES and not path.is_dir():
            check_artifact(path)
        elif not path.is_dir() and path.suffix != ".json":
            raise RequestError(f"{str(path)!r} is neither .json nor .onnx nor .plan nor a folder: give one of these.")
    below = (name for path in paths if path.is_dir() for entries in walk(path) for name in entries.files)
    if all(path.is_dir() for path in paths) and not any(Path(name).suffix in (".json", *SUFFIXES) for name in below):
        raise no_results(paths)


def no_results(paths: Sequence[Path]) -> RequestError:
    """The error for paths without anything to report."""
    names = ", ".join(repr(str(path)) for path in paths)
    return RequestError(
        f"{names} holds no results and no artifacts: give files that posexport wrote, or a folder of them."
    )
