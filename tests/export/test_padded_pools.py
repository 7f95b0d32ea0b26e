"""A Pad with zeros before a MaxPool stays: ONNX Runtime would merge it into the pads, which MaxPool ignores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from posexport.export import exporter
from posexport.export.padded_pools import keep_pads_of_pools


class Pooled(nn.Module):
    """The stem of BiT: zeros around an image, and a MaxPool."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(nn.functional.pad(x, (1, 1, 1, 1)), 3, 2)


def error(path: Path, finished: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """The error of ONNX Runtime against torch for negative numbers."""
    x = -1 - torch.rand(2, 3, 8, 8)
    if not finished:
        monkeypatch.setattr(exporter, "keep_pads_of_pools", lambda _: None)
    with exporter.quiet():
        program = torch.onnx.export(Pooled(), (x,), dynamo=True, verbose=False, opset_version=20)
    assert program is not None
    exporter.finish(program.model, "decomposed")
    ir.save(program.model, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    made = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    return float(np.abs(made - Pooled()(x).numpy()).max())


def test_the_maximum_of_negative_numbers_and_a_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(tmp_path / "kept.onnx", True, monkeypatch) == 0
    assert error(tmp_path / "moved.onnx", False, monkeypatch) > 1


def test_other_pads_stay_as_they_are() -> None:
    x = ir.Value(name="x", shape=ir.Shape([1, 1, 4, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    amounts = ir.node("Constant", [], {"value_ints": [0, 0, 1, 1, 0, 0, 1, 1]}, name="amounts")
    pad = ir.node("Pad", [x, amounts.outputs[0]], name="pad")
    pool = ir.node("AveragePool", [pad.outputs[0]], {"kernel_shape": [3, 3]}, name="pool")
    graph = ir.Graph([x], pool.outputs, nodes=[amounts, pad, pool], opset_imports={"": 20}, name="graph")
    keep_pads_of_pools(ir.Model(graph, ir_version=10))
    assert len(pad.inputs) == 2 and len(graph) == 3
