"""Exact angles in the place of a graph's own: right at far positions, the same near, and never of another encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import exact_oracle
import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from helpers import exported, small_spec
from onnx import TensorProto, helper, numpy_helper

from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import Reason, RequestError
from posexport.rewrite.angles import plan as plans
from posexport.rewrite.angles import write as writing
from posexport.rewrite.angles.columns import columns_of
from posexport.rewrite.angles.parameters import ExactAngles, exact_of

Array = np.ndarray[Any, Any]

FORMS = ("decomposed", "function", "native", "contrib")

FARTHEST = 2**24 - 1


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


def changed(name: str, value: Array, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """A decoder in which an initializer has another value."""
    model = small_graphs.decoder() if model is None else model
    weight = next(one for one in model.graph.initializer if one.name == name)
    weight.CopyFrom(numpy_helper.from_array(value, name))
    return model


def frequencies(theta: float = 10_000.0) -> Array:
    powers = theta ** (-np.arange(0, small_graphs.SIZE, 2) / small_graphs.SIZE)
    return powers.astype(np.float32).reshape(1, 1, -1)


def record(result: Any, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = result.attentions[index]["angles"]
    return found


def at(start: int) -> dict[str, Array]:
    """Inputs whose positions begin at `start` and 1,000 further."""
    feeds = helpers.feeds(2, 6, 0)
    feeds["attention_mask"][:] = 1
    return feeds | {"position_ids": np.arange(6)[None] + np.array([[start], [start + 1000]])}


def off(path: Path, feeds: dict[str, Array], model: onnx.ModelProto | None = None) -> float:
    """How far logits and keys of a file are from those of exact angles."""
    logits, keys = exact_oracle.computed(small_graphs.decoder() if model is None else model, feeds)
    errors = []
    for have, want in zip(helpers.ran(path, feeds, ["logits", "present.0.key"]), (logits, keys), strict=True):
        assert have.shape == want.shape and np.isfinite(have).all()
        errors.append(float(np.abs(have - want).max()))
    return max(errors)


@pytest.mark.parametrize("form", FORMS)
def test_far_positions_are_those_of_float64(tmp_path: Path, form: str) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, angles="exact")
    assert result.is_complete and result.changed
    model = small_graphs.decoder()
    for start, limit in ((0, 1e-6), (2**20, 1e-6), (2**24 - 2000, 1e-6), (2**31 - 2000, 3e-5)):
        before, after = (off(file, at(start), model) for file in (path, out))
        assert after <= limit and (before <= 1e-3 if start == 0 else before >= 30 * after)


def test_both_errors_stand_in_the_manifest(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", angles="exact")
    found = record(result)
    assert list(found) == ["state", "reason", "positions", "original_error", "error", "cases"]
    assert (found["state"], found["reason"], found["positions"]) == ("exact", None, FARTHEST)
    assert found["original_error"] > 0.01 and found["error"] <= 2.5e-7 and found["cases"] >= 15
    data = json.loads((tmp_path / "out.onnx.json").read_text())["rewrite"]
    assert data["angles"] == "exact" and data["attentions"][0]["angles"] == found
    # the error of the original is that of products in float32, at the positions that are said
    position = np.float32(FARTHEST)
    turns = [exact_oracle.turn(FARTHEST, pair) for pair in range(4)]
    angle = (position * frequencies().ravel()).astype(np.float64)
    worst = max(
        np.abs(np.cos(angle) - [c for c, _ in turns]).max(), np.abs(np.sin(angle) - [s for _, s in turns]).max()
    )
    assert worst <= 20 * found["original_error"] and found["original_error"] <= 2


@pytest.mark.parametrize("form", FORMS)
def test_a_second_time_changes_nothing(tmp_path: Path, form: str) -> None:
    path, out, again = helpers.saved(tmp_path), tmp_path / "out.onnx", tmp_path / "again.onnx"
    helpers.rewritten(path, out, form=form, angles="exact")
    result = helpers.rewritten(out, again, form=form, angles="exact")
    assert not result.changed and result.is_complete and again.read_bytes() == out.read_bytes()
    found = record(result)
    assert found["state"] == "exact" and found["error"] == found["original_error"] <= 2.5e-7


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, small_graphs.decoder(layers=2))
    plain = helpers.rewritten(path, tmp_path / "plain.onnx", form="native")
    assert [one["angles"] for one in plain.attentions] == [None, None]
    one = helpers.rewritten(path, tmp_path / "one.onnx", form="native", angles="exact", only=("node_attention_1",))
    assert record(one) is None and record(one, 1)["state"] == "exact"
    without = helpers.saved(tmp_path, small_graphs.decoder(rope=False), "without.onnx")
    result = helpers.rewritten(without, tmp_path / "out.onnx", form="native", angles="exact")
    assert record(result) is None and result.is_complete and result.changed


def test_the_form_alone_may_stay(tmp_path: Path) -> None:
    """A file in the form, with angles in float32: these alone are written anew."""
    path, native, out = helpers.saved(tmp_path), tmp_path / "native.onnx", tmp_path / "out.onnx"
    helpers.rewritten(path, native, form="native")
    result = helpers.rewritten(native, out, form="native", angles="exact")
    assert result.changed and [one["state"] for one in result.attentions] == ["rewritten"]
    assert off(out, at(2**22)) <= 1e-6 < off(native, at(2**22))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (frequencies().astype(np.float16).astype(np.float32), "angles-unknown"),
        (frequencies() * np.float32([1, 1, 1.003, 1]), "angles-unknown"),
        (frequencies() * np.float32(1.7), "angles-unknown"),
    ],
    ids=["half-precision", "one-frequency", "too-fast"],
)
def test_unknown_frequencies_stay(tmp_path: Path, value: Array, code: str) -> None:
    path, out = helpers.saved(tmp_path, changed("inv_freq", value)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", angles="exact")
    found = record(result)
    assert found["state"] == "parity" and found["reason"]["code"] == code and found["error"] is None
    assert result.attentions[0]["state"] == "rewritten" and not result.is_complete
    feeds = at(2**20)
    np.testing.assert_allclose(helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0], atol=1e-5)


@pytest.mark.parametrize("factor", [1 + 1e-5, 1.0001, 2.0])
def test_a_theta_that_is_recognised_wrongly_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    def wrong(encoding: Any, pairs: int) -> Any:
        found = exact_of(encoding, pairs)
        assert isinstance(found, ExactAngles)
        return attrs.evolve(found, frequencies=found.frequencies / [1, factor, factor, factor])

    monkeypatch.setattr(plans, "exact_of", wrong)
    result = helpers.rewritten(helpers.saved(tmp_path), tmp_path / "out.onnx", form="native", angles="exact")
    assert record(result)["reason"]["code"] == "angles-differ" and result.attentions[0]["state"] == "rewritten"


def _shifted(writer: Any, source: Any, value: Any) -> Any:
    return writer.nodes.one("Add", _positions(writer, source, value), writer.nodes.constant([1]))


def _of_another_row(writer: Any, source: Any, value: Any) -> Any:
    first = writer.nodes.one("Gather", _positions(writer, source, value), writer.nodes.constant([0]), axis=0)
    batch = writer.nodes.one("Shape", value, start=0, end=1)
    return writer.nodes.one("Expand", first, writer.nodes.one("Concat", batch, writer.nodes.constant([1]), axis=0))


_positions = writing._Writer._positions


@pytest.mark.parametrize("fault", [_shifted, _of_another_row])
def test_positions_that_are_written_wrongly_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(writing._Writer, "_positions", fault)
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", angles="exact")
    assert record(result)["reason"]["code"] == "angles-differ"
    feeds = at(3)
    np.testing.assert_allclose(helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0], atol=1e-5)


def test_turns_that_are_written_wrongly_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near positions are within what rounding explains; far ones are not those of float64."""
    exact_turns = writing.exact_turns
    monkeypatch.setattr(writing, "exact_turns", lambda frequencies: exact_turns(frequencies * (1 + 1e-8)))
    result = helpers.rewritten(helpers.saved(tmp_path), tmp_path / "out.onnx", form="native", angles="exact")
    assert record(result)["reason"]["code"] == "angles-differ" and "far" in record(result)["reason"]["text"]


def edited(*, rows: bool = False, mask: bool = False, negative: bool = False) -> onnx.ModelProto:
    """A decoder whose rows all have the first one's positions, whose padding isn't turned, or that keeps the negative
    sine in a value of its own."""
    model = small_graphs.decoder()
    graph = model.graph
    nodes = list(graph.node)
    places = {node.output[0]: at for at, node in enumerate(nodes)}
    cos, sin = (next(node for node in nodes if node.op_type == kind) for kind in ("Cos", "Sin"))
    if rows:
        start = next(node for node in nodes if "position_ids" in node.input)
        graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
        graph.node.insert(0, helper.make_node("Gather", ["position_ids", "first"], ["of_first"], name="g", axis=0))
        start.input[0] = "of_first"
    if mask:
        graph.initializer.append(numpy_helper.from_array(np.array([1, 3]), "inner"))
        graph.initializer.append(numpy_helper.from_array(np.float32(0), "nothing"))
        new = [
            helper.make_node("Shape", ["input_ids"], ["seq_of_ids"], name="n0", start=1, end=2),
            helper.make_node("Neg", ["seq_of_ids"], ["from"], name="n1"),
            helper.make_node("Slice", ["attention_mask", "from", "huge", "axis_one"], ["of_new"], name="n2"),
            helper.make_node("Cast", ["of_new"], ["as_bool"], name="n3", to=TensorProto.BOOL),
            helper.make_node("Unsqueeze", ["as_bool", "inner"], ["wide"], name="n4"),
            helper.make_node("Where", ["wide", "raw", "nothing"], [sin.output[0]], name="n5"),
        ]
        graph.initializer.append(numpy_helper.from_array(np.array([2**62]), "huge"))
        graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis_one"))
        sin.output[0] = "raw"
        for offset, node in enumerate(new):
            graph.node.insert(places[cos.output[0]] + 2 + offset, node)
    if negative:
        graph.node.insert(places[sin.output[0]] + 1, helper.make_node("Neg", [sin.output[0]], ["nsin"], name="nsin"))
        for node in [node for node in graph.node if node.op_type == "Mul" and sin.output[0] in node.input]:
            turned = next(one for one in graph.node if one.output[0] == node.input[0])
            negated = next(one for one in graph.node if one.output[0] == turned.input[0])
            # (-b, a) * sin as (b, a) * (nsin, sin)
            turned.input[0] = negated.input[0]
            graph.node.remove(negated)
            node.input[1] = "both_sines"
        halves = [
            helper.make_node("Slice", [one, "zero1", "half1", "last1"], [f"{one}_half"], name=f"s{at}")
            for at, one in enumerate(("nsin", sin.output[0]))
        ]
        joined = helper.make_node(
            "Concat", ["nsin_half", f"{sin.output[0]}_half"], ["both_sines"], name="joined", axis=-1
        )
        for name, number in (("zero1", 0), ("half1", small_graphs.SIZE // 2), ("last1", 3)):
            graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
        for offset, node in enumerate((*halves, joined)):
            graph.node.insert(places[sin.output[0]] + 2 + offset, node)
    onnx.checker.check_model(model, full_check=True)
    return model


def test_angles_in_a_third_value_stay(tmp_path: Path) -> None:
    """Queries are turned by a sine of their own beside that of keys, which both read too."""
    model = small_graphs.decoder()
    sin = next(node for node in model.graph.node if node.op_type == "Sin")
    for at_node, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type == "Mul" and sin.output[0] in node.input:
            parts = [f"{node.name}_{part}" for part in ("sum", "half", "other")]
            # x sin as (x sin + x (-sin')) / 2, where -sin' is computed apart
            node.output[0], result = parts[1], node.output[0]
            extra = [
                helper.make_node("Mul", [node.input[0], "own_sine"], [parts[2]], name=parts[2]),
                helper.make_node("Sub", [parts[1], parts[2]], [parts[0]], name=parts[0]),
                helper.make_node("Mul", [parts[0], "one_half"], [result], name=f"{parts[0]}_half"),
            ]
            for offset, one in enumerate(extra):
                model.graph.node.insert(at_node + 1 + offset, one)
    place = list(model.graph.node).index(sin)
    model.graph.node.insert(place + 1, helper.make_node("Neg", [sin.output[0]], ["own_sine"], name="own_sine"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "one_half"))
    path, out = helpers.saved(tmp_path, model), tmp_path / "out.onnx"
    assert off(path, at(7)) <= 1e-3  # the same function
    found = record(helpers.rewritten(path, out, form="native", angles="exact"))
    assert found["state"] == "parity" and found["reason"]["code"] == "angles-elsewhere"


def test_positions_of_another_row_stay(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, edited(rows=True)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", angles="exact")
    found = record(result)
    assert found["state"] == "parity"
    feeds = at(2**20)
    np.testing.assert_allclose(helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0], atol=1e-5)


def test_angles_that_depend_on_padding_stay(tmp_path: Path) -> None:
    result = helpers.rewritten(helpers.saved(tmp_path, edited(mask=True)), tmp_path / "out.onnx", angles="exact")
    assert record(result) is None or record(result)["state"] == "parity"


def test_sines_of_both_signs_in_one_value(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, edited(negative=True)), tmp_path / "out.onnx"
    assert off(path, at(7)) <= 1e-3  # the same function
    result = helpers.rewritten(path, out, form="native", angles="exact")
    assert record(result)["state"] == "exact"
    assert off(out, at(2**23)) <= 1e-6


def table(rows: int) -> onnx.ModelProto:
    """A decoder whose cosines and sines are looked up in tables of float32, as folded from products in float32."""
    model = small_graphs.decoder()
    graph = model.graph
    angles = (np.arange(rows, dtype=np.float32)[:, None] * frequencies().reshape(1, -1)).astype(np.float32)
    for kind, function in (("Cos", np.cos), ("Sin", np.sin)):
        node = next(one for one in graph.node if one.op_type == kind)
        at_node = list(graph.node).index(node)
        graph.initializer.append(
            numpy_helper.from_array(np.tile(function(angles), 2).astype(np.float32), f"{kind}_table")
        )
        new = [
            helper.make_node("Gather", [f"{kind}_table", "position_ids"], [f"{kind}_rows"], name=f"{kind}_rows"),
            helper.make_node("Unsqueeze", [f"{kind}_rows", "axis_one"], [node.output[0]], name=f"{kind}_wide"),
        ]
        graph.node.remove(node)
        for offset, one in enumerate(new):
            graph.node.insert(at_node + offset, one)
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis_one"))
    return model


def test_a_table_is_computed(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, table(3000)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="contrib", angles="exact")
    found = record(result)
    assert found["state"] == "exact" and found["positions"] == 2999
    assert found["error"] <= 2.5e-7 < found["original_error"] < 1e-3
    assert off(out, at(2**22)) <= 1e-6  # beyond the table too


def test_keys_that_are_shared_have_the_angles_of_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = helpers.saved(tmp_path, small_graphs.decoder(layers=2, one_cache=True))
    result = helpers.rewritten(path, tmp_path / "out.onnx", angles="exact")
    assert [record(result, layer)["state"] for layer in (0, 1)] == ["exact", "exact"]
    for layer in (0, 1):
        one = helpers.rewritten(path, tmp_path / "one.onnx", angles="exact", only=(f"node_attention_{layer}",))
        assert record(one, layer)["reason"]["code"] == "angles-shared" and record(one, 1 - layer) is None


def halved() -> onnx.ModelProto:
    """A decoder in half precision, whose angles are products in float32."""
    model = small_graphs.decoder()
    graph = model.graph
    for weight in graph.initializer:
        if weight.data_type == TensorProto.FLOAT and weight.name != "inv_freq":
            array = np.clip(numpy_helper.to_array(weight), -65504, 65504).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    for info in (*graph.input, *graph.output):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in [node for node in graph.node if node.op_type in ("Cos", "Sin")]:
        name, at_node = node.output[0], list(graph.node).index(node)
        node.output[0] = f"{name}_wide"
        graph.node.insert(
            at_node + 1, helper.make_node("Cast", [f"{name}_wide"], [name], name=f"{name}_half", to=TensorProto.FLOAT16)
        )
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("form", ["decomposed", "native"])
def test_half_precision_gets_cosines_that_are_rounded_once(tmp_path: Path, form: str) -> None:
    path, out = helpers.saved(tmp_path, halved()), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, angles="exact")
    found = record(result)
    assert found["state"] == "exact" and 1e-4 < found["error"] <= 5e-4 < 0.01 < found["original_error"]
    feeds = at(2**25)
    for name in [name for name, array in feeds.items() if array.dtype == np.float32]:
        feeds[name] = feeds[name].astype(np.float16)
    assert off(out, feeds, halved()) <= 0.004 < off(path, feeds, halved())


def test_an_artifact_of_posexport_keeps_what_its_spec_says(tmp_path: Path) -> None:
    path = tmp_path / "own.onnx"
    write_onnx(exported(small_spec("rope", layout="half", causal=True)), path)
    with pytest.raises(RequestError, match="export it again with --angles exact"):
        helpers.rewritten(path, tmp_path / "out.onnx", angles="exact")


@pytest.mark.parametrize(
    ("encoding", "code"),
    [
        ({"name": "rope", "layout": "half", "frequencies": [1.0, 0.3]}, "angles-unknown"),
        ({"name": "rotary", "layout": "half", "reason": {"code": "x", "text": "nobody knows"}}, "angles-unknown"),
        (
            {
                "name": "rope",
                "layout": "half",
                "theta": 1e4,
                "scaling": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            },
            "angles-by-length",
        ),
        ({"name": "xpos", "layout": "half", "theta": 1e4}, "angles-of-kind"),
        ({"name": "rope", "layout": "half", "theta": 0.5}, "angles-fast"),
    ],
)
def test_what_has_no_exact_angles(encoding: dict[str, Any], code: str) -> None:
    found = exact_of(encoding, 4)
    assert isinstance(found, Reason) and found.code == code and found.text


@pytest.mark.parametrize(
    "encoding",
    [
        {"theta": 10_000.0},
        {"theta": 500_000.0, "scaling": "linear", "factor": 4.0},
        {
            "theta": 1e6,
            "attention_factor": 1.25,
            "scaling": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_parameters_give_the_angles_of_their_formula(encoding: dict[str, Any]) -> None:
    found = exact_of({"name": "rope", "layout": "half", **encoding}, 4)
    assert isinstance(found, ExactAngles)
    cos, sin = found.cos_sin(np.array([0, 3, 70_000]))
    divided = encoding["factor"] if encoding.get("scaling") == "linear" else 1.0
    for at_row, position in enumerate((0, 3, 70_000)):
        for pair in range(4 if "yarn" not in encoding.values() else 1):  # its first pair is as it was
            expected = exact_oracle.turn(position, pair, encoding["theta"])
            if divided != 1.0:
                angle = position * encoding["theta"] ** (-pair / 4) / divided
                expected = (np.cos(angle), np.sin(angle))
            scale = encoding.get("attention_factor", 1.0)
            np.testing.assert_allclose((cos[at_row, pair], sin[at_row, pair]), np.array(expected) * scale, atol=1e-10)


def test_columns_are_found_and_no_others() -> None:
    exact = ExactAngles(frequencies=0.1 ** np.arange(4.0), slack=1e-6 * 0.1 ** np.arange(4.0), scale=1.0)
    positions = np.array([0, 1, 5, 900, 70_000, 2**23])
    cos, sin = exact.cos_sin(positions)
    mixed = np.concatenate((cos, -sin, sin[:, ::-1]), 1)
    found = columns_of([mixed], exact, positions)
    assert not isinstance(found, float)
    np.testing.assert_array_equal(found[0].of(cos, sin), mixed)
    assert found[0].pairs == (0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0)
    wrong = mixed.copy()
    wrong[:, 2] = np.cos(positions * exact.frequencies[2] * 1.0001)
    assert isinstance(columns_of([wrong], exact, positions), float)
