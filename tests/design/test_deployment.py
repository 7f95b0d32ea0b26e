"""The examples of docs/examples compute what torch computes, if their engines are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import attrs
import numpy as np
import onnxruntime
import pages
import pytest
from helpers import Array, run_block, small_spec, weights_for
from trt_helpers import needs_rtx

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.spec.spec import Spec

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
TOKENS = 9
SPEC = small_spec("rope", causal=True, kv_cache="shared", num_kv_heads=2, theta=100.0)


@cache
def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def states(spec: Spec) -> Array:
    return np.random.default_rng(3).standard_normal((TOKENS, spec.hidden_size)).astype(np.float32)


def truth(spec: Spec) -> Array:
    """The rows of one causal pass without a cache, in float64."""
    whole = attrs.evolve(spec, kv_cache=None)
    inputs: dict[str, Array] = {"hidden_states": states(spec)[None]}
    if spec.position_axes:
        inputs["position_ids"] = np.arange(TOKENS)[None]
    return run_block(whole, weights_for(whole), inputs)[0]


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block with shared caches, for ONNX Runtime."""
    path = tmp_path_factory.mktemp("deployment") / "block.onnx"
    write_onnx(export(SPEC, weights_for(SPEC), form="contrib", target="ort"), path)
    return path


def decoded(path: Path, spec: Spec, *pieces: int) -> Array:
    decoder = example("ort_decode").Decoder(path, TOKENS + 3)
    ends = np.cumsum(pieces)
    assert ends[-1] == TOKENS
    rows = states(spec)
    return np.concatenate([decoder.feed(rows[end - size : end]) for size, end in zip(pieces, ends, strict=True)])


def test_decoding_in_python_is_one_causal_pass(block: Path) -> None:
    found = decoded(block, SPEC, 4, 1, 3, 1)
    np.testing.assert_allclose(found, truth(SPEC), atol=2e-6)
    assert np.abs(decoded(block, SPEC, TOKENS)[::-1] - truth(SPEC)).max() > 0.01  # the comparison can fail


def test_decoding_in_python_with_consecutive_positions_is_the_same(tmp_path: Path) -> None:
    promised = attrs.evolve(SPEC, positions="consecutive")
    write_onnx(export(promised, weights_for(promised)), tmp_path / "block.onnx")
    np.testing.assert_allclose(decoded(tmp_path / "block.onnx", SPEC, 4, 1, 3, 1), truth(SPEC), atol=2e-6)


def test_the_python_example_says_what_it_can_not_do(block: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    module = example("ort_decode")
    decoder = module.Decoder(block, 2)
    with pytest.raises(ValueError, match="0 \\+ 3 tokens don't fit into 2 places"):
        decoder.feed(states(SPEC)[:3])
    monkeypatch.setattr(sys, "argv", ["ort_decode.py", str(block), "--prompt", "3", "--steps", "2"])
    assert module.main() == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["token 3", "token 4"]
    (tmp_path / "text.onnx").write_text("{}")
    for model, more, said in (
        (tmp_path / "gone.onnx", (), "gone.onnx does not exist"),
        (tmp_path / "text.onnx", (), "text.onnx can't be opened"),
        (block, ("--prompt", "-3", "--steps", "0"), "give a --prompt of at least 1 token"),
        (block, ("--steps", "-1"), "no negative --steps"),
    ):
        monkeypatch.setattr(sys, "argv", ["ort_decode.py", str(model), *more])
        assert module.main() == 2
        assert one_error(capsys, said)


def test_the_python_example_keeps_to_the_room_and_the_inputs_of_the_model(block: Path, monkeypatch: Any) -> None:
    module = example("ort_decode")
    real = module.ort.InferenceSession(str(block), providers=["CPUExecutionProvider"]).get_inputs()

    def opened(*more: Any, **over: Any) -> Any:
        values = [SimpleNamespace(name=v.name, shape=list(v.shape), type=v.type) for v in real]
        for value in values:
            if value.name.startswith("past_"):
                value.shape[2] = 2  # as with --max-seq 2
            vars(value).update(over.get(value.name, {}))
        session = MagicMock()
        session.get_inputs.return_value = [*values, *more]
        session.get_providers.return_value = ["CPUExecutionProvider"]
        monkeypatch.setattr(module.ort, "InferenceSession", lambda *_, **__: session)
        return module.Decoder("block.onnx", 24)

    with pytest.raises(ValueError, match="0 \\+ 3 tokens don't fit into 2 places"):
        opened().feed(states(SPEC)[:3])
    with pytest.raises(ValueError, match="drop --padding-mask"):
        opened(SimpleNamespace(name="attention_mask", shape=[1, 2], type="tensor(int64)"))
    with pytest.raises(ValueError, match=r"takes tensor\(bfloat16\): export it with --dtype fp32 or fp16"):
        opened(hidden_states={"type": "tensor(bfloat16)"})


def one_error(capsys: Any, said: str) -> bool:
    """Whether stderr is a single line with an error that contains `said`."""
    (line,) = capsys.readouterr().err.splitlines()
    return line.startswith("Error: ") and said in line


def test_the_tensorrt_example_looks_at_its_file_before_any_engine(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    module = example("tensorrt_run")
    monkeypatch.setattr(module, "load_engine", lambda: pytest.fail("an engine was loaded"))
    plan = tmp_path / "block.plan"
    plan.write_text("{}")
    plan.with_name("block.plan.json").write_text("{}")
    plan.with_name("block.onnx").touch()
    for arguments, said in (
        ([plan], "block.plan is no plan: make it with posexport compile"),
        ([f"{plan}.json"], "is neither .plan nor .onnx"),
        ([tmp_path / "gone.plan"], "gone.plan does not exist"),
        ([plan.with_name("block.onnx"), "--seq", "0"], "--batch and --seq must be 1 or more"),
    ):
        monkeypatch.setattr(sys, "argv", ["tensorrt_run.py", *map(str, arguments)])
        assert module.main() == 2
        assert one_error(capsys, said)


@pytest.mark.parametrize("given", [None, TypeError("pybind11::init(): factory function returned nullptr")])
def test_no_builder_is_not_run(given: TypeError | None, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    module, trt = example("tensorrt_run"), MagicMock()
    trt.Builder.side_effect, trt.Builder.return_value = given, None
    monkeypatch.setattr(module, "load_engine", lambda: trt)
    (tmp_path / "block.onnx").touch()
    monkeypatch.setattr(sys, "argv", ["tensorrt_run.py", str(tmp_path / "block.onnx")])
    assert module.main() == 3
    assert capsys.readouterr().err == "not run: this TensorRT builds on a GPU only\n"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["alibi", "none", "rope"])
@pytest.mark.parametrize("form", ["decomposed", "native", "function"])
def test_other_forms_and_encodings_decode_too(form: str, encoding: str, tmp_path: Path) -> None:
    spec = small_spec(encoding, causal=True, kv_cache="shared", layers=2)
    write_onnx(export(spec, weights_for(spec), form=form), tmp_path / "block.onnx")
    np.testing.assert_allclose(decoded(tmp_path / "block.onnx", spec, 5, 1, 1, 2), truth(spec), atol=1e-5)


def ort_sdk() -> tuple[Path, Path] | str:
    """The folder of ONNX Runtime's C++ headers and its library, or the reason why nothing can be compiled."""
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            return f"not run: no {program}"
    capi = Path(onnxruntime.__file__).parent / "capi"
    library = next(iter(sorted(capi.glob("libonnxruntime.so.*"))), None)
    if library is None:
        return "not run: this wheel of ONNX Runtime has no library for C++"
    given = os.environ.get("ORT_INCLUDE")
    places = [Path(given)] if given else [Path(root) / "onnxruntime" for root in ("/usr/include", "/usr/local/include")]
    for place in places:
        if (place / "onnxruntime_cxx_api.h").is_file():
            return place, library
    return "not run: no onnxruntime_cxx_api.h, name its folder in ORT_INCLUDE"


SDK = ort_sdk()


@pytest.mark.slow
@pytest.mark.skipif(isinstance(SDK, str), reason=str(SDK))
def test_decoding_in_cpp_is_one_causal_pass(block: Path, tmp_path: Path) -> None:
    assert not isinstance(SDK, str)
    include, library = SDK
    configure = ["cmake", "-S", EXAMPLES / "ort_cpp", "-B", tmp_path / "build", f"-DORT_INCLUDE={include}"]
    configure += [f"-DORT_LIBRARY={library}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"]
    for command in (configure, ["cmake", "--build", tmp_path / "build"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    program = tmp_path / "build" / "ort_decode"

    def decode(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)

    states(SPEC).tofile(tmp_path / "states.f32")
    done = decode(block, tmp_path / "states.f32", tmp_path / "outputs.f32")
    assert done.returncode == 0, done.stderr
    found = np.fromfile(tmp_path / "outputs.f32", np.float32).reshape(TOKENS, -1)
    np.testing.assert_allclose(found, truth(SPEC), atol=2e-6)
    assert len(decode(block).stdout.splitlines()) == 12
    assert (decode().returncode, decode(tmp_path / "gone.onnx").returncode) == (2, 2)
    assert "gone.onnx" in decode(tmp_path / "gone.onnx").stderr
    (tmp_path / "odd.f32").write_bytes(b"0123")
    assert "not rows of the hidden size" in decode(block, tmp_path / "odd.f32", tmp_path / "x").stderr


@needs_rtx
def test_tensorrt_runs_a_plan_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, checked with mocks that have only the methods of the real classes. No GPU is needed."""
    import tensorrt_rtx as trt

    module, calls = example("tensorrt_run"), []
    shapes = {"hidden_states": (-1, -1, 32), "position_ids": (-1, -1), "output": (-1, -1, 32)}
    types = {"hidden_states": trt.float16, "position_ids": trt.int64, "output": trt.float16}
    engine = create_autospec(trt.ICudaEngine, instance=True)
    engine.num_io_tensors = len(shapes)
    engine.get_tensor_name.side_effect = list(shapes).__getitem__
    engine.get_tensor_shape.side_effect = shapes.__getitem__
    engine.get_tensor_dtype.side_effect = types.__getitem__
    engine.get_tensor_mode.side_effect = lambda name: getattr(
        trt.TensorIOMode, "OUTPUT" if name == "output" else "INPUT"
    )
    context = create_autospec(trt.IExecutionContext, instance=True)
    context.set_input_shape.side_effect = lambda name, shape: calls.append(f"shape {name} {shape}")
    context.get_tensor_shape.side_effect = lambda name: calls.append(f"ask {name}") or (2, 5, 32)
    context.set_tensor_address.side_effect = lambda name, place: calls.append(f"bind {name}")
    context.execute_async_v3.side_effect = lambda stream: calls.append("run") or True
    engine.create_execution_context.return_value = context
    runtime = create_autospec(trt.Runtime, instance=True)
    runtime.deserialize_cuda_engine.return_value = engine
    cuda = MagicMock()
    cuda.Stream.return_value.synchronize.side_effect = lambda: calls.append("wait")
    array = cuda.DeviceArray.return_value
    array.copy_from.return_value = array
    array.numpy.side_effect = lambda: calls.append("read") or np.zeros((2, 5, 32))
    monkeypatch.setattr(module, "need_gpu", lambda: None)
    monkeypatch.setattr(module, "load_cuda", lambda: cuda)
    monkeypatch.setattr(trt, "Runtime", lambda logger: runtime)
    found = module.run(trt, None, b"plan", {"batch": 2, "seq": 5})
    assert list(found) == ["output"]
    assert calls == [
        "shape hidden_states (2, 5, 32)",
        "shape position_ids (2, 5)",
        "ask output",
        *(f"bind {name}" for name in shapes),
        "run",
        "wait",
        "read",
    ]
    types["hidden_states"] = trt.bfloat16
    with pytest.raises(ValueError, match="bf16, which numpy lacks"):
        module.run(trt, None, b"plan", {"batch": 2, "seq": 5})


def test_made_up_inputs_keep_the_contract() -> None:
    module = example("tensorrt_run")
    ids = module.fill("position_ids", (2, 3, 2), np.int64)
    assert ids[1].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert module.fill("attention_mask", (1, 4), np.int64).sum() == 4
    with pytest.raises(ValueError, match="input past_key is not one"):
        module.shape_for("past_key", (-1, 4, -1, 8), {"batch": 1, "seq": 1})


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not isinstance(SDK, str):
        monkeypatch.setenv("ORT_INCLUDE", str(SDK[0]))
        monkeypatch.setenv("ORT_LIBRARY", str(SDK[1]))
    assert pages.run(DOCS / "guide" / "deployment.md", tmp_path, slow=True) >= 5
    assert (tmp_path / "model_repository/rope/config.pbtxt").is_file()
    assert (tmp_path / "decode.onnx").is_file()
