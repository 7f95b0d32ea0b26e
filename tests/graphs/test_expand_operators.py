"""Operators that are expanded into standard operators give the same results in float64.

The oracle is the evaluator's kernel of each operator. The kernels were written from the specification, independently of
the expansions; other tests compare them with onnx's vectors and with ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from operator_cases import BOOL, BY_HEADS, CASES, FLAT, FLOAT, INT, INT32, SHORTER, B, D, N, S, arrays

from posexport.graphs.evaluate import Evaluator
from posexport.graphs.expand import expand


def model_of(domain: str, kind: str, inputs: list[Any], attributes: dict[str, Any], outputs: int) -> ir.Model:
    dtypes = {np.dtype(np.float64): FLOAT, np.dtype(np.int64): INT, np.dtype(np.int32): INT32, np.dtype(bool): BOOL}
    names = ["" if array is None else f"x{index}" for index, array in enumerate(inputs)]
    given = [(name, array) for name, array in zip(names, inputs, strict=True) if array is not None]
    made = [f"y{index}" for index in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(kind, names, made, name="operator", domain=domain, **attributes)],
        "graph",
        [helper.make_tensor_value_info(name, dtypes[array.dtype], array.shape) for name, array in given],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in made],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets))


@pytest.mark.parametrize("name", CASES)
def test_an_operator_written_out_is_the_same_function(name: str) -> None:
    _, kind, inputs, _, outputs = CASES[name]
    given = {f"x{index}": torch.from_numpy(array) for index, array in enumerate(inputs) if array is not None}
    expected = Evaluator(model_of(*CASES[name])).run(given)
    model = model_of(*CASES[name])
    expanded = expand(model, {key: tuple(value.shape) for key, value in given.items()})
    assert [one.name for one in expanded] == ["y0"]
    assert {node.domain for node in model.graph} == {""}
    assert kind not in {node.op_type for node in model.graph}
    actual = Evaluator(model).run(given)
    assert [*actual] == [*expected] == [f"y{index}" for index in range(outputs)]
    for key, value in expected.items():
        assert value.shape == actual[key].shape
        assert torch.isfinite(actual[key]).all()
        assert torch.allclose(value, actual[key], rtol=0, atol=1e-12), key


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scale", {"scale": 0.30001}),
        ("causal", {"is_causal": 0}),
        ("softcap", {"softcap": 2.001}),
        ("rotation", {"interleaved": 1}),
        ("multi head of another size", {"unidirectional": 0}),
        ("grouped step", {"local_window_size": 3}),
        ("grouped in all directions", {"local_window_size": 2}),
        ("grouped with a smooth softmax", {"smooth_softmax": 0}),
        ("grouped with norms", {"qk_norm_epsilon": 0.011}),
        ("causal, of given lengths", {"is_causal": 0}),
        ("window", {"left_window_size": 1}),
        ("window on both sides", {"right_window_size": 2}),
        ("packed causal", {"unidirectional": 0}),
        ("packed without biases", {"scale": 0.30001}),
    ],
)
def test_another_attribute_is_another_function(name: str, change: dict[str, Any]) -> None:
    """Shows that the comparison above can fail."""
    domain, kind, inputs, attributes, outputs = CASES[name]
    given = {f"x{index}": torch.from_numpy(array) for index, array in enumerate(inputs) if array is not None}
    expected = Evaluator(model_of(*CASES[name])).run(given)["y0"]
    model = model_of(domain, kind, inputs, attributes | change, outputs)
    expand(model, {key: tuple(value.shape) for key, value in given.items()})
    assert not torch.allclose(Evaluator(model).run(given)["y0"], expected, rtol=0, atol=1e-9)


def test_what_is_not_understood_stays_an_operator() -> None:
    inputs = [*arrays(*FLAT), None, None, None, None, np.array([S, S])]
    model = model_of("", "Attention", inputs, BY_HEADS, 1)
    assert (
        expand(model, {f"x{index}": tuple(array.shape) for index, array in enumerate(inputs) if array is not None})
        == []
    )
    assert [node.op_type for node in model.graph] == ["Attention"]


@pytest.mark.parametrize(
    ("name", "change", "outputs", "reason"),
    [
        ("packed plain", {"do_rotary": 1}, 1, "it rotates its queries and keys"),
        ("packed of other sizes", {}, 2, "its output 'y1' is read"),
        ("shorter", {}, 1, "its mask is shorter than its keys"),
        ("shorter behind a cache", {}, 3, "its mask is shorter than its keys"),
        ("plain", {}, 4, "its output 'y3' is read"),
    ],
)
def test_why_an_operator_stays_is_said(name: str, change: dict[str, Any], outputs: int, reason: str) -> None:
    domain, kind, inputs, attributes, _ = (CASES | SHORTER)[name]
    model, refused = model_of(domain, kind, inputs, attributes | change, outputs), dict[ir.Node, str]()
    shapes = {f"x{index}": tuple(array.shape) for index, array in enumerate(inputs) if array is not None}
    assert expand(model, shapes, refused=refused) == []
    assert [text.startswith(reason) for text in refused.values()] == [True]


HEADS_OF_ALL = arrays(*(FLAT[:1] * 3))
PADDING = np.array([[1] * S, [1] * (S - 2) + [0] * 2], np.int32)
LONGER = arrays((B, S + 2, N * D))[0]


@pytest.mark.parametrize(
    ("inputs", "attributes", "reason"),
    [
        ([*HEADS_OF_ALL, None, PADDING], {"mask_filter_value": -3.0}, "its mask_filter_value hides no keys"),
        (
            [HEADS_OF_ALL[0], LONGER, LONGER],
            {"unidirectional": 1},
            "it is unidirectional, and its keys are not as many",
        ),
        (
            [HEADS_OF_ALL[0], *arrays((B, N, S + 2, D), (B, N, S + 2, D))],
            {"unidirectional": 1},
            "it is unidirectional, and its keys are not as many",
        ),
    ],
    ids=["a mild filter", "other keys", "other keys by heads"],
)
def test_what_the_expansion_does_not_say_stays_an_operator(
    inputs: list[Any], attributes: dict[str, Any], reason: str
) -> None:
    model = model_of("com.microsoft", "MultiHeadAttention", inputs, {"num_heads": N, **attributes}, 1)
    refused: dict[ir.Node, str] = {}
    shapes = {f"x{index}": tuple(array.shape) for index, array in enumerate(inputs) if array is not None}
    assert expand(model, shapes, refused=refused) == []
    assert [text.startswith(reason) for text in refused.values()] == [True]


def test_the_usual_filter_is_padding() -> None:
    inputs = [*HEADS_OF_ALL, None, PADDING]
    model = model_of("com.microsoft", "MultiHeadAttention", inputs, {"num_heads": N, "mask_filter_value": -1e4}, 1)
    shapes = {f"x{index}": tuple(array.shape) for index, array in enumerate(inputs) if array is not None}
    assert len(expand(model, shapes)) == 1


def test_only_the_named_operators_are_written_out() -> None:
    model = model_of(*CASES["plain"])
    assert expand(model, {f"x{index}": shape for index, shape in enumerate(FLAT)}, names=()) == []
