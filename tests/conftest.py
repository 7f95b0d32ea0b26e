"""Shared set-up: one thread per engine (tests run in parallel processes), hypothesis without deadlines, interrupts that
arrive whatever the parent of this process ignores, and what is the same in every export made once per process."""

import functools
import os
import signal
import subprocess
from collections.abc import Mapping

os.environ.setdefault("OMP_NUM_THREADS", "1")

import forks
import hypothesis
import onnx_ir as ir
import pytest
import torch._export.utils

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
trace = exporter._trace


def trace_once(spec: Spec, fixed: Mapping[str, int | None], functions: Functions) -> ir.Model:
    """torch's exporter takes most of an export, and gives the same graph for the same block: copies of its first."""
    key = (spec, *fixed.items(), functions.opset, functions._form, functions._target)
    if key not in TRACES:
        TRACES[key] = trace(spec, fixed, functions), functions.for_target_only
    model, functions.for_target_only = TRACES[key]
    return model.clone()


exporter._trace = trace_once

forks.install()


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every export runs torch's exporter, for tests that change how it works."""
    monkeypatch.setattr(exporter, "_trace", trace)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as the product starts them, for tests of just that."""
    monkeypatch.setattr(processes, "subprocess", subprocess)
