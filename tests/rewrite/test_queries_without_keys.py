"""Real tokens that see no key, as with an empty prompt in a batch: a rewrite keeps the graph's results for them.

The oracles are attention in numpy and ONNX Runtime with the original graph.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rewrite_helpers import rewritten_model
from small_graphs import Array, Graph, run

from posexport.graphs.attention.attention import Attention
from posexport.graphs.cases import cases_of, without_keys
from posexport.rewrite.added import BiasWriter
from posexport.rewrite.rewriter import KEPT, REWRITTEN
from posexport.rewrite.whole import WholeEvidence, whole_evidence

HEADS, SIZE, HIDDEN = 2, 8, 16
FORMS = ["native", "contrib", "function"]

Hook = Callable[[Graph, str], str]
"""Changes the scores, the weights or the output."""


def seen(g: Graph) -> str:
    """The mask of visible keys, bool [B, 1, 1, E]."""
    return g.op("Cast", g.op("Unsqueeze", "encoder_attention_mask", g.constant([1, 2])), to=TensorProto.BOOL)


def zero(g: Graph) -> str:
    return g.constant(0.0, np.float32)


def replaced(fill: float) -> Hook:
    return lambda g, scores: g.op("Where", seen(g), scores, g.constant(fill, np.float32))


def added(fill: float) -> Hook:
    return lambda g, scores: g.op("Add", scores, g.op("Where", seen(g), zero(g), g.constant(fill, np.float32)))


def no_numbers(g: Graph, value: str) -> str:
    """Zeros in place of NaN, as in torch's softmax of masked scores."""
    return g.op("Where", g.op("IsNaN", value), zero(g), value)


def of_hidden_keys(g: Graph, weights: str) -> str:
    return g.op("Where", seen(g), weights, zero(g))


def largest(g: Graph) -> str:
    """1 if a row has a visible key, otherwise 0."""
    return g.op("ReduceMax", g.op("Cast", seen(g), to=TensorProto.INT32), g.constant([3]), keepdims=1)


def of_hidden_rows(g: Graph, weights: str) -> str:
    """Zeros where the mask hides all keys of a row."""
    return g.op("Where", g.op("Equal", largest(g), g.constant(0, np.int32)), zero(g), weights)


def by_the_number_of_keys(g: Graph, weights: str) -> str:
    """Weights times 1 if a row has a key and 0 otherwise, as TorchScript writes `mask.any(-1)`."""
    count = g.op("ReduceSum", g.op("Cast", seen(g), to=TensorProto.INT64), g.constant([3]), keepdims=1)
    some = g.op("Cast", g.op("Greater", count, g.constant(0)), to=TensorProto.FLOAT)
    return g.op("Mul", weights, some)


def of_infinite_logits(g: Graph, weights: str) -> str:
    """Zeros where all logits of a query are minus infinity."""
    (logits,) = next(node.input for node in g.nodes if node.op_type == "Softmax")
    infinite = g.op("Cast", g.op("Equal", logits, g.constant(-np.inf, np.float32)), to=TensorProto.INT64)
    every = g.op("Cast", g.op("ReduceMin", infinite, g.constant([-1]), keepdims=1), to=TensorProto.BOOL)
    return g.op("Where", every, zero(g), weights)


def of_rows_with_padding(g: Graph, weights: str) -> str:
    """Zeros where the mask hides any key of a row, which is another function."""
    least = g.op("ReduceMin", g.op("Cast", seen(g), to=TensorProto.INT32), g.constant([3]), keepdims=1)
    return g.op("Where", g.op("Cast", least, to=TensorProto.BOOL), weights, zero(g))


def of_seen_rows(g: Graph, weights: str) -> str:
    return g.op("Where", g.op("Cast", largest(g), to=TensorProto.BOOL), zero(g), weights)


def nan_to_num(g: Graph, weights: str) -> str:
    """nan_to_num as torch's exporter writes it. It also replaces infinite numbers, but there are none."""
    numbers = no_numbers(g, weights)
    for compared, fill in (("Less", -3e38), ("Greater", 3e38)):
        side = g.op(compared, weights, zero(g))
        infinite = g.op("And", side, g.op("IsInf", weights))
        numbers = g.op("Where", infinite, g.constant(fill, np.float32), numbers)
    return numbers


def same(g: Graph, value: str) -> str:
    return value


def cross_attention(scores: Hook, weights: Hook = same, output: Hook = same) -> onnx.ModelProto:
    """Cross-attention to the tokens of an encoder with a padding mask."""
    g = Graph()
    q, k, v = _projected(g)
    product = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    logits = scores(g, g.op("Mul", product, g.constant(SIZE**-0.5, np.float32)))
    mixed = g.op("MatMul", weights(g, g.op("Softmax", logits, axis=-1)), v)
    return _model(g, mixed, output)


def by_operator(mask: Callable[[Graph], str]) -> onnx.ModelProto:
    """The same with ONNX's Attention, whose mask [B, 1, 1, E] is expanded to [B, 1, S, E]."""
    g = Graph()
    operands = _projected(g)
    lengths = g.op("Concat", g.constant([1, 1]), g.length("features", 1), g.constant([1]), axis=0)
    return _model(g, g.op("Attention", *operands, g.op("Expand", mask(g), lengths)), opset=23)


def _projected(g: Graph, prefix: str = "") -> list[str]:
    """Queries, keys and values [B, N, S, D]."""

    def heads(name: str, source: str) -> str:
        projected = g.op("MatMul", source, g.random(prefix + name, HIDDEN, HIDDEN))
        return g.op("Transpose", g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE])), perm=[0, 2, 1, 3])

    return [heads("q", "features"), heads("k", "encoder_hidden_states"), heads("v", "encoder_hidden_states")]


def _model(g: Graph, mixed: str, output: Hook = same, opset: int = 18) -> onnx.ModelProto:
    joined = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    g.op("Identity", output(g, joined), name="output")
    shapes = {"features": ["batch", "seq", HIDDEN], "encoder_hidden_states": ["batch", "encoder", HIDDEN]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    inputs.append(helper.make_tensor_value_info("encoder_attention_mask", TensorProto.INT64, ["batch", "encoder"]))
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, shapes["features"])]
    graph = helper.make_graph(g.nodes, "cross_attention", inputs, outputs, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def arrays() -> dict[str, Array]:
    """Inputs of three rows. The mask hides all encoder tokens of the second row and some of the third."""
    rng = np.random.default_rng(2)
    mask = np.ones((3, 7), np.int64)
    mask[1], mask[2, 4:] = 0, 0
    features, encoder = (rng.standard_normal((3, length, HIDDEN)).astype(np.float32) for length in (4, 7))
    return {"features": features, "encoder_hidden_states": encoder, "encoder_attention_mask": mask}


def expected(model: onnx.ModelProto, given: dict[str, Array]) -> Array:
    """The output in float64, with zeros for queries that see no key."""
    weights = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer}
    sources = {"q": "features", "k": "encoder_hidden_states", "v": "encoder_hidden_states"}
    q, k, v = (
        (given[source].astype(np.float64) @ weights[name]).reshape(3, -1, HEADS, SIZE).transpose(0, 2, 1, 3)
        for name, source in sources.items()
    )
    powers = np.exp(q @ k.swapaxes(-1, -2) * SIZE**-0.5) * given["encoder_attention_mask"][:, None, None]
    total = powers.sum(-1, keepdims=True)
    mixed: Array = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(3, -1, HIDDEN)


GUARDED: dict[str, tuple[Hook, Hook]] = {
    "no numbers of minus infinity": (replaced(-np.inf), no_numbers),
    "no numbers of an added mask": (added(-np.inf), no_numbers),
    "weights of hidden keys": (replaced(-1e9), of_hidden_keys),
    "weights of keys that an added mask hides": (added(-1e9), of_hidden_keys),
    "weights of rows without keys": (replaced(-np.inf), of_hidden_rows),
    "rows without keys times zero": (replaced(-1e9), by_the_number_of_keys),
    "queries whose logits are infinite": (replaced(-np.inf), of_infinite_logits),
    "nan_to_num": (replaced(-np.inf), nan_to_num),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("guard", GUARDED)
def test_zeros_stay_zeros(guard: str, form: str) -> None:
    model = cross_attention(*GUARDED[guard])
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    given = arrays()
    want = expected(model, given)
    assert not want[1].any() and want[0].any()
    for one in (model, proto):
        np.testing.assert_allclose(run(one, given)["output"], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_guard_that_never_acts_gives_no_zeros(form: str) -> None:
    """A softmax of equal logits is not NaN: the result is the mean of all values."""
    model = cross_attention(replaced(-1e9), no_numbers)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert "IsNaN" not in {node.op_type for node in proto.graph.node}
    assert "Greater" not in {node.op_type for node in proto.graph.node}
    want, have = (run(one, arrays())["output"] for one in (model, proto))
    assert np.abs(want[1]).max() > 0.1
    np.testing.assert_allclose(have, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("fill", "stays"), [(-1e4, False), (-65504.0, True), (-3.4e38, False), (-np.inf, True)])
def test_a_mask_to_which_logits_add_up_to_infinity_keeps_its_guard(fill: float, stays: bool) -> None:
    """In fp16, a logit of -30 is enough: -65,504 - 30 is infinite."""
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(-65504) - np.float16(30)) and np.isfinite(np.float16(-1e4) - np.float16(30))
    (site,) = rewritten_model(cross_attention(added(fill), no_numbers), form="contrib", target="ort")[0].sites
    assert site.state == REWRITTEN and isinstance(site.attention, Attention)
    assert (site.attention.guard is not None) is stays


@pytest.mark.parametrize("weights", [of_rows_with_padding, of_seen_rows])
def test_zeros_of_rows_that_see_keys_keep_their_attention(weights: Hook) -> None:
    done, _ = rewritten_model(cross_attention(replaced(-1e9), weights), form="native", target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [(KEPT, "weights")]


def compared(model: onnx.ModelProto, *, without: bool = True) -> WholeEvidence:
    """The evidence for a whole graph whose attention was rewritten; `without` adds the case of a row without keys."""
    done, _ = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN] and done.sites[0].view is not None
    own = without_keys(done.roles) if without else ()
    return whole_evidence(done.original, done.model, cases_of(done.roles, 0, own=own))


def test_zeros_behind_the_attention_are_seen_by_the_whole_graph() -> None:
    """If the graph replaces NaN by zeros only after the attention, an attention that returns means differs."""
    model = cross_attention(replaced(-np.inf), output=no_numbers)
    assert compared(model, without=False).problem is None
    problem = compared(model).problem
    assert problem is not None and "a row of an encoder that is all padding" in problem.text


@pytest.mark.parametrize("hook", [replaced(-np.inf), added(-np.inf), replaced(-1e4), added(-1e9)])
def test_what_the_graph_does_not_promise_is_no_difference(hook: Hook) -> None:
    """NaN and means of all values in a row without keys do not count as a difference."""
    found = compared(cross_attention(hook))
    assert found.problem is None and found.cases == compared(cross_attention(hook), without=False).cases + 1


@pytest.mark.parametrize("guard", GUARDED)
def test_the_evidence_sees_zeros_that_are_lost(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BiasWriter, "sees_key", lambda *_: None)
    done, _ = rewritten_model(cross_attention(*GUARDED[guard]), form="native", target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [(KEPT, "not-the-same")]


def infinite(g: Graph) -> str:
    return g.op("Where", seen(g), zero(g), g.constant(-np.inf, np.float32))


def low(g: Graph) -> str:
    """A mask of finite numbers: if all keys are hidden, all logits get the same number."""
    return g.op("Cast", g.op("Where", seen(g), zero(g), g.constant(-1e9, np.float32)), to=TensorProto.FLOAT)


def low_in_half_precision(g: Graph) -> str:
    """A mask with numbers that become minus infinity in half precision."""
    half = g.op("Cast", g.op("Where", seen(g), zero(g), g.constant(-1e9, np.float32)), to=TensorProto.FLOAT16)
    return g.op("Cast", half, to=TensorProto.FLOAT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["decomposed", "contrib", "function"])
@pytest.mark.parametrize("mask", [seen, infinite, low_in_half_precision])
def test_zeros_of_the_operator_stay_zeros(mask: Callable[[Graph], str], form: str) -> None:
    """ONNX's Attention gives zeros where its mask hides all keys."""
    model = by_operator(mask)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    given = arrays()
    want = expected(model, given)
    for one in (model, proto):
        np.testing.assert_allclose(run(one, given)["output"], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", ["contrib", "function"])
def test_zeros_of_one_head_stay_zeros(form: str) -> None:
    """The mask hides all keys of some rows, but only from the second head."""

    def by_head(g: Graph) -> str:
        return g.op("Or", seen(g), g.constant([[[[True]], [[False]]]], bool))

    model = by_operator(by_head)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    given = arrays()
    all_keys = given | {"encoder_attention_mask": np.ones_like(given["encoder_attention_mask"])}
    first, second = (expected(model, one).reshape(3, 4, HEADS, SIZE) for one in (all_keys, given))
    want = np.stack([first[:, :, 0], second[:, :, 1]], 2).reshape(3, 4, HIDDEN)
    for one in (model, proto):
        np.testing.assert_allclose(run(one, given)["output"], want, rtol=0, atol=2e-6)


def test_the_operator_has_no_guard_where_no_logit_is_infinite() -> None:
    model = by_operator(low)
    done, proto = rewritten_model(model, form="contrib", target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    assert {"Greater", "IsNaN"}.isdisjoint({node.op_type for node in proto.graph.node})
    given = arrays()
    weights = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    values = given["encoder_hidden_states"][1] @ weights["v"]
    have = run(proto, given)["output"]
    np.testing.assert_allclose(have[1], np.broadcast_to(values.mean(0), have[1].shape), rtol=0, atol=2e-6)


def test_zeros_of_the_operator_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BiasWriter, "sees_key", lambda *_: None)
    done, _ = rewritten_model(by_operator(seen), form="contrib", target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [(KEPT, "not-the-same")]


def test_layers_with_one_mask_share_their_guard() -> None:
    """The graph checks the mask once, whatever the number of layers."""
    g = Graph()
    mask = g.op("Expand", seen(g), g.op("Concat", g.constant([1, 1]), g.length("features", 1), g.constant([1]), axis=0))
    mixed = g.op("Add", *(g.op("Attention", *_projected(g, f"{layer}."), mask) for layer in ("0", "1")))
    done, proto = rewritten_model(_model(g, mixed, opset=23), form="contrib", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN] * 2
    kinds = [node.op_type for node in proto.graph.node]
    assert [kinds.count(kind) for kind in ("ReduceMax", "Greater", "MultiHeadAttention")] == [1, 1, 2]
