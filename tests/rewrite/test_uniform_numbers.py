"""Numbers that a graph computes and does not store.

Mask fills, caps and scales are cast, expanded to the shape of the scores, or computed. The oracle is attention in
numpy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Array, Graph, run

from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model

HEADS, SIZE, HIDDEN, SEQ = 4, 8, 32, 6
CAP = 2.5

Make = Callable[[Graph, str], str]
"""Makes a number for the scores."""


def number(value: float, dtype: type = np.float32) -> Callable[[Graph], str]:
    return lambda g: g.constant(value, dtype)


def ones_like(g: Graph, scores: str) -> str:
    one = numpy_helper.from_array(np.array([1], np.float32))
    return g.op("ConstantOfShape", g.op("Shape", scores), value=one)


def table(g: Graph, *others: float) -> str:
    """A table with -1e9 for each query and key; `others` replace its first numbers."""
    numbers = np.full((1, 1, SEQ, SEQ), -1e9)
    numbers.flat[: len(others)] = others
    return g.constant(numbers, np.float32)


FILLS: dict[str, Make] = {
    "cast": lambda g, _: g.op("Cast", g.constant(-1e9, np.float64), to=TensorProto.FLOAT),
    "cast like scores": lambda g, s: g.op("CastLike", g.constant(-1e9, np.float64), s),
    "a number of ones": lambda g, s: g.op("Mul", ones_like(g, s), g.constant(-1e9, np.float32)),
    "zeros less a number": lambda g, s: g.op(
        "Sub", g.op("ConstantOfShape", g.op("Shape", s)), g.constant(1e9, np.float32)
    ),
    "expanded": lambda g, s: g.op("Expand", g.constant(-1e30, np.float32), g.op("Shape", s)),
    "the same either way": lambda g, s: g.op(
        "Where",
        g.op("Greater", s, g.constant(0.0, np.float32)),
        g.constant(-1e9, np.float32),
        g.op("Neg", number(1e9)(g)),
    ),
    "a table of one number": lambda g, _: table(g),
}

WRONG_FILLS: dict[str, tuple[Make, str]] = {
    "a table with another number": (lambda g, _: table(g, -1e9, -1.0), "score-where"),
    "a table with a larger first number": (lambda g, _: table(g, 0.0), "score-where"),
    "expanded positive": (lambda g, s: g.op("Expand", g.constant(1e9, np.float32), g.op("Shape", s)), "score-fill"),
    "ones": (ones_like, "score-fill"),
    "by the number of tokens": (
        lambda g, s: g.op("Mul", g.op("Cast", g.op("Size", s), to=TensorProto.FLOAT), g.constant(-1e9, np.float32)),
        "score-where",
    ),
    "of the features": (lambda g, s: g.op("Mul", g.op("Abs", s), g.constant(-1e9, np.float32)), "score-where"),
}


def model_of(g: Graph, seq: int | str) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", seq, HIDDEN]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", seq]),
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", seq, HIDDEN])
    graph = helper.make_graph(g.nodes, "main_graph", infos, [output], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def masked(
    fill: Make, *, divisor: Callable[[Graph], str] | None = None, cap: Callable[[Graph], str] | None = None
) -> Graph:
    """Attention whose scores, with an optional cap, are filled where the mask is zero."""
    g = Graph()

    def heads(name: str, *perm: int) -> str:
        projected = g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN))
        return g.op("Transpose", g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE])), perm=list(perm))

    scores = g.op("MatMul", heads("q", 0, 2, 1, 3), heads("k", 0, 2, 3, 1))
    scores = g.op("Div", scores, (divisor or number(2.0))(g))
    if cap is not None:
        limit = cap(g)
        scores = g.op("Mul", g.op("Tanh", g.op("Div", scores, limit)), limit)
    seen = g.op("Unsqueeze", g.op("Cast", "attention_mask", to=TensorProto.BOOL), g.constant([1, 2]))
    weights = g.op("Softmax", g.op("Where", seen, scores, fill(g, scores)), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", weights, heads("v", 0, 2, 1, 3)), perm=[0, 2, 1, 3])
    g.op("Reshape", mixed, g.constant([0, 0, HIDDEN]), name="output")
    return g


def attended(g: Graph, x: Array, mask: Array, *, divisor: float = 2.0, cap: float = 0.0) -> Array:
    """The same in numpy."""
    weights = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in g.weights}
    q, k, v = (
        (x.astype(np.float64) @ weights[name]).reshape(*x.shape[:2], HEADS, SIZE).transpose(0, 2, 1, 3)
        for name in "qkv"
    )
    scores = q @ k.transpose(0, 1, 3, 2) / divisor
    scores = cap * np.tanh(scores / cap) if cap else scores
    powers = np.exp(scores - scores.max(-1, keepdims=True)) * (mask[:, None, None, :] != 0)
    mixed = powers / powers.sum(-1, keepdims=True) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(x.shape)


def given(batch: int, seq: int) -> dict[str, Array]:
    mask = np.ones((batch, seq), np.int64)
    mask[-1, : seq // 2] = 0
    return {
        "features": np.random.default_rng(seq).standard_normal((batch, seq, HIDDEN)).astype(np.float32),
        "attention_mask": mask,
    }


def check(g: Graph, seq: int | str, lengths: tuple[int, ...], *, divisor: float = 2.0, cap: float = 0.0) -> None:
    model = model_of(g, seq)
    done = rewrite_model(ir.from_proto(model), form="native", target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for length in lengths:
        arrays = given(2, length)
        expected = attended(g, arrays["features"], arrays["attention_mask"], divisor=divisor, cap=cap)
        np.testing.assert_allclose(run(ir.to_proto(done.model), arrays)["output"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_that_is_made_is_a_number(name: str) -> None:
    fixed = "table" in name
    check(masked(FILLS[name]), SEQ if fixed else "seq", (SEQ,) if fixed else (1, SEQ, 11))


@pytest.mark.parametrize("name", WRONG_FILLS)
def test_a_fill_that_hides_nothing_or_varies_is_left_alone(name: str) -> None:
    make, code = WRONG_FILLS[name]
    model = model_of(masked(make), SEQ if "table" in name else "seq")
    (site,) = rewrite_model(ir.from_proto(model), form="native", target="ort").sites
    assert site.reason is not None
    assert (site.state, site.reason.code) == (KEPT, code)


def test_a_fill_that_callers_may_give_is_no_number() -> None:
    g = masked(lambda g, _: g.weight("bias", np.array(-1e9, np.float32)))
    model = model_of(g, "seq")
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, []))
    (site,) = rewrite_model(ir.from_proto(model), form="native", target="ort").sites
    assert site.reason is not None
    assert (site.state, site.reason.code) == (KEPT, "score-where")


def test_a_cap_that_is_cast_is_a_number() -> None:
    g = masked(FILLS["expanded"], cap=lambda g: g.op("Cast", g.constant(CAP, np.float64), to=TensorProto.FLOAT))
    check(g, "seq", (1, SEQ, 11), cap=CAP)


def root_of_the_head_size(g: Graph) -> str:
    return g.op("Sqrt", g.op("Cast", g.constant(4 * SIZE**2), to=TensorProto.FLOAT))


def test_a_divisor_that_is_computed_below_a_cap_is_a_number() -> None:
    g = masked(FILLS["cast"], divisor=root_of_the_head_size, cap=number(CAP))
    check(g, "seq", (1, SEQ, 11), divisor=2.0 * SIZE, cap=CAP)


def test_a_computed_number_that_fp32_does_not_hold_is_still_read_from_the_graph() -> None:
    def third(g: Graph) -> str:
        return g.op("Cast", g.op("Sqrt", g.constant(3.3, np.float64)), to=TensorProto.FLOAT)

    check(masked(FILLS["cast"], divisor=third), "seq", (1, SEQ, 11), divisor=3.3**0.5)


def test_another_cap_is_another_function() -> None:
    """Shows that the comparisons above can fail."""
    arrays, g = given(2, SEQ), masked(FILLS["cast"], cap=number(CAP))
    actual = run(model_of(g, "seq"), arrays)["output"]
    expected = attended(g, arrays["features"], arrays["attention_mask"], cap=CAP + 0.1)
    assert np.abs(actual - expected).max() > 1e-3


def softmax_of(axis: int | None, rank: int, opset: int) -> ir.Model:
    """Attention of one head with a softmax over an axis of its scores [B, S, T], or [B*S, T] if `rank` is 2."""
    g = Graph()
    q, k, v = (g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN)) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))
    if rank == 2:
        shape = g.op(
            "Concat", g.constant([-1]), g.op("Slice", g.op("Shape", scores), *map(g.constant, ([2], [3]))), axis=0
        )
        flat = g.op("Reshape", scores, shape)
        weights = g.op(
            "Reshape", g.op("Softmax", flat, **({} if axis is None else {"axis": axis})), g.op("Shape", scores)
        )
    else:
        weights = g.op("Softmax", scores, **({} if axis is None else {"axis": axis}))
    g.op("MatMul", weights, v, name="output")
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    ]
    graph = helper.make_graph(g.nodes, "main_graph", infos[:1], infos[1:], g.weights)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6))


@pytest.mark.parametrize(
    ("axis", "rank", "opset", "reason"),
    [
        (None, 2, 11, None),  # axis 1 is the last
        (None, 3, 11, "normalises over axis 1 and those behind it together"),
        (2, 3, 11, None),
        (None, 3, 13, None),
        (1, 3, 13, "normalises over axis 1, and values are summed over another one"),
    ],
)
def test_the_axis_of_a_softmax_is_that_of_its_opset(
    axis: int | None, rank: int, opset: int, reason: str | None
) -> None:
    (found,) = view_of(softmax_of(axis, rank, opset)).attentions
    if reason is None:
        assert hasattr(found, "num_heads")
    else:
        assert found.reason.code == "softmax-axis"  # type: ignore[union-attr]
        assert found.reason.text.endswith(reason)  # type: ignore[union-attr]
