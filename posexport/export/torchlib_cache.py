"""A cache for the table of translations that torch's exporter builds at every export: it is built once per opset.

Building takes about 0.6 s, half of the export of a block. The table depends only on the installed torch and onnxscript.
With a version of torch that keeps the table elsewhere, exports are slower but give the same graphs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

OPERATORS, REGISTRY = "get_torchlib_ops", "from_torchlib"


@cache
def _operators(apis: Any) -> list[Any]:
    return list(getattr(apis, OPERATORS)())


@cache
def _registry(build: Any, opset: int) -> Any:
    return build(opset_version=opset)


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """A context in which torch's exporter gets a copy of the table that was built first."""
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
        table.functions = {target: list(metas) for target, metas in table.functions.items()}
        return table

    with (  # `mock` restores the old values, whatever is raised
        mock.patch.object(apis, OPERATORS, return_value=operators),
        mock.patch.object(_registration.ONNXRegistry, REGISTRY, staticmethod(registry)),
    ):
        yield
