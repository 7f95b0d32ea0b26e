"""Masks that take the number of keys from the shape of the scores.

A rewrite takes this shape from the graph's inputs and caches, because the scores are inside the new operator. The
oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import itertools
from typing import Any

import attention_graphs as graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, Writer, padding, visible
from onnx import TensorProto
from rewrite_helpers import rewritten_model
from small_graphs import run

from posexport.rewrite.key_lengths import circular
from posexport.rewrite.rewriter import REWRITTEN
from posexport.rewrite.site import Site

Array = np.ndarray[Any, Any]

FORMS = ("native", "contrib", "function")

SIZES = [(1, 1, 9), (2, 6, 0), (1, 4, 13)]
"""Rows, tokens and cached tokens. GroupQueryAttention accepts several tokens after cached ones only for one row."""

ROOM = 24
"""The length of a buffer in tokens."""


def inputs(model: onnx.ModelProto, rows: int, seq: int, past: int) -> dict[str, Array]:
    rng, sizes = np.random.default_rng(seq), {"batch": rows, "seq": seq, "past": past, "total": past + seq}
    made: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        whole = value.type.tensor_type.elem_type == TensorProto.INT64
        made[value.name] = np.ones(shape, np.int64) if whole else rng.standard_normal(shape).astype(np.float32)
    return made


def logits_by_length(g: Writer, scores: str) -> str:
    """Scores times log(number of keys + 1)."""
    keys = g.op("Cast", g.op("Shape", scores, start=3), to=TensorProto.FLOAT)
    return g.op("Mul", scores, g.op("Log", g.op("Add", keys, g.floats(1.0))))


def whole_shape(g: Writer, scores: str) -> str:
    """Adds a causal mask [batch, heads, seq, keys] with the shape of the scores."""
    seen = g.op("GreaterOrEqual", graphs.distances(g, scores), g.const(0))
    wide = g.op("Expand", seen, g.op("Shape", scores))
    return g.op("Where", wide, scores, g.floats(-np.inf))


MASKS: dict[str, list[graphs.Add]] = {
    "causal": [visible()],
    "window": [visible(behind=4)],
    "behind padding": [padding(), visible()],
    "before padding": [visible(), padding()],
    "whole shape": [whole_shape],
    "scaled": [logits_by_length, visible()],
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("form", "key_heads", "name"), [*itertools.product(FORMS, [2, HEADS], MASKS)])
def test_caches_may_be_buffers(name: str, key_heads: int, form: str) -> None:
    model = graphs.attention(cached=True, key_heads=key_heads, add=MASKS[name])
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    for rows, seq, past in SIZES:
        given = inputs(model, rows, seq, past)
        want = run(model, given)
        buffers = {
            key: np.pad(array, ((0, 0), (0, 0), (0, ROOM - past), (0, 0))) if key.startswith("past") else array
            for key, array in given.items()
        }
        if "attention_mask" not in given:
            buffers["past_sequence_length"] = np.array([past])
        have = run(after, buffers)
        np.testing.assert_allclose(have["output"], want["output"], atol=2e-5)
        np.testing.assert_allclose(have["present_key"][:, :, : past + seq], want["present_key"], atol=2e-5)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("cached", "form", "name"), [*itertools.product([False, True], FORMS, MASKS)])
def test_scores_are_not_computed_for_their_shape(name: str, form: str, cached: bool) -> None:
    model = graphs.attention(cached=cached, key_heads=2, add=MASKS[name])
    done, after = rewritten_model(model, form=form, target="ort")
    assert [site.state for site in done.sites] == [REWRITTEN]
    if cached or "padding" not in name:  # otherwise the mask's length has its own name and may be 1
        assert sum(node.op_type == "MatMul" for node in after.graph.node) == 3
    for rows, seq, past in SIZES:
        given = inputs(model, rows, seq, past if cached else 0)
        want, have = run(model, given), run(after, given)
        for key, value in want.items():
            np.testing.assert_allclose(have[key], value, atol=2e-5)


def test_rows_that_may_be_one_keep_the_shape_of_the_scores() -> None:
    """The batch dimensions of tokens and mask have different names, so either may be 1."""

    def mask(g: Writer, scores: str) -> str:
        given = g.input("attention_mask", TensorProto.FLOAT, "rows", 1, "seq", "seq")
        return whole_shape(g, g.op("Add", scores, given))

    model = graphs.attention(add=[mask])
    for form in FORMS:
        _, after = rewritten_model(model, form=form, target="ort")
        for rows, of_mask in ((2, 2), (2, 1), (1, 3)):
            given = inputs(model, rows, 5, 0)
            shape = (of_mask, 1, 5, 5)
            given["attention_mask"] = np.random.default_rng(rows).standard_normal(shape).astype(np.float32)
            np.testing.assert_allclose(run(after, given)["output"], run(model, given)["output"], atol=2e-5)


def test_a_circle_is_that_of_its_own_layer() -> None:
    """The second layer reads the output of the first, and the first depends on itself."""

    def value(kind: str, *read: ir.Value) -> ir.Value:
        (result,) = ir.node(kind, list(read)).outputs
        return result

    features = ir.Value(name="features")
    old = {"first": value("Relu", features)}
    old["length"] = value("Shape", old["first"])
    old["second"] = value("Relu", old["first"])
    keys = value("Identity", features)
    first = Site(replaced={"first": value("Attention", features, old["length"])}, keys=keys, sizes=None)  # type: ignore[arg-type]
    second = Site(replaced={"second": value("Attention", old["first"])}, keys=keys, sizes=None)  # type: ignore[arg-type]
    assert circular([first, second], old) == [True, False]
    assert circular([second], old) == [False]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_the_length_of_a_buffer_gets_a_name_that_is_free(form: str) -> None:
    model = graphs.attention(cached=True, key_heads=2, add=[visible()])
    taken = next(node for node in model.graph.node if node.op_type == "MatMul").output[0]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["past_sequence_length" if name == taken else name for name in names]
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    assert [one.name for one in after.graph.input][-1] == "past_sequence_length_1"
    given = inputs(model, 2, 1, 5)
    pasts = {name: np.pad(given[name], ((0, 0), (0, 0), (0, 9), (0, 0))) for name in given if name.startswith("past_")}
    have = run(after, {**given, **pasts, "past_sequence_length_1": np.array([5])})
    np.testing.assert_allclose(have["output"], run(model, given)["output"], atol=2e-5)
