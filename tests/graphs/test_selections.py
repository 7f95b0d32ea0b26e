"""Sums that choose between a value and a number are a Where. The oracle is numpy's where."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from descriptions import described

from posexport.graphs.evaluate import Evaluator
from posexport.graphs.selections import with_selections
from posexport.rewrite.result import REWRITTEN
from posexport.rewrite.rewriter import rewrite_model

X = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float32)
SEEN = np.array([[True, False, True], [False, True, True]])[:, None]
CAUSAL = np.tri(3, dtype=bool)


def model_of(body: str, after: str = "z = Softmax(y)") -> ir.Model:
    """A graph from x, `seen` (truth values) and `ids` (integers) to z, in the notation of onnx's parser.

    `body` computes y, and `after` computes z from it.
    """
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 3, 3] x, bool[2, 1, 3] seen, int64[2, 1, 3] ids) => (float[2, 3, 3] z)
        <float low = {{-1000}}, float one = {{1}}, float[3, 3] tri = {{1, 0, 0, 1, 1, 0, 1, 1, 1}},
         float[3, 3] above = {{0, -7, -7, 0, 0, -7, 0, 0, 0}}, float[3, 3] uneven = {{0, -7, -6, 0, 0, -7, 0, 0, 0}},
         float[3, 3] halves = {{0.5, 0, 0, 1, 1, 0, 1, 1, 1}}> {{ {body} {after} }}"""
    return ir.serde.deserialize_model(onnx.parser.parse_model(text))


def evaluated(model: ir.Model) -> np.ndarray[Any, Any]:
    given = {"x": torch.from_numpy(X), "seen": torch.from_numpy(SEEN), "ids": torch.from_numpy(SEEN * 1)}
    return Evaluator(model).run(given, ["y"])["y"].numpy()


FACTORS = "m = Cast<to = 1>(seen) not = Not(seen) n = Cast<to = 1>(not)"
CHOICES = {
    "truth values": (f"{FACTORS} a = Mul(m, x) b = Mul(low, n) y = Add(a, b)", SEEN, -1000),
    "the other order": (f"{FACTORS} a = Mul(x, m) b = Mul(n, low) y = Add(b, a)", SEEN, -1000),
    "kept where false": (f"{FACTORS} a = Mul(n, x) b = Mul(low, m) y = Add(a, b)", ~SEEN, -1000),
    "a difference": (f"{FACTORS} a = Mul(m, x) b = Mul(low, n) y = Sub(a, b)", SEEN, 1000),
    "a negative": (f"{FACTORS} a = Mul(m, x) c = Mul(low, n) b = Neg(c) y = Add(a, b)", SEEN, 1000),
    "one minus the factor": (
        "m = Cast<to = 1>(seen) n = Sub(one, m) a = Mul(m, x) b = Mul(low, n) y = Add(a, b)",
        SEEN,
        -1000,
    ),
    "a comparison": (
        "zero = Constant<value_int = 0>() c = Greater(ids, zero) m = Cast<to = 1>(c) not = Not(c) n = Cast<to = 1>(not)"
        "a = Mul(m, x) b = Mul(low, n) y = Add(a, b)",
        SEEN,
        -1000,
    ),
    "a table": ("n = Sub(one, tri) a = Mul(x, tri) b = Mul(n, low) y = Add(a, b)", CAUSAL, -1000),
    "two tables": ("a = Mul(x, tri) y = Add(a, above)", CAUSAL, -7),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_a_where(name: str) -> None:
    body, kept, number = CHOICES[name]
    model, expected = model_of(body), np.where(kept, X, np.float32(number))
    np.testing.assert_array_equal(evaluated(model), expected)
    with_selections(model.graph)
    assert [node.op_type for node in model.graph if node.outputs[0].name == "y"] == ["Where"]
    np.testing.assert_array_equal(evaluated(model), expected)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


OTHERS = {
    "the same factor twice": f"{FACTORS} a = Mul(m, x) b = Mul(low, m) y = Add(a, b)",
    "two conditions": f"{FACTORS} a = Mul(tri, x) b = Mul(low, n) y = Add(a, b)",
    "a factor of integers that may be 2": (
        "m = Cast<to = 1>(ids) n = Sub(one, m) a = Mul(m, x) b = Mul(low, n) y = Add(a, b)"
    ),
    "a table with other numbers": "n = Sub(one, halves) a = Mul(x, halves) b = Mul(n, low) y = Add(a, b)",
    "a table with two numbers": "a = Mul(x, tri) y = Add(a, uneven)",
    "not one minus the factor": f"{FACTORS} k = Sub(low, m) a = Mul(m, x) b = Mul(low, k) y = Add(a, b)",
    "the difference the other way": f"{FACTORS} a = Mul(m, x) b = Mul(low, n) y = Sub(b, a)",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    model = model_of(OTHERS[name])
    before = evaluated(model)
    with_selections(model.graph)
    assert "Where" not in {node.op_type for node in model.graph}
    np.testing.assert_array_equal(evaluated(model), before)


def test_weights_are_chosen_too() -> None:
    model = model_of(f"s = Softmax(x) {FACTORS} a = Mul(m, s) b = Mul(low, n) y = Add(a, b)", "z = MatMul(y, x)")
    with_selections(model.graph)
    assert "Where" in {node.op_type for node in model.graph}


def test_sums_far_from_a_softmax_stay() -> None:
    model = model_of(CHOICES["truth values"][0], "t = Tanh(y) z = Softmax(t)")
    with_selections(model.graph)
    assert "Where" not in {node.op_type for node in model.graph}


def test_attention_as_tensorflow_writes_it_is_described_and_rewritten() -> None:
    """tf2onnx: keys by queries, transposed afterwards, with a mask of products before and after the softmax."""
    text = """<ir_version: 10, opset_import: ["" : 17]> g (
        int32[b, s] token_ids, int32[b, s] padding_mask) => (float[b, s, 8] y)
        <float scale = {0.5}, float low = {-1e9}, float zero = {0}, int64[4] heads = {0, 0, 2, 4},
         int64[3] rows = {0, 0, 8}, int64[1] axes = {1}> {
        x = Gather(table, token_ids)
        q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
        q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
        q2 = Mul(q1, scale) q = Transpose<perm = [0, 2, 3, 1]>(q2)
        k = Transpose<perm = [0, 2, 1, 3]>(k1) v = Transpose<perm = [0, 2, 1, 3]>(v1)
        turned = MatMul(k, q) scores = Transpose<perm = [0, 1, 3, 2]>(turned)
        length = Shape<start = 1, end = 2>(token_ids) start = Constant<value_ints = [0, 0]>()
        both = Concat<axis = 0>(length, length) last = Constant<value_ints = [2, 3]>()
        square = Slice(lower, start, both, last) causal = Cast<to = 6>(square)
        m1 = Unsqueeze(padding_mask, axes) m2 = Unsqueeze(m1, axes) least = Min(m2, causal)
        seen = Cast<to = 9>(least) not = Not(seen) m = Cast<to = 1>(seen) n = Cast<to = 1>(not)
        kept = Mul(m, scores) hidden = Mul(low, n) logits = Add(kept, hidden)
        weights = Softmax<axis = -1>(logits)
        some = Mul(m, weights) none = Mul(zero, n) all = Add(some, none)
        z = MatMul(all, v) t = Transpose<perm = [0, 2, 1, 3]>(z) y = Reshape(t, rows)
    }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((20, 8)), "lower": np.tri(16)[None, None]}
    weights |= {name: rng.standard_normal((8, 8)) for name in ("wq", "wk", "wv")}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    found = described(model)
    assert (found["num_heads"], found["head_dim"], found["scale"]) == (2, 4, 0.5)
    assert found["encoding"] == {"name": "none"}
    assert (found["mask"]["kind"], found["mask"]["padding"]) == ("causal", ["padding_mask"])
    done = rewrite_model(ir.from_proto(model), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
