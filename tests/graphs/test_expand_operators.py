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
from onnx import TensorProto, helper

from posexport.graphs.evaluate import Evaluator
from posexport.graphs.expand import expand

B, S, P, N, K, D = 2, 5, 3, 4, 2, 8
FLOAT, INT, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
MASK = np.tril(np.ones((S, P + S), bool), P)
MASK[2, 4] = False


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape) for shape in shapes]


def bias(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).standard_normal(shape)


FLAT = ((B, S, N * D), (B, S, K * D), (B, S, K * D))
HEADS = ((B, N, S, D), (B, K, S, D), (B, K, S, D))
PAST = ((B, K, P, D), (B, K, P, D))
BY_HEADS = {"q_num_heads": N, "kv_num_heads": K}
COS, SIN = np.cos(bias(B, S, 3)), np.sin(bias(B, S, 3))
TABLES = [np.cos(bias(40, 3)), np.sin(bias(40, 3))]
PLACES = np.array([[3, 1, 7, 30, 2], [0, 39, 5, 6, 6]])

SEEN = np.tril(np.ones((S, S), np.int32))
WEIGHTS = arrays((B, S, 12), (12, 3 * N * D), (3 * N * D,))
PADDED = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]], np.int32)
PACKED: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "plain": (WEIGHTS, {"num_heads": N}, 1),
    "without biases": (WEIGHTS[:2], {"num_heads": N, "scale": 0.3, "do_rotary": 0}, 2),
    "causal": (WEIGHTS, {"num_heads": N, "unidirectional": 1}, 2),
    "of other sizes": (
        arrays((B, S, 12), (12, 2 * N * D + N * 6)),
        {"num_heads": N, "qkv_hidden_sizes": [32, 32, 24]},
        1,
    ),
    "with lengths": ([*WEIGHTS, np.array([3, S], np.int32)], {"num_heads": N}, 1),
    "with ends and starts": ([*WEIGHTS, np.array([3, S, 0, 2], np.int32)], {"num_heads": N}, 1),
    "padded": ([*WEIGHTS, PADDED], {"num_heads": N}, 1),
    "padded mildly": ([*WEIGHTS, PADDED], {"num_heads": N, "mask_filter_value": -3.0}, 1),
    "without keys that are seen": ([*WEIGHTS, np.zeros(B, np.int32)], {"num_heads": N}, 1),
    "with a mask of queries": ([*WEIGHTS, np.stack([SEEN, SEEN[::-1]])], {"num_heads": N}, 1),
    "cached": (
        [*WEIGHTS, np.ones((B, P + S), np.int32), bias(2, B, N, P, D), bias(1, N, S, P + S)],
        {"num_heads": N, "unidirectional": 1},
        2,
    ),
    "cached with a mask of all places": (
        [*WEIGHTS, np.tril(np.ones((B, 1, 20, 20), np.int32)), bias(2, B, N, P, D)],
        {"num_heads": N},
        2,
    ),
}
"""Cases of com.microsoft Attention, which projects its input."""

STEP = [
    *arrays((B, 1, N * D), (B, 1, K * D), (B, 1, K * D), *PAST),
    np.array([P, P - 1], np.int32),
    np.array(P + 1, np.int32),
    np.cos(bias(40, 4)),
    np.sin(bias(40, 4)),
]
"""The inputs of a step of GroupQueryAttention with its rotation."""
PROMPT = [
    *arrays(*FLAT),
    *[None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32), np.cos(bias(40, 4)), np.sin(bias(40, 4))],
]
"""The inputs of a prompt of GroupQueryAttention with its rotation."""

CASES: dict[str, tuple[str, str, list[Any], dict[str, Any], int]] = {
    "plain": ("", "Attention", arrays(*FLAT), BY_HEADS, 1),
    "scale": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "scale": 0.3}, 1),
    "heads": ("", "Attention", arrays(*HEADS), {}, 1),
    "causal": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "is_causal": 1}, 1),
    "softcap": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "softcap": 2.0}, 1),
    "cached": ("", "Attention", [*arrays(*FLAT), MASK, *arrays(*PAST)], BY_HEADS, 3),
    "added": ("", "Attention", [*arrays(*FLAT), bias(B, 1, S, P + S), *arrays(*PAST)], BY_HEADS, 3),
    "cached causal": ("", "Attention", [*arrays(*FLAT), None, *arrays(*PAST)], {**BY_HEADS, "is_causal": 1}, 3),
    "of given lengths": ("", "Attention", [*arrays(*FLAT), *[None] * 3, np.array([S, S - 2])], BY_HEADS, 1),
    "causal, of given lengths": (
        "",
        "Attention",
        [*arrays((B, 2, N * D), *FLAT[1:]), None, None, None, np.array([S, S - 2])],
        {**BY_HEADS, "is_causal": 1},
        1,
    ),
    "of lengths that hide queries": (
        "",
        "Attention",
        [*arrays(*FLAT), None, None, None, np.array([2, S])],
        {**BY_HEADS, "is_causal": 1},
        1,
    ),
    "masked, of given lengths": (
        "",
        "Attention",
        [*arrays(*FLAT), MASK[:, :S], None, None, np.array([1, S - 1])],
        BY_HEADS,
        1,
    ),
    "window": (
        "",
        "Attention",
        [*arrays(*FLAT), None, *arrays(*PAST)],
        {**BY_HEADS, "is_causal": 1, "left_window_size": 2},
        3,
    ),
    "window on both sides": (
        "",
        "Attention",
        arrays(*FLAT),
        {**BY_HEADS, "left_window_size": 2, "right_window_size": 1},
        1,
    ),
    "window on the right": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "right_window_size": 1}, 1),
    "window of given lengths": (
        "",
        "Attention",
        [*arrays(*FLAT), None, None, None, np.array([2, S])],
        {**BY_HEADS, "is_causal": 1, "left_window_size": 0},
        1,
    ),
    "rotation": ("", "RotaryEmbedding", [bias(B, N, S, D), COS, SIN], {"rotary_embedding_dim": 6}, 1),
    "rotation of tokens": (
        "",
        "RotaryEmbedding",
        [bias(B, S, N * D), *TABLES, PLACES],
        {"num_heads": N, "rotary_embedding_dim": 6, "interleaved": 1},
        1,
    ),
    "microsoft rotation": (
        "com.microsoft",
        "RotaryEmbedding",
        [bias(B, S, N * D), PLACES, *TABLES],
        {"num_heads": N, "rotary_embedding_dim": 6},
        1,
    ),
    "microsoft rotation from a place": (
        "com.microsoft",
        "RotaryEmbedding",
        [bias(B, S, N * 6), np.array([4]), *TABLES],
        {"interleaved": 1},
        1,
    ),
    "multi head": ("com.microsoft", "MultiHeadAttention", arrays(*(FLAT[:1] * 3)), {"num_heads": N}, 1),
    "multi head of another size": (
        "com.microsoft",
        "MultiHeadAttention",
        arrays(FLAT[0], FLAT[0], (B, S, N * 6)),
        {"num_heads": N, "unidirectional": 1},
        1,
    ),
    "multi head with biases": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), bias(3 * N * D), None, bias(1, N, S, S)],
        {"num_heads": N, "scale": 0.2},
        1,
    ),
    "multi head of keys as a cache has them, with biases": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(FLAT[0], (B, N, S + 2, D), (B, N, S + 2, D)), bias(3 * N * D)],
        {"num_heads": N},
        1,
    ),
    "multi head cached": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), None, None, None, *arrays((B, N, P, D), (B, N, P, D))],
        {"num_heads": N},
        3,
    ),
    "multi head with a mask of queries": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), None, np.stack([SEEN, SEEN[::-1]])],
        {"num_heads": N},
        1,
    ),
    "multi head with lengths": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), None, np.array([3, S], np.int32)],
        {"num_heads": N},
        1,
    ),
    **{f"packed {name}": ("com.microsoft", "Attention", *case) for name, case in PACKED.items()},
    "grouped": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays(*FLAT), None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K},
        1,
    ),
    "grouped and rotated": (
        "com.microsoft",
        "GroupQueryAttention",
        [
            *arrays((B, 1, N * D), (B, 1, K * D), (B, 1, K * D), *PAST),
            np.array([P, P], np.int32),
            np.array(P + 1, np.int32),
            np.cos(bias(40, 4)),
            np.sin(bias(40, 4)),
        ],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1, "rotary_interleaved": 1},
        3,
    ),
    "grouped and packed": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays((B, S, (N + 2 * K) * D)), None, None, None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K, "scale": 0.25},
        1,
    ),
    "grouped step": (
        "com.microsoft",
        "GroupQueryAttention",
        [
            *arrays((B, 1, N * D), (B, 1, K * D), (B, 1, K * D), *PAST),
            np.array([P, P - 1], np.int32),
            np.array(P + 1, np.int32),
        ],
        {"num_heads": N, "kv_num_heads": K, "local_window_size": 2, "softcap": 3.0},
        3,
    ),
    "grouped in all directions": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays(*FLAT), None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K, "causal": 0, "local_window_size": 3},
        1,
    ),
    "grouped with a smooth softmax": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays(*FLAT), None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K, "smooth_softmax": 1},
        1,
    ),
    "grouped at given positions": (
        "com.microsoft",
        "GroupQueryAttention",
        [*STEP, PLACES[:, :1]],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1},
        3,
    ),
    "a grouped prompt at given positions": (
        "com.microsoft",
        "GroupQueryAttention",
        [*PROMPT, PLACES],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1},
        1,
    ),
    "grouped with norms": (
        "com.microsoft",
        "GroupQueryAttention",
        [*STEP, *[None] * 5, *arrays((D,), (D,))],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1, "qk_norm_epsilon": 0.01},
        3,
    ),
}


SHORTER: dict[str, tuple[str, str, list[Any], dict[str, Any], int]] = {
    "shorter": ("", "Attention", [*arrays(*FLAT), MASK[:, : S - 1]], BY_HEADS, 1),
    "shorter behind a cache": ("", "Attention", [*arrays(*FLAT), bias(S, S), *arrays(*PAST)], BY_HEADS, 3),
}
"""Masks that are shorter than the keys and hide the rest."""


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
