"""Shared set-up: one thread per engine (tests run in parallel processes), hypothesis without deadlines, interrupts that
arrive whatever the parent of this process ignores, and what is the same in every export made once per process."""

import functools
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import forks
import hypothesis
import onnx_ir as ir
import pytest
import torch._export.utils
from torch.onnx._internal.exporter import _core

from posexport import processes
from posexport.export import exporter
from posexport.export.function_bodies import Functions
from posexport.spec.spec import Spec

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

# Each export lists all composite operators of torch anew, a sixth of its time. The list does not change.
torch._export.utils._materialize_cpp_cia_ops = functools.cache(torch._export.utils._materialize_cpp_cia_ops)

TRACES: dict[tuple[object, ...], tuple[ir.Model, bool]] = {}
PROGRAMS: dict[tuple[object, ...], torch.export.ExportedProgram] = {}
traced: ContextVar[tuple[object, ...] | None] = ContextVar("traced", default=None)
trace, prepare = exporter._trace, _core._prepare_exported_program_for_export


def trace_once(spec: Spec, fixed: Mapping[str, int | None], functions: Functions) -> ir.Model:
    """Copies of the first graph of the same block: torch's exporter, most of an export, gives the same one again."""
    block = (spec, *fixed.items(), functions.opset)
    key = (*block, functions._form, functions._target)
    if key not in TRACES:
        token = traced.set(block)
        try:
            TRACES[key] = trace(spec, fixed, functions), functions.for_target_only
        finally:
            traced.reset(token)
    model, functions.for_target_only = TRACES[key]
    return model.clone()


def prepare_once(program: torch.export.ExportedProgram, **options: Any) -> torch.export.ExportedProgram:
    """The decomposed program of the same block in another form, which is most of a trace and is not changed by it."""
    block = traced.get()
    if block is None:
        return prepare(program, **options)
    if block not in PROGRAMS:
        PROGRAMS[block] = prepare(program, **options)
    return PROGRAMS[block]


_core._prepare_exported_program_for_export = prepare_once
exporter._trace = trace_once

forks.install()


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Every export runs torch's exporter, for tests that change how it works; a test's own undo leaves it so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "_trace", trace)
        yield


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as the product starts them, for tests of just that."""
    monkeypatch.setattr(processes, "subprocess", subprocess)
