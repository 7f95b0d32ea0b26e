"""Behaviour that all runners share: right outputs in every dtype, inputs kept in place while timed, and no options that
are silently ignored."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from helpers import Array, small_spec
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from verify_helpers import write

from posexport import runtimes
from posexport.bench import worker
from posexport.errors import Reason, RequestError, RuntimeMissingError
from posexport.runtimes import ORT, RUNTIMES, TENSORRT, Runtime, gpu_missing, onnx_reference, ort, runtime, torch_eager
from posexport.runtimes.installation import install_command
from posexport.runtimes.tensors import BF16, NUMPY_DTYPES, dtype_name, load_arrays, save_arrays, to_numpy, to_torch
from posexport.verify.parity import TOLERANCES

ENGINES: dict[str, ModuleType] = {"torch": torch_eager, "ort": ort, "reference": onnx_reference}
POSITIONS = np.array([[5, 900, 2, 2], [0, 1, 77, 3]])


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound artifact for each dtype, each in one form."""
    folder = tmp_path_factory.mktemp("artifacts")
    forms = {"fp32": "function", "fp16": "decomposed", "bf16": "function"}
    return {
        dtype: write(folder, dtype, small_spec("rope", dtype=dtype, num_kv_heads=2), form)
        for dtype, form in forms.items()
    }


def inputs(dtype: str) -> dict[str, Array]:
    values = np.random.default_rng(1).standard_normal((2, 4, 32))
    return {"hidden_states": values.astype(NUMPY_DTYPES[dtype]), "position_ids": POSITIONS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_in_every_dtype_that_they_have(artifacts: dict[str, Path], engine: str, dtype: str) -> None:
    path, given_inputs = artifacts[dtype], inputs(dtype)
    if (engine, dtype) == ("ort", "bf16"):
        with pytest.raises(Exception, match="NOT_IMPLEMENTED"):  # so verify states "not run" before it opens the file
            ort.load(path, {"threads": 1})
        return
    truth = torch_eager.load(path, {"dtype": "fp64"}).run(given_inputs)["output"]
    kept = {name: array.copy() for name, array in given_inputs.items()}
    runner = ENGINES[engine].load(path, {})
    found, again = runner.run(given_inputs), runner.run(given_inputs)
    assert list(found) == ["output"]
    assert dtype_name(found["output"].dtype) == dtype
    tolerance = TOLERANCES[dtype].ceiling * float(np.sqrt(np.mean(truth**2)))
    assert np.abs(found["output"].astype(np.float64) - truth).max() <= tolerance
    assert found["output"].tobytes() == again["output"].tobytes()
    for name, array in kept.items():
        assert array.tobytes() == given_inputs[name].tobytes()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_timed_runs_on_inputs_that_were_bound_once(
    artifacts: dict[str, Path], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ENGINES[engine].load(artifacts["fp32"], {})
    once = runner.prepare(inputs("fp32"))
    gc.collect()
    for name in ("to_torch", "to_numpy", "_value", "_array"):
        for owner in (ENGINES[engine], type(runner)):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, _copied)
    for _ in range(4):
        seconds = once()
        assert isinstance(seconds, float)
        assert seconds > 0


def _copied(*arguments: object) -> None:
    raise AssertionError("a copy within what is timed")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_description_is_text(artifacts: dict[str, Path], engine: str) -> None:
    found = ENGINES[engine].load(artifacts["fp32"], {}).describe()
    assert list(found) == ["engine", "version", "device"]
    assert all(isinstance(text, str) and text for text in found.values())
    assert "CPU" in found["device"]


@pytest.mark.parametrize(("options", "entry"), [({}, ""), ({"spinning": True}, ""), ({"spinning": False}, "0")])
def test_idle_threads_sleep_where_that_is_asked_for(
    artifacts: dict[str, Path], options: dict[str, bool], entry: str
) -> None:
    told = ort.load(artifacts["fp32"], options)._session.get_session_options()
    name = "session.intra_op.allow_spinning"  # ONNX Runtime's name of the option
    try:
        found = told.get_session_config_entry(name)
    except RuntimeError:  # it has none
        found = ""
    assert found == entry


def test_options_reach_the_session(artifacts: dict[str, Path]) -> None:
    session = ort.load(artifacts["fp32"], {"provider": "CPU", "threads": 1})._session
    assert session.get_session_options().intra_op_num_threads == 1
    assert session.get_providers() == ["CPUExecutionProvider"]
    plain = ort.load(artifacts["fp32"], {"disabled_optimizers": ["ConstantFolding"]})
    np.testing.assert_allclose(
        plain.run(inputs("fp32"))["output"],
        torch_eager.load(artifacts["fp32"], {}).run(inputs("fp32"))["output"],
        atol=1e-5,
    )


class NoGpu:
    """ONNX Runtime as if there were a GPU: it records the requests for sessions, and captures no CUDA graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, str]] = []
        self._session = onnxruntime.InferenceSession
        monkeypatch.setattr(ort, "gpu_missing", lambda: None)
        monkeypatch.setattr(ort, "_torch_stream", lambda: None)
        monkeypatch.setattr(ort.onnxruntime, "preload_dlls", lambda: None, raising=False)
        monkeypatch.setattr(ort.onnxruntime, "InferenceSession", self.open)
        monkeypatch.setattr(self._session, "get_providers", lambda session: ["CUDAExecutionProvider"])

    def open(self, path: str, settings: Any, providers: list[Any]) -> Any:
        self.asked.append(providers[0][1])
        if providers[0][1]["enable_cuda_graph"] == "1":
            raise ort.Fail("not all nodes are on the GPU")
        return self._session(path, settings, providers=["CPUExecutionProvider"])


def test_a_file_that_cannot_be_recorded_as_a_cuda_graph_is_refused(
    artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = NoGpu(monkeypatch)
    with pytest.raises(RequestError, match=r"can't record '.*\.onnx' as a CUDA graph"):
        ort.load(artifacts["fp32"], {"provider": "CUDA", "cuda_graph": True})
    assert [asked["enable_cuda_graph"] for asked in gpu.asked] == ["1", "0"]
    (tmp_path / "damaged.onnx").write_bytes(b"no graph")
    with pytest.raises(Exception, match="Protobuf"):
        ort.load(tmp_path / "damaged.onnx", {"provider": "CUDA", "cuda_graph": True})


def test_runs_of_new_lengths_need_no_plans(artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = NoGpu(monkeypatch)
    for options in ({}, {"new_lengths": True}):
        ort.load(artifacts["fp32"], {"provider": "CUDA", **options})
    assert [asked.get("sdpa_kernel") for asked in gpu.asked] == [None, "19"]


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("torch", {"devise": "cpu"}, "unknown option of torch 'devise': did you mean 'device'?"),
        ("torch", {"device": "tpu"}, "unknown device of torch 'tpu'"),
        ("torch", {"dtype": "fp8"}, "unknown dtype of torch 'fp8'"),
        ("torch", {"threads": 1}, "unknown option of torch 'threads'"),
        ("ort", {"thread": 1}, "did you mean 'threads'?"),
        ("ort", {"provider": "cuda"}, "unknown provider of onnxruntime 'cuda'"),
        ("ort", {"dtype": "fp64"}, "unknown option of onnxruntime 'dtype'"),
        ("reference", {"threads": 1}, "unknown option of onnx-reference 'threads': allowed: none."),
    ],
)
def test_options_that_are_not_known_are_refused(
    artifacts: dict[str, Path], engine: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ENGINES[engine].load(artifacts["fp32"], options)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", [row.name for row in RUNTIMES.values() if row.module != TENSORRT])
def test_the_options_of_the_table_are_known_to_their_engines(name: str) -> None:
    row = RUNTIMES[name]
    with pytest.raises(RequestError, match="it came from"):
        row.load(Path("a.plan"))


@pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")
@pytest.mark.parametrize(("engine", "options"), [("torch", {"device": "cuda"}), ("ort", {"provider": "CUDA"})])
def test_without_a_gpu_cuda_is_missing_and_never_the_cpu(
    artifacts: dict[str, Path], engine: str, options: dict[str, str]
) -> None:
    with pytest.raises(RuntimeMissingError, match="no GPU: "):
        ENGINES[engine].load(artifacts["fp32"], options)


def test_a_provider_that_gives_way_to_the_cpu_is_missing(
    artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a CUDA library is absent, ONNX Runtime opens the session on the CPU."""
    monkeypatch.setattr(ort, "gpu_missing", lambda: None)
    monkeypatch.setattr(ort, "_torch_stream", lambda: None)
    for name in ("preload_dlls", "set_default_logger_severity"):
        monkeypatch.setattr(onnxruntime, name, lambda *arguments: None, raising=False)
    session = onnxruntime.InferenceSession(str(artifacts["fp32"]), providers=["CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *arguments, **more: session)
    with pytest.raises(RuntimeMissingError, match="could not start CUDAExecutionProvider"):
        ort.load(artifacts["fp32"], {"provider": "CUDA"})


@pytest.mark.parametrize(
    ("statuses", "devices", "said"),
    [
        ((0, 0), 1, None),
        ((0, 0), 0, "no GPU: the NVIDIA driver shows no device"),
        ((100, 0), 1, "no GPU: the NVIDIA driver shows no device"),
        ((0, 3), 1, "no GPU: the NVIDIA driver shows no device"),
        (None, 0, "no GPU: there is no NVIDIA driver"),
    ],
)
def test_the_driver_is_asked_whether_there_is_a_gpu(
    statuses: tuple[int, int] | None, devices: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            if statuses is None:
                raise OSError(name)

        def cuInit(self, flags: int) -> int:
            assert statuses is not None
            return statuses[0]

        def cuDeviceGetCount(self, count: Any) -> int:
            assert statuses is not None
            count._obj.value = devices
            return statuses[1]

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert runtimes.gpu_missing.__wrapped__() == said


def test_a_row_says_what_is_missing() -> None:
    gone = Runtime(name="x", summary="", module=ORT, package="no_such_package", install="posexport[x]")
    assert gone.missing() == Reason("not-installed", f"not installed: {install_command('posexport[x]')}")
    assert RUNTIMES["torch"].missing() is None
    assert (why := gpu_missing()) is None or RUNTIMES["torch-cuda"].missing() == Reason("no-gpu", why)
    with pytest.raises(RequestError, match="did you mean 'ort-cpu'"):
        runtime("ort_cpu")


ARRAYS = st.sampled_from([*NUMPY_DTYPES.values(), np.dtype(np.int8), np.dtype(np.uint16)]).flatmap(
    lambda dtype: hnp.arrays(
        np.uint16 if dtype == BF16 else dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    ).map(lambda array: array.view(BF16) if dtype == BF16 else array)
)


@given(arrays=st.dictionaries(st.text(st.characters(), max_size=8), ARRAYS, max_size=4), turned=st.booleans())
def test_tensors_cross_between_processes_bit_by_bit(
    arrays: dict[str, Array], turned: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "arrays.npz"
    given_arrays = {name: array.T if turned else array for name, array in arrays.items()}
    save_arrays(path, given_arrays)
    found = load_arrays(path)
    assert list(found) == list(arrays)
    for name, array in given_arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


@given(ARRAYS.filter(lambda array: array.dtype != np.uint16))
def test_tensors_cross_to_torch_and_back_bit_by_bit(array: Array) -> None:
    tensor = to_torch(array)
    assert tuple(tensor.shape) == array.shape
    found = to_numpy(tensor)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    if array.size and array.dtype != np.bool_:
        tensor.zero_()
        assert to_numpy(to_torch(array)).tobytes() == array.tobytes()  # torch's tensor has separate memory


def test_dtypes_have_one_name_each() -> None:
    assert {name: dtype_name(dtype) for name, dtype in NUMPY_DTYPES.items()} == {name: name for name in NUMPY_DTYPES}
    assert dtype_name(np.dtype(np.int8)) == "int8"
    assert dtype_name(np.dtype(ml_dtypes.float8_e4m3fn)) == "float8_e4m3fn"


@pytest.mark.parametrize("name", ["torch", "onnx-reference", "ort-cpu"])
def test_bench_gives_an_engine_only_options_that_it_knows(artifacts: dict[str, Path], name: str) -> None:
    assert worker.Worker().open(attrs.asdict(RUNTIMES[name]), {}, str(artifacts["fp32"]), threads=1)["describe"][
        "engine"
    ]
