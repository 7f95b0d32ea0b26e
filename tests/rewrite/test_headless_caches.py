"""Caches of one head whose axis of heads is removed before new tokens are appended, such as the keys of an indexer,
become buffers like all others. So do caches of no features. The oracle is ONNX Runtime on the graph before."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import feeds, rewritten_model
from small_graphs import HIDDEN, Array, decoder, run
from test_cache_readers import ROOM, SIZES, buffers_of, with_nodes

from posexport.rewrite.headless_caches import append_with_heads
from posexport.rewrite.rewriter import KEPT, REWRITTEN

PAST, PRESENT, SIZE = "past_key_values.0.indexer.key", "present.0.indexer.key", 6


def with_indexer(axis: int = 1, returned: bool = True) -> onnx.ModelProto:
    """A decoder with a third cache [B, 1, P, 6], which is [B, P, 6] where tokens are appended. `sums` [B, T] are sums
    of what it then is. `axis` is that of the Concat."""
    model = decoder()
    embedded = next(node.output[0] for node in model.graph.node if node.op_type == "Gather")
    float_info = helper.make_tensor_value_info
    model.graph.input.append(float_info(PAST, TensorProto.FLOAT, ["batch", 1, "past", SIZE]))
    model.graph.output.append(float_info("sums", TensorProto.FLOAT, ["batch", "total"]))
    if returned:
        model.graph.output.append(float_info(PRESENT, TensorProto.FLOAT, ["batch", 1, "total", SIZE]))
    return with_nodes(
        model,
        helper.make_node("MatMul", [embedded, "width"], ["new"], name="new"),
        helper.make_node("Squeeze", [PAST, "heads"], ["cached"], name="cached"),
        helper.make_node("Concat", ["cached", "new"], ["all"], name="all", axis=axis),
        helper.make_node("ReduceSum", ["all", "features"], ["sums"], name="sums", keepdims=0),
        helper.make_node("Unsqueeze", ["all", "heads"], [PRESENT], name="present"),
        width=np.random.default_rng(1).standard_normal((HIDDEN, SIZE)).astype(np.float32),
        heads=np.array([1]),
        features=np.array([2]),
    )


def inputs_of(rows: int, seq: int, past: int) -> dict[str, Array]:
    """Inputs without padding."""
    inputs = feeds(rows, seq, past)
    inputs["attention_mask"][:] = 1
    inputs[PAST] = np.random.default_rng(2).standard_normal((rows, 1, past, SIZE)).astype(np.float32)
    return inputs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "axis"), [*itertools.product(["native", "contrib", "decomposed"], [1, -2])])
def test_a_cache_without_heads_becomes_a_buffer(form: str, axis: int) -> None:
    model = with_indexer(axis=axis)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN], done.sites[0].reason
    for rows, seq, past in SIZES:
        inputs = inputs_of(rows, seq, past)
        want, have = run(model, inputs), run(after, buffers_of(inputs, past))
        assert have[PRESENT].shape == (rows, 1, ROOM, SIZE)
        for name, value in want.items():
            part = have[name][:, :, : past + seq] if name.startswith("present") else have[name]
            np.testing.assert_allclose(part, value, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["native", "contrib", "decomposed"])
def test_a_cache_may_have_no_features(form: str) -> None:
    """As the rotated part of the keys of GLM 5, which aren't rotated."""
    model, (past_name, name) = decoder(), ("past_key_values.1.value", "present.1.value")
    infos = [helper.make_tensor_value_info(past_name, TensorProto.FLOAT, ["batch", 1, "past", 0])]
    infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1, "total", 0]))
    model.graph.input.append(infos[0])
    model.graph.output.append(infos[1])
    embedded = next(node.output[0] for node in model.graph.node if node.op_type == "Gather")
    model = with_nodes(
        model,
        helper.make_node("MatMul", [embedded, "width"], ["none"], name="none"),
        helper.make_node("Unsqueeze", ["none", "heads"], ["new"], name="new"),
        helper.make_node("Concat", [past_name, "new"], [name], name="joint", axis=2),
        width=np.zeros((HIDDEN, 0), np.float32),
        heads=np.array([1]),
    )
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN], done.sites[0].reason
    for rows, seq, past in SIZES:
        inputs = feeds(rows, seq, past) | {past_name: np.zeros((rows, 1, past, 0), np.float32)}
        inputs["attention_mask"][:] = 1
        want, have = run(model, inputs), run(after, buffers_of(inputs, past))
        np.testing.assert_allclose(have["logits"], want["logits"], atol=2e-5, rtol=1e-5)
        assert have[name].shape == (rows, 1, ROOM, 0)


def test_a_cache_that_is_not_returned_is_no_buffer() -> None:
    done, _ = rewritten_model(with_indexer(returned=False), form="native", target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [KEPT]
    assert [site.reason and site.reason.code for site in done.sites] == ["cache-kind"]


def test_the_function_stays_the_same_and_other_graphs_stay_as_they_are() -> None:
    model = ir.from_proto(with_indexer())
    append_with_heads(model)
    joint = next(node for node in model.graph if node.outputs[0].name == PRESENT)
    assert joint.op_type == "Concat" and joint.inputs[0] is not None and joint.inputs[0].name == PAST
    model.graph.sort()
    inputs = inputs_of(2, 3, 4)
    want, have = run(with_indexer(), inputs), run(ir.to_proto(model), inputs)
    assert all(np.array_equal(have[name], value) for name, value in want.items())
    for other in (decoder(), with_indexer(axis=2), with_indexer(returned=False)):
        unchanged = ir.from_proto(other)
        append_with_heads(unchanged)
        assert [node.op_type for node in unchanged.graph] == [node.op_type for node in ir.from_proto(other).graph]
