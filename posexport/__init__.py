"""posexport: ship attention with positional encodings on ONNX Runtime and TensorRT, and prove that it is the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# ONNX Runtime reads it once, when it is first imported, and child processes inherit it. Without it, ONNX Runtime 1.29
# and later write through $TMPDIR/.ses, even if that is a link. They also keep a database below the home folder and send
# it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def public_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports the file of a public name when the name is first used.

    `modules` has the names that each file of the package defines. `--help`, `list` and the reading of results must not
    load torch or onnx, which plain imports in `__init__` would do.
    """
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
