"""The runners of torch, ONNX Runtime and onnx's reference: outputs by name, timing, bf16, and no silent fallbacks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import pytest
from helpers import case, inputs_for
from onnx import TensorProto, helper
from verify_helpers import write

from posexport.errors import RequestError
from posexport.runtimes import gpu_missing, onnx_reference, ort, torch_eager

ENGINES = (torch_eager, ort, onnx_reference)


def one_node(path: Path, op: str, kind: int, **attributes: int) -> Path:
    """A file with one node that reads x, and indices i if the node has an axis."""
    names = ["x", "i"] if "axis" in attributes else ["x"]
    inputs = [helper.make_tensor_value_info(n, kind if n == "x" else TensorProto.INT64, ["a", "b"]) for n in names]
    output = helper.make_tensor_value_info("y", kind, ["a", "b"])
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attributes)], "g", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__.rpartition(".")[2])
def test_an_engine_runs_and_can_be_timed(engine: ModuleType, tmp_path: Path) -> None:
    spec = case("relative-table")
    path, inputs = write(tmp_path, "a", spec), inputs_for(spec, 2, 70, "uneven")
    runner = engine.load(path, {})
    truth = torch_eager.load(path, {"dtype": "fp64"}).run(inputs)["output"]
    assert truth.dtype == np.float64
    found = runner.run(inputs)
    assert list(found) == ["output"]
    assert found["output"].dtype == np.float32
    np.testing.assert_allclose(found["output"], truth, atol=1e-5)
    once = runner.prepare(inputs)
    assert 0 < once() < 10
    assert 0 < once() < 10
    assert set(runner.describe()) == {"engine", "version", "device"}
    with pytest.raises(RequestError, match="plan"):
        engine.load(tmp_path / "a.plan", {})


def test_bfloat16_goes_through_onnx_runtime_by_its_bits(tmp_path: Path) -> None:
    runner = ort.load(one_node(tmp_path / "i.onnx", "Identity", TensorProto.BFLOAT16), {})
    x = np.array([[1.5, -0.0, 3e38], [np.inf, 1e-40, 2.0]], ml_dtypes.bfloat16)
    found = runner.run({"x": x})["y"]
    assert found.dtype == x.dtype
    assert found.tobytes() == x.tobytes()


def test_the_reference_gathers_along_negative_and_long_axes(tmp_path: Path) -> None:
    runner = onnx_reference.load(one_node(tmp_path / "g.onnx", "GatherElements", TensorProto.FLOAT, axis=-1), {})
    x = np.arange(300, dtype=np.float32).reshape(2, 150)
    found = runner.run({"x": x, "i": np.array([[149, -1, 0], [70, 3, -150]])})["y"]
    np.testing.assert_array_equal(found, [[149, 149, 0], [220, 153, 150]])


@pytest.mark.parametrize("opset", [9, 13, 15])
def test_the_reference_normalises_by_the_statistics_that_it_is_given(opset: int, tmp_path: Path) -> None:
    names = ["x", "scale", "bias", "mean", "variance"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("BatchNormalization", names, ["y"], epsilon=0.5, momentum=0.25)
    graph = helper.make_graph([node], "g", inputs, [output])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7), tmp_path / "g.onnx"
    )
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    given = [np.array(values, np.float32) for values in ([1, 2, 3], [0, 1, 0], [5, 6, 7], [1.5, 3.5, 8.5])]
    found = onnx_reference.load(tmp_path / "g.onnx", {}).run({"x": x, **dict(zip(names[1:], given, strict=True))})["y"]
    scale, bias, mean, variance = (values[:, None] for values in given)
    np.testing.assert_allclose(found, scale * (x - mean) / (variance + 0.5) ** 0.5 + bias, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "shapes", [((3, 40), (40, 5)), ((2, 1, 3, 40), (4, 40, 5)), ((40,), (40, 5)), ((0, 40), (40, 5))]
)
def test_products_of_the_reference_are_those_of_onnx(dtype: type, shapes: tuple[tuple[int, ...], ...]) -> None:
    """The faster products are equal to onnx's bit by bit, also for infinities and NaN."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = [helper.make_tensor_value_info(name, kind, None) for name in ("a", "b", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["y"])], "g", names[:2], names[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    generator = np.random.default_rng(0)
    inputs = {name: generator.standard_normal(shape).astype(dtype) for name, shape in zip("ab", shapes, strict=True)}
    inputs["a"][..., :1] *= dtype(400)
    inputs["b"][..., :1, :3] = np.array([np.inf, np.nan, 60_000]).astype(dtype)
    with np.errstate(all="ignore"):
        expected = onnx.reference.ReferenceEvaluator(model).run(None, inputs)[0]
    made = onnx_reference.ReferenceRunner(model, Path()).run(inputs)["y"]
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(made.astype(np.float32), expected.astype(np.float32))


@pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error_and_no_fallback(tmp_path: Path) -> None:
    path = write(tmp_path, "a", case("none"))
    with pytest.raises(Exception, match="CUDA"):
        ort.load(path, {"provider": "CUDA"})
    with pytest.raises(Exception, match="GPU"):
        torch_eager.load(path, {"device": "cuda"})
