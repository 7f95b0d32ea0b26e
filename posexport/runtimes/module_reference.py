"""The reference FILE.py:NAME to a torch module of the user, checked before anything runs the file."""

from __future__ import annotations

from pathlib import Path

from posexport.errors import FieldError, shown
from posexport.files import not_a_file
from posexport.runtimes import Runtime

MODULE = Runtime("module", "the user's own torch module", "posexport.runtimes.torch_module", "torch", "torch")
"""Runs the user's module. It is not one of the runtimes that are judged."""


def checkpoint_of(reference: str | None) -> Path | None:
    """The folder of a checkpoint whose whole model a reference names; None if it names a module in a file."""
    return Path(reference) if reference is not None and Path(reference).is_dir() else None


def module_parts(reference: str) -> tuple[Path, str]:
    """The file and the name; FieldError for text that is not a reference, and if the file doesn't exist."""
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise FieldError("module", f"is {shown(reference)}: give a file and a name in it, such as model.py:Model.")
    if wrong := not_a_file(Path(file)):
        raise FieldError("module", f"{shown(reference)} can't be read, {file!r} is {wrong}: give an existing .py file.")
    return Path(file), name
