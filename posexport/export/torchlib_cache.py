"""torch's exporter builds its table of translations at every export: here it does so once for each opset.

That is about 0.6 s of each export of a block, half of it. The table depends on the installed torch and onnxscript
only. Where another torch keeps it elsewhere, exports are as right as before, and as slow.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

OPERATORS, REGISTRY = "get_torchlib_ops", "from_torchlib"


@cache
def _operators(apis: Any) -> list[Any]:
    """The operators that onnxscript translates, parsed from their sources."""
    return list(getattr(apis, OPERATORS)())


@cache
def _registry(build: Any, opset: int) -> Any:
    """The table of translations for one opset."""
    return build(opset_version=opset)


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """While this is open, torch's exporter gets a copy of the table that was built first."""
    try:
        from torch.onnx._internal.exporter import _registration

        apis: Any = vars(_registration)["onnxscript_apis"]
        operators = _operators(apis)
        build = getattr(_registration.ONNXRegistry, REGISTRY)
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def registry(opset_version: int) -> Any:
        table = copy.copy(_registry(build, opset_version))
        table.functions = {target: list(found) for target, found in table.functions.items()}
        return table

    with (
        _replaced(apis, OPERATORS, lambda: operators),
        _replaced(_registration.ONNXRegistry, REGISTRY, staticmethod(registry)),
    ):
        yield


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: object) -> Iterator[None]:
    before = vars(holder).get(name)  # None where a module loads it lazily, from another object
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
