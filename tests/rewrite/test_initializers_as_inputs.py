"""Initializers that are inputs: constants before IR version 4, later default values that callers may change.

The oracle is ONNX Runtime, which takes other numbers for such an input only from IR version 4 on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.rewrite.result import KEPT, REWRITTEN

HEADS, SIZE, HIDDEN = 2, 8, 16
SCALE = "scale"


def saved(path: Path, ir_version: int) -> Path:
    """Attention of opset 11, whose initializers are all inputs too; its scale is the initializer SCALE."""
    g = Graph()

    def heads(name: str, order: list[int]) -> str:
        projected = g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN))
        return g.op("Transpose", g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE])), perm=order)

    scores = g.op("MatMul", heads("q", [0, 2, 1, 3]), heads("k", [0, 2, 3, 1]))
    weights = g.op("Softmax", g.op("Mul", scores, g.weight(SCALE, np.array(0.25, np.float32))), axis=3)
    mixed = g.op("Transpose", g.op("MatMul", weights, heads("v", [0, 2, 1, 3])), perm=[0, 2, 1, 3])
    g.op("Reshape", mixed, g.constant([0, 0, HIDDEN]), name="output")
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    ]
    weights_too = [helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)) for one in g.weights]
    graph = helper.make_graph(g.nodes, "main_graph", [infos[0], *weights_too], infos[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=ir_version)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())
    return path


def changes(path: Path, name: str) -> bool:
    """Whether ONNX Runtime takes other numbers for an initializer."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return name in {one.name for one in session.get_overridable_initializers()}


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_initializers_of_old_files_are_constants(tmp_path: Path, form: str) -> None:
    path, out = saved(tmp_path / "in.onnx", 3), tmp_path / "out.onnx"
    assert not changes(path, SCALE)
    result = helpers.rewritten(path, out, form=form, target="ort")
    assert [one["state"] for one in result.attentions] == [REWRITTEN]
    assert [one.name for one in onnx.load(out).graph.input] == ["features"]
    features = {"features": np.random.default_rng(0).standard_normal((3, 7, HIDDEN)).astype(np.float32)}
    (expected,), (actual,) = helpers.ran(path, features), helpers.ran(out, features)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


def test_initializers_of_later_files_may_change(tmp_path: Path) -> None:
    path = saved(tmp_path / "in.onnx", 4)
    assert changes(path, SCALE)
    result = helpers.rewritten(path, tmp_path / "out.onnx", form="native", target="ort")
    assert [one["state"] for one in result.attentions] == [KEPT]
