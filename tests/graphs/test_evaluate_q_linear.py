"""ONNX Runtime's operators on quantised tensors, compared with ONNX Runtime. A result may differ by one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import MICROSOFT, Array, evaluated, normal, one_node, run
from onnx import TensorProto, helper

from posexport.graphs.kernels.registry import KERNELS

RANDOM = np.random.default_rng(3)


def whole(*shape: int, signed: bool = False) -> Array:
    return RANDOM.integers(-128, 128, shape).astype(np.int8) if signed else RANDOM.integers(0, 256, shape, np.uint8)


def scale(number: float) -> Array:
    return np.array(number, np.float32)


def zero(number: int, signed: bool = False) -> Array:
    return np.array(number, np.int8 if signed else np.uint8)


ROWS = [whole(2, 3, 4), scale(0.1), zero(100)]
LOGITS = [whole(2, 3, 7), scale(0.03), zero(90), scale(1 / 256), zero(0)]
PICTURE = [whole(2, 3, 6, 5), scale(0.05), zero(117)]
CASES: dict[str, tuple[str, list[Array | None], dict[str, Any]]] = {
    "sum": ("QLinearAdd", [*ROWS, whole(4), scale(0.2), zero(9), scale(0.3), zero(90)], {}),
    "signed sum": (
        "QLinearAdd",
        [
            *[whole(3, 4, signed=True), scale(0.1), zero(5, signed=True)],
            *[whole(3, 4, signed=True), scale(0.2), zero(-9, signed=True)],
            *[scale(0.3), zero(-3, signed=True)],
        ],
        {},
    ),
    "product": ("QLinearMul", [*ROWS, whole(3, 1), scale(0.02), zero(90), scale(0.1), zero(128)], {}),
    "pool": ("QLinearAveragePool", [*PICTURE, scale(0.04), zero(111)], {"kernel_shape": [2, 3], "strides": [2, 1]}),
    "global pool": ("QLinearGlobalAveragePool", [*PICTURE, scale(0.01), zero(111)], {}),
    "leaky": ("QLinearLeakyRelu", [*PICTURE, scale(0.04), zero(50)], {"alpha": 0.2}),
    "sigmoid": ("QLinearSigmoid", [*PICTURE, scale(1 / 256), zero(0)], {}),
    "softmax": ("QLinearSoftmax", LOGITS, {"of": 13, "axis": -1}),
    "softmax of two axes": ("QLinearSoftmax", LOGITS, {"of": 12, "axis": 1}),
    "parts": (
        "QLinearConcat",
        [scale(0.2), zero(100), whole(2, 3), scale(0.1), zero(90), whole(2, 4), scale(0.3), zero(120)],
        {"axis": 1},
    ),
    "choice": (
        "QLinearWhere",
        [
            RANDOM.random((3, 4)) < 0.5,
            *[whole(3, 4), scale(0.1), zero(90)],
            *[whole(4), scale(0.2), zero(110)],
            *[scale(0.15), zero(100)],
        ],
        {},
    ),
    "gemm": (
        "QGemm",
        [
            *[whole(3, 4), scale(0.1), zero(120), whole(4, 5), scale(0.02), zero(130)],
            *[np.arange(5, dtype=np.int32) * 40, scale(0.3), zero(100)],
        ],
        {},
    ),
    # Weights of 7 bits: on CPUs without VNNI, ONNX Runtime's sums of two products with signed weights saturate.
    "gemm of columns": (
        "QGemm",
        [whole(4, 3), scale(0.1), zero(120), whole(5, 4, signed=True) // 2, np.abs(normal(5)), np.zeros(5, np.int8)],
        {"transA": 1, "transB": 1, "alpha": 0.5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_quantised_operators(name: str) -> None:
    operator, inputs, attributes = CASES[name]
    wide = operator == "QGemm" and len(inputs) < 8
    kind = TensorProto.FLOAT if wide else TensorProto.INT8 if name == "signed sum" else TensorProto.UINT8
    plain = {key: value for key, value in attributes.items() if key != "of"}
    model, feeds = one_node(operator, inputs, domain=MICROSOFT, dtypes={0: kind}, **plain)
    if operator == "QLinearSoftmax":
        model.graph.node[0].attribute.append(helper.make_attribute("opset", attributes["of"]))
    ([expected], [found]) = run(model, feeds), evaluated(model, feeds)
    assert found.shape == expected.shape
    assert len(np.unique(expected)) > 4  # not all values saturate
    bound = 1e-5 * np.abs(expected).max() if wide else 1
    assert np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() <= bound
    if not wide:
        assert found.dtype == expected.dtype
        assert (found != expected).mean() < 0.1


def test_every_such_operator_is_tried() -> None:
    tried = {operator for operator, *_ in CASES.values()}
    assert tried == {name for domain, name in KERNELS if domain == MICROSOFT and name.startswith(("QLinear", "QGemm"))}
