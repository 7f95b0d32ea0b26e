"""Audio inputs are long enough for the convolutions after them. The oracle is torch's convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.graphs.axes import FRAMES
from posexport.graphs.roles import roles_of
from posexport.graphs.sizes import fitted
from posexport.verify.graph.cases import drawn_cases

Layer = tuple[str, int, int, int]
"""Operator, kernel, stride and dilation."""

LAYERS: dict[str, list[Layer]] = {
    "Moonshine": [("Conv", 127, 64, 1), ("Conv", 7, 3, 1), ("Conv", 3, 2, 1)],
    "wav2vec": [("Conv", 10, 5, 1), *[("Conv", 3, 2, 1)] * 4, *[("Conv", 2, 2, 1)] * 2],
    "pooled": [("Conv", 9, 4, 3), ("MaxPool", 5, 3, 1), ("AveragePool", 4, 4, 1)],
    "short": [("Conv", 3, 1, 1), ("Conv", 3, 2, 1)],
}
WIDTH = 4


def sound(layers: list[Layer], with_kernel: bool = True) -> onnx.ModelProto:
    """A graph from audio [batch, samples] through layers to tokens that are multiplied with a weight."""
    g = Graph()
    value, channels = g.op("Unsqueeze", "input_values", g.constant([1])), 1
    for operator, kernel, stride, dilation in layers:
        inputs, fields = [value], {"kernel_shape": [kernel], "strides": [stride]}
        if operator == "Conv":
            inputs.append(g.weight(f"w{len(g.nodes)}", np.ones((WIDTH, channels, kernel), np.float32)))
            fields, channels = fields | {"dilations": [dilation]}, WIDTH
            fields = fields if with_kernel else {key: fields[key] for key in ("strides", "dilations")}
        value = g.op("Tanh", g.op(operator, *inputs, **fields))
    tokens = g.op("Transpose", value, perm=[0, 2, 1])
    mixed = g.op("MatMul", tokens, g.weight("mix", np.ones((WIDTH, WIDTH), np.float32)))
    far = g.weight(
        "far", np.ones((WIDTH, WIDTH, 128), np.float32)
    )  # a convolution over tokens, with padding at both ends
    g.op("Conv", g.op("Transpose", mixed, perm=[0, 2, 1]), far, pads=[64, 64], name="y")
    given = helper.make_tensor_value_info("input_values", TensorProto.FLOAT, ["batch", "samples"])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH, "tokens"])
    graph = helper.make_graph(g.nodes, "graph", [given], [made], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def tokens_of(layers: list[Layer], samples: int) -> int:
    """The number of tokens that torch's layers give for so many samples; 0 if they do not accept them."""
    value: Any = torch.zeros(1, 1, samples)
    try:
        for operator, kernel, stride, dilation in layers:
            if operator == "Conv":
                value = torch.nn.functional.conv1d(value, torch.ones(1, 1, kernel), stride=stride, dilation=dilation)
            else:
                value = torch.nn.functional.avg_pool1d(value, kernel, stride)
    except RuntimeError:
        return 0
    return int(value.shape[-1])


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_as_many_tokens_as_asked(name: str, with_kernel: bool) -> None:
    roles = roles_of(ir.from_proto(sound(LAYERS[name], with_kernel)))
    length, step = roles["input_values"].frames
    assert [tokens_of(LAYERS[name], length + extra) for extra in (-1, 0, step - 1, step)] == [0, 1, 1, 2]
    for tokens in (1, 8, 200):
        samples = fitted(roles, {"seq": tokens})[FRAMES]
        least = tokens_of(LAYERS[name], 256 + step - 1)  # tokens of a short sound, in whole steps
        assert samples >= 256 and tokens_of(LAYERS[name], samples) == max(tokens, least)


def test_cases_have_several_lengths() -> None:
    cases = drawn_cases(roles_of(ir.from_proto(sound(LAYERS["Moonshine"]))), 0)
    lengths = {case.arrays["input_values"].shape[1] for case in cases}
    assert len(lengths) > 3 and min(tokens_of(LAYERS["Moonshine"], length) for length in lengths) >= 8


@pytest.mark.parametrize("computed", [True, False])
def test_sound_that_is_cut_into_frames_has_whole_ones(computed: bool) -> None:
    """A streaming encoder reshapes its audio into frames; a partial frame is an error."""
    g = Graph()
    shape = g.constant([0, -1, 80])
    if computed:
        rows = g.op("Slice", g.op("Shape", "input_values"), g.constant([0]), g.constant([1]))
        shape = g.op("Concat", rows, g.constant([-1]), g.constant([80]), axis=0)
    frames = g.op("Transpose", g.op("Reshape", "input_values", shape), perm=[0, 2, 1])
    g.op("Conv", frames, g.weight("w", np.ones((WIDTH, 80, 5), np.float32)), strides=[2], name="y")
    given = helper.make_tensor_value_info("input_values", TensorProto.FLOAT, ["batch", "samples"])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH, "tokens"])
    graph = helper.make_graph(g.nodes, "graph", [given], [made], g.weights)
    roles = roles_of(ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])))
    assert roles["input_values"].frames == (
        400,
        160,
    )  # five frames for the first token, and two more for each other token
    lengths = {case.arrays["input_values"].shape[1] for case in drawn_cases(roles, 0)}
    assert len(lengths) > 3 and all(length % 80 == 0 for length in lengths)


def test_sound_without_convolutions_is_short() -> None:
    assert fitted(roles_of(ir.from_proto(sound([]))), {"seq": 9})[FRAMES] == 256
