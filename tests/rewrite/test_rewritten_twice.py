"""A file that was rewritten before stays as it is, also if a rotation of it could not be written as an operator."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import rewrite_helpers as helpers

from posexport.rewrite.broadcasts import LengthsApart
from posexport.rewrite.result import ALREADY, KEPT, REWRITTEN
from posexport.rewrite.rotated import RotationWriter


def refuse(*arguments: object) -> None:
    raise LengthsApart("the layout of its cosines depends on lengths.")


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_an_attention_without_its_rotation_is_in_the_form(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.in_process(monkeypatch)
    monkeypatch.setattr(RotationWriter, "_part", refuse)
    path, first, second = helpers.saved(tmp_path), tmp_path / "first.onnx", tmp_path / "second.onnx"
    (one,) = helpers.rewritten(path, first, form=form, target="ort").attentions
    assert one["state"] == REWRITTEN
    operators = [node.op_type for node in onnx.load(first).graph.node]
    assert "RotaryEmbedding" not in operators and "Softmax" not in operators
    (one,) = helpers.rewritten(first, second, form=form, target="ort").attentions
    assert (one["state"], one["reason"]["code"]) == (KEPT, ALREADY)
    assert first.read_bytes() == second.read_bytes()
