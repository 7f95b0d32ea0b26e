"""The parts of the TensorRT runtime that need no GPU: what is asked of CUDA, in which order, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from trt_helpers import RTX, needs_rtx

from posexport import trt_api
from posexport.runtimes.cuda import by_events, captured
from posexport.runtimes.trt import PlanRunner, _bytes


class Cuda:
    """Stands in for polygraphy's wrapper of the CUDA runtime: keeps the calls, each event takes 2.5 ms."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.failing = failing
        self.handle = self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cudaEventElapsedTime":
                ctypes.cast(args[0], ctypes.POINTER(ctypes.c_float))[0] = 2.5
            return int(name == self.failing)

        return call

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError("CUDA Error")

    def stream_synchronize(self, stream: int) -> None:
        self.calls.append("synchronize")


def test_events_stand_around_the_run_alone() -> None:
    cuda = Cuda()
    once = by_events(cuda, 7, lambda: cuda.calls.append("run"))
    cuda.calls.clear()
    assert once() == pytest.approx(0.0025)
    assert cuda.calls == [
        "synchronize",
        "cudaEventRecord",
        "run",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaEventElapsedTime",
    ]


def test_a_graph_is_recorded_once_and_replayed() -> None:
    cuda = Cuda()
    replay = captured(cuda, 7, lambda: cuda.calls.append("run"))
    replay()
    replay()
    assert cuda.calls.count("run") == 1
    assert cuda.calls[:3] == ["cudaStreamBeginCapture", "run", "cudaStreamEndCapture"]
    assert cuda.calls[3:] == ["cudaGraphInstantiateWithFlags", "cudaGraphLaunch", "cudaGraphLaunch"]


def test_a_run_that_fails_ends_the_capture() -> None:
    cuda = Cuda()

    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        captured(cuda, 7, broken)
    assert cuda.calls[-1] == "cudaStreamEndCapture"
    with pytest.raises(RuntimeError, match="CUDA Error"):
        captured(Cuda("cudaGraphInstantiateWithFlags"), 7, lambda: None)
    with pytest.raises(RuntimeError, match="CUDA Error"):
        by_events(Cuda("cudaEventElapsedTime"), 7, lambda: None)()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_tensors_cross_as_their_bytes(dtype: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype).transpose(0, 2, 1)
    raw = _bytes(array)
    assert raw.dtype == np.uint8
    assert np.array_equal(np.frombuffer(raw.tobytes(), dtype=dtype).reshape(array.shape), array)


@needs_rtx
def test_a_plan_that_the_engine_refuses_is_an_error_with_its_words() -> None:
    """Without a GPU every plan is refused; with one, this is no plan."""
    with pytest.raises(RuntimeError, match="can't open the plan"):
        PlanRunner(trt_api.load(RTX), b"no plan at all", RTX, {}, {})
