"""Dimensions of different lengths with the same name, as some exporters write them: the name is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from descriptions import described
from rewrite_helpers import feeds, rewritten_model
from small_graphs import decoder, run

from posexport.graphs.axes import reused_names
from posexport.graphs.baked import agree
from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import REWRITTEN


def renamed(model: onnx.ModelProto, names: dict[str, str], default: str | None = None) -> onnx.ModelProto:
    """A graph with renamed dimensions. Names that are not in `names` become `default`, or stay if it is None."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = names.get(dim.dim_param, dim.dim_param if default is None else default)
    return model


ONE_NAME: dict[str, dict[str, Any]] = {
    "unk": {"names": {}, "default": "unk"},
    "a letter": {"names": {}, "default": "N"},
    "tokens and cached ones": {"names": {"seq": "s", "past": "s"}},
    "cached ones and all": {"names": {"total": "s", "past": "s"}},
    "rows and tokens": {"names": {"batch": "s", "seq": "s"}},
}


@pytest.mark.parametrize("name", ONE_NAME)
def test_what_is_said_is_what_is_said_of_proper_names(name: str) -> None:
    assert described(renamed(decoder(), **ONE_NAME[name])) == described(decoder())


@pytest.mark.parametrize("name", ONE_NAME)
def test_inputs_have_lengths_of_their_own(name: str) -> None:
    """Equal names must not lead to equal lengths."""
    view = view_of(ir.from_proto(renamed(decoder(), **ONE_NAME[name])))
    shapes = {key: array.shape for key, array in view.inputs.arrays.items()}
    assert shapes["input_ids"] == (3, 5) and shapes["past_key_values.0.key"] == (3, 2, 7, 8)
    sizes = {value.name: view.probe.shapes.of(value) for value in view.model.graph.inputs}
    tokens, cached = sizes["input_ids"], sizes["past_key_values.0.key"]
    assert len({tokens[0], tokens[1], cached[2]}) == 3


@pytest.mark.parametrize("name", ["unk", "tokens and cached ones"])
def test_they_are_written_anew_as_they_are(name: str) -> None:
    model = renamed(decoder(), **ONE_NAME[name])
    done, after = rewritten_model(model, form="native", target="ort")
    assert [site.state for site in done.sites] == [REWRITTEN]
    for sizes in ((1, 1, 9), (2, 6, 0), (3, 4, 13)):
        want, have = run(model, feeds(*sizes)), run(after, feeds(*sizes))
        np.testing.assert_allclose(have["logits"], want["logits"], atol=2e-5)
    names = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in model.graph.input]
    assert names == [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in after.graph.input]


SOUND: dict[str, tuple[dict[str, str], dict[str, tuple[int | str, ...]]]] = {
    "a mask as long as tokens": (
        {"ids": "token_ids", "mask": "attention_mask"},
        {"ids": ("b", "s"), "mask": ("b", "s")},
    ),
    "tokens first": ({"ids": "token_ids", "mask": "attention_mask"}, {"ids": ("s", "b"), "mask": ("b", "s")}),
    "square masks": ({"x": "features", "mask": "attention_mask"}, {"x": ("b", "s", 8), "mask": ("s", "s")}),
    "square pictures": ({"x": "images"}, {"x": ("b", 3, "side", "side")}),
    "square features": ({"x": "features"}, {"x": ("b", "s", "s")}),
    "one length of encoder and decoder": (
        {"ids": "token_ids", "encoder": "encoder_token_ids"},
        {"ids": ("b", "s"), "encoder": ("b", "s")},
    ),
    "buffers with a mask": (
        {"ids": "token_ids", "past": "past", "mask": "attention_mask"},
        {"ids": ("b", "s"), "past": ("b", 2, "most", 8), "mask": ("b", "most")},
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_names_of_one_length_count(name: str) -> None:
    kinds, shapes = SOUND[name]
    assert reused_names(kinds, shapes) == set()


@pytest.mark.parametrize("name", ["unk", "unk__12", "UNK", "unknown", "None", "dynamic", "*", "-1", "any"])
def test_placeholders_are_no_names(name: str) -> None:
    kinds = {"ids": "token_ids", "mask": "attention_mask"}
    assert reused_names(kinds, {"ids": (1, name), "mask": (1, name)}) == {name}


def test_outputs_agree_with_any_length_of_a_name() -> None:
    """Only names with one length tell whether a graph mixes rows and tokens."""
    inputs, outputs = {"x": (("n", "n"), "fp32")}, {"y": (("n",), "fp32")}
    assert agree(inputs, outputs, {"x": (2, 5)}, {"y": (5,)}) and agree(inputs, outputs, {"x": (2, 5)}, {"y": (2,)})
    assert not agree(inputs, outputs, {"x": (2, 5)}, {"y": (10,)})
