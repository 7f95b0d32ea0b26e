"""ONNX Runtime, CPU or CUDA provider. Inputs and outputs are bound on the device if it is timed.

Options:

- `provider`: "CPU" or "CUDA".
- `threads`: intra-op threads. The default is ONNX Runtime's own choice, or the number of CPUs to which this process is
  restricted.
- `cuda_graph`: capture the run once and replay it.
- `disabled_optimizers`: names of graph optimizers.
- `graph_level`: how far graphs are optimized, one of GRAPH_LEVELS.
- `new_lengths`: each run has other lengths; on CUDA, attention then uses kernels that don't plan for each length.
- `io_binding`: false: timed by plain calls, which allocate their outputs each time; true: `run` binds too, as timed
  runs do, except for bf16.
- `spinning`: false: threads without work sleep at once, so that other processes have the cores.
- `denormal_as_zero`: true: results below the smallest normal number, 1.2e-38 in fp32, are zeros. For the process's main
  thread, ONNX Runtime takes it only from the first session.
- `shared`: {output: input} of caches that a bound run writes in place; default: those of posexport's own files.

ONNX Runtime falls back to the CPU without an error if its CUDA provider can't load. Here that is an error.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from posexport.errors import RequestError, RuntimeMissingError, check_known
from posexport.machine import kept_to
from posexport.runtimes import gpu_missing
from posexport.runtimes.base import Arrays, check_onnx_file, timed
from posexport.runtimes.cuda import by_torch_events
from posexport.runtimes.tensors import BF16

OLDEST = "1.31"
"""The oldest version that posexport supports: older versions may lack operators that its files use."""

_ONNX_BF16 = 16
_DEVICES = {"CPU": "cpu", "CUDA": "cuda"}
_OPTIONS = (
    "provider",
    "threads",
    "cuda_graph",
    "disabled_optimizers",
    "graph_level",
    "new_lengths",
    "io_binding",
    "spinning",
    "denormal_as_zero",
    "shared",
)
GRAPH_LEVELS = {"all": "ENABLE_ALL", "extended": "ENABLE_EXTENDED", "basic": "ENABLE_BASIC", "disable": "DISABLE_ALL"}
"""onnxruntime's GraphOptimizationLevel without `ORT_`, by the option's name of it."""

DENORMAL_AS_ZERO = "session.set_denormal_as_zero"
"""The entry of a session's configuration that `denormal_as_zero` sets."""

_SPINNING = "session.intra_op.allow_spinning"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

LARGE = 2**26
"""From this number of bytes of a file on, its weights are not read with its graph."""

_NO_PLANS = 1 | 2 | 16
"""`sdpa_kernel` of flash, memory-efficient and plain attention, without cuDNN's.

cuDNN's attention plans for 40 ms at each new length (MultiHeadAttention on an H100, ONNX Runtime 1.31.1).
"""

_QUIET = 4  # fatal only: errors also come as exceptions with the same text


class OrtRunner:
    """One session."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        provider: str,
        cuda_graph: bool = False,
        stream: Any = None,
        io_binding: bool | None = None,
        shared: Mapping[str, str] | None = None,
    ) -> None:
        self._session, self._provider, self._cuda_graph, self._stream = session, provider, cuda_graph, stream
        self._io_binding = io_binding
        self._names = [value.name for value in session.get_outputs()]
        values = (*session.get_inputs(), *session.get_outputs())
        self._has_bf16 = any(value.type == "tensor(bfloat16)" for value in values)
        # Outputs that use an input's buffer in timed runs, as pipelines do: caches that are written into.
        inputs = {value.name for value in session.get_inputs()}
        pairs = {name: name.replace("present_", "past_", 1) for name in self._names if "write_indices" in inputs}
        own = {name: past for name, past in pairs.items() if past != name and past in inputs}
        self._shared = own if shared is None else dict(shared)

    def run(self, inputs: Arrays) -> Arrays:
        if not self._io_binding or self._has_bf16:  # ONNX Runtime can't copy a bound bf16 output
            return self._run(inputs)
        binding, held = self._bind(inputs)
        assert held  # the bound memory lives until the outputs are copied
        self._session.run_with_iobinding(binding, self._outside_graph())
        binding.synchronize_outputs()
        return dict(zip(self._names, binding.copy_outputs_to_cpu(), strict=True))

    def _run(self, inputs: Arrays) -> Arrays:
        if not self._has_bf16 and not self._cuda_graph:
            return dict(zip(self._names, self._session.run(self._names, inputs), strict=True))
        binding = self._session.io_binding()
        values = {name: self._value(array) for name, array in inputs.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._names:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding, self._outside_graph())
        binding.synchronize_outputs()
        return {name: _array(value) for name, value in zip(self._names, binding.get_outputs(), strict=True)}

    def _bind(self, inputs: Arrays) -> tuple[Any, dict[str, onnxruntime.OrtValue]]:
        """Bind inputs and outputs in memory of the device. The second result keeps that memory alive."""
        binding = self._session.io_binding()
        device = _DEVICES[self._provider]
        written = self._shared.values()  # on the CPU a value is the array's own memory
        held = {name: self._value(array.copy() if name in written else array, device) for name, array in inputs.items()}
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in self._run(inputs).items():  # once, to know the shapes, so that outputs get a fixed place
            if name in self._shared:
                binding.bind_ortvalue_output(name, held[self._shared[name]])
                continue
            kind = _ONNX_BF16 if array.dtype == BF16 else array.dtype.type
            held[f"output {name}"] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, kind, device, 0)
            binding.bind_ortvalue_output(name, held[f"output {name}"])
        return binding, held

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        if self._io_binding is False:
            return timed(lambda: self._run(inputs))
        binding, held = self._bind(inputs)
        stream, options = self._stream, None
        if stream is not None:
            options = onnxruntime.RunOptions()  # otherwise the host waits at the end of each run, inside the events
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")

        def once() -> None:
            self._session.run_with_iobinding(binding, options)
            if stream is None:
                binding.synchronize_outputs()
            assert held  # the bound memory lives as long as the call

        return timed(once) if stream is None else by_torch_events(once, stream)

    def describe(self) -> dict[str, str]:
        device = f"CPU ({platform.machine()})" if self._provider == "CPU" else "CUDA device 0"
        return {"engine": "onnxruntime", "version": onnxruntime.__version__, "device": device}

    def _outside_graph(self) -> onnxruntime.RunOptions | None:
        """Run options that keep one run from being captured, if the session captures."""
        if not self._cuda_graph:
            return None
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", "-1")
        return options

    def _value(self, array: np.ndarray[Any, Any], device: str = "cpu") -> onnxruntime.OrtValue:
        """An OrtValue on the device; bf16, which numpy lacks, is passed by its bits."""
        array = np.ascontiguousarray(array)
        if array.dtype != BF16:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)
        bits = array.view(np.uint16)
        if device == "cpu":
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BF16)
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, _ONNX_BF16, device, 0)
        value.update_inplace(bits)
        return value


def _array(value: onnxruntime.OrtValue) -> np.ndarray[Any, Any]:
    """A CPU OrtValue as numpy; bf16 by its bits."""
    if value.data_type() != "tensor(bfloat16)":
        array: np.ndarray[Any, Any] = value.numpy()
        return array
    shape = tuple(value.shape())
    raw = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape))) if 0 not in shape else b""
    return np.frombuffer(raw, dtype=BF16).reshape(shape)


def is_too_old() -> bool:
    """Whether the installed ONNX Runtime is older than OLDEST."""
    here, oldest = (tuple(map(int, text.split(".")[:2])) for text in (onnxruntime.__version__, OLDEST))
    return here < oldest


def _torch_stream() -> Any:
    """A CUDA stream of torch; None if torch is not installed or has no CUDA."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def session_options(
    threads: int | None = None, level: str = "all", denormal_as_zero: bool = False, spinning: bool = True
) -> onnxruntime.SessionOptions:
    """Options of a quiet session; RequestError for a `level` that is not in GRAPH_LEVELS."""
    check_known("graph_level of onnxruntime", level, GRAPH_LEVELS)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _QUIET
    settings.intra_op_num_threads = int(threads or kept_to())
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{GRAPH_LEVELS[level]}")
    if denormal_as_zero:
        settings.add_session_config_entry(DENORMAL_AS_ZERO, "1")
    if not spinning:
        settings.add_session_config_entry(_SPINNING, "0")
    return settings


def load(path: Path, options: Mapping[str, Any]) -> OrtRunner:
    """Open the `.onnx` file at `path`; raises what `open_session` raises."""
    session, stream = open_session(path, options)
    provider, cuda_graph = options.get("provider", "CPU"), bool(options.get("cuda_graph"))
    return OrtRunner(session, provider, cuda_graph, stream, options.get("io_binding"), options.get("shared"))


def _model_of(path: Path, settings: onnxruntime.SessionOptions) -> str | bytes:
    """What a session is created from: the file, or its message without weights if it is large and contains them.

    ONNX Runtime then reads each weight when it needs it, not all of them as a message first.
    """
    if path.stat().st_size < LARGE:
        return str(path)
    from posexport.artifact.weights_on_disk import around_weights

    message = around_weights(path)
    if message is None:
        return str(path)
    settings.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
    return message


def open_session(path: Path, options: Mapping[str, Any]) -> tuple[onnxruntime.InferenceSession, Any]:
    """A session of the `.onnx` file at `path`, and torch's stream that it runs in, None on the CPU.

    Raises what ONNX Runtime raises, RequestError for wrong options, and RuntimeMissingError if the CUDA provider can't
    start.
    """
    check_onnx_file("onnxruntime", path, options, _OPTIONS)
    provider, cuda_graph, stream = options.get("provider", "CPU"), bool(options.get("cuda_graph")), None
    check_known("provider of onnxruntime", provider, _DEVICES)
    if provider == "CUDA" and (missing := gpu_missing()) is not None:
        raise RuntimeMissingError(f"onnxruntime can't run on CUDA, {missing}.")
    level, denormal_as_zero = str(options.get("graph_level", "all")), bool(options.get("denormal_as_zero"))
    settings = session_options(options.get("threads"), level, denormal_as_zero, bool(options.get("spinning", True)))
    providers: list[Any] = ["CPUExecutionProvider"]
    if provider == "CUDA":
        onnxruntime.set_default_logger_severity(_QUIET)
        stream = _torch_stream()  # first: ONNX Runtime then shares torch's CUDA libraries
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        cuda = {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": str(int(cuda_graph))}
        if options.get("new_lengths"):
            cuda["sdpa_kernel"] = str(_NO_PLANS)
        if stream is not None:
            cuda["user_compute_stream"] = str(stream.cuda_stream)
        providers = [("CUDAExecutionProvider", cuda), "CPUExecutionProvider"]
    more = {"disabled_optimizers": options["disabled_optimizers"]} if options.get("disabled_optimizers") else {}
    try:
        session = onnxruntime.InferenceSession(_model_of(path, settings), settings, providers=providers, **more)
    except Fail:
        if not cuda_graph:
            raise
        open_session(path, {**options, "cuda_graph": False})  # raises if something else is wrong
        raise RequestError(
            f"onnxruntime can't record {path.name!r} as a CUDA graph, since it runs some of its nodes on the CPU: "
            "leave CUDA graphs out."
        ) from None
    session.disable_fallback()
    name = f"{provider}ExecutionProvider"
    if session.get_providers()[0] != name:
        raise RuntimeMissingError(
            f"onnxruntime {onnxruntime.__version__} could not start {name}: "
            "install onnxruntime-gpu with the CUDA and cuDNN libraries that it was built for."
        )
    return session, stream
