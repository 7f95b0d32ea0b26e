"""Runs torch's exporter once for equal blocks of a test process, because it takes most of the time and gives the same
graph.

An export of a block that was traced before gets a copy of its graph. An export in another form reuses the decomposed
program.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.onnx._internal.exporter import _capture_strategies, _core

from posexport.export import exporter
from posexport.graphs.function_bodies import Functions
from posexport.spec.spec import Spec

Strategy: Any = _capture_strategies.TorchExportNonStrictStrategy

GRAPHS: dict[tuple[object, ...], tuple[ir.Model, dict[str, Any]]] = {}
PROGRAMS: dict[tuple[object, ...] | None, torch.export.ExportedProgram] = {}
program_key: ContextVar[tuple[object, ...] | None] = ContextVar("program_key", default=None)
trace, prepare = exporter._trace, _core._prepare_exported_program_for_export
capture = Strategy._capture


@contextmanager
def same_program(*key: object) -> Iterator[None]:
    """Exports inside this context are of the module that `key` names. Its program is the same for every opset."""
    token = program_key.set(key)
    try:
        yield
    finally:
        program_key.reset(token)


def trace_once(spec: Spec, fixed: Mapping[str, int | None], functions: Functions) -> ir.Model:
    block = (spec, *fixed.items())
    key = (*block, functions.opset, functions.form, functions.target)
    if key not in GRAPHS:
        with same_program(*block):
            GRAPHS[key] = trace(spec, fixed, functions), _copied(vars(functions))
    model, built = GRAPHS[key]
    vars(functions).update(_copied(built))  # which bodies exist, and for which calls
    return model.clone()


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in values.items()}


def capture_once(self: Any, *arguments: Any, **options: Any) -> torch.export.ExportedProgram:
    """Returns the decomposed program instead of the original one: `prepare_once` does not look at its argument then."""
    return PROGRAMS.get(program_key.get()) or capture(self, *arguments, **options)


def prepare_once(program: torch.export.ExportedProgram, **options: Any) -> torch.export.ExportedProgram:
    key = program_key.get()
    if key is None:
        return prepare(program, **options)
    if key not in PROGRAMS:
        PROGRAMS[key] = prepare(program, **options)
    return PROGRAMS[key]


def install() -> None:
    """Trace only once from now on."""
    Strategy._capture = capture_once
    _core._prepare_exported_program_for_export = prepare_once
    exporter._trace = trace_once


@contextmanager
def anew() -> Iterator[None]:
    """Every export inside this context runs torch's exporter. A test's own `monkeypatch.undo` does not end this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "_trace", trace)
        yield
