"""Decoders that compute their angles in unusual ways. This file does not import posexport."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import small_graphs
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]


def changed(name: str, value: Array, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """A decoder with another value in one initializer."""
    model = small_graphs.decoder() if model is None else model
    weight = next(one for one in model.graph.initializer if one.name == name)
    weight.CopyFrom(numpy_helper.from_array(value, name))
    return model


def frequencies(theta: float = 10_000.0) -> Array:
    powers = theta ** (-np.arange(0, small_graphs.SIZE, 2) / small_graphs.SIZE)
    return powers.astype(np.float32).reshape(1, 1, -1)


def edited(*, rows: bool = False, mask: bool = False, negative: bool = False) -> onnx.ModelProto:
    """A decoder with one or more changes.

    - `rows`: all rows have the positions of the first row.
    - `mask`: the sine is 0 at padding.
    - `negative`: the negative sine is a value of its own.
    """
    model = small_graphs.decoder()
    graph = model.graph
    nodes = list(graph.node)
    places = {node.output[0]: at for at, node in enumerate(nodes)}
    cos, sin = (next(node for node in nodes if node.op_type == kind) for kind in ("Cos", "Sin"))
    if rows:
        start = next(node for node in nodes if "position_ids" in node.input)
        graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
        graph.node.insert(0, helper.make_node("Gather", ["position_ids", "first"], ["of_first"], name="g", axis=0))
        start.input[0] = "of_first"
    if mask:
        graph.initializer.append(numpy_helper.from_array(np.array([1, 3]), "inner"))
        graph.initializer.append(numpy_helper.from_array(np.float32(0), "nothing"))
        new = [
            helper.make_node("Shape", ["input_ids"], ["seq_of_ids"], name="n0", start=1, end=2),
            helper.make_node("Neg", ["seq_of_ids"], ["from"], name="n1"),
            helper.make_node("Slice", ["attention_mask", "from", "huge", "axis_one"], ["of_new"], name="n2"),
            helper.make_node("Cast", ["of_new"], ["as_bool"], name="n3", to=TensorProto.BOOL),
            helper.make_node("Unsqueeze", ["as_bool", "inner"], ["wide"], name="n4"),
            helper.make_node("Where", ["wide", "raw", "nothing"], [sin.output[0]], name="n5"),
        ]
        graph.initializer.append(numpy_helper.from_array(np.array([2**62]), "huge"))
        graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis_one"))
        sin.output[0] = "raw"
        for offset, node in enumerate(new):
            graph.node.insert(places[cos.output[0]] + 2 + offset, node)
    if negative:
        graph.node.insert(places[sin.output[0]] + 1, helper.make_node("Neg", [sin.output[0]], ["nsin"], name="nsin"))
        for node in [node for node in graph.node if node.op_type == "Mul" and sin.output[0] in node.input]:
            turned = next(one for one in graph.node if one.output[0] == node.input[0])
            negated = next(one for one in graph.node if one.output[0] == turned.input[0])
            # (-b, a) * sin as (b, a) * (nsin, sin)
            turned.input[0] = negated.input[0]
            graph.node.remove(negated)
            node.input[1] = "both_sines"
        halves = [
            helper.make_node("Slice", [one, "zero1", "half1", "last1"], [f"{one}_half"], name=f"s{at}")
            for at, one in enumerate(("nsin", sin.output[0]))
        ]
        joined = helper.make_node(
            "Concat", ["nsin_half", f"{sin.output[0]}_half"], ["both_sines"], name="joined", axis=-1
        )
        for name, number in (("zero1", 0), ("half1", small_graphs.SIZE // 2), ("last1", 3)):
            graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
        for offset, node in enumerate((*halves, joined)):
            graph.node.insert(places[sin.output[0]] + 2 + offset, node)
    onnx.checker.check_model(model, full_check=True)
    return model


def table(rows: int) -> onnx.ModelProto:
    """A decoder that looks cosines and sines up in float32 tables, folded from products in float32."""
    model = small_graphs.decoder()
    graph = model.graph
    angles = (np.arange(rows, dtype=np.float32)[:, None] * frequencies().reshape(1, -1)).astype(np.float32)
    for kind, function in (("Cos", np.cos), ("Sin", np.sin)):
        node = next(one for one in graph.node if one.op_type == kind)
        at_node = list(graph.node).index(node)
        graph.initializer.append(
            numpy_helper.from_array(np.tile(function(angles), 2).astype(np.float32), f"{kind}_table")
        )
        new = [
            helper.make_node("Gather", [f"{kind}_table", "position_ids"], [f"{kind}_rows"], name=f"{kind}_rows"),
            helper.make_node("Unsqueeze", [f"{kind}_rows", "axis_one"], [node.output[0]], name=f"{kind}_wide"),
        ]
        graph.node.remove(node)
        for offset, one in enumerate(new):
            graph.node.insert(at_node + offset, one)
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis_one"))
    return model


def halved() -> onnx.ModelProto:
    """A decoder in half precision that computes its angles in float32."""
    model = small_graphs.decoder()
    graph = model.graph
    for weight in graph.initializer:
        if weight.data_type == TensorProto.FLOAT and weight.name != "inv_freq":
            array = np.clip(numpy_helper.to_array(weight), -65504, 65504).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    for info in (*graph.input, *graph.output):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in [node for node in graph.node if node.op_type in ("Cos", "Sin")]:
        name, at_node = node.output[0], list(graph.node).index(node)
        node.output[0] = f"{name}_wide"
        graph.node.insert(
            at_node + 1, helper.make_node("Cast", [f"{name}_wide"], [name], name=f"{name}_half", to=TensorProto.FLOAT16)
        )
    onnx.checker.check_model(model, full_check=True)
    return model


def third_value() -> onnx.ModelProto:
    """A decoder whose rotations read the sine and also a separate value with the negative sine."""
    model = small_graphs.decoder()
    sin = next(node for node in model.graph.node if node.op_type == "Sin")
    for at_node, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type == "Mul" and sin.output[0] in node.input:
            parts = [f"{node.name}_{part}" for part in ("sum", "half", "other")]
            # The graph should compute x sin as (x sin - x (-sin)) / 2, with a separate value for -sin.
            node.output[0], result = parts[1], node.output[0]
            extra = [
                helper.make_node("Mul", [node.input[0], "own_sine"], [parts[2]], name=parts[2]),
                helper.make_node("Sub", [parts[1], parts[2]], [parts[0]], name=parts[0]),
                helper.make_node("Mul", [parts[0], "one_half"], [result], name=f"{parts[0]}_half"),
            ]
            for offset, one in enumerate(extra):
                model.graph.node.insert(at_node + 1 + offset, one)
    place = list(model.graph.node).index(sin)
    model.graph.node.insert(place + 1, helper.make_node("Neg", [sin.output[0]], ["own_sine"], name="own_sine"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "one_half"))
    return model
