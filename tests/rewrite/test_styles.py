"""Attention as people and exporters write it: each style is rewritten and computes the same as before.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
from helpers import cli
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Graph

from posexport.verify.verifier import verify

HEADS, SIZE, HIDDEN = 4, 8, 32
TRACED = (2, 6)
"""The numbers of rows and tokens of the trace of a graph."""


def model_of(g: Graph, *outputs: str) -> onnx.ModelProto:
    """A graph from features [batch, seq, HIDDEN] to its outputs."""
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "seq", HIDDEN])
    found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", None, HIDDEN]) for name in outputs]
    graph = helper.make_graph(g.nodes, "main_graph", [features], found, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def heads_of(g: Graph, name: str, order: tuple[int, ...], source: str = "features") -> str:
    """A projection split into heads, [B, N, S, D] for the order (0, 2, 1, 3)."""
    projected = g.op("MatMul", source, g.random(f"{name}_proj", HIDDEN, HIDDEN))
    return g.op("Transpose", g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE])), perm=list(order))


def merged(g: Graph, heads: str) -> str:
    """[B, N, S, D] to the output of the graph."""
    tokens = g.op("Reshape", g.op("Transpose", heads, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    return g.op("MatMul", tokens, g.random("o_proj", HIDDEN, HIDDEN), name="output")


def scores_of(g: Graph) -> str:
    q, k = heads_of(g, "q", (0, 2, 1, 3)), heads_of(g, "k", (0, 2, 3, 1))
    return g.op("Mul", g.op("MatMul", q, k), g.constant(SIZE**-0.5, np.float32))


def written_out(g: Graph, *, reciprocal: bool = False, axis: int = -1, other: bool = False) -> str:
    """exp(x - max(x)) / sum(exp(x - max(x))). It is wrong if the sum has another `axis` or is over `other` scores."""
    scores = scores_of(g)
    powers = g.op("Exp", g.op("Sub", scores, g.op("ReduceMax", scores, g.constant([-1]))))
    summed = g.op("Exp", g.op("Mul", scores, g.constant(0.5, np.float32))) if other else powers
    total = g.op("ReduceSum", summed, g.constant([axis]))
    weights = g.op("Mul", powers, g.op("Reciprocal", total)) if reciprocal else g.op("Div", powers, total)
    return merged(g, g.op("MatMul", weights, heads_of(g, "v", (0, 2, 1, 3))))


def weights_on_the_right(g: Graph) -> str:
    """values^T weights^T, as diffusion models write it."""
    weights = g.op("Transpose", g.op("Softmax", scores_of(g), axis=-1), perm=[0, 1, 3, 2])
    mixed = g.op("MatMul", heads_of(g, "v", (0, 2, 3, 1)), weights)
    return merged(g, g.op("Transpose", mixed, perm=[0, 1, 3, 2]))


def pooled(g: Graph) -> str:
    """One learned query reads all tokens."""
    shape = g.op("Concat", g.length("features", 0), g.constant([HEADS, 1, SIZE]), axis=0)
    query = g.op("Expand", g.random("query", 1, HEADS, 1, SIZE), shape)
    scores = g.op("MatMul", query, heads_of(g, "k", (0, 2, 3, 1)))
    return merged(g, g.op("MatMul", g.op("Softmax", scores, axis=-1), heads_of(g, "v", (0, 2, 1, 3))))


def multiplied_mask(g: Graph) -> str:
    """scores * seen - 10000 (1 - seen), as the first GPT writes its causal mask."""
    scores = scores_of(g)
    length = g.op("Squeeze", g.length("features", 1))
    places = g.op("Range", g.constant(0), length, g.constant(1))
    seen = g.op("LessOrEqual", places, g.op("Unsqueeze", places, g.constant([1])))
    seen = g.op("Cast", seen, to=TensorProto.FLOAT)
    hidden = g.op("Mul", g.op("Sub", g.constant(1.0, np.float32), seen), g.constant(-1e4, np.float32))
    weights = g.op("Softmax", g.op("Add", g.op("Mul", scores, seen), hidden), axis=-1)
    return merged(g, g.op("MatMul", weights, heads_of(g, "v", (0, 2, 1, 3))))


def traced_sizes(g: Graph) -> str:
    """Rows and heads on one axis with the size of the example, as TorchScript writes MultiheadAttention."""
    batch, seq = TRACED

    def side(name: str) -> str:
        projected = g.op("MatMul", g.op("Transpose", "features", perm=[1, 0, 2]), g.random(name, HIDDEN, HIDDEN))
        heads = g.op("Reshape", projected, g.constant([seq, batch * HEADS, SIZE]))
        return g.op("Transpose", heads, perm=[1, 0, 2])

    scores = g.op(
        "MatMul",
        g.op("Mul", side("q"), g.constant(SIZE**-0.5, np.float32)),
        g.op("Transpose", side("k"), perm=[0, 2, 1]),
    )
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), side("v"))
    tokens = g.op("Reshape", g.op("Transpose", mixed, perm=[1, 0, 2]), g.constant([seq, batch, HIDDEN]))
    return g.op("Transpose", g.op("MatMul", tokens, g.random("o", HIDDEN, HIDDEN)), perm=[1, 0, 2], name="output")


def hidden_by_a_constant_node(g: Graph) -> str:
    """Where(seen, scores, -inf) with a Constant, as TorchScript writes masked_fill. No value states its dtype."""
    length = g.op("Squeeze", g.length("features", 1))
    places = g.op("Range", g.constant(0), length, g.constant(1))
    ahead = g.op("Greater", places, g.op("Unsqueeze", places, g.constant([1])))
    never = g.op("Constant", value=numpy_helper.from_array(np.array(-np.inf, np.float32)))
    weights = g.op("Softmax", g.op("Where", ahead, never, scores_of(g)), axis=-1)
    return merged(g, g.op("MatMul", weights, heads_of(g, "v", (0, 2, 1, 3))))


def heads_before_rows(g: Graph) -> str:
    """Heads [N, B, S, D], as in Zipformer, with a bias by key position at a rate for each head."""
    scores = g.op("MatMul", heads_of(g, "q", (2, 0, 1, 3)), heads_of(g, "k", (2, 0, 3, 1)))
    places = g.op("Range", g.constant(0), g.op("Squeeze", g.length("features", 1)), g.constant(1))
    rates = g.random("rates", HEADS, 1, 1, 1)
    biased = g.op("Add", scores, g.op("Mul", rates, g.op("Cast", places, to=TensorProto.FLOAT)))
    mixed = g.op("MatMul", g.op("Softmax", biased, axis=-1), heads_of(g, "v", (2, 0, 1, 3)))
    return merged(g, g.op("Transpose", mixed, perm=[1, 0, 2, 3]))


def hidden_twice(g: Graph) -> str:
    """Tokens that do not see themselves, except the first, as in Reformer.

    The logit of a token for itself is low, but larger than those of later keys.
    """
    places = g.op("Range", g.constant(0), g.op("Squeeze", g.length("features", 1)), g.constant(1))
    rows = g.op("Unsqueeze", places, g.constant([1]))
    itself = g.op("Where", g.op("Equal", rows, places), g.constant(-5e4, np.float32), scores_of(g))
    scores = g.op("Where", g.op("Greater", places, rows), g.constant(-3e38, np.float32), itself)
    return merged(g, g.op("MatMul", g.op("Softmax", scores, axis=-1), heads_of(g, "v", (0, 2, 1, 3))))


STYLES = {
    "hidden twice": hidden_twice,
    "heads before rows": heads_before_rows,
    "hidden by a Constant": hidden_by_a_constant_node,
    "softmax written out": written_out,
    "softmax with a reciprocal": lambda g: written_out(g, reciprocal=True),
    "weights on the right": weights_on_the_right,
    "a learned query": pooled,
    "a mask that multiplies": multiplied_mask,
    "sizes of the example": traced_sizes,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_rewritten(style: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    g = Graph()
    path, out = helpers.saved(tmp_path, model_of(g, STYLES[style](g))), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, target="ort")
    assert [(one["state"], one["reason"]) for one in result.attentions] == [("rewritten", None)]
    features = {"features": np.random.default_rng(1).standard_normal((*TRACED, HIDDEN)).astype(np.float32)}
    before, after = helpers.ran(path, features)[0], helpers.ran(out, features)[0]
    np.testing.assert_allclose(after, before, atol=2e-6 * float(np.abs(before).max()))


def test_a_constant_of_no_stated_dtype_has_no_fewer_digits(tmp_path: Path) -> None:
    g = Graph()
    path = helpers.saved(tmp_path, model_of(g, hidden_by_a_constant_node(g)))
    [found] = json.loads(cli("inspect", path, "--json").stdout)["attentions"]
    assert (found["num_heads"], found["reason"]) == (HEADS, None)


@pytest.mark.parametrize("fault", [{"axis": -2}, {"other": True}])
def test_what_is_no_softmax_is_left_alone(
    fault: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.in_process(monkeypatch)
    g = Graph()
    path = helpers.saved(tmp_path, model_of(g, written_out(g, **fault)))
    result = helpers.rewritten(path, tmp_path / "out.onnx", form="native", target="ort")
    assert not result.changed
    assert all(one["state"] == "kept" for one in result.attentions)


def test_an_einsum_that_sums_over_heads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    g = Graph()
    q, k = heads_of(g, "q", (0, 2, 1, 3)), heads_of(g, "k", (0, 2, 1, 3))
    weights = g.op("Softmax", g.op("Einsum", q, k, equation="bhsd,bhtd->bhst"), axis=-1)
    mixed = g.op("Einsum", weights, k, equation="bhst,bhtd->bsd")
    tokens = g.op("MatMul", mixed, g.random("o_proj", SIZE, HIDDEN), name="output")
    path = helpers.saved(tmp_path, model_of(g, tokens))
    result = helpers.rewritten(path, tmp_path / "out.onnx", form="native", target="ort")
    assert [one["reason"]["code"] for one in result.attentions] == ["einsum"]


@pytest.mark.parametrize("form", ["native", "contrib", "decomposed"])
@pytest.mark.parametrize("halves", ["qk", "qkv", "v"])
def test_dtypes_are_those_that_readers_expect(
    halves: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in float16 with weights and values in float32, as TorchScript writes float16 models."""
    helpers.in_process(monkeypatch)
    g = Graph()

    def side(name: str, order: tuple[int, ...]) -> str:
        half = TensorProto.FLOAT16 if name in halves else TensorProto.FLOAT
        narrow = g.op("Cast", "features", to=half)
        weight = g.op("Cast", g.random(f"{name}_proj", HIDDEN, HIDDEN), to=half)
        return g.op(
            "Transpose", g.op("Reshape", g.op("MatMul", narrow, weight), g.constant([0, 0, HEADS, SIZE])), perm=[*order]
        )

    scores = g.op("Cast", g.op("MatMul", side("q", (0, 2, 1, 3)), side("k", (0, 2, 3, 1))), to=TensorProto.FLOAT)
    values = g.op("Cast", side("v", (0, 2, 1, 3)), to=TensorProto.FLOAT)
    path = helpers.saved(tmp_path, model_of(g, merged(g, g.op("MatMul", g.op("Softmax", scores, axis=-1), values))))
    out = tmp_path / "out.onnx"
    helpers.rewritten(path, out, form=form, target="ort")
    features = {"features": np.random.default_rng(1).standard_normal((*TRACED, HIDDEN)).astype(np.float32)}
    before, after = helpers.ran(path, features)[0], helpers.ran(out, features)[0]
    assert before.dtype == after.dtype
    np.testing.assert_allclose(after, before, atol=5e-3 * float(np.abs(before).max()))


def test_both_products_of_a_softmax_are_rewritten_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    g = Graph()
    weights = g.op("Softmax", scores_of(g), axis=-1)
    mixed = [g.op("MatMul", weights, heads_of(g, name, (0, 2, 1, 3))) for name in ("v", "w")]
    path, out = helpers.saved(tmp_path, model_of(g, merged(g, g.op("Sub", *mixed)))), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", target="ort")
    assert [one["state"] for one in result.attentions] == ["rewritten"] * 2
    assert len({one["name"] for one in result.attentions}) == 2
    assert not any(node.op_type == "Softmax" for node in onnx.load(out).graph.node)
    assert not helpers.rewritten(out, tmp_path / "twice.onnx", form="native", target="ort").changed


def test_sizes_of_the_example_are_found_by_verify(tmp_path: Path) -> None:
    g = Graph()
    path = helpers.saved(tmp_path, model_of(g, traced_sizes(g)))
    [verdict] = [one for one in verify([path]).verdicts if one.runtime == "ort-cpu"]
    assert verdict.state == "passed", verdict.reason
    assert verdict.worst is not None and "[2, 6]" in verdict.worst.case
