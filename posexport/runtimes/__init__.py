"""The runtimes that execute artifacts: one row per runtime, one file per engine. Importing this loads no engine.

A row says whether the runtime can run here, and if not, why not. Engines take seconds to load, and some crash. So they
load only in the child process that runs them (posexport.runtimes.worker).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import Reason, check_known
from posexport.runtimes.base import Runner
from posexport.runtimes.installation import install_command
from posexport.runtimes.numpy_threads import ONE_THREAD

TORCH = "posexport.runtimes.torch_eager"
REFERENCE = "posexport.runtimes.onnx_reference"
ORT = "posexport.runtimes.ort"
TENSORRT = "posexport.runtimes.tensorrt.engine"
INTERPRETER = "posexport.runtimes.tensorrt.interpreter"

TORCH_WORKER = "torch"
"""The runtime whose worker also computes the float64 reference and the torch error."""

NOT_INSTALLED, NO_GPU = "not-installed", "no-gpu"
"""Codes of the reasons why a runtime is missing."""


@attrs.frozen
class Runtime:
    """One runtime. `module` has the `load(path, options)` that opens an artifact with the row's `options`.

    `instead` is a package that serves as well as `package`, `note` is repeated in every verdict of the runtime,
    `unsupported_dtypes` gives the reason, by dtype, why it can't run artifacts of that dtype, and its process gets the
    variables of `environment` unless the user's environment has them. An `exact` one computes in float64 and rounds
    only outputs, angles and whole numbers.
    """

    name: str
    summary: str
    module: str
    package: str
    install: str
    needs_gpu: bool = False
    options: Mapping[str, Any] = attrs.field(factory=dict)
    instead: str | None = None
    note: str | None = None
    unsupported_dtypes: Mapping[str, str] = attrs.field(factory=dict)
    environment: Mapping[str, str] = attrs.field(factory=dict)
    exact: bool = False

    def missing(self) -> Reason | None:
        """Why it can't run here; None if it can."""
        if not any(importlib.util.find_spec(name) for name in (self.package, self.instead) if name):
            return Reason(NOT_INSTALLED, f"not installed: {install_command(self.install)}")
        why = gpu_missing() if self.needs_gpu else None
        return None if why is None else Reason(NO_GPU, why)

    def load(self, path: Path) -> Runner:
        """Open the artifact at `path`; imports the engine into this process."""
        runner: Runner = import_module(self.module).load(path, dict(self.options))
        return runner


_NO_GRAPH = "the block of the file's spec, not its graph"

_ROWS = (
    Runtime("torch", "PyTorch eager on the CPU", TORCH, "torch", "torch", False, {"device": "cpu"}, note=_NO_GRAPH),
    Runtime(
        "torch-cuda", "PyTorch eager on the GPU", TORCH, "torch", "torch", True, {"device": "cuda"}, note=_NO_GRAPH
    ),
    Runtime(
        name="onnx-reference",
        summary="onnx's ReferenceEvaluator (numpy)",
        module=REFERENCE,
        package="onnx",
        install="onnx",
        environment=ONE_THREAD,
    ),
    Runtime(
        name="ort-cpu",
        summary="ONNX Runtime, CPU provider",
        module=ORT,
        package="onnxruntime",
        install="onnxruntime",
        options={"provider": "CPU"},
        unsupported_dtypes={"bf16": "ONNX Runtime's CPU provider has no bf16 kernels"},
    ),
    Runtime(
        "ort-cuda", "ONNX Runtime, CUDA provider", ORT, "onnxruntime", "onnxruntime-gpu", True, {"provider": "CUDA"}
    ),
    Runtime("tensorrt", "TensorRT", TENSORRT, "tensorrt", "posexport[tensorrt]", True, {"module": "tensorrt"}),
    Runtime(
        "tensorrt-rtx", "TensorRT for RTX", TENSORRT, "tensorrt_rtx", "posexport[rtx]", True, {"module": "tensorrt_rtx"}
    ),
    Runtime(
        name="tensorrt-import",
        summary="what TensorRT's parser makes of the file, evaluated in float64 on the CPU: no kernels are run",
        module=INTERPRETER,
        package="tensorrt_rtx",
        instead="tensorrt",
        install="posexport[rtx]",
        note="import only: kernels were not run",
        exact=True,
    ),
)

RUNTIMES: dict[str, Runtime] = {row.name: row for row in _ROWS}
"""Every runtime by name, in the order of reports."""

WITHOUT_GRAPHS = frozenset(name for name, row in RUNTIMES.items() if row.module == TORCH)
"""The runtimes that build the block of a file's spec, with its weights, and don't run its graph."""


def runtime(name: str) -> Runtime:
    """The row with that name; RequestError that names the most similar one if there is none."""
    check_known("runtime", name, RUNTIMES)
    return RUNTIMES[name]


@functools.cache
def gpu_missing() -> str | None:
    """Why no CUDA device can be used; None if one can. It asks the driver itself, without importing an engine."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "no GPU: there is no NVIDIA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
        return None
    return "no GPU: the NVIDIA driver shows no device"
