"""The parts of the TensorRT runtime that need no GPU: the calls of CUDA and their order, and refusals."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from trt_helpers import RTX, needs_rtx

from posexport.errors import RuntimeMissingError
from posexport.runtimes import cuda as cuda_runtime
from posexport.runtimes.cuda import by_events, captured, library_folders, load_runtime
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt import engine as trt_runtime
from posexport.runtimes.tensorrt.engine import PlanRunner, _bytes


class Cuda:
    """Stands in for polygraphy's wrapper of the CUDA runtime. It records the calls. Each timing is 2.5 ms."""

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
    """Without a GPU every plan is refused. With one, these bytes are refused because they are not a plan."""
    with pytest.raises(RuntimeError, match="can't open the plan"):
        PlanRunner(api.load(RTX), b"no plan at all", RTX, {}, {}, {})


def gpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(trt_runtime, "device", lambda: ("a GPU", capability))


def engine(diagnostics: int | None) -> Any:
    """An engine's module that opens no plan. If `diagnostics` is None, it can't say why."""

    class Runtime:
        def __init__(self, log: Any) -> None:
            if diagnostics is not None:
                self.get_engine_validity = lambda plan: (2, diagnostics)

        def deserialize_cuda_engine(self, plan: Any) -> None:
            return None

    class Log:
        ERROR, INTERNAL_ERROR = 1, 0

    more = {} if diagnostics is None else {"EngineInvalidityDiagnostics": SimpleNamespace(UNSUPPORTED_CC=2)}
    members = {"NONE": 0, "CURRENT": 1, "SM89": 89, "SM120": 120}
    capability = SimpleNamespace(__members__=members)
    return SimpleNamespace(Runtime=Runtime, ILogger=Log, ComputeCapability=capability, __version__="1.7", **more)


@pytest.mark.parametrize(
    ("diagnostics", "capability"), [(2, "9.0"), (2, "8.9"), (3, "12.0"), (None, "9.0"), (0, "9.0")]
)
def test_a_gpu_that_the_plan_does_not_serve_is_a_missing_runtime(
    monkeypatch: pytest.MonkeyPatch, diagnostics: int | None, capability: str
) -> None:
    gpu(monkeypatch, capability)
    with pytest.raises(RuntimeMissingError) as caught:
        PlanRunner(engine(diagnostics), b"plan", RTX, {}, {}, {})
    assert str(caught.value) == (
        f"the plan does not support this GPU (compute capability {capability}): tensorrt-rtx 1.7 builds for 8.9, 12.0."
    )


@pytest.mark.parametrize(("diagnostics", "capability"), [(1, "8.9"), (0, "12.0"), (None, "8.9"), (32, "9.0")])
def test_a_plan_that_should_open_and_does_not_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, diagnostics: int | None, capability: str
) -> None:
    gpu(monkeypatch, capability)
    with pytest.raises(RuntimeError, match="can't open the plan: it gives no reason"):
        PlanRunner(engine(diagnostics), b"plan", RTX, {}, {}, {})


HALF = {"x": "FLOAT", "past": "HALF", "y": "HALF"}


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        (HALF, None),
        ({**HALF, "x": "HALF"}, "its inputs are x fp16, past fp16, instead of x fp32, past fp16"),
        ({**HALF, "y": "FLOAT"}, "its outputs are y fp32, instead of y fp16"),
        ({**HALF, "y": "FP8"}, "its outputs are y FP8, instead of y fp16"),
        ({"x": "FLOAT", "y": "HALF"}, "its inputs are x fp32, instead of x fp32, past fp16"),
    ],
)
def test_a_plan_of_other_tensors_than_its_manifest_states_is_not_run(
    monkeypatch: pytest.MonkeyPatch, dtypes: dict[str, str], said: str | None
) -> None:
    """Tensors are passed as bytes, so kernels would read beyond the end of smaller ones."""
    names = list(dtypes)
    opened = SimpleNamespace(
        num_io_tensors=len(names),
        get_tensor_name=names.__getitem__,
        get_tensor_mode=lambda name: SimpleNamespace(name="OUTPUT" if name == "y" else "INPUT"),
        get_tensor_dtype=lambda name: SimpleNamespace(name=dtypes[name]),
    )

    class Reached(Exception):
        pass

    def reach() -> None:
        raise Reached

    made = engine(None)
    monkeypatch.setattr(made.Runtime, "deserialize_cuda_engine", lambda self, plan: opened)
    monkeypatch.setattr(trt_runtime, "load_runtime", reach)
    inputs, outputs = {"x": ((1,), "fp32"), "past": ((1,), "fp16")}, {"y": ((1,), "fp16")}
    with pytest.raises(Reached if said is None else RuntimeError, match=said):
        PlanRunner(made, b"plan", RTX, {}, inputs, outputs)


def test_the_cuda_runtime_of_pips_packages_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda_runtime", "cu13", "cublas"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
    for name in ("cuda_runtime", "cu13"):
        (tmp_path / "nvidia" / name / "lib" / "libcudart.so.13").write_bytes(b"no library")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "missing"), ""])
    found = [str(tmp_path / "nvidia" / name / "lib") for name in ("cu13", "cuda_runtime")]
    assert [folder for folder in library_folders() if folder.startswith(str(tmp_path))] == found
    monkeypatch.setenv("LD_LIBRARY_PATH", "/first")
    seen = []
    monkeypatch.setattr("polygraphy.cuda.wrapper", lambda: seen.extend(os.environ["LD_LIBRARY_PATH"].split(":")))
    assert load_runtime().__name__ == "polygraphy.cuda"
    load_runtime()
    assert seen[0] == "/first"
    assert [seen.count(folder) for folder in found] == [2, 2]  # not added again


def test_a_cuda_runtime_that_is_missing_is_a_missing_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcudart.so.13").write_bytes(b"no library")
    monkeypatch.setattr(cuda_runtime, "library_folders", lambda: [str(tmp_path)])
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setattr("polygraphy.cuda.cuda.G_CUDA", None)
    with pytest.raises(RuntimeMissingError, match=r"CUDA runtime library can't be loaded \(.*libcudart\.so\.13"):
        load_runtime()


class Handle:
    """A stream or an array on the device. `freed` lists the numbers of those that were freed."""

    freed: ClassVar[list[int]] = []

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def copy_from(self, array: Any) -> Handle:
        return self

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        assert self.ptr not in self.freed, "freed twice"
        self.freed.append(self.ptr)


def runner_on_a_stand_in(**engine: Any) -> PlanRunner:
    """A runner with stand-ins for the engine and CUDA, which only record their calls."""
    numbers = iter(range(1, 100))
    context = SimpleNamespace(
        set_input_shape=lambda *_: True,
        set_tensor_address=lambda *_: True,
        get_tensor_shape=lambda name: (1, 2),
        update_device_memory_size_for_shapes=lambda: 10,
        set_device_memory=lambda *_: None,
        execute_async_v3=lambda stream: True,
    )
    runner = PlanRunner.__new__(PlanRunner)
    runner._held, runner._cache, runner._cuda_graph, runner._outputs = [], None, False, {"output": "fp16"}
    runner._profiles = {"x": {moment: [1, 2] for moment in ("min", "opt", "max")}}
    runner._trt = SimpleNamespace(ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2))
    runner._engine = SimpleNamespace(**{"create_execution_context": lambda strategy: context, **engine})
    runner._cuda = SimpleNamespace(
        Stream=lambda: Handle(next(numbers)),
        DeviceArray=SimpleNamespace(raw=lambda shape: Handle(next(numbers))),
        wrapper=Cuda,
    )
    return runner


def test_each_shape_frees_the_device_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "freed", [])
    runner = runner_on_a_stand_in()
    first = runner.prepare({"x": np.zeros((1, 2), np.float16)})
    assert first() == pytest.approx(0.0025)
    assert Handle.freed == []
    second = runner.prepare({"x": np.zeros((1, 2), np.float16)})
    assert sorted(Handle.freed) == [1, 2, 3, 4]  # stream, input, output, scratch
    assert second() == pytest.approx(0.0025)
    with pytest.raises(RuntimeError, match="a later prepare freed the buffers"):
        first()


def test_an_empty_cache_has_an_address_and_its_own_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "freed", [])
    runner = runner_on_a_stand_in()
    runner._profiles = {"past_key": {"min": [1, 0], "opt": [1, 4], "max": [1, 9]}}
    sizes: list[int] = []
    shapes: dict[str, tuple[int, ...]] = {}
    raw, context = runner._cuda.DeviceArray.raw, runner._engine.create_execution_context(2)
    runner._cuda.DeviceArray.raw = lambda shape: sizes.append(shape[0]) or raw(shape)
    context.set_input_shape = lambda name, shape: shapes.update({name: shape}) or True
    assert runner.prepare({"past_key": np.zeros((1, 0), np.float16)})() == pytest.approx(0.0025)
    assert sizes[0] == 1
    assert shapes == {"past_key": (1, 0)}


def test_a_runtime_cache_goes_into_the_context_and_comes_back_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "freed", [])
    asked: list[object] = []
    cache = SimpleNamespace(deserialize=lambda stored: asked.append(stored), serialize=lambda: b"kernels")
    config = SimpleNamespace(
        create_runtime_cache=lambda: cache,
        set_runtime_cache=lambda given: asked.append(given) or True,
        set_execution_context_allocation_strategy=lambda strategy: asked.append(strategy),
    )
    runner = runner_on_a_stand_in(create_runtime_config=lambda: config)
    make = runner._engine.create_execution_context
    runner._engine.create_execution_context = lambda given: asked.append(given) or make(given)
    assert runner.warm({"x": np.zeros((1, 2), np.float16)}, b"earlier") == b"kernels"
    assert asked == [b"earlier", 2, cache, config]


GARBAGE = """
import gc, sys
from posexport.runtimes.tensorrt import api, interpreter

_, trt = interpreter._engine()
log = api.make_log(trt)

class Busy(type(log)):
    def log(self, severity, message):
        self.kept = [[] for _ in range(10_000)]  # more than the objects after which Python collects garbage

busy = Busy()
gc.collect()
builders = [api.create(trt.Builder, log)]
builders.append(builders)
del builders
print("begins", flush=True)
api.create(trt.Builder, busy) if sys.argv[1] == "guarded" else trt.Builder(busy)
print("made", hasattr(busy, "kept"), gc.isenabled())
"""
"""A script in which a builder is garbage-collected while another one logs."""


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("way", ["guarded", pytest.param("plain", marks=pytest.mark.slow)])
def test_the_end_of_a_builder_waits_for_another_that_begins(way: str) -> None:
    """Without the guard the script never ends, which shows that the garbage exists."""
    command = [sys.executable, "-P", "-c", GARBAGE, way]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begins\n"
        if way == "plain":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(5)
        else:
            assert process.stdout.readline() == "made True True\n"
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
