"""A module that checks values is exported without its checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from posexport.export import exporter, traced


class Checked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > 0)
        return x * 2


def program_of(monkeypatch: pytest.MonkeyPatch | None) -> torch.onnx.ONNXProgram:
    if monkeypatch is not None:
        monkeypatch.setattr(traced, "_CHANGES", ())
    with exporter.quiet():
        exported = traced.translatable(torch.export.export(Checked(), (torch.ones(2, 3),), strict=False))
        program = torch.onnx.export(exported, dynamo=True, verbose=False)
    assert program is not None
    return program


def test_checks_are_left_out(tmp_path: Path) -> None:
    program = program_of(None)
    exporter.finish(program.model, "decomposed")
    assert [node.op_type for node in program.model.graph] == ["Mul"]
    ir.save(program.model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": np.full((2, 3), 3, np.float32)})[0], np.full((2, 3), 6))


def test_torch_itself_does_not_translate_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError):
        program_of(monkeypatch)
