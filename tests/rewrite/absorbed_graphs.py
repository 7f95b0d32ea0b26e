"""Attention graphs with nodes that have no effect on short rows of usual numbers, without an import of posexport."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper
from small_graphs import Graph

HEADS, SIZE, HIDDEN = 4, 8, 32
FAR = 300
"""A number of tokens. Nodes that depend on lengths have an effect only from about 256 tokens on."""

Hook = Callable[[Graph, str], str]


def same(g: Graph, value: str) -> str:
    return value


def by_heads(g: Graph) -> str:
    return g.constant([0, 0, HEADS, SIZE])


def many(g: Graph) -> str:
    """The number of tokens [1]."""
    return g.length("features", 1)


def long(g: Graph) -> str:
    """Whether there are more than 256 tokens."""
    return g.op("Greater", g.length("features", 1), g.constant([256]))


def growing(g: Graph) -> str:
    """max(1, log(n) / log(256)) for n tokens, as Qwen scales queries."""
    count = g.op("Cast", g.length("features", 1), to=TensorProto.FLOAT)
    return g.op(
        "Max", g.op("Mul", g.op("Log", count), g.constant(1 / np.log(256), np.float32)), g.constant([1.0], np.float32)
    )


def model_of(
    *,
    q: Hook = same,
    k: Hook = same,
    v: Hook = same,
    scores: Hook = same,
    weights: Hook = same,
    merged: Hook = same,
    split: Callable[[Graph], str] = by_heads,
    encoder: bool = False,
) -> onnx.ModelProto:
    """Attention with a hook at each step.

    The hooks change the queries, keys and values [B, N, T, D], the scores, the weights and the merged result
    [B, T, N * D]. A hook may read an input attention_mask [B, T]. `split` gives the shape [B, T, N, D] of the
    projections. With `encoder`, keys and values come from encoder_hidden_states [B, E, HIDDEN].
    """
    g = Graph()

    def heads(name: str, hook: Hook) -> str:
        source = "encoder_hidden_states" if encoder and name != "q" else "features"
        projected = g.op("MatMul", source, g.random(f"{name}_proj", HIDDEN, HIDDEN))
        return hook(g, g.op("Transpose", g.op("Reshape", projected, split(g)), perm=[0, 2, 1, 3]))

    queries, keys, values = heads("q", q), heads("k", k), heads("v", v)
    product = g.op("MatMul", queries, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    logits = scores(g, g.op("Mul", product, g.constant(SIZE**-0.5, np.float32)))
    mixed = g.op("MatMul", weights(g, g.op("Softmax", logits, axis=-1)), values)
    joined = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    g.op("MatMul", merged(g, joined), g.random("o_proj", HIDDEN, HIDDEN), name="output")
    features, output = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    )
    inputs = [features]
    if encoder:
        shape = ["batch", "encoder", HIDDEN]
        inputs.append(helper.make_tensor_value_info("encoder_hidden_states", TensorProto.FLOAT, shape))
    if any("attention_mask" in node.input for node in g.nodes):
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "seq"]))
    graph = helper.make_graph(g.nodes, "main_graph", inputs, [output], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model
