"""`rewrite --angles exact` and `verify --against` as a user calls them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from helpers import cli

pytestmark = pytest.mark.few_bands


@pytest.fixture(autouse=True)
def _one_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    helpers.only_one_runtime(monkeypatch, tmp_path)


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A file with a decoder of one layer and a cache."""
    return helpers.saved(tmp_path)


@pytest.mark.slow
def test_exact_angles_are_said_with_both_errors(decoder: Path) -> None:
    arguments = ("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--angles", "exact")
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    lines = [re.sub(" {2,}", " | ", line.strip()) for line in helpers.numbers_hidden(result.stdout).splitlines()]
    assert lines[2] == "attention | recognised | state | error | cases | angles"
    assert re.search(r"rewritten \| # \| 24 \| exact, error #, was # up to 16777215$", lines[3]), lines[3]
    assert "ort-cpu | passed: error #, limit #, 37 sets of inputs" in lines
    data = json.loads(cli(*arguments, "--json").stdout)
    (angles,) = (one["angles"] for one in data["attentions"])
    assert data["angles"] == "exact" and angles["state"] == "exact" and angles["reason"] is None
    assert angles["error"] <= 2.5e-7 < 0.01 < angles["original_error"]
    verified = cli("verify", "out.onnx", "--against", "in.onnx", "--runtime", "ort-cpu", "--json")
    assert verified.exit_code == 0, verified.output
    (verdict,) = json.loads(verified.stdout)["verdicts"]
    assert verdict["state"] == "passed" and verdict["reference"] == "in.onnx with exact angles"
    assert any("differ by 0 " in note or "e-1" in note for note in verdict["notes"]), verdict["notes"]


@pytest.mark.slow
def test_a_manifest_makes_no_other_change_pass(decoder: Path) -> None:
    """If the manifest says that angles are exact, verify allows exact angles and no other change of the source."""
    arguments = ("--form", "decomposed", "--angles", "exact")
    assert cli("rewrite", "in.onnx", "-o", "out.onnx", *arguments).exit_code == 0
    model = onnx.load("out.onnx")
    weight = next(one for one in model.graph.initializer if one.name == "head.weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(1.001), weight.name))
    onnx.save(model, "out.onnx")
    manifest = json.loads(Path("out.onnx.json").read_text())
    manifest["sha256"] = hashlib.sha256(Path("out.onnx").read_bytes()).hexdigest()
    Path("out.onnx.json").write_text(json.dumps(manifest))
    result = cli("verify", "out.onnx", "--against", "in.onnx", "--runtime", "ort-cpu", "--json")
    (verdict,) = json.loads(result.stdout)["verdicts"]
    assert (result.exit_code, verdict["state"]) == (1, "failed")
    manifest["rewrite"]["attentions"][0]["name"] = "another"
    Path("out.onnx.json").write_text(json.dumps(manifest))
    result = cli("verify", "out.onnx", "--against", "in.onnx", "--runtime", "ort-cpu")
    assert result.exit_code == 2 and "has no attention 'another' whose angles can be made exact" in result.stderr


@pytest.mark.slow
def test_angles_that_stay_are_said(tmp_path: Path) -> None:
    model = small_graphs.decoder()
    weight = next(one for one in model.graph.initializer if one.name == "inv_freq")
    rounded = onnx.numpy_helper.to_array(weight).astype(np.float16).astype(np.float32)
    weight.CopyFrom(onnx.numpy_helper.from_array(rounded, weight.name))
    helpers.saved(tmp_path, model)
    arguments = ("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--angles", "exact")
    result = cli(*arguments)
    assert result.exit_code == 0 and "parity, its frequencies match no known parameters" in " ".join(
        result.stdout.split()
    )
    Path("out.onnx").unlink()
    result = cli(*arguments, "--require-all", "--json")
    refusal = json.loads(result.stdout)["refusal"]
    assert result.exit_code == 1 and not Path("out.onnx").exists() and refusal["code"] == "angles-left"
    assert "the angles of 1 of 1 attentions are left as they were, node_attention_0: its frequencies" in refusal["text"]
