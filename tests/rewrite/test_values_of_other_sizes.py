"""Value heads with another size than key heads, as in DeepSeek's multi-head latent attention.

TensorRT's parser accepts only operators with equal sizes; ONNX Runtime also accepts others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, causal, run

from posexport.rewrite.rewriter import REWRITTEN

HEADS, HIDDEN = 4, 32
SHAPES = [(1, 1, 3), (2, 7, 0), (3, 4, 9)]
"""Rows, tokens and cached tokens."""


def model_of(
    size: int, value_size: int, kv_heads: int = HEADS, cached: bool = False, masked: bool = True
) -> onnx.ModelProto:
    """Attention with queries and keys of one size and values of another; it is causal if `masked`."""
    g = Graph()
    sides = []
    for name, heads, width in (("q", HEADS, size), ("k", kv_heads, size), ("v", kv_heads, value_size)):
        projected = g.op("MatMul", "features", g.random(name, HIDDEN, heads * width))
        split = g.op("Reshape", projected, g.constant([0, 0, heads, width]))
        sides.append(g.op("Transpose", split, perm=[0, 2, 1, 3]))
    q, k, v = sides
    inputs = [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "seq", HIDDEN])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", HIDDEN])]
    if cached:
        k, v = (
            g.op("Concat", f"past_{name}", new, axis=2, name=f"present_{name}")
            for name, new in (("key", k), ("value", v))
        )
        for name, width in (("key", size), ("value", value_size)):
            for values, kind, length in ((inputs, "past", "past"), (outputs, "present", "total")):
                dims = ["batch", kv_heads, length, width]
                values.append(helper.make_tensor_value_info(f"{kind}_{name}", TensorProto.FLOAT, dims))
    if kv_heads < HEADS:
        repeat = g.constant([1, 1, HEADS // kv_heads, 1, 1])
        k, v = (
            g.op(
                "Reshape",
                g.op("Expand", g.op("Unsqueeze", one, g.constant([2])), repeat),
                g.constant([0, HEADS, -1, w]),
            )
            for one, w in ((k, size), (v, value_size))
        )
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(size**-0.5, np.float32))
    if masked:
        scores = g.op("Where", causal(g, scores), scores, g.constant(-1e9, np.float32))
    weights = g.op("Softmax", scores, axis=-1)
    merged = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    whole = g.op("Reshape", merged, g.constant([0, 0, HEADS * value_size]))
    g.op("MatMul", whole, g.random("out", HEADS * value_size, HIDDEN), name="y")
    graph = helper.make_graph(g.nodes, "graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def inputs_of(model: onnx.ModelProto, batch: int, seq: int, past: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seq)
    sizes = {"batch": batch, "seq": seq, "past": past}
    shapes = {
        value.name: [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("size", "value_size"), [(8, 16), (16, 8)])
@pytest.mark.parametrize("target", ["portable", "ort"])
@pytest.mark.parametrize("form", ["native", "contrib", "function"])
def test_values_keep_their_size(
    form: str, target: str, size: int, value_size: int, kv_heads: int, cached: bool
) -> None:
    model = model_of(size, value_size, kv_heads, cached)
    done, proto = rewritten_model(model, form=form, target=target)
    assert [one.state for one in done.sites] == [REWRITTEN]
    for shape in SHAPES:
        arrays = inputs_of(model, *shape)
        want, have = run(model, arrays), run(proto, arrays)
        for name, expected in want.items():
            assert have[name].shape == expected.shape and np.isfinite(expected).all()
            np.testing.assert_allclose(have[name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("form", ["native", "contrib"])
def test_portable_operators_have_one_size(form: str, cached: bool) -> None:
    """TensorRT's parser requires equal sizes."""
    _, proto = rewritten_model(model_of(16, 8, cached=cached), form=form, target="portable")
    types = onnx.shape_inference.infer_shapes(proto).graph.value_info
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in types}
    (node,) = (node for node in proto.graph.node if node.op_type in ("Attention", "MultiHeadAttention"))
    assert {shapes[name][2] for name in node.input[:3]} == {HEADS * 16}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["native", "contrib", "decomposed", "function"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("size", "value_size"), [(8, 16), (16, 8)])
def test_shared_caches_of_two_sizes(size: int, value_size: int, kv_heads: int, form: str) -> None:
    """Buffers give the same results as growing caches."""
    model = model_of(size, value_size, kv_heads, cached=True, masked=False)
    done, proto = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [one.state for one in done.sites] == [REWRITTEN]
    for batch, seq, past in SHAPES:
        arrays = inputs_of(model, batch, seq, past)
        room = {
            name: np.concatenate((array, np.zeros((*array.shape[:2], seq + 2, array.shape[3]), np.float32)), 2)
            for name, array in arrays.items()
            if name.startswith("past")
        }
        more = {one.name: np.array([past]) for one in proto.graph.input if one.name not in arrays}
        expected, actual = run(model, arrays), run(proto, {**arrays, **room, **more})
        np.testing.assert_allclose(actual["y"], expected["y"], rtol=0, atol=2e-5)
        for name in ("present_key", "present_value"):
            np.testing.assert_allclose(actual[name][:, :, : past + seq], expected[name], rtol=0, atol=1e-6)
