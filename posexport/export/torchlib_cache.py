"""A cache for torch's exporter, which parses the sources of all operators that it can translate at every export.

That takes about 0.4 s, a third of the export of a block. The list depends on the installed torch and onnxscript only. A
version of torch that keeps it elsewhere is slower, and exports the same graphs.
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
    """Within this context, torch's exporter uses the list that was read first."""
    try:
        from torch.onnx._internal.exporter import _registration

        apis: Any = vars(_registration)["onnxscript_apis"]
        operators = _operators(apis)
    except (ImportError, AttributeError, KeyError):
        yield
        return
    before = vars(apis).get(NAME)  # None where the module is loaded lazily, through another object
    vars(apis)[NAME] = lambda: operators
    try:
        yield
    finally:
        if before is None:
            vars(apis).pop(NAME, None)
        else:
            vars(apis)[NAME] = before
