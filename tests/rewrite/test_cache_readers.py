"""What reads a cache, or scores, beside the attention: nodes that nothing reads don't matter, others keep the caches as
they are. The oracle is ONNX Runtime on the graph as it was."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from descriptions import described
from onnx import TensorProto, helper, numpy_helper
from rewrite_helpers import feeds, rewritten_model
from small_graphs import KV_HEADS, SIZE, decoder, run

from posexport.rewrite.rewriter import KEPT, REWRITTEN

Array = np.ndarray[Any, Any]

FORMS = ("native", "contrib", "function")

SIZES = [(1, 1, 9), (2, 6, 0), (1, 4, 13)]
"""Rows, tokens, and cached ones; GroupQueryAttention takes several tokens behind others for one row."""

ROOM = 24
"""Places of a buffer."""


def with_nodes(model: onnx.ModelProto, *nodes: onnx.NodeProto, **weights: Array) -> onnx.ModelProto:
    """A graph with more nodes, in an order that onnx takes."""
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    inner = ir.from_proto(model)
    inner.graph.sort()
    return ir.to_proto(inner)


def read(model: onnx.ModelProto, what: str) -> str:
    """The name of a value: scores, what is softmaxed, weights, the keys, or those that are cached."""
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    product = next(node for node in model.graph.node if node.op_type == "MatMul" and "transpose" in node.input[1])
    names = {"scores": product.output[0], "logits": softmax.input[0], "weights": softmax.output[0]}
    return names.get(what, {"keys": "present.0.key", "cached": "past_key_values.0.key"}.get(what, what))


WHAT = ("scores", "logits", "weights", "keys", "cached")


def with_dead_nodes(what: str) -> onnx.ModelProto:
    """A decoder with two nodes behind a value of which nothing is read."""
    model = decoder()
    value = read(model, what)
    return with_nodes(
        model,
        helper.make_node("Mul", [value, "unread"], ["dead_0"], name="dead_0"),
        helper.make_node("Sqrt", ["dead_0"], ["dead_1"], name="dead_1"),
        unread=np.float32(3),
    )


def check_shared(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """A graph with buffers does what one with grown caches did."""
    for rows, seq, past in SIZES:
        inputs = feeds(rows, seq, past)
        inputs["attention_mask"][:] = 1
        buffers = {
            name: np.pad(array, ((0, 0), (0, 0), (0, ROOM - past), (0, 0))) if name.startswith("past") else array
            for name, array in inputs.items()
        }
        want, have = run(before, inputs), run(after, buffers)
        np.testing.assert_allclose(have["logits"], want["logits"], atol=2e-5)
        np.testing.assert_allclose(have["present.0.key"][:, :, : past + seq], want["present.0.key"], atol=2e-5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "what"), [*itertools.product(FORMS, WHAT)])
def test_nodes_that_nothing_reads_keep_no_cache_from_being_shared(what: str, form: str) -> None:
    model = with_dead_nodes(what)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    check_shared(model, after)
    kept = {weight.name for weight in after.graph.initializer}
    assert {weight.name for weight in model.graph.initializer if weight.name.endswith(".weight")} <= kept


@pytest.mark.parametrize("what", WHAT)
def test_nodes_that_nothing_reads_say_nothing_of_attention(what: str) -> None:
    assert described(with_dead_nodes(what)) == described(decoder())


def test_attention_that_nothing_reads_is_none() -> None:
    model = decoder(layers=2)
    ends = next(node for node in model.graph.node if "logits" in node.output)
    first = next(node for node in model.graph.node if node.op_type == "Add" and node.output[0] == ends.input[0])
    ends.input[0] = first.input[0]  # what the first layer gives
    for output in [output for output in model.graph.output if output.name.startswith("present.1")]:
        model.graph.output.remove(output)
    done, _ = rewritten_model(model, form="native", target="ort")
    assert [site.attention.name for site in done.sites] == ["node_attention_0"]


def summed(of: str) -> onnx.ModelProto:
    """A decoder with an output that is computed from a cache."""
    model = decoder(layers=2)
    model.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, []))
    return with_nodes(model, helper.make_node("ReduceSum", [read(model, of)], ["sum"], name="summed", keepdims=0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", ["keys", "cached"])
def test_what_reads_a_cache_keeps_all_as_they_are(of: str, form: str) -> None:
    done, _ = rewritten_model(summed(of), form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [KEPT, KEPT] and not done.changed
    assert [site.reason and site.reason.code for site in done.sites] == ["cache-readers", "others-left"]
    assert "ReduceSum 'summed' reads its cache" in str(done.sites[0].reason)
    grown, _ = rewritten_model(summed(of), form=form, target="ort")
    assert [site.state for site in grown.sites] == [REWRITTEN, REWRITTEN]


def read_again() -> onnx.ModelProto:
    """A decoder whose second layer reads the keys of the first layer's cache, each less the one before it."""
    model = decoder(layers=2, one_cache=True)
    places = [at for at, node in enumerate(model.graph.node) if "present.0.key" in node.input]
    weights = {"begin": np.array([0]), "last": np.array([-1]), "tokens": np.array([2])}
    model.graph.node[places[-1]].input[0] = "changed"
    zeros = np.zeros((1, KV_HEADS, 1, SIZE), np.float32)
    return with_nodes(
        model,
        helper.make_node("Slice", ["present.0.key", "begin", "last", "tokens"], ["front"], name="front"),
        helper.make_node("Shape", ["present.0.key"], ["rows"], name="rows", start=0, end=1),
        helper.make_node("Concat", ["rows", "rest"], ["one"], name="one", axis=0),
        helper.make_node("Expand", ["zeros", "one"], ["first"], name="first"),
        helper.make_node("Concat", ["first", "front"], ["before"], name="before", axis=2),
        helper.make_node("Sub", ["present.0.key", "before"], ["changed"], name="changed"),
        zeros=zeros,
        rest=np.array([KV_HEADS, 1, SIZE]),
        **weights,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
def test_layers_that_read_one_cache_in_other_ways_keep_it(form: str) -> None:
    model = read_again()
    done, _ = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [KEPT, KEPT]
    assert "cache-readers" in [site.reason and site.reason.code for site in done.sites]
    grown, after = rewritten_model(model, form=form, target="ort")
    assert REWRITTEN in [site.state for site in grown.sites]
    for sizes in SIZES:
        want, have = run(model, feeds(*sizes)), run(after, feeds(*sizes))
        np.testing.assert_allclose(have["logits"], want["logits"], atol=2e-5)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_shapes_of_repeated_keys_are_no_readers(form: str) -> None:
    """As TorchScript asks for them: they say how many tokens are cached, not how long buffers are."""
    model = decoder()
    product = next(node for node in model.graph.node if node.op_type == "MatMul" and node.input[0] == "attention_0")
    model.graph.output.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [4]))
    model = with_nodes(
        model,
        helper.make_node("Shape", [product.input[1]], ["repeated"], name="repeated"),
        helper.make_node("Identity", ["repeated"], ["sizes"], name="sizes"),
    )
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN], done.sites[0].reason
    check_shared(model, after)
    inputs = feeds(1, 1, 9)
    buffers = {
        name: np.pad(array, ((0, 0), (0, 0), (0, ROOM - 9), (0, 0))) if name.startswith("past") else array
        for name, array in inputs.items()
    }
    np.testing.assert_array_equal(run(after, buffers)["sizes"], run(model, inputs)["sizes"])
