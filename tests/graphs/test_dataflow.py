"""The flow of content through a graph."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.attention.dataflow import Dataflow, values_read
from posexport.graphs.view import view_of


def test_sequences_are_no_tensors_that_content_passes_through() -> None:
    """A mixture of experts is split with SplitToSequence, as in JetMoe, where queries come after it."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[6, 4] x) => (float[n, 4] y) {
        sizes = Constant<value_ints = [2, 4]>() one = Constant<value_int = 1>()
        before = Neg(x) parts = SplitToSequence(before, sizes) part = SequenceAt(parts, one) y = Exp(part)
    }"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    above = [value.name for value in Dataflow(model, set(), {"x"}).dominators(model.graph.outputs[0])]
    assert above == ["y", "part", "before", "x"]


def test_a_branch_in_a_branch_may_give_a_value_of_the_graph_as_it_is() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[2] x, float[2] z, bool c) => (float[2] y) {
        y = If(c) <then_branch = t () => (float[2] p) { p = If(c) <
            then_branch = tt () => (float[2] z) { }, else_branch = te () => (float[2] q) { q = Neg(x) }> },
        else_branch = e () => (float[2] r) { r = Exp(x) }>
    }"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    assert [value.name for value in values_read(model.graph[0])] == ["c", "c", "z", "x", "x"]


IDS = {
    "tokens before rows": "some = Transpose<perm = [1, 0]>(ids)",
    "behind a first token": "some = Concat<axis = 1>(first, ids)",
    "one in place of another": "is = Equal(ids, first) some = Where(is, first, ids)",
    "padded": "some = Pad(ids, pads)",
    "of one of several tables, as in CSM": "some = Add(ids, first)",
    "hashed, as in CANINE": "more = Mul(ids, first) some = Mod(more, first)",
    "bounded": "more = Max(ids, first) less = Sub(more, first) some = Min(less, first)",
    "some overwritten": "at = NonZero(ids) places = Transpose(at) some = ScatterND(ids, places, news)",
}


@pytest.mark.parametrize("name", IDS)
def test_ids_stay_ids(name: str) -> None:
    """Values that are looked up by ids are features. Comparisons with ids are not."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (int64[2, n] ids) => (float[a, b, 4] y, bool[2, n] same)
      <int64[2, 1] first = {{1, 2}}, int64[4] pads = {{0, 1, 0, 0}},
       int64[2] news = {{0, 1}}, float[2, 4] table = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
        {IDS[name]} y = Gather(table, some) same = Equal(ids, first)
    }}"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    assert [value.name for value in Dataflow(model, {"ids"}, set()).content] == ["y"]


OTHERS = {
    "ids of some of their bits": ("bits = BitwiseAnd(input_ids, one) x = Gather(table, bits)", "x", "features-unknown"),
    "a constant": ("x = Gather(table, input_ids)", "table", None),
}
"""Nodes that make the features x, the value that their softmax weights, and the expected reason code."""


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_softmax_weights_is_features_or_is_named(name: str) -> None:
    made, weighted, code = OTHERS[name]
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (int64[batch, 2] input_ids) => (float[a, b, c] y)
      <int64 one = {{1}}, int64 two = {{2}}, float[2, 2] table = {{1, 2, 3, 4}}> {{
        {made} t = Transpose<perm = [0, 2, 1]>(x) scores = MatMul(x, t)
        weights = Softmax<axis = -1>(scores) y = MatMul(weights, {weighted})
    }}"""
    found = view_of(ir.from_proto(onnx.parser.parse_model(text))).attentions
    assert [one.reason.code for one in found if isinstance(one, UnknownAttention)] == ([code] if code else [])
    assert len(found) == bool(code)


def test_hashed_ids_make_features() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (int64[batch, tokens] input_ids) => (float[a, b, c] y)
      <int64 prime = {31}, int64 two = {2}, float[2, 2] table = {1, 2, 3, 4}> {
        more = Mul(input_ids, prime) hashed = Mod(more, two) x = Gather(table, hashed)
        t = Transpose<perm = [0, 2, 1]>(x) scores = MatMul(x, t) weights = Softmax<axis = -1>(scores)
        y = MatMul(weights, x)
    }"""
    (found,) = view_of(ir.from_proto(onnx.parser.parse_model(text))).attentions
    assert isinstance(found, Attention) and (found.num_heads, found.head_dim) == (1, 2)


def test_floats_made_of_ids_are_none() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (int64[2, n] ids) => (float[2, n] y)
      <float half = {0.5}> { numbers = Cast<to = 1>(ids) y = Mul(numbers, half) z = Gather(y, ids) }"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    assert [value.name for value in Dataflow(model, {"ids"}, set()).content] == ["z"]


COMBINED = {
    "two softmaxes, as differential transformers have them": (
        "a = Softmax<axis = -1>(scores) more = Mul(scores, half) b = Softmax<axis = -1>(more) w = Sub(a, b)",
        ["weights", "weights"],
    ),
    "the sum twice": ("e = Exp(scores) sum = ReduceSum(e, last) all = Add(sum, sum) w = Div(e, all)", ["sinks"]),
    "a number in the sum": ("e = Exp(scores) sum = ReduceSum(e, last) all = Add(sum, half) w = Div(e, all)", []),
    "one softmax": ("w = Softmax<axis = -1>(scores)", []),
    "experts, whose parts are added": (
        "chosen = MatMul(x, weights) gates = Softmax<axis = -1>(chosen) more = Add(gates, half) "
        "twice = MatMul(more, weights) two = MatMul(twice, t) w = Add(two, scores)",
        [],
    ),
}
"""Nodes that compute weights from scores of features, and the expected reason codes."""


@pytest.mark.parametrize("name", COMBINED)
def test_weights_that_are_combined_are_named(name: str) -> None:
    made, codes = COMBINED[name]
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[batch, tokens, 4] x) => (float[a, b, 4] y)
      <float half = {{0.5}}, int64[1] last = {{-1}},
       float[4, 4] weights = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}}> {{
        t = Transpose<perm = [0, 2, 1]>(x) scores = MatMul(x, t) {made} y = MatMul(w, x)
    }}"""
    found = view_of(ir.from_proto(onnx.parser.parse_model(text)), {"x": "features"}).attentions
    assert [one.reason.code for one in found if isinstance(one, UnknownAttention)] == codes
