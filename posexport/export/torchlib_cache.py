"""torch's exporter reads the sources of all operators that it can translate at every export: here it does so once.

That is about 0.4 s of each export of a block, a third of it. The list depends on the installed torch and onnxscript
only. Where another torch keeps it elsewhere, exports are as right as before, and as slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

NAME = "get_torchlib_ops"


@cache
def _operators(apis: Any) -> list[Any]:
    """The operators that onnxscript translates, parsed."""
    return list(getattr(apis, NAME)())


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """While this is open, torch's exporter is given the list that was read first."""
    try:
        from torch.onnx._internal.exporter import _registration

        apis: Any = vars(_registration)["onnxscript_apis"]
        found = _operators(apis)
    except (ImportError, AttributeError, KeyError):
        yield
        return
    before = vars(apis).get(NAME)  # None where the module is loaded lazily, through another object
    vars(apis)[NAME] = lambda: found
    try:
        yield
    finally:
        if before is None:
            vars(apis).pop(NAME, None)
        else:
            vars(apis)[NAME] = before
