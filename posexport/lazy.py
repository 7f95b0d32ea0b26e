"""Public names of a package that load the file that defines them when they are first used.

`--help`, `list` and the reading of results must not import torch or onnx, which a plain import in `__init__` would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def public_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds the names in `modules`: file of the package to the names it defines."""
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
