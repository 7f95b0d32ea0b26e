"""Descriptions of caches without new keys, and of key heads that are repeated as a block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from attention_graphs import HEADS, SIZE, Add, Writer, attention, repeated
from descriptions import described
from grouped_graphs import grouped
from onnx import TensorProto, helper

WIDTH = HEADS * SIZE


def projected(g: Writer, heads: int) -> str:
    """hidden_states, projected to [batch, heads, seq, SIZE]."""
    rng = np.random.default_rng(len(g.nodes))
    weight = g.floats(rng.standard_normal((WIDTH, heads * SIZE)) / 8)
    split = g.op("Reshape", g.op("MatMul", "hidden_states", weight), g.const([0, 0, heads, SIZE]))
    return g.op("Transpose", split, perm=[0, 2, 1, 3])


def attention_to(make: Callable[[Writer, str], str]) -> onnx.ModelProto:
    """Attention to keys and values [batch, HEADS, tokens, SIZE]; `make` makes each from its name, key or value."""
    g = Writer()
    g.input("hidden_states", g.type, "batch", "seq", WIDTH)
    q, k, v = projected(g, HEADS), make(g, "key"), make(g, "value")
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(SIZE**-0.5))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, WIDTH])], ["output"], name="node_output"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", WIDTH)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def of_encoder(heads: int, *, given_back: bool = False) -> Callable[[Writer, str], str]:
    """A cache of encoder keys or values with optimum's names, repeated for all heads. `given_back` adds an output."""

    def make(g: Writer, name: str) -> str:
        past = g.input(f"past_key_values.0.encoder.{name}", g.type, "batch", heads, "encoder", SIZE)
        if given_back:
            present = f"present.0.encoder.{name}"
            g.nodes.append(helper.make_node("Identity", [past], [present]))
            g.outputs.append(helper.make_tensor_value_info(present, g.type, ("batch", heads, "encoder", SIZE)))
        return past if heads == HEADS else repeated(g, past, HEADS // heads)

    return make


@pytest.mark.parametrize("given_back", [False, True])
@pytest.mark.parametrize("heads", [HEADS, 2])
def test_a_cache_that_gets_no_new_keys_does_not_grow(heads: int, given_back: bool) -> None:
    found = described(attention_to(of_encoder(heads, given_back=given_back)))
    names = ("key", "value")
    assert found["num_kv_heads"] == heads
    assert found["cache"] == {
        "kind": "static",
        "inputs": {name: f"past_key_values.0.encoder.{name}" for name in names},
        "outputs": {name: f"present.0.encoder.{name}" if given_back else "" for name in names},
    }


def tiled(g: Writer, heads: str, count: int) -> str:
    """Repeats heads as a block: k0 k1 becomes k0 k1 k0 k1."""
    return g.op("Tile", heads, g.const([1, HEADS // count, 1, 1]))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("repeat", [tiled, lambda g, heads, count: repeated(g, heads, HEADS // count)])
def test_heads_that_are_repeated_in_either_order_are_key_heads(repeat: Callable[..., str], count: int) -> None:
    found = described(attention_to(lambda g, name: repeat(g, projected(g, count), count)))
    assert (found["state"], found["num_heads"], found["num_kv_heads"]) == ("recognised", HEADS, count)


def test_heads_of_different_numbers_are_as_many_as_are_read() -> None:
    """The keys have two heads that are repeated, and the values have four."""
    found = described(attention_to(lambda g, name: tiled(g, projected(g, 2), 2) if name == "key" else projected(g, 4)))
    assert (found["num_heads"], found["num_kv_heads"]) == (HEADS, HEADS)


def quantised(dtype: int, *, told: bool) -> Callable[[Writer, str], str]:
    """A quantised cache: new keys or values are quantised and appended, then all are dequantised.

    With `told`, the file states the dtype of the joined values, which are an output.
    """

    def make(g: Writer, name: str) -> str:
        past, present = g.input(f"past_key_values.0.{name}", dtype, "batch", HEADS, "past", SIZE), f"present.0.{name}"
        zero = g.const(0, helper.tensor_dtype_to_np_dtype(dtype))
        new = g.op("QuantizeLinear", projected(g, HEADS), g.floats(0.02), zero)
        g.nodes.append(helper.make_node("Concat", [past, new], [present if told else f"all_{name}"], axis=2))
        if not told:
            g.nodes.append(helper.make_node("Identity", [f"all_{name}"], [present]))
        g.outputs.append(helper.make_tensor_value_info(present, dtype, ("batch", HEADS, "total", SIZE)))
        return g.op("DequantizeLinear", present if told else f"all_{name}", g.floats(0.02), zero)

    return make


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.UINT8])
def test_caches_that_are_joined_before_they_are_scaled(dtype: int, told: bool) -> None:
    names = ("key", "value")
    assert described(attention_to(quantised(dtype, told=told)))["cache"] == {
        "kind": "grown",
        "inputs": {name: f"past_key_values.0.{name}" for name in names},
        "outputs": {name: f"present.0.{name}" for name in names},
    }


@pytest.mark.parametrize("window", [None, 4])
def test_an_operator_that_counts_keys_from_the_left_is_causal(window: int | None) -> None:
    found = described(grouped() if window is None else grouped(local_window_size=window))
    assert (found["mask"]["kind"], found["mask"]["window"]) == ("causal" if window is None else "window", window)
    assert found["mask"]["padding"] == ["attention_mask"]
    assert found["encoding"] == {"name": "rope", "layout": "half", "theta": 10_000.0}


def causal_by_a_table(rows: int) -> Add:
    """A causal mask whose positions of queries are a part of a table. Beyond its end the part is empty."""

    def add(g: Writer, scores: str) -> str:
        seq, keys = (g.op("Shape", scores, start=axis, end=axis + 1) for axis in (2, 3))
        queries = g.op("Slice", g.const(np.arange(rows)), g.op("Sub", keys, seq), keys, g.const([0]))
        places = g.op("Range", g.const(0), g.op("Squeeze", keys), g.const(1))
        seen = g.op("LessOrEqual", places, g.op("Unsqueeze", queries, g.const([1])))
        return g.op("Add", scores, g.op("Where", seen, g.floats(0.0), g.floats(-np.inf)))

    return add


def test_a_mask_is_measured_up_to_the_end_of_its_table() -> None:
    """As TorchScript writes BERT as a decoder."""
    mask = described(attention(add=[causal_by_a_table(300)], cached=True))["mask"]
    assert (mask["kind"], mask["tested"]) == ("causal", 256)
