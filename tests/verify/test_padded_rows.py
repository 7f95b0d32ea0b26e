"""A padded row must give the same tokens as the row alone, unless transformers itself lets padding affect its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import cli
from small_decoders import exported_model, small_checkpoint

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def generation_of(folder: Path, path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the verdict on tokens."""
    result = cli("verify", path, "--from", folder, "--runtime", "ort-cpu", *options, "--json")
    assert not result.stderr.startswith("Error"), result.stderr
    return result.exit_code, json.loads(result.stdout)["verdicts"][-1]


@pytest.mark.slow
def test_a_model_that_lets_padding_into_its_rows_is_inconclusive(tmp_path: Path) -> None:
    """A bias of the projection makes values at padding nonzero, and these enter the state."""
    small_checkpoint(tmp_path / "checkpoint", "Bamba", mamba_proj_bias=True)
    (tmp_path / "made").mkdir()
    path = exported_model(tmp_path / "checkpoint", tmp_path / "made/model.onnx", "--form", "native")
    code, verdict = generation_of(tmp_path / "checkpoint", path)
    assert (code, verdict["check"], verdict["state"]) == (0, "generation", "passed")
    assert len(verdict["not_shown"]) == 1
    assert "transformers itself makes other tokens of a row that is padded on the left" in verdict["not_shown"][0]
    assert generation_of(tmp_path / "checkpoint", path, "--strict")[0] == 1


@pytest.mark.slow
def test_a_model_that_keeps_padding_out_passes(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "checkpoint", "Bamba")
    (tmp_path / "made").mkdir()
    path = exported_model(tmp_path / "checkpoint", tmp_path / "made/model.onnx", "--form", "native")
    code, verdict = generation_of(tmp_path / "checkpoint", path, "--strict")
    assert (code, verdict["state"], verdict["not_shown"]) == (0, "passed", [])
