"""Dimensions with different names may be different: if one of them is 1, the new file still gives the same results.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from attention_graphs import Writer
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import run

from posexport.rewrite.broadcasts import Broadcasts
from posexport.rewrite.rewriter import KEPT, REWRITTEN

Array = np.ndarray[Any, Any]
Dims = Sequence[str | int | None]

HEADS, SIZE, HIDDEN = 2, 8, 16
FREQUENCIES = 100.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))


def rotated(g: Writer, heads: str, positions: str) -> str:
    """Heads [B, N, S, D], rotated in the layout half by positions [B, S]."""
    wide = g.op("Unsqueeze", g.op("Cast", positions, to=TensorProto.FLOAT), g.const([1, 3]))
    angles = g.op("Mul", wide, g.floats(np.concatenate([FREQUENCIES, FREQUENCIES])))
    return turned(g, heads, g.op("Cos", angles), g.op("Sin", angles))


def turned(g: Writer, heads: str, cos: str, sin: str) -> str:
    half, end, last = g.const([SIZE // 2]), g.const([SIZE]), g.const([3])
    second = g.op("Neg", g.op("Slice", heads, half, end, last))
    swapped = g.op("Concat", second, g.op("Slice", heads, g.const([0]), half, last), axis=3)
    return g.op("Add", g.op("Mul", heads, cos), g.op("Mul", swapped, sin))


def model_of(
    *,
    tokens: Dims = ("batch", "seq"),
    encoder: Dims | None = None,
    positions: Dims | None = None,
    mask: Dims | None = None,
    added: Dims | None = None,
    past: Dims | None = None,
) -> onnx.ModelProto:
    """Attention over `hidden_states` [*tokens, HIDDEN], optionally over encoder tokens or with a cache.

    The arguments are the dimensions of `position_ids`, of `attention_mask`, of an added float mask, and the rows and
    the length of the cache.
    """
    g = Writer()
    x = g.input("hidden_states", g.type, *tokens, HIDDEN)
    memory = x if encoder is None else g.input("encoder_hidden_states", g.type, *encoder, HIDDEN)
    rng, sides = np.random.default_rng(0), []
    for number, source in enumerate((x, memory, memory)):
        weight = g.floats(rng.standard_normal((HIDDEN, HIDDEN)) / 4)
        split = g.op("Reshape", g.op("MatMul", source, weight), g.const([0, 0, HEADS, SIZE]))
        heads = g.op("Transpose", split, perm=[0, 2, 1, 3])
        if positions is not None and number < 2:
            heads = rotated(g, heads, g.input("position_ids", TensorProto.INT64, *positions))
        sides.append(heads)
    q, k, v = sides
    if past is not None:
        rows, length = past
        for name in ("key", "value"):
            new = g.input(f"past_{name}", g.type, rows, HEADS, length, SIZE), k if name == "key" else v
            g.nodes.append(helper.make_node("Concat", new, [f"present_{name}"], axis=2))
            g.outputs.append(helper.make_tensor_value_info(f"present_{name}", g.type, (rows, HEADS, None, SIZE)))
        k, v = "present_key", "present_value"
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(SIZE**-0.5))
    if mask is not None:
        wide = g.op("Cast", g.input("attention_mask", TensorProto.INT64, *mask), to=g.type)
        wide = g.op("Unsqueeze", wide, g.const([1, 2] if len(mask) == 2 else [1]))
        scores = g.op("Add", scores, g.op("Mul", g.op("Sub", g.floats(1.0), wide), g.floats(-1e9)))
    if added is not None:
        scores = g.op("Add", scores, g.input("attention_mask", g.type, *added))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, HIDDEN])], ["output"], name="node_output"))
    g.outputs.insert(0, helper.make_tensor_value_info("output", g.type, (None, None, HIDDEN)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def drawn(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Inputs of these shapes; masks hide the first of several keys."""
    rng, arrays = np.random.default_rng(4), {}
    for value in model.graph.input:
        shape = tuple(shapes[value.name])
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            arrays[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif value.name == "position_ids":
            arrays[value.name] = rng.integers(0, 50, shape)
        else:
            arrays[value.name] = np.ones(shape, np.int64)
            if shape[-1] > 1:
                arrays[value.name][0, ..., 0] = 0
    return arrays


def agree(before: onnx.ModelProto, after: onnx.ModelProto, arrays: Mapping[str, Array]) -> None:
    expected, actual = run(before, arrays), run(after, arrays)
    for name, value in expected.items():
        assert value.shape == actual[name].shape
        assert np.isfinite(actual[name]).all()
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=2e-5)


X = "hidden_states"
CASES: dict[str, tuple[dict[str, Dims], list[dict[str, Sequence[int]]]]] = {
    "positions of one row": (
        {"positions": ("position_rows", "seq")},
        [
            {X: (3, 6, HIDDEN), "position_ids": (1, 6)},
            {X: (3, 6, HIDDEN), "position_ids": (3, 6)},
            {X: (1, 6, HIDDEN), "position_ids": (3, 6)},
        ],
    ),
    "positions of one place": (
        {"positions": ("batch", "places")},
        [{X: (2, 6, HIDDEN), "position_ids": (2, 1)}, {X: (2, 6, HIDDEN), "position_ids": (2, 6)}],
    ),
    "nothing has a name": (
        {"tokens": (None, None), "positions": (None, None), "mask": (None, None)},
        [
            {X: (3, 6, HIDDEN), "position_ids": (1, 6), "attention_mask": (3, 6)},
            {X: (3, 6, HIDDEN), "position_ids": (3, 6), "attention_mask": (1, 6)},
            {X: (1, 6, HIDDEN), "position_ids": (1, 6), "attention_mask": (3, 6)},
        ],
    ),
    "a mask of more rows": (
        {"mask": ("mask_rows", "seq")},
        [{X: (1, 6, HIDDEN), "attention_mask": (3, 6)}, {X: (3, 6, HIDDEN), "attention_mask": (1, 6)}],
    ),
    "a mask of one key": (
        {"mask": ("batch", "mask_length")},
        [{X: (2, 6, HIDDEN), "attention_mask": (2, 1)}, {X: (2, 6, HIDDEN), "attention_mask": (2, 6)}],
    ),
    "a mask of one query": (
        {"mask": ("batch", "queries", "seq")},
        [{X: (2, 6, HIDDEN), "attention_mask": (2, 1, 6)}, {X: (2, 6, HIDDEN), "attention_mask": (2, 6, 6)}],
    ),
    "a mask of numbers": (
        {"added": ("a", 1, "b", "c")},
        [
            {X: (2, 6, HIDDEN), "attention_mask": (1, 1, 1, 6)},
            {X: (2, 6, HIDDEN), "attention_mask": (2, 1, 6, 1)},
            {X: (2, 1, HIDDEN), "attention_mask": (2, 1, 5, 1)},
        ],
    ),
    "a mask of numbers over a cache": (
        {"past": ("batch", "past"), "added": ("a", "b", "c", "d")},
        [
            {X: (2, 3, HIDDEN), "attention_mask": mask} | dict.fromkeys(("past_key", "past_value"), (2, HEADS, 4, SIZE))
            for mask in ((1, 1, 1, 1), (2, 1, 3, 7), (1, 1, 1, 7), (2, 1, 1, 1))
        ],
    ),
    "an encoder of one row": (
        {"encoder": ("encoder_rows", "length")},
        [
            {X: (3, 6, HIDDEN), "encoder_hidden_states": (1, 9, HIDDEN)},
            {X: (1, 6, HIDDEN), "encoder_hidden_states": (3, 9, HIDDEN)},
        ],
    ),
    "caches with names of their own": (
        {"past": ("cache_rows", "past")},
        [{X: (2, 3, HIDDEN), **dict.fromkeys(("past_key", "past_value"), (2, HEADS, 4, SIZE))}],
    ),
    "positions of one row before a cache": (
        {"past": ("batch", "past"), "positions": ("position_rows", "seq")},
        [
            {X: (3, 4, HIDDEN), "position_ids": (1, 4)}
            | dict.fromkeys(("past_key", "past_value"), (3, HEADS, 5, SIZE)),
            {X: (3, 4, HIDDEN), "position_ids": (3, 4)}
            | dict.fromkeys(("past_key", "past_value"), (3, HEADS, 0, SIZE)),
        ],
    ),
}
"""Dimensions by name, and shapes of inputs that the graph accepts."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "name"), [*itertools.product(["native", "contrib", "function"], CASES)])
def test_lengths_that_meet(name: str, form: str) -> None:
    dims, inputs = CASES[name]
    model = model_of(**dims)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for shapes in inputs:
        agree(model, proto, drawn(model, shapes))


@pytest.mark.parametrize("name", [name for name in CASES if "cache" not in name])
def test_they_are_what_fails_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: all lengths count as equal."""
    monkeypatch.setattr(Broadcasts, "same", lambda self, one, other: True)
    dims, inputs = CASES[name]
    model = model_of(**dims)
    _, proto = rewritten_model(model, form="native", target="ort")

    def fails(shapes: Mapping[str, Sequence[int]]) -> bool:
        try:
            agree(model, proto, drawn(model, shapes))
        except Exception:  # ONNX Runtime raises its own errors.
            return True
        return False

    assert any(map(fails, inputs))


NAMED: dict[str, tuple[dict[str, Dims], list[str]]] = {
    "plain": ({}, []),
    "positions": ({"positions": ("batch", "seq")}, []),
    "mask": ({"mask": ("batch", "seq")}, ["Expand"]),
    "queries by keys": ({"added": ("batch", 1, "seq", "seq")}, []),
    "cache": ({"past": ("batch", "past"), "positions": ("batch", "seq")}, []),
    "cache, mask": ({"past": ("batch", "past"), "mask": ("batch", "total")}, ["Expand"]),
    "encoder": ({"encoder": ("batch", "length")}, []),
}


@pytest.mark.parametrize("name", NAMED)
def test_nothing_is_expanded_where_names_agree(name: str) -> None:
    """The exception is a mask with one row for all queries, which is always expanded."""
    dims, expected = NAMED[name]
    done, proto = rewritten_model(model_of(**dims), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node if node.op_type == "Expand"] == expected


def test_a_mask_of_more_rows_than_a_cache() -> None:
    """The new operator doesn't include the cache or buffer, as that requires equal rows."""
    model, pasts = model_of(past=("batch", "past"), mask=("mask_rows", "total")), ("past_key", "past_value")
    done, grown = rewritten_model(model, form="native", target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    done, shared = rewritten_model(model, form="native", target="ort", kv_cache="shared")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for rows, mask_rows in ((1, 3), (3, 1), (2, 2)):
        shapes: dict[str, Sequence[int]] = {X: (rows, 3, HIDDEN), "attention_mask": (mask_rows, 7)}
        inputs = drawn(model, shapes | dict.fromkeys(pasts, (rows, HEADS, 4, SIZE)))
        agree(model, grown, inputs)
        want = run(model, inputs)
        have = run(shared, inputs | {name: np.pad(inputs[name], ((0, 0), (0, 0), (0, 5), (0, 0))) for name in pasts})
        for name, value in want.items():
            used = have[name][:, :, :7] if name.startswith("present") else have[name]
            np.testing.assert_allclose(used, value, rtol=0, atol=2e-5)


def flat_heads(bias_rows: Callable[[Writer], str]) -> onnx.ModelProto:
    """Attention with rows and heads on one axis; `bias_rows` gives the number of rows [1] of a bias."""
    g, rng = Writer(), np.random.default_rng(0)
    x = g.input("hidden_states", g.type, "batch", "seq", HIDDEN)
    batch, seq = (g.op("Shape", x, start=axis, end=axis + 1) for axis in (0, 1))
    both = g.op("Mul", batch, g.const([HEADS]))
    shape = g.op("Concat", both, seq, g.const([SIZE]), axis=0)
    sides = []
    for _ in range(3):
        weight = g.floats(rng.standard_normal((HIDDEN, HIDDEN)) / 4)
        split = g.op("Reshape", g.op("MatMul", x, weight), g.const([0, 0, HEADS, SIZE]))
        sides.append(g.op("Reshape", g.op("Transpose", split, perm=[0, 2, 1, 3]), shape))
    q, k, v = sides
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.floats(SIZE**-0.5))
    rows = g.op("Squeeze", bias_rows(g), g.const([0]))
    places = g.op("Cast", g.op("Range", g.const(0), g.length(x, 1), g.const(1)), to=g.type)
    numbers = g.op("Cast", g.op("Range", g.const(1), g.op("Add", rows, g.const(1)), g.const(1)), to=g.type)
    by_row = g.op("Unsqueeze", numbers, g.const([1, 2]))
    bias = g.op("Mul", by_row, g.op("Mul", g.op("Unsqueeze", places, g.const([0, 1])), g.floats(-0.1)))
    mixed = g.op("MatMul", g.op("Softmax", g.op("Add", scores, bias), axis=-1), v)
    split = g.op("Reshape", mixed, g.op("Concat", batch, g.const([HEADS]), seq, g.const([SIZE]), axis=0))
    out = g.op("Transpose", split, perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, HIDDEN])], ["output"], name="node_output"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", HIDDEN)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def one(g: Writer) -> str:
    return g.const([1])


def rows_and_heads(g: Writer) -> str:
    return g.op("Mul", g.op("Shape", "hidden_states", start=0, end=1), g.const([HEADS]))


def more_in_long_rows(g: Writer) -> str:
    """1, and from 256 tokens on the number of rows times heads."""
    long = g.op("Greater", g.op("Shape", "hidden_states", start=1, end=2), g.const([256]))
    return g.op("Where", long, rows_and_heads(g), g.const([1]))


@pytest.mark.parametrize("rows", [one, rows_and_heads, more_in_long_rows])
def test_a_term_of_rows_and_heads(rows: Callable[[Writer], str]) -> None:
    model = flat_heads(rows)
    done, proto = rewritten_model(model, form="native", target="ort")
    expected = [(KEPT, "rows")] if rows is more_in_long_rows else [(REWRITTEN, None)]
    assert [(site.state, site.reason and site.reason.code) for site in done.sites] == expected
    for batch, seq in ((1, 1), (2, 9), (2, 300)):
        agree(model, proto, drawn(model, {X: (batch, seq, HIDDEN)}))


def test_cosines_with_an_axis_that_grows() -> None:
    """The cosines have one row for all heads, and one row for each head if there are more than 256 tokens."""
    g, rng = Writer(), np.random.default_rng(0)
    x = g.input("hidden_states", g.type, "batch", "seq", HIDDEN)
    seq = g.op("Shape", x, start=1, end=2)
    count = g.op("Where", g.op("Greater", seq, g.const([256])), g.const([HEADS]), g.const([1]))
    last = g.op("Squeeze", g.op("Add", count, g.const([1])), g.const([0]))
    by_head = g.op("Cast", g.op("Range", g.const(1), last, g.const(1)), to=g.type)
    places = g.op("Cast", g.op("Range", g.const(0), g.length(x, 1), g.const(1)), to=g.type)
    angles = g.op("Mul", g.op("Unsqueeze", places, g.const([1])), g.floats(np.concatenate([FREQUENCIES, FREQUENCIES])))
    angles = g.op("Mul", angles, g.op("Unsqueeze", by_head, g.const([1, 2])))
    cos, sin = g.op("Cos", angles), g.op("Sin", angles)
    sides = []
    for number in range(3):
        weight = g.floats(rng.standard_normal((HIDDEN, HIDDEN)) / 4)
        split = g.op("Reshape", g.op("MatMul", x, weight), g.const([0, 0, HEADS, SIZE]))
        heads = g.op("Transpose", split, perm=[0, 2, 1, 3])
        sides.append(heads if number == 2 else turned(g, heads, cos, sin))
    q, k, v = sides
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(SIZE**-0.5))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, HIDDEN])], ["output"], name="node_output"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", HIDDEN)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert "RotaryEmbedding" not in {node.op_type for node in proto.graph.node}
    assert len(done.sites) == 1
    for batch, seq in ((2, 9), (2, 300)):
        agree(model, proto, drawn(model, {X: (batch, seq, HIDDEN)}))
