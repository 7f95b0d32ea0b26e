"""Scales, dtypes, widths and key lengths that the rewrite gives to operators.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from absorbed_graphs import HIDDEN, model_of
from attention_graphs import Writer
from onnx import TensorProto, helper, numpy_helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

Array = np.ndarray[Any, Any]

FORMS = ["native", "contrib", "function"]


def agree(before: onnx.ModelProto, after: onnx.ModelProto, arrays: Mapping[str, Array], limit: float = 2e-5) -> None:
    expected, actual = run(before, arrays), run(after, arrays)
    for name, value in expected.items():
        assert value.shape == actual[name].shape
        assert value.dtype == actual[name].dtype
        assert np.isfinite(actual[name]).all()
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=limit)


def features(batch: int, seq: int, dtype: Any = np.float32) -> dict[str, Array]:
    return {"features": np.random.default_rng(seq).standard_normal((batch, seq, HIDDEN)).astype(dtype)}


def negative(g: Graph, value: str) -> str:
    return g.op("Neg", value)


def less_than_none(g: Graph, value: str) -> str:
    return g.op("Mul", value, g.constant(-0.75, np.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hooks", [{"k": negative}, {"scores": less_than_none}, {"q": negative, "k": negative}])
def test_scales_below_zero(hooks: dict[str, Any], form: str) -> None:
    """ONNX Runtime's Attention accepts only a scale above 0."""
    model = model_of(**hooks)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for batch, seq in ((1, 1), (2, 7)):
        agree(model, proto, features(batch, seq))


def of_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in float64."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            wide = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in model.graph.node:
        if node.op_type == "Cast":
            node.attribute[0].i = TensorProto.DOUBLE
    return model


def far_bias(g: Graph, value: str) -> str:
    """Adds a slope over the keys plus 1e9 for all keys: float32 loses the slope."""
    places = g.op("Range", g.constant(0), g.op("Squeeze", g.length("features", 1)), g.constant(1))
    slopes = g.op("Mul", g.op("Cast", places, to=TensorProto.FLOAT), g.constant(0.125, np.float32))
    return g.op("Add", value, g.op("Add", slopes, g.constant(1e9, np.float32)))


def test_biases_in_double_precision() -> None:
    model = of_double(model_of(scores=far_bias))
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for batch, seq in ((1, 1), (2, 9), (1, 40)):
        agree(model, proto, features(batch, seq, np.float64), 1e-6)


def packed(g: Writer, x: str) -> list[str]:
    """Queries, keys and values [B, S, HIDDEN], sliced from one projection by a width that the graph computes."""
    weight = g.floats(np.random.default_rng(1).standard_normal((HIDDEN, 3 * HIDDEN)) / 6)
    whole = g.op("MatMul", x, weight)
    width = g.op("Div", g.op("Shape", whole, start=2, end=3), g.const([3]))
    twice, last = g.op("Mul", width, g.const([2])), g.const([2**31])
    bounds = ((g.const([0]), width), (width, twice), (twice, last))
    return [g.op("Slice", whole, start, end, g.const([2])) for start, end in bounds]


def test_widths_that_no_shape_inference_knows() -> None:
    """ONNX Runtime does not load an Attention whose queries have an unknown width."""
    g = Writer()
    heads, size = 4, HIDDEN // 4
    x = g.input("features", g.type, "batch", "seq", HIDDEN)
    split = [g.op("Reshape", one, g.const([0, 0, heads, size])) for one in packed(g, x)]
    q, k, v = (g.op("Transpose", one, perm=[0, 2, 1, 3]) for one in split)
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(0.5))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    merged = g.op("Reshape", out, g.const([0, 0, HIDDEN]))
    weight = g.floats(np.random.default_rng(2).standard_normal((HIDDEN, HIDDEN)) / 6)
    g.nodes.append(helper.make_node("MatMul", [merged, weight], ["output"], name="node_output"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", HIDDEN)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    assert "Reshape" not in {node.op_type for node in proto.graph.node}
    for batch, seq in ((1, 1), (2, 7)):
        agree(model, proto, features(batch, seq))


def cached(size: int, axis: int, *, heads_first: bool = False) -> onnx.ModelProto:
    """Attention with a cache and a bias whose slope grows with the length of an axis of the keys above 250.

    The keys are [B, N, T, size], or [B * N, T, size] with `heads_first`.
    """
    g, heads = Writer(), 2
    hidden, rng = heads * size, np.random.default_rng(0)
    x = g.input("features", g.type, "batch", "seq", hidden)
    sides = []
    for _ in range(3):
        projected = g.op("MatMul", x, g.floats(rng.standard_normal((hidden, hidden)) / 6))
        split = g.op("Reshape", projected, g.const([0, 0, heads, size]))
        sides.append(g.op("Transpose", split, perm=[0, 2, 1, 3]))
    q = sides[0]
    for name, new in (("key", sides[1]), ("value", sides[2])):
        past = g.input(f"past_{name}", g.type, "batch", heads, "past", size)
        g.nodes.append(helper.make_node("Concat", [past, new], [f"present_{name}"], axis=2))
        g.outputs.append(helper.make_tensor_value_info(f"present_{name}", g.type, ("batch", heads, "keys", size)))
    k, v = "present_key", "present_value"
    flat = g.op("Reshape", k, g.op("Concat", g.const([-1]), g.op("Shape", k, start=2, end=4), axis=0))
    length = g.op("Gather", g.op("Shape", flat if heads_first else k), g.const(axis))
    mask = g.input("attention_mask", TensorProto.INT64, "batch", "total")
    slope = g.op("Max", g.floats(0.0), g.op("Sub", g.op("Cast", length, to=g.type), g.floats(250.0)))
    places = g.op("Cast", g.op("Range", g.const(0), g.length(mask, 1), g.const(1)), to=g.type)
    bias = g.op("Mul", places, g.op("Mul", slope, g.floats(-0.01)))
    wide = g.op("Unsqueeze", g.op("Cast", mask, to=g.type), g.const([1, 2]))
    hidden_keys = g.op("Mul", g.op("Sub", g.floats(1.0), wide), g.floats(-1e9))
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(0.3))
    scores = g.op("Add", scores, g.op("Add", hidden_keys, bias))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, hidden])], ["output"], name="node_output"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", hidden)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("form", "size", "axis"), [*itertools.product(["native", "contrib"], [3, 5, 7, 12], range(4))])
def test_lengths_of_keys_are_told_from_other_axes(axis: int, size: int, form: str) -> None:
    """The head size equals the number of rows, tokens or keys in the inputs that the rewrite tries."""
    model = cached(size, axis)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    compare(model, proto, size)


@pytest.mark.parametrize("axis", range(3))
def test_lengths_of_keys_with_rows_and_heads_in_one(axis: int) -> None:
    model = cached(12, axis, heads_first=True)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    compare(model, proto, 12)


def compare(before: onnx.ModelProto, after: onnx.ModelProto, size: int) -> None:
    rng = np.random.default_rng(5)
    for batch, seq, past in ((2, 3, 9), (3, 2, 0), (1, 1, 400), (130, 1, 2)):
        arrays: dict[str, Array] = {
            f"past_{name}": rng.standard_normal((batch, 2, past, size)).astype(np.float32) for name in ("key", "value")
        }
        arrays["features"] = rng.standard_normal((batch, seq, 2 * size)).astype(np.float32)
        arrays["attention_mask"] = np.ones((batch, past + seq), np.int64)
        agree(before, after, arrays)
