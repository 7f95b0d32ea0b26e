"""Models that clamp overflows in fp16 are exported with the clamp, and their buffers get the dtype of the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_decoders import exported_model
from tiny_models import checkpoint
from torch import nn

from posexport.export.half_overflow import ClampsAlways

pytest.importorskip("transformers")


class Guarded(nn.Module):
    """A module with the clamp of BART's layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 4
        if hidden.dtype == torch.float16 and not torch.isfinite(hidden).all():
            largest = torch.finfo(hidden.dtype).max - 1000
            hidden = torch.clamp(hidden, min=-largest, max=largest)
        return hidden


class GuardedFromInfinity(nn.Module):
    """A module with the clamp of LongT5's layers, and after it that of T5's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 4
        if hidden.dtype == torch.float16 and torch.isinf(hidden).any():
            largest = torch.finfo(hidden.dtype).max - 1000
            hidden = torch.clamp(hidden, min=-largest, max=largest)
        if hidden.dtype == torch.float16:
            hidden = hidden + torch.where(torch.isinf(hidden).any(), 1.0, 2.0)
        return hidden


@pytest.mark.parametrize("kind", [Guarded, GuardedFromInfinity])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_traced_clamps_as_the_module(dtype: torch.dtype, kind: type[nn.Module]) -> None:
    values = torch.tensor([[1.0, -2.5, 60000.0, -60000.0, 0.0]] * 2, dtype=dtype)
    sizes = {"x": {0: torch.export.Dim.AUTO}}
    with ClampsAlways():
        traced = torch.export.export(kind(), (values,), dynamic_shapes=sizes, strict=False)
    for rows in (values, values[:, :2].repeat(3, 3)[:, :5]):
        assert torch.equal(traced.module()(rows), kind()(rows))
    assert Counter(str(node.target) for node in traced.graph.nodes)["aten.clamp.default"] == (dtype == torch.float16)


@pytest.mark.slow
def test_bart_in_fp16(tmp_path: Path) -> None:
    """The checkpoint is in fp32, and one of its buffers is a view."""
    exported_model(checkpoint("bart"), tmp_path / "model.onnx", "--dtype", "fp16")
    for part in ("encoder", "decoder"):
        model = onnx.load(tmp_path / f"{part}_model.onnx")
        weights = {tensor.data_type for tensor in model.graph.initializer if np.prod(tensor.dims) > 100}
        assert weights == {onnx.TensorProto.FLOAT16}
