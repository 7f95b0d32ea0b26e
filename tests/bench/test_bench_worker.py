"""The process that measures times: its answers and the memory that it reports, without a GPU."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from helpers import small_spec

from posexport import machine
from posexport.bench import worker as bench_worker
from posexport.bench.worker import Worker, explain
from posexport.errors import Reason, RequestError
from posexport.runtimes import RUNTIMES, Runtime, cuda


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the memory limit, because the worker runs in the process of the tests here."""
    monkeypatch.setattr(machine, "limit_to_what_is_free", lambda keep_free: None)


class NotImplemented(Exception):
    """An operator without a kernel."""


def test_an_engine_that_refuses_is_told_from_one_that_fails() -> None:
    class Refusing(Worker):
        def time(self, burst: int) -> dict[str, Any]:
            errors = (RequestError("no such file."), NotImplemented("no bf16"), ValueError("\n no\nmore"))
            raise errors[burst]

    reasons = []
    for burst in range(3):
        with pytest.raises((RequestError, NotImplemented, ValueError)) as raised:
            Refusing().answer({"do": "time", "burst": burst})
        reasons.append(explain(raised.value))
    assert reasons == [
        Reason("refused", "no such file."),
        Reason("refused", "NotImplemented: no bf16"),
        Reason("failed", "ValueError:  no"),
    ]


class Hungry:
    """A runner that takes 64 MB for four tokens and no memory for other lengths."""

    def prepare(self, inputs: dict[str, Any]) -> Callable[[], float]:
        taken = np.ones(2**23 if inputs["hidden_states"].shape[1] == 4 else 1)
        return lambda: float(taken[0])

    def describe(self) -> dict[str, str]:
        return {"engine": "hungry"}


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told anew on Linux only")
def test_each_shape_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "load", lambda self, path: Hungry())
    worker = Worker()
    worker.open(attrs.asdict(RUNTIMES["ort-cpu"]), {}, "block.onnx", None)
    spec = small_spec("none").to_dict()
    large, small = (worker.shape(spec, batch=1, seq=seq, seed=0, warmup=1)["memory"] for seq in (4, 5))
    assert large >= 2**26
    assert small < 2**25


def test_the_gpu_is_asked_before_memory_counts_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(Runtime, "load", lambda self, path: Hungry())
    monkeypatch.setattr(bench_worker, "memory_used", lambda: order.append("gpu") or 5)
    monkeypatch.setattr(machine, "forget_peak", lambda: order.append("peak") or 0)
    worker = Worker()
    worker.open(attrs.asdict(RUNTIMES["ort-cuda"]), {}, "block.onnx", None)
    assert order == ["gpu", "peak"]
    assert worker.shape(small_spec("none").to_dict(), batch=1, seq=5, seed=0, warmup=1)["gpu_memory"] == 0


class Driver:
    """Replaces libcuda: 3 of 10 bytes are free; the call `failing` returns an error."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuMemGetInfo_v2":
                for at, value in enumerate((3, 10)):
                    ctypes.cast(args[at], ctypes.POINTER(ctypes.c_size_t))[0] = value
            return int(name == self.failing)

        return call


@pytest.fixture
def fresh() -> Iterator[None]:
    cuda._context.cache_clear()
    yield
    cuda._context.cache_clear()


def test_memory_in_use_is_told_by_the_driver(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: driver)
    assert [cuda.memory_used(), cuda.memory_used()] == [7, 7]
    assert driver.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2") == 2


@pytest.mark.parametrize("failing", ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"])
def test_a_driver_that_fails_leaves_the_figure_out(fresh: None, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    driver = Driver(failing)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: driver)
    with pytest.raises(OSError, match="error 1"):
        cuda.memory_used()
    assert bench_worker._gpu_used(True) is None
    pushed = driver.calls.count("cuCtxPushCurrent_v2") if failing != "cuCtxPushCurrent_v2" else 0
    assert driver.calls.count("cuCtxPopCurrent_v2") == pushed


def test_without_a_driver_the_figure_is_left_out(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise OSError(name)

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    assert bench_worker._gpu_used(True) is None
    assert bench_worker._gpu_used(False) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes"),
        RuntimeError("[ONNXRuntimeError] : Failed to allocate memory for requested buffer of size 12"),
        RuntimeError("CUDA out of memory. Tried to allocate 12 GiB"),
    ],
    ids=["python", "C++", "torch", "onnxruntime", "cuda"],
)
def test_memory_that_did_not_suffice_is_told_from_other_failures(error: Exception) -> None:
    reason = explain(error)
    assert reason.code == "memory"
    assert reason.text.startswith("out of memory: ")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_a_process_gets_what_is_free_and_a_plain_no_beyond() -> None:
    code = (
        "from posexport import machine as room\nkeep = []\nroom.limit_to_what_is_free(2**60)\n"
        "keep.append(bytearray(room.HEADROOM // 2))\ntry:\n    keep.append(bytearray(2 * room.HEADROOM))\n"
        "except MemoryError as error:\n    print(room.is_short(error))\n"
        "room.limit_to_what_is_free(0)\nkeep.append(bytearray(room.HEADROOM))\nprint('more')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "more"]


class Runs:
    """A runner whose runs report a given number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs = seconds, 0

    def prepare(self, inputs: dict[str, Any]) -> Callable[[], float]:
        def call() -> float:
            self.runs += 1
            return self.seconds

        return call

    def describe(self) -> dict[str, str]:
        return {"engine": "counting"}


@pytest.mark.parametrize(("seconds", "timed", "runs"), [(0.001, 3, 4), (1.0, 1, 1)])
def test_short_runs_come_in_bursts_behind_one_that_wakes_threads(
    monkeypatch: pytest.MonkeyPatch, seconds: float, timed: int, runs: int
) -> None:
    runner = Runs(seconds)
    monkeypatch.setattr(Runtime, "load", lambda self, path: runner)
    worker = Worker()
    worker.open(attrs.asdict(RUNTIMES["ort-cpu"]), {}, "block.onnx", None)
    found = worker.shape(small_spec("none").to_dict(), batch=1, seq=5, seed=0, warmup=2)
    assert found["run_seconds"] == seconds
    before = runner.runs
    assert worker.time(3) == {"seconds": [seconds] * timed}
    assert runner.runs - before == runs


def test_threads_are_woken_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After they wake up, threads are several times slower for some milliseconds."""
    clock = iter(0.25 * tick for tick in range(100))
    runner = Runs(0.001)
    monkeypatch.setattr(Runtime, "load", lambda self, path: runner)
    worker = Worker()
    worker.open(attrs.asdict(RUNTIMES["ort-cpu"]), {}, "block.onnx", None)
    worker.shape(small_spec("none").to_dict(), batch=1, seq=5, seed=0, warmup=2)
    before = runner.runs
    monkeypatch.setattr(bench_worker.time, "perf_counter", lambda: next(clock))
    assert worker.time(5, wake=1.0) == {"seconds": [0.001] * 5}
    assert runner.runs - before == 1 + 3 + 5  # The runs that wake the threads are not timed.


def test_warming_up_ends_in_time_but_not_before_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runs(1.0)
    monkeypatch.setattr(Runtime, "load", lambda self, path: runner)
    monkeypatch.setattr(bench_worker, "WARMUP_SECONDS", -1.0)
    worker = Worker()
    worker.open(attrs.asdict(RUNTIMES["ort-cpu"]), {}, "block.onnx", None)
    worker.shape(small_spec("none").to_dict(), batch=1, seq=5, seed=0, warmup=9)
    assert runner.runs == 2
