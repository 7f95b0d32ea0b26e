"""The timing of ONNX Runtime on a stream: the host must not wait between the events. The stream is a stand-in."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from engines import bound
from helpers import exported, small_spec

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort
from posexport.spec.contract import bounds_of, graph_inputs, graph_outputs
from posexport.verify.cases import make_cases

KEY = "disable_synchronize_execution_providers"


class Noting:
    """A session that records the options of its bound runs."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.options: list[onnxruntime.RunOptions | None] = []
        self.bindings: list[Any] = []

    def run_with_iobinding(self, binding: Any, options: onnxruntime.RunOptions | None = None) -> None:
        self.options.append(options)
        self.bindings.append(binding)
        self._session.run_with_iobinding(binding, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize("stream", [None, "a stream"])
def test_only_runs_between_events_leave_the_wait_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    spec = small_spec("none")
    path = tmp_path / "block.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    session = Noting(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]))
    monkeypatch.setattr(ort, "by_torch_events", lambda call, on: lambda: call() or 1.0)
    once = ort.OrtRunner(session, "CPU", stream=stream).prepare({"hidden_states": np.zeros((1, 3, 32), np.float32)})
    session.options.clear()
    assert once() > 0
    (options,) = session.options
    if stream is None:
        assert options is None  # onnxruntime waits by itself
    else:
        assert options is not None
        assert options.get_run_config_entry(KEY) == "1"


def test_bound_runs_are_judged_where_they_are_asked_for(tmp_path: Path) -> None:
    """A fault in the binding shows in `run` only if bound runs are requested."""
    write_onnx(exported(small_spec("none")), path := tmp_path / "block.onnx")
    inputs = {"hidden_states": np.random.default_rng(0).standard_normal((1, 3, 32)).astype(np.float32)}
    wanted = ort.load(path, {}).run(inputs)["output"]
    for options, factor in (({}, 1), ({"io_binding": False}, 1), ({"io_binding": True}, 2)):
        np.testing.assert_array_equal(ort.load(path, options).run(inputs)["output"], wanted)
        np.testing.assert_array_equal(bound.load(path, options).run(inputs)["output"], wanted / factor)


def test_a_session_takes_no_more_cpus_than_its_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_onnx(exported(small_spec("none")), path := tmp_path / "block.onnx")
    made, asked = onnxruntime.InferenceSession, []

    def noting(path: str, settings: onnxruntime.SessionOptions, **more: Any) -> onnxruntime.InferenceSession:
        asked.append(settings.intra_op_num_threads)
        return made(path, settings, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noting)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    for cpus in ({0}, {0, 1}, {0, 1, 2}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cpus=cpus: cpus, raising=False)
        ort.load(path, {})
    ort.load(path, {"threads": 3})
    assert asked == [1, 2, 0, 3]


def test_onnxruntime_knows_that_option() -> None:
    """onnxruntime accepts any option name without an error. So look for the name in its library."""
    (library,) = Path(onnxruntime.__file__).parent.joinpath("capi").glob("onnxruntime_pybind11_state*")
    assert KEY.encode() in library.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "in_place"), [("shared", True), ("concat", False)])
def test_a_shared_cache_is_written_in_place_when_timed(tmp_path: Path, kind: str, in_place: bool) -> None:
    spec = small_spec("rope", kv_cache=kind, causal=True)
    write_onnx(exported(spec), tmp_path / "block.onnx")
    session = Noting(onnxruntime.InferenceSession(tmp_path / "block.onnx", providers=["CPUExecutionProvider"]))
    runner = ort.OrtRunner(session, "CPU")
    inputs = next(each for each in make_cases(spec, 0, bounds_of(graph_inputs(spec), {})) if "step" in each.name).arrays
    wanted, before = runner.run(inputs), {name: array.copy() for name, array in inputs.items()}
    bound: list[int] = []
    value = runner._value

    def noting(array: np.ndarray[Any, Any], device: str = "cpu") -> Any:
        made = value(array, device)
        bound.append(made.data_ptr())
        return made

    runner._value = noting  # type: ignore[method-assign]
    once = runner.prepare(inputs)
    for _ in range(3):  # each run writes the same tokens to the same slots
        assert once() > 0
    made = dict(zip(graph_outputs(spec), session.bindings[-1].get_outputs(), strict=True))
    for name, array in wanted.items():
        np.testing.assert_array_equal(made[name].numpy(), array)
        assert (made[name].data_ptr() in bound) == (in_place and name != "output")
    for name, array in inputs.items():  # the caller's arrays are unchanged
        np.testing.assert_array_equal(array, before[name])
