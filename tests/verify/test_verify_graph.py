"""ONNX files without posexport's metadata: every runtime is compared with the file's own float64 evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_files import foreign, one_layer, small_graph
from helpers import CHILD_PATH, cli

from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES, Runtime
from posexport.verify import verify
from posexport.verify.result import FAILED, NOT_RUN, PASSED, Report, Verdict

ORT = {"ort-cpu": RUNTIMES["ort-cpu"]}


@pytest.fixture(autouse=True)
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CHILD_PATH)


def faulty(how: str) -> dict[str, Runtime]:
    row = Runtime(
        name="faulty", summary="", module="engines.graph_fault", package="os", install="", options={"how": how}
    )
    return {"faulty": row}


def verdict_of(path: Path, runtimes: dict[str, Runtime] = ORT, **options: Any) -> Verdict:
    report = verify([path], runtimes=runtimes, **options)
    assert not report.unreadable, report.unreadable
    (verdict,) = report.verdicts
    return verdict


pytestmark = pytest.mark.few_bands


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of one layer with a cache, rotary positions and a vocabulary."""
    return foreign(tmp_path_factory.mktemp("decoder"), "decoder", one_layer(vocab_size=23, kv_cache="concat"))


@pytest.fixture(scope="module")
def report(decoder: Path) -> Report:
    names = ("torch", "onnx-reference", "ort-cpu", "tensorrt-import")
    return verify([decoder], runtimes={name: RUNTIMES[name] for name in names})


@pytest.mark.slow
def test_every_runtime_is_judged_by_the_file_itself(report: Report) -> None:
    by_runtime = {verdict.runtime: verdict for verdict in report.verdicts}
    assert by_runtime["torch"].state == NOT_RUN
    assert "this file has none" in str(by_runtime["torch"].reason)
    for name in ("onnx-reference", "ort-cpu", "tensorrt-import"):
        verdict = by_runtime[name]
        assert verdict.state == PASSED, verdict
        assert verdict.reference == "the file itself"
        assert verdict.cases >= 20
        assert verdict.worst is not None
        assert verdict.worst.limit is not None
        assert verdict.worst.limit < (0.1 if verdict.worst.far_out else 1e-2)
        assert "weights: not checked, no manifest" in verdict.note
        assert "outputs at padding were not compared" in verdict.notes
    assert by_runtime["ort-cpu"].reach is not None
    assert by_runtime["ort-cpu"].reach.keys == 600
    assert report.exit_code() == 0


def test_a_runtimes_fault_fails_and_the_node_is_named(decoder: Path) -> None:
    verdict = verdict_of(decoder, faulty("operator"))
    assert verdict.state == FAILED
    assert "off by" in str(verdict.reason)
    assert str(verdict.where).startswith("Sin "), verdict.where


@pytest.mark.slow
def test_a_fault_of_the_graph_as_a_whole_is_told_as_one(decoder: Path) -> None:
    verdict = verdict_of(decoder, faulty("whole"))
    assert verdict.state == FAILED
    assert "each of its values is right" in str(verdict.where) or "nodes before it are fused" in str(verdict.where)


@pytest.mark.parametrize(("how", "reason"), [("dtype", "is fp16, it must be fp32"), ("shape", "has shape")])
def test_wrong_outputs_fail(decoder: Path, how: str, reason: str) -> None:
    verdict = verdict_of(decoder, faulty(how))
    assert verdict.state == FAILED
    assert reason in str(verdict.reason)


def test_an_error_names_the_inputs_on_which_it_comes(decoder: Path) -> None:
    verdict = verdict_of(decoder, faulty("second"))
    assert verdict.state == FAILED
    assert "it takes two rows at most (inputs: several prompts [3, 12] past=0)" in str(verdict.reason)


@pytest.mark.slow
def test_half_precision_has_the_limits_of_its_own_rounding(tmp_path: Path) -> None:
    verdict = verdict_of(foreign(tmp_path, "half", one_layer(dtype="fp16")))
    assert verdict.state == PASSED
    assert verdict.worst is not None
    assert verdict.worst.torch_error is not None
    assert verdict.worst.reference_rms is not None
    assert 1e-4 < verdict.worst.torch_error / verdict.worst.reference_rms < 1e-1


def test_inputs_that_the_graph_cannot_take_are_named(tmp_path: Path) -> None:
    """A table of 16 positions in the graph refuses every longer prompt."""
    verdict = verdict_of(small_graph(tmp_path, "table"))
    assert verdict.state == PASSED
    assert any(note.startswith("not tried: several prompts [3, 17]") or "not tried: " in note for note in verdict.notes)
    assert verdict.cases >= 3
    assert verdict.reach is not None
    assert verdict.reach.position is None
    assert "position" not in str(verdict.reach)


def test_whole_numbers_and_masks_among_the_outputs(tmp_path: Path) -> None:
    verdict = verdict_of(small_graph(tmp_path, "kinds"))
    assert verdict.state == PASSED, verdict


def test_a_size_of_pictures_that_the_graph_takes_is_looked_for(tmp_path: Path) -> None:
    verdict = verdict_of(small_graph(tmp_path, "pictures"))
    assert verdict.state == PASSED
    assert verdict.worst is not None
    assert "height=224 width=224" in verdict.worst.case


def test_a_graph_without_inputs_is_verified(tmp_path: Path) -> None:
    assert verdict_of(small_graph(tmp_path, "constant")).state == PASSED


def test_roles_are_asked_for_and_taken(tmp_path: Path) -> None:
    path = small_graph(tmp_path, "unknown")
    report = verify([path], runtimes=ORT)
    assert report.exit_code() == 2
    assert "--input foo=ROLE" in report.unreadable[0].error
    assert verdict_of(path, roles={"foo": "mask"}).state == PASSED
    bad = verify([path], runtimes=ORT, roles={"foo": "tokens"})
    assert "unknown role 'tokens' of the input 'foo'" in bad.unreadable[0].error


def test_the_users_own_inputs(tmp_path: Path) -> None:
    path = small_graph(tmp_path, "unknown")
    np.savez(tmp_path / "mine.npz", x=np.ones((2, 3, 4), np.float32), foo=np.ones((2, 3), np.int64))
    verdict = verdict_of(path, inputs=tmp_path / "mine.npz")
    assert (verdict.state, verdict.cases) == (PASSED, 1)
    for arrays, message in (
        ({"x": np.ones((2, 3, 4), np.float32)}, "they lack 'foo'"),
        ({"x": np.ones((2, 3), np.float32), "foo": np.ones((2, 3), np.int64)}, "'x' has shape [2, 3]"),
        ({"x": np.ones((2, 3, 4)), "foo": np.ones((2, 3), np.int64)}, "'x' is float64, the graph takes float32"),
        ({"x": np.full((2, 3, 4), np.nan, np.float32), "foo": np.ones((2, 3), np.int64)}, "holds NaN or Inf"),
        ({"x": np.ones((2, 3, 4), np.float32), "foo": np.ones((2, 5), np.int64)}, "has 5 of 's', and 'x' has 3"),
    ):
        np.savez(tmp_path / "bad.npz", **arrays)  # type: ignore[arg-type]
        unreadable = verify([path], runtimes=ORT, inputs=tmp_path / "bad.npz").unreadable
        assert message in unreadable[0].error, unreadable


def test_own_inputs_that_the_graph_cannot_take_are_an_error(tmp_path: Path) -> None:
    path = small_graph(tmp_path, "table")
    np.savez(tmp_path / "long.npz", x=np.ones((1, 40, 4), np.float32))
    report = verify([path], runtimes=ORT, inputs=tmp_path / "long.npz")
    assert report.exit_code() == 2
    assert "can't be evaluated on the inputs 'long.npz'" in report.unreadable[0].error


def test_what_needs_a_spec_is_refused(decoder: Path, tmp_path: Path) -> None:
    report = verify([decoder], runtimes=ORT, properties=True)
    assert "--properties needs" in report.unreadable[0].error
    with pytest.raises(RequestError, match="is not there"):
        verify([tmp_path / "nothing.onnx"], runtimes=ORT)


def test_a_file_that_no_runtime_opens_fails(tmp_path: Path) -> None:
    path = small_graph(tmp_path, "kinds")
    model = onnx.load(path)
    next(node for node in model.graph.node if node.op_type == "Softmax").attribute[0].name = "axes"
    onnx.save(model, path)
    verdict = verdict_of(path)
    assert verdict.state != PASSED
    assert verify([path], runtimes=ORT).exit_code() in (1, 3)


def test_the_command_shows_tables_and_json(decoder: Path, tmp_path: Path) -> None:
    junit, markdown = tmp_path / "out.xml", tmp_path / "out.md"
    run = cli("verify", str(decoder), "--runtime", "ort-cpu", "--junit", str(junit), "--markdown", str(markdown))
    assert run.exit_code == 0
    assert "Parity with the file itself in float64" in run.stdout
    assert "ort-cpu" in junit.read_text()
    assert "passed" in markdown.read_text()
    data = json.loads(cli("verify", str(decoder), "--runtime", "ort-cpu", "--json", "--cases", "2").stdout)
    assert data["verdicts"][0]["reference"] == "the file itself"
    assert data["verdicts"][0]["cases"] >= 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "foo"), "--input 'foo' is not NAME=ROLE"),
        (("--input", "foo=mask", "--input", "foo=ones"), "--input gives 'foo' two roles"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    run = cli("verify", str(small_graph(tmp_path, "unknown")), *arguments)
    assert run.exit_code == 2
    assert message in run.stderr


def _masked(path: Path, mask: str, *shape: str) -> Path:
    """A file that multiplies x [tokens, rows, 4] by a mask or another input of its rows and tokens."""
    kind = onnx.TensorProto.BOOL if mask == "key_padding_mask" else onnx.TensorProto.INT32
    inputs = [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["seq", "batch", 4]),
        onnx.helper.make_tensor_value_info(mask, kind, shape),
    ]
    nodes = [
        onnx.helper.make_node("Cast", [mask], ["numbers"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Transpose", ["numbers"], ["turned"]),
        onnx.helper.make_node("Unsqueeze", ["turned", "last"], ["column"]),
        onnx.helper.make_node("Mul", ["x", "column"], ["y"]),
    ]
    last = onnx.numpy_helper.from_array(np.array([len(shape)]), "last")
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["seq", "batch", 4])]
    graph = onnx.helper.make_graph(nodes, "masked", inputs, outputs, [last])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_tokens_before_rows_beside_a_mask_of_rows_and_tokens(tmp_path: Path) -> None:
    assert verdict_of(_masked(tmp_path / "masked.onnx", "key_padding_mask", "batch", "seq")).state == PASSED


def test_an_input_of_other_axes_than_its_role_has_is_one_sentence(tmp_path: Path) -> None:
    path = _masked(tmp_path / "masked.onnx", "seqlens_k", "seq")
    result = cli("verify", str(path), "--runtime", "ort-cpu")
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith(f"Error: {str(path)!r}: the input 'seqlens_k' can't be drawn as last_key: ")
    assert result.stderr.count("\n") == 1
