"""Exact angles that replace a graph's own: right at far positions, equal at near ones, never of another encoding."""

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
from exact_graphs import changed, edited, frequencies, halved, table, third_value
from helpers import exported, small_spec

from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.rewrite.angles import plan as plans
from posexport.rewrite.angles import write as writing
from posexport.rewrite.angles.parameters import ExactAngles, exact_of

Array = np.ndarray[Any, Any]

FORMS = ("decomposed", "function", "native", "contrib")

FARTHEST = 2**24 - 1


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


def record(result: Any, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = result.attentions[index]["angles"]
    return found


def at(start: int) -> dict[str, Array]:
    """Inputs of two rows whose positions start at `start` and at `start` + 1,000."""
    feeds = helpers.feeds(2, 6, 0)
    feeds["attention_mask"][:] = 1
    return feeds | {"position_ids": np.arange(6)[None] + np.array([[start], [start + 1000]])}


def off(path: Path, feeds: dict[str, Array], model: onnx.ModelProto | None = None) -> float:
    """The difference of logits and keys of a file from those with exact angles."""
    logits, keys = exact_oracle.computed(small_graphs.decoder() if model is None else model, feeds)
    errors = []
    for have, want in zip(helpers.ran(path, feeds, ["logits", "present.0.key"]), (logits, keys), strict=True):
        assert have.shape == want.shape and np.isfinite(have).all()
        errors.append(float(np.abs(have - want).max()))
    return max(errors)


@pytest.mark.sampled(4)
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
    assert found["original_error"] > 0.01 and found["error"] <= 2.5e-7 and found["cases"] >= 8
    data = json.loads((tmp_path / "out.onnx.json").read_text())["rewrite"]
    assert data["angles"] == "exact" and data["attentions"][0]["angles"] == found
    # The recorded error of the original is that of float32 products, at the recorded positions.
    position = np.float32(FARTHEST)
    turns = [exact_oracle.turn(FARTHEST, pair) for pair in range(4)]
    angle = (position * frequencies().ravel()).astype(np.float64)
    worst = max(
        np.abs(np.cos(angle) - [c for c, _ in turns]).max(), np.abs(np.sin(angle) - [s for _, s in turns]).max()
    )
    assert worst <= 20 * found["original_error"] and found["original_error"] <= 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_a_second_time_changes_nothing(tmp_path: Path, form: str) -> None:
    path, out, again = helpers.saved(tmp_path), tmp_path / "out.onnx", tmp_path / "again.onnx"
    helpers.rewritten(path, out, form=form, angles="exact")
    result = helpers.rewritten(out, again, form=form, angles="exact")
    assert not result.changed and result.is_complete and again.read_bytes() == out.read_bytes()
    found = record(result)
    assert found["state"] == "exact" and found["error"] == found["original_error"] <= 2.5e-7


@pytest.mark.slow
def test_only_what_is_asked_for(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, small_graphs.decoder(layers=2))
    plain = helpers.rewritten(path, tmp_path / "plain.onnx", form="native")
    assert [one["angles"] for one in plain.attentions] == [None, None]
    one = helpers.rewritten(path, tmp_path / "one.onnx", form="native", angles="exact", only=("node_attention_1",))
    assert record(one) is None and record(one, 1)["state"] == "exact"
    without = helpers.saved(tmp_path, small_graphs.decoder(rope=False), "without.onnx")
    result = helpers.rewritten(without, tmp_path / "out.onnx", form="native", angles="exact")
    assert record(result) is None and result.is_complete and result.changed


@pytest.mark.slow
def test_the_form_alone_may_stay(tmp_path: Path) -> None:
    """The file already has the form, with float32 angles: only the angles are rewritten."""
    path, native, out = helpers.saved(tmp_path), tmp_path / "native.onnx", tmp_path / "out.onnx"
    helpers.rewritten(path, native, form="native")
    result = helpers.rewritten(native, out, form="native", angles="exact")
    assert result.changed and [one["state"] for one in result.attentions] == ["rewritten"]
    assert off(out, at(2**22)) <= 1e-6 < off(native, at(2**22))


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
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


@pytest.mark.slow
def test_turns_that_are_written_wrongly_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors at near positions look like rounding, but at far positions the angles differ from float64."""
    exact_turns = writing.exact_turns
    monkeypatch.setattr(writing, "exact_turns", lambda frequencies: exact_turns(frequencies * (1 + 1e-8)))
    result = helpers.rewritten(helpers.saved(tmp_path), tmp_path / "out.onnx", form="native", angles="exact")
    assert record(result)["reason"]["code"] == "angles-differ" and "far" in record(result)["reason"]["text"]


@pytest.mark.slow
def test_angles_in_a_third_value_stay(tmp_path: Path) -> None:
    """The rotations read the sine, and also a separate value with the negative sine."""
    model = third_value()
    path, out = helpers.saved(tmp_path, model), tmp_path / "out.onnx"
    assert off(path, at(7)) <= 1e-3  # the same function
    found = record(helpers.rewritten(path, out, form="native", angles="exact"))
    assert found["state"] == "parity" and found["reason"]["code"] == "angles-elsewhere"


@pytest.mark.slow
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


@pytest.mark.slow
def test_sines_of_both_signs_in_one_value(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, edited(negative=True)), tmp_path / "out.onnx"
    assert off(path, at(7)) <= 1e-3  # the same function
    result = helpers.rewritten(path, out, form="native", angles="exact")
    assert record(result)["state"] == "exact"
    assert off(out, at(2**23)) <= 1e-6


@pytest.mark.slow
def test_a_table_is_computed(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, table(3000)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="contrib", angles="exact")
    found = record(result)
    assert found["state"] == "exact" and found["positions"] == 2999
    assert found["error"] <= 2.5e-7 < found["original_error"] < 1e-3
    assert off(out, at(2**22)) <= 1e-6  # beyond the table too


@pytest.mark.slow
def test_keys_that_are_shared_have_the_angles_of_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = helpers.saved(tmp_path, small_graphs.decoder(layers=2, one_cache=True))
    result = helpers.rewritten(path, tmp_path / "out.onnx", angles="exact")
    assert [record(result, layer)["state"] for layer in (0, 1)] == ["exact", "exact"]
    for layer in (0, 1):
        one = helpers.rewritten(path, tmp_path / "one.onnx", angles="exact", only=(f"node_attention_{layer}",))
        assert record(one, layer)["reason"]["code"] == "angles-shared" and record(one, 1 - layer) is None


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_artifact_of_posexport_keeps_what_its_spec_says(tmp_path: Path) -> None:
    path = tmp_path / "own.onnx"
    write_onnx(exported(small_spec("rope", layout="half", causal=True)), path)
    with pytest.raises(RequestError, match="export it again with --angles exact"):
        helpers.rewritten(path, tmp_path / "out.onnx", angles="exact")
