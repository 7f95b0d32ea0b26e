"""A hand-written graph, rewritten into every form: it computes the same in ONNX Runtime; and attention that is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, SIZE, attention, visible
from rewrite_helpers import rewritten_model
from small_graphs import SHAPES, decoder, inputs, no_attention, run, with_operator

from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.rewrite import site, surgery
from posexport.rewrite.evidence import LIMIT
from posexport.rewrite.rewriter import ALREADY, KEPT, REWRITTEN, rewrite_model
from posexport.rewrite.shared_cache import LENGTH_INPUT

OPERATORS = {
    "native": [("RotaryEmbedding", ""), ("Attention", "")],
    "contrib": [("RotaryEmbedding", "com.microsoft"), ("MultiHeadAttention", "com.microsoft")],
    "function": [("RotaryPosition", "posexport"), ("CachedAttention", "posexport")],
}
"""The operators that a form writes for a decoder with a cache."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("target", "form"), [*itertools.product(["portable", "ort", "tensorrt"], OPERATORS)])
def test_every_form_is_the_same_function(form: str, target: str) -> None:
    model = decoder(layers=2)
    done, proto = rewritten_model(model, form=form, target=target)
    assert [one.state for one in done.sites] == [REWRITTEN, REWRITTEN]
    for one in done.sites:
        assert one.evidence is not None
        assert one.evidence.cases >= 12
        assert one.evidence.error <= LIMIT
    for kind, domain in OPERATORS[form]:
        assert with_operator(proto, kind, domain), kind
    assert "Softmax" not in {node.op_type for node in proto.graph.node}
    for batch, seq, past, left in SHAPES:
        arrays = inputs(batch, seq, past, left, layers=2)
        expected, actual = run(model, arrays), run(proto, arrays)
        assert [*expected] == [*actual]
        seen = arrays["attention_mask"][:, past:] == 1
        for name, value in expected.items():
            assert value.shape == actual[name].shape
            if name == "logits":  # Caches of later layers differ at padding, whose keys are hidden.
                assert np.isfinite(actual[name]).all()
                np.testing.assert_allclose(actual[name][seen], value[seen], rtol=0, atol=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["decomposed", *OPERATORS])
def test_inputs_outputs_weights_and_metadata_stay(form: str) -> None:
    model = decoder()
    _, proto = rewritten_model(model, form=form, target="ort")
    for before, after in ((model.graph.input, proto.graph.input), (model.graph.output, proto.graph.output)):
        assert [one.SerializeToString() for one in before] == [one.SerializeToString() for one in after]
    left = {tensor.name: tensor.raw_data for tensor in proto.graph.initializer}
    for tensor in model.graph.initializer:
        if tensor.name.endswith("weight"):
            assert left[tensor.name] == tensor.raw_data
    assert [(one.key, one.value) for one in proto.metadata_props] == [("author", "somebody else")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", [*OPERATORS, "decomposed"])
def test_the_second_time_nothing_changes(form: str) -> None:
    first, proto = rewritten_model(decoder(layers=2), form=form, target="ort")
    second = rewrite_model(ir.from_proto(proto), form=form, target="ort")
    assert not second.changed
    assert [(one.state, one.reason and one.reason.code) for one in second.sites] == [(KEPT, ALREADY)] * 2
    again, same = rewritten_model(decoder(layers=2), form=form, target="ort")
    assert same.SerializeToString(deterministic=True) == proto.SerializeToString(deterministic=True)
    assert again.changed == first.changed


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("start", "form"), [*itertools.product(OPERATORS, ["decomposed", *OPERATORS])])
def test_any_form_becomes_any_other(start: str, form: str) -> None:
    if start == form:
        return
    model = decoder()
    _, middle = rewritten_model(model, form=start, target="ort")
    done, proto = rewritten_model(middle, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    for kind, domain in OPERATORS[start]:
        assert not with_operator(proto, kind, domain), kind
    arrays = inputs(2, 3, 4, 1)
    np.testing.assert_allclose(run(proto, arrays)["logits"], run(model, arrays)["logits"], rtol=0, atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["contrib", "native", "decomposed"])
def test_shared_caches_give_what_grown_ones_give(form: str) -> None:
    model = decoder()
    done, proto = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert LENGTH_INPUT not in [one.name for one in proto.graph.input]
    for batch, seq, past, left in ((2, 6, 0, 2), (3, 1, 9, 4), (1, 4, 5, 0)):
        arrays = inputs(batch, seq, past, left)
        expected = run(model, arrays)
        room = {
            name: np.concatenate((value, np.full((batch, 2, seq + 3, 8), 1e3, np.float32)), 2)
            for name, value in arrays.items()
            if name.startswith("past")
        }
        actual = run(proto, {**arrays, **room})
        seen = arrays["attention_mask"][:, past:] == 1
        np.testing.assert_allclose(actual["logits"][seen], expected["logits"][seen], rtol=0, atol=2e-5)
        for kind in ("key", "value"):
            assert actual[f"present.0.{kind}"].shape[2] == past + seq + 3
            cached = actual[f"present.0.{kind}"][:, :, : past + seq]
            np.testing.assert_allclose(cached, expected[f"present.0.{kind}"], rtol=0, atol=2e-5)


def test_shared_caches_suit_the_cuda_provider_of_onnxruntime() -> None:
    """The CUDA provider's fusion of rotations gives wrong graphs, so the values do not come directly from a MatMul.

    Lengths come only from shapes, because the CPU would have to wait for a length that the GPU computes.
    """
    _, proto = rewritten_model(decoder(), form="contrib", target="ort", kv_cache="shared")
    made_by = {name: node for node in proto.graph.node for name in node.output}
    (attention,) = (node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
    assert [made_by[name].op_type for name in attention.input[:2]] == ["RotaryEmbedding"] * 2
    assert made_by[attention.input[2]].op_type == "Reshape"
    pending, ends = [attention.input[6]], set()
    while pending:
        node = made_by.get(pending.pop())
        if node is not None and node.op_type != "Shape":
            ends.add(node.op_type)
            pending += node.input
    assert ends <= {"Cast", "Squeeze", "Add", "Sub", "Constant"}


def test_a_graph_without_a_cache_can_not_share_it() -> None:
    with pytest.raises(RequestError, match="the graph has none that grows"):
        rewrite_model(ir.from_proto(decoder(cache=False)), kv_cache="shared", form="contrib", target="ort")


def test_a_graph_without_attention_is_left_alone() -> None:
    model = ir.from_proto(no_attention())
    done = rewrite_model(model, form="native")
    assert done.model is model
    assert (done.changed, done.sites) == (False, ())


def test_only_names_what_is_rewritten() -> None:
    done, proto = rewritten_model(decoder(layers=2), form="native", only=("node_attention_1",))
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [
        (KEPT, "not-chosen"),
        (REWRITTEN, None),
    ]
    kinds = [node.op_type for node in proto.graph.node]
    assert (kinds.count("Softmax"), kinds.count("Attention")) == (1, 1)


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "scale": (
        "split_scale",
        lambda right: lambda factors, q: (right(factors, q)[0] * (1 + 2**-20), right(factors, q)[1]),
    ),
    "queries of another layout": ("to_tokens", lambda right: lambda *args: _backwards(right, *args)),
    "results of another layout": ("from_tokens", lambda right: lambda *args: _backwards(right, *args)),
}
"""Planted faults: a function of the module `site` and its wrong replacement."""


def _backwards(right: Callable[..., ir.Value], nodes: Any, value: ir.Value, *others: Any) -> ir.Value:
    return nodes.one("Neg", right(nodes, value, *others))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_replacement_is_kept_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(site, name, wrong(getattr(site, name)))
    model = ir.from_proto(decoder())
    done = rewrite_model(model, form="native", target="ort")
    assert done.model is model
    (one,) = done.sites
    assert (one.state, one.reason and one.reason.code) == (KEPT, "not-the-same")
    assert one.evidence is not None
    assert one.evidence.error > LIMIT


def with_another_length(model: onnx.ModelProto, *caches: str) -> onnx.ModelProto:
    """The model with another name for the length of these caches."""
    for value in model.graph.input:
        if value.name in caches:
            value.type.tensor_type.shape.dim[2].dim_param = "other_past"
    return model


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_caches_that_a_product_binds_have_one_length(form: str) -> None:
    """As torch exports decoders without a mask: it names the lengths of keys and values apart."""
    model = with_another_length(attention(cached=True, add=[visible()]), "past_value")
    done = rewrite_model(ir.from_proto(model), kv_cache="shared", form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1, 3, HEADS * SIZE)).astype(np.float32)
    past = {name: rng.standard_normal((1, HEADS, 5, SIZE)).astype(np.float32) for name in ("past_key", "past_value")}
    free = np.full((1, HEADS, 4, SIZE), 1000.0, np.float32)
    buffers = {name: np.concatenate((cache, free), 2) for name, cache in past.items()}
    before = run(model, {"hidden_states": features, **past})
    length = {"past_sequence_length": np.array([5])}
    after = run(ir.to_proto(done.model), {"hidden_states": features, **buffers, **length})
    np.testing.assert_allclose(after["output"], before["output"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(after["present_value"][:, :, :8], before["present_value"], rtol=0, atol=2e-5)


def test_caches_with_lengths_of_their_own_are_not_shared() -> None:
    """Two layers side by side, and nothing says that their caches are equally long."""
    one = attention(cached=True, add=[visible()])
    other = onnx.compose.add_prefix(one, "other_")
    for name in ("node", "initializer", "input", "output"):
        getattr(one.graph, name).extend(getattr(other.graph, name))
    model = with_another_length(one, "other_past_key", "other_past_value")
    with pytest.raises(RequestError, match="have lengths of their own"):
        rewrite_model(ir.from_proto(model), kv_cache="shared", form="contrib", target="ort")


@pytest.mark.parametrize("given", [{"form": "nativ"}, {"target": "gpu"}, {"opset": 17}, {"kv_cache": "paged"}])
def test_wrong_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        rewrite_model(ir.from_proto(decoder()), **given)


def test_what_is_not_understood_is_named() -> None:
    model = decoder()
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    at = [*model.graph.node].index(softmax)
    model.graph.node.insert(at, onnx.helper.make_node("Sin", [softmax.input[0]], ["waves"], name="waves"))
    softmax.input[0] = "waves"
    done = rewrite_model(ir.from_proto(model), form="native")
    (one,) = done.sites
    assert isinstance(one.attention, UnknownAttention)
    assert one.attention.reason.code == "score-operator"
    assert "'waves'" in one.attention.reason.text


def test_what_was_recognised() -> None:
    done, _ = rewritten_model(decoder(), form="native")
    attention = done.sites[0].attention
    assert isinstance(attention, Attention)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 8)
    assert attention.scale == pytest.approx(8**-0.5, rel=1e-6)
    for side in (attention.q, attention.k):
        assert side.rotary is not None
        assert (side.rotary.pairs.interleaved, side.rotary.pairs.runs) == (False, (4,))
    assert attention.k.cache is not None
    assert attention.k.cache.name == "past_key_values.0.key"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_cache", [None, "shared"])
@pytest.mark.parametrize("length_of", ["keys", "repeated"])
def test_a_mask_may_count_the_keys_behind_the_cache(length_of: str, kv_cache: str | None) -> None:
    model = decoder(length_of=length_of)
    done, proto = rewritten_model(model, form="contrib", target="ort", kv_cache=kv_cache)
    assert [one.state for one in done.sites] == [REWRITTEN]
    if kv_cache is None:
        for shape in SHAPES:
            expected, actual = (run(one, inputs(*shape)) for one in (model, proto))
            for name, want in expected.items():
                assert np.abs(want - actual[name]).max() < 1e-5


def test_a_mask_that_is_computed_from_keys_behind_the_cache_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgery, "move_lengths", lambda *_: False)
    done, _ = rewritten_model(decoder(length_of="keys"), form="contrib", target="ort")
    (one,) = done.sites
    assert one.state == KEPT
    assert one.reason is not None
    assert "depend on its own output" in one.reason.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", OPERATORS)
def test_layers_may_share_the_cache_of_one(form: str) -> None:
    model = decoder(layers=3, one_cache=True)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN] * 3
    if form == "function":
        assert sum(node.op_type.startswith("CachedAttention") for node in proto.graph.node) == 1
    for shape in SHAPES:
        expected, actual = (run(one, inputs(*shape)) for one in (model, proto))
        for name, want in expected.items():
            assert np.abs(want - actual[name]).max() < 1e-5
