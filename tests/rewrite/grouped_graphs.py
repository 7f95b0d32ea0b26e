"""Graphs with GroupQueryAttention, as model builders for ONNX Runtime write them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper
from small_graphs import HEADS, HIDDEN, KV_HEADS, SIZE, Graph


def grouped(**options: int) -> onnx.ModelProto:
    """GroupQueryAttention that does its own rotation, as onnxruntime-genai's builder writes it.

    `options` are further attributes of the operator.
    """
    g, heads, kv_heads, size, width = Graph(), HEADS, KV_HEADS, SIZE, HIDDEN
    angles = np.outer(np.arange(64), 10_000.0 ** (-np.arange(size // 2) * 2 / size))
    q, k, v = (
        g.op("MatMul", "inputs_embeds", g.random(name, width, n * size), name=name + "_out")
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    last = g.op("Sub", g.op("ReduceSum", "attention_mask", g.constant([1]), keepdims=0), g.constant(1))
    last, total = (
        g.op("Cast", length, to=TensorProto.INT32) for length in (last, g.op("Squeeze", g.length("attention_mask", 1)))
    )
    tables = [g.weight(name, turn(angles).astype(np.float32)) for name, turn in (("cos", np.cos), ("sin", np.sin))]
    caches = [f"past_key_values.0.{part}" for part in ("key", "value")]
    outputs = ["attended", "present.0.key", "present.0.value"]
    options |= {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    inputs = [q, k, v, *caches, last, total, *tables]
    kind, domain = "GroupQueryAttention", "com.microsoft"
    g.nodes.append(helper.make_node(kind, inputs, outputs, name="attention", domain=domain, **options))
    given = {
        "inputs_embeds": (["batch", "seq", width], np.float32),
        "attention_mask": (["batch", "total"], np.int64),
        **{name: (["batch", kv_heads, "past", size], np.float32) for name in caches},
    }
    made = [["batch", "seq", width], *[["batch", kv_heads, "total", size]] * 2]
    float_, kinds = TensorProto.FLOAT, {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64}
    graph = helper.make_graph(
        g.nodes,
        "grouped",
        [helper.make_tensor_value_info(name, kinds[kind], shape) for name, (shape, kind) in given.items()],
        [helper.make_tensor_value_info(name, float_, dims) for name, dims in zip(outputs, made, strict=True)],
        g.weights,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
