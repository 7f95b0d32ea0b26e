"""Rewritten files: what changes and what stays, the manifest, the evidence, and planted faults."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import grouped_graphs
import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from onnx import numpy_helper

from posexport.artifact import onnx_file
from posexport.artifact.manifest import OnnxManifest, read_manifest
from posexport.errors import RequestError
from posexport.files import protected_inputs
from posexport.rewrite import draft, files, opset, rewriter, site, whole
from posexport.rewrite.evidence import Evidence
from posexport.rewrite.request import RewriteOptions
from posexport.spec.forms import FORMS

pytestmark = pytest.mark.all_inputs

KEYS = ["name", "layer", "num_heads", "num_kv_heads", "head_dim", "scale", "mask", "encoding", "cache", "operator"]
KEYS += ["state", "reason", "error", "cases", "angles"]

OPERATORS = {
    "function": ("CachedAttention", "posexport"),
    "native": ("Attention", ""),
    "contrib": ("MultiHeadAttention", "com.microsoft"),
}


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["function", "native", "contrib"])
def test_a_decoder_computes_the_same_in_each_form(form: str, tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, small_graphs.decoder(layers=2)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form)
    assert [one["state"] for one in result.attentions] == ["rewritten", "rewritten"]
    model = onnx.load(out)
    onnx.checker.check_model(model)
    assert {entry.domain for entry in model.opset_import} == {"", OPERATORS[form][1]}
    assert small_graphs.with_operator(model, *OPERATORS[form])
    for batch, seq, past in ((1, 5, 0), (3, 1, 9), (2, 4, 7)):
        inputs = helpers.feeds(batch, seq, past, layers=2)
        for before, after in zip(helpers.ran(path, inputs), helpers.ran(out, inputs), strict=True):
            assert before.shape == after.shape
            seen = inputs["attention_mask"][:, past:].astype(bool)
            if before.ndim == 3:
                before, after = before[seen], after[seen]
            assert np.isfinite(after).all()
            np.testing.assert_allclose(after, before, atol=2e-6)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_the_rest_stays(form: str, tmp_path: Path) -> None:
    model, out = small_graphs.decoder(), tmp_path / "out.onnx"
    for value in (*model.graph.input, *model.graph.output):  # as torch describes them
        value.doc_string = f"the {value.name}"
        value.metadata_props.add(key="kind", value="of the user")
    path = helpers.saved(tmp_path, model)
    helpers.rewritten(path, out, form=form)
    before, after = onnx.load(path), onnx.load(out)
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)
    assert list(after.metadata_props) == list(before.metadata_props)
    assert (after.producer_name, after.graph.name) == ("by hand", "main_graph")
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    for tensor in before.graph.initializer:
        if tensor.name.endswith(".weight"):
            np.testing.assert_array_equal(kept[tensor.name], numpy_helper.to_array(tensor))
    assert "o_proj" in " ".join(kept)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_graph_that_takes_or_gives_nothing_is_refused(kind: str, tmp_path: Path) -> None:
    path = helpers.saved(tmp_path)
    model = onnx.load(path)
    model.graph.ClearField(kind)
    onnx.save(model, path)
    with pytest.raises(RequestError, match=f"has no {kind}s: export it with some"):
        helpers.rewritten(path, tmp_path / "out.onnx")


def test_a_file_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(model: Any, source: Path, path: Path, staged: Any) -> dict[str, str]:
        return {path.name: staged.write(path, lambda file: file.write(source.read_bytes()[:-9]))}

    monkeypatch.setattr(files, "write_graph", faulty)
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    with pytest.raises(RequestError, match=r"the new file would be wrong.*out\.onnx' is not an ONNX file"):
        helpers.rewritten(path, out, form="native")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_records_have_the_keys_and_the_evidence(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, small_graphs.decoder(layers=2))
    result = helpers.rewritten(path, tmp_path / "out.onnx", form="native")
    assert len(result.attentions) == 2
    for layer, one in enumerate(result.attentions):
        assert set(KEYS) <= set(one) and list(one)[-3:] == ["error", "cases", "angles"]
        assert (one["name"], one["layer"]) == (f"node_attention_{layer}", layer)
        assert (one["num_heads"], one["num_kv_heads"], one["head_dim"]) == (4, 2, 8)
        assert one["scale"] == pytest.approx(8**-0.5, rel=1e-6)
        assert one["reason"] is None
        assert 0 <= one["error"] <= 1e-9
        assert one["cases"] >= 15
    assert result.whole is not None and result.whole.cases >= 15 and 0 <= result.whole.error <= 1e-7


def test_the_manifest_says_where_the_file_came_from(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="contrib", target="ort", seed=3)
    manifest = read_manifest(out)
    assert isinstance(manifest, OnnxManifest) and manifest.rewrite is not None
    assert manifest.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (manifest.form, manifest.target, manifest.spec, manifest.opset) == ("contrib", "ort", None, 18)
    assert manifest.domains == {"": 18, "com.microsoft": 1}
    assert set(manifest.tools) == {"torch", "onnx", "onnxscript", "onnx-ir"}
    record = manifest.rewrite
    assert record.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (record.source.file, record.source.external_data, record.seed) == ("in.onnx", {}, 3)
    assert json.loads(json.dumps(record.attentions)) == json.loads(json.dumps(result.attentions))
    assert (record.changed, record.whole) == (True, result.whole)
    assert [tensor.name for tensor in manifest.inputs] == [value.name for value in onnx.load(path).graph.input]
    text = out.with_name("out.onnx.json").read_text()
    assert str(tmp_path) not in text


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path)
    made = []
    for name in ("a", "b"):
        out = tmp_path / name / "out.onnx"
        out.parent.mkdir()
        helpers.rewritten(path, out, form="native")
        made.append({file: (out.parent / file).read_bytes() for file in helpers.names_of(out.parent)})
    assert made[0] == made[1]
    assert list(made[0]) == ["out.onnx", "out.onnx.json"]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("external", "form"), [*itertools.product([False, True], list(FORMS))])
def test_what_is_in_the_form_stays_byte_for_byte(form: str, external: bool, tmp_path: Path) -> None:
    path = helpers.saved(tmp_path)
    if external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    first, second = tmp_path / "first" / "out.onnx", tmp_path / "second" / "out.onnx"
    for out in (first, second):
        out.parent.mkdir()
    helpers.rewritten(path, first, form=form)
    result = helpers.rewritten(first, second, form=form)
    assert [(one["state"], one["reason"]["code"]) for one in result.attentions] == [("kept", "already-in-form")]
    assert result.is_complete and not result.changed and result.whole is None
    assert first.read_bytes() == second.read_bytes()
    beside = ["out.onnx.data"] if external else []
    assert helpers.names_of(second.parent) == ["out.onnx", *beside, "out.onnx.json"]
    for name in beside:
        assert first.with_name(name).read_bytes() == second.with_name(name).read_bytes()


def test_an_operator_that_rotates_by_itself_is_in_the_form(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, grouped_graphs.grouped())
    stays = helpers.rewritten(path, tmp_path / "out.onnx", form="contrib", target="ort")
    assert [one["reason"]["code"] for one in stays.attentions] == ["already-in-form"]
    assert (tmp_path / "out.onnx").read_bytes() == path.read_bytes()
    assert helpers.rewritten(path, tmp_path / "other.onnx", form="contrib").changed


def test_a_file_without_attention_is_copied(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, small_graphs.no_attention()), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native")
    assert (result.attentions, result.changed, result.is_complete) == ((), False, False)
    assert out.read_bytes() == path.read_bytes()


def test_with_require_all_nothing_is_written(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, small_graphs.no_attention()), tmp_path / "out.onnx"
    assert not helpers.rewritten(path, out, require_all=True).is_complete
    assert helpers.names_of(tmp_path) == ["in.onnx"]


@pytest.mark.slow
def test_only_some_are_rewritten(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, small_graphs.decoder(layers=2))
    result = helpers.rewritten(path, tmp_path / "out.onnx", form="native", only=("node_attention_1",))
    states = [(one["state"], (one["reason"] or {}).get("code")) for one in result.attentions]
    assert states == [("kept", "not-chosen"), ("rewritten", None)]
    assert not result.is_complete
    with pytest.raises(RequestError, match="--only: unknown attention 'node_attention_2'"):
        helpers.rewritten(path, tmp_path / "other.onnx", only=("node_attention_2",))
    assert "other.onnx" not in helpers.names_of(tmp_path)


@pytest.mark.slow
def test_external_data_of_the_original_is_not_needed(tmp_path: Path) -> None:
    folder, out = tmp_path / "from", tmp_path / "out.onnx"
    folder.mkdir()
    path = helpers.saved(folder)
    expected = helpers.ran(path, helpers.feeds(2, 3, 2))
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    sha256 = hashlib.sha256((folder / "w.bin").read_bytes()).hexdigest()
    helpers.rewritten(path, out, form="native")
    for file in folder.iterdir():
        file.unlink()
    np.testing.assert_allclose(helpers.ran(out, helpers.feeds(2, 3, 2))[0][0], expected[0][0], atol=2e-6)
    manifest = read_manifest(out)
    assert isinstance(manifest, OnnxManifest) and manifest.rewrite is not None
    assert manifest.rewrite.source.external_data == {"w.bin": sha256}
    assert list(manifest.external_data) == ["out.onnx.data"]


@pytest.mark.slow
def test_weights_of_an_earlier_file_go(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    helpers.rewritten(path, out, form="native")
    assert "out.onnx.data" in helpers.names_of(tmp_path)
    helpers.rewritten(helpers.saved(tmp_path, name="inline.onnx"), out, form="native")
    assert "out.onnx.data" not in helpers.names_of(tmp_path)
    (tmp_path / "out.onnx.data").write_bytes(b"not ours")
    helpers.rewritten(tmp_path / "inline.onnx", out, form="native")
    assert (tmp_path / "out.onnx.data").read_bytes() == b"not ours"


@pytest.mark.parametrize("place", ["in.onnx", "w.bin", "out.onnx.data", "link.onnx"])
def test_nothing_that_is_read_is_written_over(place: str, tmp_path: Path) -> None:
    path = helpers.saved(tmp_path)
    location = "w.bin" if place != "out.onnx.data" else place
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=location, size_threshold=0)
    (tmp_path / "link.onnx").symlink_to(path)
    before = {name: (tmp_path / name).read_bytes() for name in helpers.names_of(tmp_path)}
    out = {"w.bin": "w.bin", "out.onnx.data": "out.onnx"}.get(place, place)
    with protected_inputs(), pytest.raises(RequestError, match=r"must end in \.onnx|is a file that this command"):
        helpers.rewritten(path, tmp_path / out, form="native")
    assert {name: (tmp_path / name).read_bytes() for name in helpers.names_of(tmp_path)} == before


def _twice_the_scale(factors: Any, q: Any) -> tuple[float, list[float]]:
    return 2.0 * float(np.prod(factors)), []


@pytest.mark.slow
def test_a_wrong_replacement_is_kept_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = helpers.saved(tmp_path, small_graphs.decoder(layers=2)), tmp_path / "out.onnx"
    monkeypatch.setattr(site, "split_scale", _twice_the_scale)
    result = helpers.rewritten(path, out, form="native")
    for one in result.attentions:
        assert (one["state"], one["reason"]["code"]) == ("kept", "not-the-same")
        assert "differs by" in one["reason"]["text"]
        assert one["error"] > 1e-3 and one["cases"] > 0
    assert out.read_bytes() == path.read_bytes()
    assert not result.changed and not result.is_complete


@pytest.mark.slow
def test_one_wrong_site_leaves_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = site.SiteWriter._by_heads

    def second_wrong(self: Any, q: Any, attention: Any) -> Any:
        q = right(self, q, attention)
        return self._times(q, 2.0) if attention.layer == 1 else q

    monkeypatch.setattr(site.SiteWriter, "_by_heads", second_wrong)
    path, out = helpers.saved(tmp_path, small_graphs.decoder(layers=2)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native")
    assert [one["state"] for one in result.attentions] == ["rewritten", "kept"]
    inputs = helpers.feeds(1, 5, 3, layers=2)
    for before, after in zip(helpers.ran(path, inputs), helpers.ran(out, inputs), strict=True):
        np.testing.assert_allclose(after, before, atol=2e-6)


def test_what_only_the_whole_shows_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the sites misses a fault, because their evidence is replaced by one that always agrees."""
    monkeypatch.setattr(site, "split_scale", _twice_the_scale)
    agreeing = lambda before, after, attentions, *_, **__: {one.name: Evidence(cases=1) for one in attentions}  # noqa: E731
    monkeypatch.setattr(rewriter, "evidence_of", agreeing)
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native")
    (one,) = result.attentions
    assert (one["state"], one["reason"]["code"]) == ("kept", whole.DIFFERS)
    assert "output 'logits' differs by" in one["reason"]["text"]
    assert out.read_bytes() == path.read_bytes()


def test_many_weights_are_streamed_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    write = files.write_graph
    monkeypatch.setattr(files, "write_graph", lambda *arguments: write(*arguments, external_from=1000))
    helpers.rewritten(path, out, form="native")
    assert onnx_file.external_files(onnx.load(out, load_external_data=False)) == ["out.onnx.data"]
    inputs = helpers.feeds(2, 3, 4)
    np.testing.assert_allclose(helpers.ran(out, inputs)[0][0], helpers.ran(path, inputs)[0][0], atol=2e-6)


@pytest.mark.parametrize("way", ["raises", "does nothing"])
def test_an_opset_that_can_t_be_converted_is_refused(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any, **__: Any) -> None:
        if way == "raises":
            raise ValueError("no adapter")

    monkeypatch.setattr(opset.version_converter, "convert_version", convert)
    with pytest.raises(RequestError, match=r"'.*in\.onnx': opset 18 can't be converted to 23"):
        helpers.rewritten(helpers.saved(tmp_path), tmp_path / "out.onnx", form="native")
    assert helpers.names_of(tmp_path) == ["in.onnx"]


def test_a_failure_at_the_end_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    out.write_bytes(b"before")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draft, "add_manifest", fail)
    with pytest.raises(RequestError, match="No space left"):
        helpers.rewritten(path, out, form="native")
    assert out.read_bytes() == b"before"
    assert helpers.names_of(tmp_path) == ["in.onnx", "out.onnx"]


def test_shared_caches_are_buffers(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="contrib", target="ort", kv_cache="shared")
    assert result.is_complete and result.whole is not None
    inputs = helpers.feeds(1, 2, 6)
    buffered = dict(inputs)
    for kind in ("key", "value"):
        name = f"past_key_values.0.{kind}"
        buffered[name] = np.concatenate((inputs[name], np.zeros((1, 2, 5, 8), np.float32)), 2)
    before, after = helpers.ran(path, inputs), helpers.ran(out, buffered)
    np.testing.assert_allclose(after[0], before[0], atol=2e-6)
    for grown, buffer in zip(before[1:], after[1:], strict=True):
        assert buffer.shape[2] == 11
        np.testing.assert_allclose(buffer[:, :, :8], grown, atol=2e-6)
    twice = tmp_path / "twice.onnx"
    again = helpers.rewritten(out, twice, form="contrib", target="ort", kv_cache="shared")
    assert again.is_complete and not again.changed
    assert twice.read_bytes() == out.read_bytes()
    other = helpers.rewritten(out, tmp_path / "native.onnx", form="native", target="ort", kv_cache="shared")
    assert other.is_complete and other.changed and other.whole is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"form": "nativ"}, "unknown form 'nativ'"),
        ({"target": "gpu"}, "unknown target 'gpu'"),
        ({"opset": "x"}, "opset is 'x'"),
        ({"kv_cache": "grown"}, "kv_cache is 'grown': it must be shared"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        RewriteOptions(**options)
