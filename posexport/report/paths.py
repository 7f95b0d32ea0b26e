"""Paths that people give for results, checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posexport.artifact.paths import SUFFIXES, check_artifact
from posexport.errors import RequestError


def check_paths(paths: Sequence[Path]) -> None:
    """RequestError where a path is missing, or no folder and no file of a kind that a report takes."""
    for path in paths:
        if not path.exists():
            raise RequestError(f"{str(path)!r} is not there: give result files, artifacts or a folder of them.")
        if path.suffix in SUFFIXES and not path.is_dir():
            check_artifact(path)
        elif not path.is_dir() and path.suffix != ".json":
            raise RequestError(f"{str(path)!r} is neither .json nor .onnx nor .plan nor a folder: give one of these.")
