"""Attention is described as without an encoding only if the order of tokens was tested.

Positions inside com.microsoft operators are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, SIZE, Writer, attention
from descriptions import described
from onnx import TensorProto, helper

from posexport.graphs.attention.describe import Describer
from posexport.graphs.view import view_of

WIDTH, ROWS, WORDS = HEADS * SIZE, 40, 50

Array = np.ndarray[Any, Any]

Stem = Callable[[Writer], str]
"""Makes the features [batch, seq, WIDTH] of the attention."""


def encoder(stem: Stem, layers: int = 1) -> onnx.ModelProto:
    """Layers of attention with a residual after a stem."""
    g, rng = Writer(), np.random.default_rng(3)
    x = stem(g)
    for _ in range(layers):
        sides = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            weight = g.floats(rng.standard_normal((WIDTH, WIDTH)) / 8)
            split = g.op("Reshape", g.op("MatMul", x, weight), g.const([0, 0, HEADS, SIZE]))
            sides.append(g.op("Transpose", split, perm=perm))
        q, k, v = sides
        scores = g.op("Mul", g.op("MatMul", q, k), g.floats(SIZE**-0.5))
        out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        x = g.op("Add", x, g.op("Reshape", out, g.const([0, 0, WIDTH])))
    g.nodes.append(helper.make_node("Identity", [x], ["output"]))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", WIDTH)))
    graph = helper.make_graph(g.nodes, "encoder", g.inputs, g.outputs, g.weights)
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)


def named(model: onnx.ModelProto) -> dict[str, Any]:
    encoding: dict[str, Any] = described(model)["encoding"]
    return encoding


def embed_layer_norm(table: Array, places: str | int | None = None) -> Stem:
    """com.microsoft EmbedLayerNormalization with a table of positions.

    The positions are the input `places`, the number `places` for all tokens, or by default counted by the operator.
    """

    def stem(g: Writer) -> str:
        ids = g.input("input_ids", TensorProto.INT32, "batch", "seq")
        words = g.floats(np.random.default_rng(1).standard_normal((WORDS, WIDTH)))
        norm = (g.floats(np.ones(WIDTH)), g.floats(np.zeros(WIDTH)))
        inputs = [ids, "", words, g.floats(table), "", *norm]
        if isinstance(places, str):
            inputs += ["", g.input(places, TensorProto.INT32, "batch", "seq")]
        elif places is not None:
            shape = g.op("Shape", ids)
            fill = onnx.numpy_helper.from_array(np.array([places], np.int32))
            inputs += ["", g.op("ConstantOfShape", shape, value=fill)]
        node = helper.make_node("EmbedLayerNormalization", inputs, ["embedded", "count"], domain="com.microsoft")
        g.nodes.append(node)
        return "embedded"

    return stem


def skip_layer_norm(table: Array, operator: str) -> Stem:
    """An operator that adds words and rows of a table of positions and normalises the sum."""

    def stem(g: Writer) -> str:
        ids = g.input("input_ids", TensorProto.INT64, "batch", "seq")
        words = g.op("Gather", g.floats(np.random.default_rng(1).standard_normal((WORDS, WIDTH))), ids)
        places = g.input("position_ids", TensorProto.INT64, "batch", "seq")
        added = g.op("Gather", g.floats(table), places)
        return g.op(operator, words, added, g.floats(np.ones(WIDTH)), domain="com.microsoft")

    return stem


def features(g: Writer) -> str:
    return g.input("hidden_states", g.type, "batch", "seq", WIDTH)


def mixed(g: Writer) -> str:
    """Features that a convolution mixes with those of neighbouring tokens."""
    weight = g.floats(np.random.default_rng(2).standard_normal((WIDTH, 1, 3)))
    turned = g.op("Transpose", features(g), perm=[0, 2, 1])
    return g.op("Transpose", g.op("Conv", turned, weight, group=WIDTH, pads=[1, 1]), perm=[0, 2, 1])


def numbers(rows: int = ROWS) -> Array:
    return np.random.default_rng(5).standard_normal((rows, WIDTH))


def test_the_table_of_positions_inside_of_an_operator_is_read() -> None:
    assert named(encoder(embed_layer_norm(numbers()))) == {"name": "learned", "max_positions": ROWS}
    angles = np.arange(ROWS)[:, None] * 100.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    sines = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(ROWS, WIDTH)
    found = named(encoder(embed_layer_norm(sines)))
    assert (found["name"], round(found["theta"], 3)) == ("sinusoidal", 100.0)


def test_a_table_with_the_same_row_for_all_is_not_called_learned() -> None:
    assert named(encoder(embed_layer_norm(np.ones((ROWS, WIDTH)))))["name"] != "learned"
    assert named(encoder(embed_layer_norm(numbers(), 3)))["name"] != "learned"
    assert named(encoder(embed_layer_norm(numbers(), "position_ids")))["name"] == "learned"


@pytest.mark.parametrize("operator", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_positions_that_are_added_inside_of_a_norm_are_read(operator: str) -> None:
    assert named(encoder(skip_layer_norm(numbers(), operator))) == {"name": "learned", "max_positions": ROWS}


def test_no_encoding_is_none_in_all_layers() -> None:
    view = view_of(ir.from_proto(encoder(features, layers=3)))
    assert [Describer(view).describe(one)["encoding"] for one in view.attentions] == [{"name": "none"}] * 3


def test_order_that_acts_by_no_encoding_is_unknown() -> None:
    found = named(encoder(mixed))
    assert found["name"] == "unknown" and found["reason"]["code"] == "positions-unknown"


def by_inputs(g: Writer, heads: str, queries: bool) -> str:
    """Rotates heads by cosines and sines that are inputs."""
    cos, sin = (g.op("Unsqueeze", g.input(name, g.type, "batch", "seq", SIZE), g.const([1])) for name in ("cos", "sin"))
    ends = g.const([0]), g.const([SIZE // 2]), g.const([SIZE]), g.const([-1])
    first, second = (g.op("Slice", heads, *pair, ends[3]) for pair in (ends[:2], ends[1:3]))
    other = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return g.op("Add", g.op("Mul", heads, cos), g.op("Mul", other, sin))


def test_cosines_and_sines_that_are_inputs_are_not_none() -> None:
    found = named(attention(rotate=by_inputs))
    assert found["name"] == "unknown" and found["reason"]["code"] == "order-not-tried"


def test_positions_on_queries_alone_that_come_in_as_features_are_not_none() -> None:
    def added(g: Writer, heads: str, queries: bool) -> str:
        places = g.input("position_embeddings", g.type, "batch", "seq", SIZE)
        return g.op("Add", heads, g.op("Unsqueeze", places, g.const([1]))) if queries else heads

    assert named(attention(rotate=added))["name"] == "unknown"
