"""Forms of operators that onnx's test vectors do not use (older opsets, sequences), against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from one_node import assert_same, compare, evaluated, normal, run
from onnx import TensorProto, helper

INT64 = TensorProto.INT64
X = normal(2, 3, 4)
IMAGE = normal(1, 4, 5, 6)

OLDER: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "squeeze": ("Squeeze", [normal(2, 1, 3, 1)], {"axes": [1], "opset": 11}),
    "unsqueeze": ("Unsqueeze", [X], {"axes": [0, 4], "opset": 12}),
    "split": ("Split", [X], {"axis": 2, "split": [1, 3], "opset": 11, "outputs": 2}),
    "split-equal": ("Split", [X], {"axis": 1, "opset": 12, "outputs": 3}),
    "split-18": ("Split", [normal(2, 5)], {"axis": 1, "num_outputs": 3, "opset": 18, "outputs": 3}),
    "slice-attributes": ("Slice", [X], {"starts": [0, -2], "ends": [9, -1], "axes": [0, 2], "opset": 9}),
    "reduce-attribute": ("ReduceMean", [X], {"axes": [-1], "keepdims": 0, "opset": 17}),
    "reduce-all": ("ReduceMax", [X], {"opset": 13}),
    "reduce-sum-11": ("ReduceSum", [X], {"axes": [0, 2], "opset": 12}),
    "reduce-whole": ("ReduceMean", [np.array([[1, -2, -2]], np.int64)], {"opset": 17, "dtypes": {0: INT64}}),
    "pad-attribute": ("Pad", [X], {"pads": [0, 1, 0, 1, 0, 2], "value": 1.5, "opset": 10}),
    "clip-attributes": ("Clip", [X], {"min": -0.5, "max": 0.25, "opset": 10}),
    "top-k-attribute": ("TopK", [X], {"k": 2, "opset": 9, "outputs": 2, "dtypes": {1: INT64}}),
    "dropout": ("Dropout", [X], {"ratio": 0.3, "opset": 11, "outputs": 1}),
    "softmax-flat": ("Softmax", [X], {"axis": 1, "opset": 12}),
    "softmax-default": ("Softmax", [X], {"opset": 11}),
    "log-softmax": ("LogSoftmax", [X], {"axis": 2, "opset": 11}),
    "hardmax-flat": ("Hardmax", [X], {"axis": 1, "opset": 11}),
    "upsample": ("Upsample", [IMAGE], {"scales": [1.0, 1.0, 2.0, 1.5], "mode": "linear", "opset": 8}),
    "upsample-input": ("Upsample", [IMAGE, np.array([1, 1, 2, 3], np.float32)], {"opset": 9}),
    "resize-10": ("Resize", [IMAGE, np.array([1, 1, 0.6, 1.5], np.float32)], {"mode": "nearest", "opset": 10}),
    "resize-11": (
        "Resize",
        [IMAGE, np.zeros(0, np.float32), np.array([1, 1, 0.6, 1.5], np.float32)],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners", "opset": 11},
    ),
    "batch-norm-9": ("BatchNormalization", [IMAGE, *(np.abs(normal(4)) for _ in range(4))], {"opset": 9}),
    "group-norm-18": ("GroupNormalization", [IMAGE, normal(2), normal(2)], {"num_groups": 2, "opset": 18}),
    "global-lp-pool": ("GlobalLpPool", [IMAGE], {"p": 3, "opset": 18}),
    "gemm": ("Gemm", [normal(3, 2), normal(4, 3), normal(4)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "conv-1d": ("Conv", [normal(2, 4, 9), normal(6, 2, 3)], {"group": 2, "dilations": [2], "pads": [1, 0]}),
    "conv-same": ("Conv", [IMAGE, normal(2, 4, 3, 2), normal(2)], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "einsum": ("Einsum", [X, normal(2, 5, 4)], {"equation": "b i d, b j d -> b i j"}),
    "mod": ("Mod", [np.array([-7, 7], np.int64), np.array([3, -3], np.int64)], {"dtypes": {0: INT64}}),
    "div": ("Div", [np.array([-7, 7], np.int64), np.array([2, 2], np.int64)], {"dtypes": {0: INT64}}),
    "pow": ("Pow", [np.array([2, 3], np.int64), np.array([2.0, 0.5], np.float32)], {"dtypes": {0: INT64}}),
    "cast": ("Cast", [np.array([1.9, -1.9, 0.5], np.float32)], {"to": INT64, "dtypes": {0: INT64}}),
    "reshape-zero": ("Reshape", [X, np.array([0, -1, 2])], {}),
    "gather-negative": ("Gather", [X, np.array([[-1, 0]])], {"axis": 1}),
    "expand-ones": ("Expand", [normal(3, 1), np.array([2, 1, 4])], {}),
    "cumsum": ("CumSum", [X, np.array(1)], {"exclusive": 1, "reverse": 1}),
    "range": ("Range", [np.array(v, np.float32) for v in (0.0, 2.1, 0.7)], {}),
}


@pytest.mark.parametrize("name", OLDER)
def test_forms_of_operators(name: str) -> None:
    operator, inputs, options = OLDER[name]
    compare(operator, inputs, options.pop("outputs", 1), **options)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')


SEQUENCES = {
    "construct, at": """g (float[2,3] x, float[2,3] y) => (float[2,3] z)
        { s = SequenceConstruct(x, y) i = Constant<value_int = -1>() z = SequenceAt(s, i) }""",
    "erase, concat": """g (float[2,3] x, float[2,3] y) => (float[N,3] z)
        { s = SequenceConstruct(x, y, x, y) i = Constant<value_int = 1>() t = SequenceErase(s, i)
          z = ConcatFromSequence<axis = 0>(t) }""",
    "split, insert, stack": """g (float[2,3] x, float[2,3] y) => (float[N,2,3] z, int64 n)
        { s = SequenceConstruct(x) i = Constant<value_int = 0>() t = SequenceInsert(s, y, i)
          n = SequenceLength(t) z = ConcatFromSequence<axis = 0, new_axis = 1>(t) }""",
    "optional": """g (float[2,3] x, float[2,3] y) => (float[2,3] z, bool b)
        { o = Optional(x) b = OptionalHasElement(o) p = OptionalGetElement(o) z = Add(p, y) }""",
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str) -> None:
    model, feeds = parsed(SEQUENCES[name]), {"x": normal(2, 3), "y": normal(2, 3)}
    assert_same(evaluated(model, feeds), run(model, feeds))


def test_a_range_has_as_many_numbers_as_in_a_runtime() -> None:
    """1.2 and 0.4 in fp32 have a quotient of 3.00000007, and the runtime counts 4."""
    for limit, delta in ((1.0, 0.1), (0.9, 0.3), (2.1, 0.7), (1.2, 0.4)):
        compare("Range", [np.array(v, np.float32) for v in (0.0, limit, delta)])


@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4])
def test_quantised_types(kind: int) -> None:
    """Values saturate to the range of the zero point's type, also with 4 bits."""
    x = np.array([-9e3, -0.75, -0.26, 0.0, 0.25, 0.74, 9e3], np.float32)
    zero = helper.make_tensor("zero", kind, [], [3])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5])
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [7])],
        [scale, zero],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert_same(evaluated(model, {"x": x}), run(model, {"x": x}))
