"""Sizes come from inputs with the same dimension, so that all layers of a stack share masks and biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from helpers import exported, open_ort, small_spec, weights_for

from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.export import export
from posexport.export.sizes_of_inputs import read_from_inputs

MODEL = """
<ir_version: 9, opset_import: ["" : 18]>
agraph (float[batch, seq, 4] x, float[batch, 2, past, 4] cache) => (int64[1] n) <float[batch, seq, 4] y> {
    y = Neg (x)
    n = Shape <start: int = 1, end: int = 2> (y)
}
"""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("positions", ["data", "consecutive"])
@pytest.mark.parametrize("over", [{}, {"kv_cache": "concat"}, {"vocab_size": 9}, {"padding_mask": True}])
def test_layers_share_the_sum_of_mask_and_bias(positions: str, over: dict[str, Any]) -> None:
    graph = exported(small_spec("alibi", layers=3, causal=True, positions=positions, **over), "native").graph
    masks = {node.inputs[3] for node in graph if node.op_type == "Attention"}
    assert [node.op_type for node in graph].count("Attention") == 3
    assert len(masks) == 1


@pytest.mark.parametrize("num_heads", [12, 64])
def test_layers_share_it_with_many_heads(num_heads: int) -> None:
    spec = small_spec("alibi", layers=2, causal=True, num_heads=num_heads, hidden_size=4 * num_heads)
    graph = exported(spec, "native").graph
    assert len({node.inputs[3] for node in graph if node.op_type == "Attention"}) == 1


@pytest.mark.parametrize(
    ("encoding", "form"), [(name, form) for name in ("shaw", "cope") for form in ("decomposed", "native")]
)
def test_scores_read_the_buffer_that_attention_writes(encoding: str, form: str) -> None:
    assert written(encoding, form) == ["present_key", "present_value"]


def test_weighted_values_read_the_buffer_that_a_contrib_operator_writes() -> None:
    assert written("shaw", "contrib") == []


def written(encoding: str, form: str) -> list[str | None]:
    """The outputs of all nodes that write into a buffer."""
    spec = small_spec(encoding, causal=True, kv_cache="shared", num_heads=12, hidden_size=96)
    made = export(spec, weights_for(spec), form=form, target="ort")
    return [node.outputs[0].name for node in made.graph if node.op_type in ("ScatterND", "TensorScatter")]


def test_a_bias_of_a_layers_weights_stays_with_it() -> None:
    graph = exported(small_spec("t5", layers=3, causal=True), "native").graph
    assert len({node.inputs[3] for node in graph if node.op_type == "Attention"}) == 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache", [None, "concat", "shared"])
def test_files_without_this_compute_the_same(cache: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec("alibi", layers=2, causal=True, padding_mask=True, kv_cache=cache)
    made = export(spec, weights_for(spec), form="native")
    monkeypatch.setattr("posexport.export.exporter.read_from_inputs", lambda model: None)
    plain = export(spec, weights_for(spec), form="native")
    assert len(list(made.graph)) < len(list(plain.graph))
    past = {None: {}, "concat": {"past_seq": 3}, "shared": {"past_seq": 3, "max_seq": 9}}[cache]
    inputs = seeded_inputs(spec, Sizes(batch=2, seq=5, **past), 0)
    one, other = (open_ort(model)(inputs) for model in (made, plain))
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


def shape_of(text: str) -> ir.Node:
    """The Shape node of a model afterwards."""
    model = ir.from_onnx_text(text)
    read_from_inputs(model)
    (node,) = (node for node in model.graph if node.op_type == "Shape")
    return node


def test_a_size_of_the_same_name_is_read_from_an_input() -> None:
    node = shape_of(MODEL)
    assert (node.inputs[0].name, node.attributes["start"].as_int(), node.attributes["end"].as_int()) == ("x", 1, 2)
    moved = shape_of(MODEL.replace("float[batch, seq, 4] y", "float[batch, past, 4] y"))
    assert (moved.inputs[0].name, moved.attributes["start"].as_int(), moved.attributes["end"].as_int()) == (
        "cache",
        2,
        3,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("float[batch, seq, 4] y", "float[batch, other, 4] y"),  # No input has this dimension.
        ("float[batch, seq, 4] y", "float[batch, 7, 4] y"),  # a number
        ("<start: int = 1, end: int = 2>", "<start: int = 1>"),  # more than one dimension
        ("<start: int = 1, end: int = 2>", ""),
    ],
)
def test_other_sizes_stay(before: str, after: str) -> None:
    assert shape_of(MODEL.replace(before, after)).inputs[0].name == "y"
