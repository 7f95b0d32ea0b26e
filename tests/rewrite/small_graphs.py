"""Small attention graphs, written by hand with onnx as exporters write them. This file does not import posexport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

VOCABULARY, HIDDEN, HEADS, KV_HEADS, SIZE = 19, 32, 4, 2, 8


class Graph:
    """Builds the nodes and weights of a graph."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """The output of a new node."""
        output = name or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def parts(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """The outputs of a new node with several outputs."""
        outputs = [f"{kind.lower()}_{len(self.nodes)}_{at}" for at in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"node_{outputs[0]}", **attributes))
        return outputs

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant as an initializer, as torch exports it."""
        return self.weight(f"const_{len(self.weights)}", np.asarray(value, dtype))

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """An initializer."""
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def random(self, name: str, *shape: int) -> str:
        """A random weight."""
        return self.weight(name, (self._rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def length(self, value: str, axis: int) -> str:
        """The length [1] of an axis."""
        return self.op("Shape", value, start=axis, end=axis + 1)


def causal(g: Graph, scores: str) -> str:
    """Causal mask, bool [S, T], of scores [B, N, S, T] whose last query is at the last key."""
    rows, keys = (
        g.op("Range", g.constant(0), g.op("Squeeze", g.length(scores, axis)), g.constant(1)) for axis in (2, 3)
    )
    first = g.op("Sub", g.length(scores, 3), g.length(scores, 2))
    return g.op("LessOrEqual", keys, g.op("Unsqueeze", g.op("Add", rows, first), g.constant([1])))


def decoder(
    *,
    layers: int = 1,
    rope: bool = True,
    cache: bool = True,
    opset: int = 18,
    seed: int = 0,
    length_of: str = "mask",
    one_cache: bool = False,
) -> onnx.ModelProto:
    """A causal decoder with grouped heads, RoPE of the layout half, a padding mask and a cache.

    The causal mask takes the number of keys from what `length_of` names: the padding `mask`, the `keys` after the
    cache, or the keys `repeated` for all heads. With `one_cache`, all layers read the keys and values of the first.
    """
    g = Graph(seed)
    inputs = [_info("input_ids", TensorProto.INT64, "batch", "seq")]
    inputs.append(_info("attention_mask", TensorProto.INT64, "batch", "total" if cache else "seq"))
    inputs.append(_info("position_ids", TensorProto.INT64, "batch", "seq"))
    outputs = [_info("logits", TensorProto.FLOAT, "batch", "seq", VOCABULARY)]
    x = g.op("Gather", g.random("embed.weight", VOCABULARY, HIDDEN), "input_ids")
    cos, sin = _angles(g) if rope else ("", "")
    seen = _seen(g, cache) if length_of == "mask" else ""
    for layer in range(layers):
        owner = 0 if one_cache else layer
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")] if cache and owner == layer else []
        present = [f"present.{owner}.{kind}" for kind in ("key", "value")]
        inputs += [_info(name, TensorProto.FLOAT, "batch", KV_HEADS, "past", SIZE) for name in past]
        outputs += [_info(name, TensorProto.FLOAT, "batch", KV_HEADS, "total", SIZE) for name in present[: len(past)]]
        x = g.op("Add", x, _attention(g, x, layer, (cos, sin) if rope else None, seen or length_of, past, present))
    g.op("MatMul", x, g.random("head.weight", HIDDEN, VOCABULARY), name="logits")
    return _model(g, inputs, outputs, opset)


def no_attention(opset: int = 18) -> onnx.ModelProto:
    """A graph without attention."""
    g = Graph()
    hidden = g.op("Relu", g.op("MatMul", "x", g.random("w", HIDDEN, 3 * HIDDEN)))
    g.op("Softmax", g.op("MatMul", hidden, g.random("v", 3 * HIDDEN, 5)), axis=-1, name="y")
    inputs, outputs = [_info("x", TensorProto.FLOAT, "batch", HIDDEN)], [_info("y", TensorProto.FLOAT, "batch", 5)]
    return _model(g, inputs, outputs, opset)


def with_operator(model: onnx.ModelProto, kind: str, domain: str) -> bool:
    """Whether a node of this kind is in the main graph or a function."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(node.op_type == kind and node.domain == domain for node in nodes)


def _info(name: str, dtype: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(
    g: Graph, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto], opset: int
) -> onnx.ModelProto:
    graph = helper.make_graph(g.nodes, "main_graph", inputs, outputs, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], producer_name="by hand")
    model.ir_version = 9
    model.metadata_props.add(key="author", value="somebody else")
    onnx.checker.check_model(model, full_check=model.ByteSize() < 10**6)
    return model


def _angles(g: Graph) -> tuple[str, str]:
    """Cosines and sines [B, 1, S, D]."""
    frequencies = 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    places = g.op("Cast", g.op("Unsqueeze", "position_ids", g.constant([2])), to=TensorProto.FLOAT)
    angles = g.op("Mul", places, g.weight("inv_freq", frequencies.astype(np.float32).reshape(1, 1, -1)))
    angles = g.op("Unsqueeze", g.op("Concat", angles, angles, axis=-1), g.constant([1]))
    return g.op("Cos", angles), g.op("Sin", angles)


def _seen(g: Graph, cache: bool, keys_of: str | None = None) -> str:
    """The mask [B, 1, S, T]: 0 where a token sees a key, and the lowest float32 elsewhere.

    The number of keys is that of `keys_of` [B, K, T, D] if given, otherwise that of attention_mask.
    """
    seq, total = g.length("input_ids", 1), g.length(keys_of, 2) if keys_of else g.length("attention_mask", 1)
    zero, one = g.constant(0), g.constant(1)
    keys = g.op("Range", zero, g.op("Squeeze", total), one)
    queries = g.op("Range", zero, g.op("Squeeze", seq), one)
    if cache:
        queries = g.op("Add", queries, g.op("Sub", total, seq))
    before = g.op("LessOrEqual", keys, g.op("Unsqueeze", queries, g.constant([1])))
    valid = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.constant([1, 2])), to=TensorProto.BOOL)
    least = g.constant(np.finfo(np.float32).min, np.float32)
    return g.op("Where", g.op("And", before, valid), g.constant(0.0, np.float32), least)


def _attention(
    g: Graph, x: str, layer: int, angles: tuple[str, str] | None, seen: str, past: Sequence[str], present: Sequence[str]
) -> str:
    def heads(name: str, count: int) -> str:
        weight = g.random(f"layers.{layer}.{name}.weight", HIDDEN, count * SIZE)
        split = g.op("Reshape", g.op("MatMul", x, weight), g.constant([0, 0, count, SIZE]))
        return g.op("Transpose", split, perm=[0, 2, 1, 3])

    q, k, v = heads("q_proj", HEADS), heads("k_proj", KV_HEADS), heads("v_proj", KV_HEADS)
    if angles is not None:
        q, k = _rotated(g, q, angles), _rotated(g, k, angles)
    if past:
        k = g.op("Concat", past[0], k, axis=2, name=present[0])
        v = g.op("Concat", past[1], v, axis=2, name=present[1])
    elif layer and present[0].startswith("present.0."):
        k, v = present
    seen = _seen(g, bool(past), k) if seen == "keys" else seen
    k, v = (_repeated(g, value) for value in (k, v))
    seen = _seen(g, bool(past), k) if seen == "repeated" else seen
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    weights = g.op("Softmax", g.op("Add", scores, seen), axis=-1, name=f"attention_{layer}")
    merged = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    merged = g.op("Reshape", merged, g.constant([0, 0, HEADS * SIZE]))
    return g.op("MatMul", merged, g.random(f"layers.{layer}.o_proj.weight", HEADS * SIZE, HIDDEN))


def _rotated(g: Graph, x: str, angles: tuple[str, str]) -> str:
    def part(start: int, end: int) -> str:
        return g.op("Slice", x, g.constant([start]), g.constant([end]), g.constant([3]))

    turned = g.op("Concat", g.op("Neg", part(SIZE // 2, SIZE)), part(0, SIZE // 2), axis=-1)
    return g.op("Add", g.op("Mul", x, angles[0]), g.op("Mul", turned, angles[1]))


def _repeated(g: Graph, x: str) -> str:
    """Repeats each key head for the query heads that share it."""
    groups = HEADS // KV_HEADS
    shape = g.op("Concat", g.length(x, 0), g.constant([KV_HEADS, groups]), g.length(x, 2), g.constant([SIZE]), axis=0)
    wide = g.op("Expand", g.op("Unsqueeze", x, g.constant([2])), shape)
    flat = g.op("Concat", g.length(x, 0), g.constant([HEADS]), g.length(x, 2), g.constant([SIZE]), axis=0)
    return g.op("Reshape", wide, flat)


def run(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def inputs(batch: int, seq: int, past: int, left: int = 0, layers: int = 1) -> dict[str, Array]:
    """`seq` tokens after `past` cached ones. The first `left` tokens of each row except the first are padding."""
    rng = np.random.default_rng(seq)
    mask = np.ones((batch, past + seq), np.int64)
    mask[1:, :left] = 0
    places = np.maximum(mask.cumsum(1) - 1, 0)[:, past:]
    arrays: dict[str, Array] = {
        "input_ids": rng.integers(0, 19, (batch, seq)),
        "attention_mask": mask,
        "position_ids": places,
    }
    for layer in range(layers):
        for kind in ("key", "value"):
            arrays[f"past_key_values.{layer}.{kind}"] = rng.standard_normal((batch, 2, past, 8)).astype(np.float32)
    return arrays


SHAPES = [(1, 1, 0, 0), (2, 6, 0, 2), (3, 1, 9, 4), (2, 4, 5, 1)]
"""Batch, tokens, cached tokens, padding on the left."""
