"""The GPU's name and capability from the driver, and events and graphs on a stream from the CUDA runtime of polygraphy.

Importing this loads neither.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posexport.errors import RuntimeMissingError

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


def device() -> tuple[str, str]:
    """Name and compute capability ("8.9") of the first GPU; OSError if the driver returns an error."""
    driver, handle = _driver(), ctypes.c_int()
    name, numbers = ctypes.create_string_buffer(256), []
    _check(driver.cuDeviceGet(ctypes.byref(handle), 0))
    _check(driver.cuDeviceGetName(name, 256, handle))
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle))
        numbers.append(value.value)
    return name.value.decode(), ".".join(map(str, numbers))


def device_count() -> int:
    """The number of GPUs that the driver shows; OSError if it returns an error."""
    driver, count = _driver(), ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)))
    return count.value


def library_folders() -> list[str]:
    """The folders of the CUDA runtime in pip's packages.

    They are `nvidia/cuda_runtime/lib`, and `nvidia/cu13/lib` from CUDA 13 on.
    """
    pattern = "nvidia/*/bin/**/cudart64_*.dll" if sys.platform == "win32" else "nvidia/*/lib/libcudart.so*"
    folders = (file.parent for entry in sys.path if entry for file in sorted(Path(entry).glob(pattern)))
    return list(dict.fromkeys(map(str, folders)))


def load_runtime() -> Any:
    """polygraphy's `cuda` module with the CUDA runtime loaded; RuntimeMissingError if it doesn't exist.

    polygraphy searches the folders of an environment variable, but not those of CUDA 13's packages.
    """
    variable = "PATH" if sys.platform == "win32" else "LD_LIBRARY_PATH"
    folders = [*filter(None, os.environ.get(variable, "").split(os.pathsep)), *library_folders()]
    os.environ[variable] = os.pathsep.join(dict.fromkeys(folders))
    from polygraphy import cuda
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    try:
        cuda.wrapper()
    except (OSError, PolygraphyException) as error:
        raise RuntimeMissingError(
            f"the CUDA runtime library can't be loaded ({str(error).splitlines()[0] if str(error) else 'not found'}): "
            "install nvidia-cuda-runtime, or name its folder in LD_LIBRARY_PATH."
        ) from error
    return cuda


def memory_used() -> int:
    """Bytes in use by all processes on the first GPU; OSError if the driver returns an error."""
    driver, free, total = _driver(), ctypes.c_size_t(), ctypes.c_size_t()
    _check(driver.cuCtxPushCurrent_v2(_context()))
    try:
        _check(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return total.value - free.value


@functools.cache
def _context() -> ctypes.c_void_p:
    """The first GPU's primary context, which the engines of this process share. It is kept until the process ends."""
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(handle), 0))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    return context


def _driver() -> Any:
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    _check(driver.cuInit(0))
    return driver


def by_events(cuda: Any, stream: int, enqueue: Callable[[], object]) -> Callable[[], float]:
    """A call that runs `enqueue` once and returns its seconds on the stream; `cuda` is polygraphy's wrapper."""
    events = [ctypes.c_void_p() for _ in range(2)]
    for event in events:
        cuda.check(cuda.handle.cudaEventCreate(ctypes.byref(event)))

    def once() -> float:
        elapsed = ctypes.c_float()
        cuda.stream_synchronize(stream)
        cuda.check(cuda.handle.cudaEventRecord(events[0], ctypes.c_void_p(stream)))
        enqueue()
        cuda.check(cuda.handle.cudaEventRecord(events[1], ctypes.c_void_p(stream)))
        cuda.check(cuda.handle.cudaEventSynchronize(events[1]))
        cuda.check(cuda.handle.cudaEventElapsedTime(ctypes.byref(elapsed), *events))
        return elapsed.value / 1e3  # it gives milliseconds

    return once


def by_torch_events(call: Callable[[], object], stream: Any) -> Callable[[], float]:
    """A call that runs `call` once and returns its seconds on a CUDA stream of torch."""
    import torch

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.synchronize()
        start.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return once


def captured(cuda: Any, stream: int, enqueue: Callable[[], object]) -> Callable[[], None]:
    """Record what `enqueue` puts on the stream as a CUDA graph. The result is a call that replays it."""
    graph, executable, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(stream)
    cuda.check(cuda.handle.cudaStreamBeginCapture(handle, _THREAD_LOCAL))
    try:
        enqueue()
    finally:  # a stream left capturing can't be used again
        ended = cuda.handle.cudaStreamEndCapture(handle, ctypes.byref(graph))
    cuda.check(ended)
    cuda.check(cuda.handle.cudaGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    return lambda: cuda.check(cuda.handle.cudaGraphLaunch(executable, handle))


def _check(status: int) -> None:
    if status:
        raise OSError(f"the NVIDIA driver answered with error {status}")
