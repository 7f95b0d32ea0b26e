"""Nodes that do nothing on short inputs of usual numbers, and something on others: they are never taken over.

The oracle is ONNX Runtime on the graph as it was, on inputs on which they do something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

HEADS, SIZE, HIDDEN = 4, 8, 32
FAR = 300
"""Tokens; what depends on lengths changes from 256 on."""

Hook = Callable[[Graph, str], str]


def same(g: Graph, value: str) -> str:
    return value


def long(g: Graph) -> str:
    """Whether there are more than 256 tokens."""
    return g.op("Greater", g.length("features", 1), g.constant([256]))


def growing(g: Graph) -> str:
    """max(1, log(n) / log(256)) of n tokens, as Qwen scales queries."""
    count = g.op("Cast", g.length("features", 1), to=TensorProto.FLOAT)
    return g.op(
        "Max", g.op("Mul", g.op("Log", count), g.constant(1 / np.log(256), np.float32)), g.constant([1.0], np.float32)
    )


def clipped(g: Graph, value: str) -> str:
    return g.op("Clip", value, g.constant(-8.0, np.float32), g.constant(8.0, np.float32))


def scaled_by_length(g: Graph, value: str) -> str:
    return g.op("Mul", value, growing(g))


def scaled_by_choice(g: Graph, value: str) -> str:
    return g.op("Mul", value, g.op("Where", long(g), g.constant([2.0], np.float32), g.constant([1.0], np.float32)))


def scaled_by_whole_division(g: Graph, value: str) -> str:
    """1 + n // 256."""
    steps = g.op("Div", g.length("features", 1), g.constant([256]))
    return g.op("Mul", value, g.op("Cast", g.op("Add", steps, g.constant([1])), to=TensorProto.FLOAT))


def chosen(g: Graph, value: str) -> str:
    return g.op("Where", long(g), g.op("Neg", value), value)


def last_keys(g: Graph, value: str) -> str:
    """The last 256 tokens of [B, N, T, D]."""
    return g.op("Slice", value, g.constant([-256]), g.constant([2**31 - 1]), g.constant([2]))


def first_keys(g: Graph, value: str) -> str:
    return g.op("Slice", value, g.constant([0]), g.constant([256]), g.constant([2]))


def last_keys_computed(g: Graph, value: str) -> str:
    """From max(n - 256, 0) on."""
    start = g.op("Max", g.op("Sub", g.length("features", 1), g.constant([256])), g.constant([0]))
    return g.op("Slice", value, start, g.constant([2**31 - 1]), g.constant([2]))


def model_of(
    *, q: Hook = same, k: Hook = same, v: Hook = same, scores: Hook = same, weights: Hook = same
) -> onnx.ModelProto:
    g = Graph()

    def heads(name: str, hook: Hook) -> str:
        projected = g.op("MatMul", "features", g.random(f"{name}_proj", HIDDEN, HIDDEN))
        split = g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE]))
        return hook(g, g.op("Transpose", split, perm=[0, 2, 1, 3]))

    queries, keys, values = heads("q", q), heads("k", k), heads("v", v)
    product = g.op("MatMul", queries, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    logits = scores(g, g.op("Mul", product, g.constant(SIZE**-0.5, np.float32)))
    mixed = g.op("MatMul", weights(g, g.op("Softmax", logits, axis=-1)), values)
    merged = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    g.op("MatMul", merged, g.random("o_proj", HIDDEN, HIDDEN), name="output")
    features, output = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    )
    graph = helper.make_graph(g.nodes, "main_graph", [features], [output], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


FAULTS: dict[str, tuple[dict[str, Hook], float]] = {
    "clipped queries": ({"q": clipped}, 6.0),
    "clipped values": ({"v": clipped}, 6.0),
    "queries scaled by the length": ({"q": scaled_by_length}, 1.0),
    "keys scaled by a choice": ({"k": scaled_by_choice}, 1.0),
    "queries scaled by a whole division": ({"q": scaled_by_whole_division}, 1.0),
    "queries chosen": ({"q": chosen}, 1.0),
    "scores scaled by the length": ({"scores": scaled_by_length}, 1.0),
    "weights scaled by a choice": ({"weights": scaled_by_choice}, 1.0),
    "the last keys": ({"k": last_keys, "v": last_keys}, 1.0),
    "the first keys": ({"k": first_keys, "v": first_keys}, 1.0),
    "the last keys, computed": ({"k": last_keys_computed, "v": last_keys_computed}, 1.0),
}
"""What stands in the graph, and the size of features on which it does something."""


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_nothing_on_short_inputs_stays(fault: str, form: str) -> None:
    hooks, size = FAULTS[fault]
    model = model_of(**hooks)
    features = size * np.random.default_rng(1).standard_normal((2, FAR, HIDDEN)).astype(np.float32)
    expected, plain = (run(one, {"features": features})["output"] for one in (model, model_of()))
    largest = float(np.abs(expected).max())
    assert float(np.abs(plain - expected).max()) > 1e-3 * largest  # it does something here
    _, proto = rewritten_model(model, form=form, target="ort")
    actual = run(proto, {"features": features})["output"]
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("fault", [name for name in FAULTS if "weights" not in name])
def test_attention_begins_below_it(fault: str) -> None:
    """Its products are an operator all the same."""
    done, proto = rewritten_model(model_of(**FAULTS[fault][0]), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("Attention") == 1


def size_of_heads(g: Graph, value: str) -> str:
    """Divided by the last length."""
    size = g.op("Slice", g.op("Shape", value), g.constant([-1]), g.constant([2**31 - 1]))
    return g.op("Div", value, g.op("Cast", size, to=TensorProto.FLOAT))


def whole_slice(g: Graph, value: str) -> str:
    return g.op("Slice", value, g.constant([0]), g.constant([2**63 - 1]), g.constant([2]))


@pytest.mark.parametrize("hooks", [{"q": size_of_heads, "k": size_of_heads}, {"k": whole_slice}])
def test_what_is_the_same_for_all_inputs_is_taken_over(hooks: dict[str, Any]) -> None:
    done, proto = rewritten_model(model_of(**hooks), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert not {node.op_type for node in proto.graph.node} & {"Div", "Slice", "Softmax"}


def test_a_default_that_callers_may_change_is_no_constant() -> None:
    model = model_of()
    scale = next(one for one in model.graph.initializer if onnx.numpy_helper.to_array(one).shape == ())
    model.graph.input.append(helper.make_tensor_value_info(scale.name, TensorProto.FLOAT, []))
    onnx.checker.check_model(model, full_check=True)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    features = np.random.default_rng(1).standard_normal((2, 7, HIDDEN)).astype(np.float32)
    for given in ({}, {scale.name: np.array(1.5, np.float32)}):
        arrays = {"features": features, **given}
        np.testing.assert_allclose(run(proto, arrays)["output"], run(model, arrays)["output"], rtol=0, atol=2e-5)
