"""Exports files of whole models only once in a test run. The first process that needs a file makes it for all."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER: list[Path] = []
"""One folder, which all processes of this run share (shared_setup.py)."""


def made_once(checkpoint: Path, path: Path, options: Sequence[str], make: Callable[[Path], None]) -> None:
    """Write what `make` writes for a checkpoint into the folder of `path`. It is copied if another test has already
    made it."""
    digest = hashlib.sha256(repr((path.name, *options)).encode())
    for each in sorted(checkpoint.iterdir()):
        digest.update(each.name.encode())
        digest.update(each.read_bytes())
    kept = FOLDER[0] / digest.hexdigest()
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            new = kept.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            make(new / path.name)
            new.rename(kept)
    shutil.copytree(kept, path.parent, dirs_exist_ok=True)
