"""Modules in float32 that compute a part in bfloat16, which ONNX Runtime's CPU provider does not support."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from posexport.export import export_module
from posexport.export.bfloat16 import without_bfloat16_arithmetic


class Slopes(torch.nn.Module):
    """ALiBi as in Falcon: integers, which bfloat16 cannot all represent, times slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.7, 0.13]))

    def forward(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = mask.cumsum(-1) - 1
        alibi = self.slopes[:, None].bfloat16() * places[:, None, :]
        return (alibi.to(torch.float32) - 1) / 3, alibi * 2 + 0.3


def test_results_are_rounded_as_in_torch() -> None:
    model = export_module(Slopes(), (torch.ones(2, 6, dtype=torch.int64),), {"mask": {1: torch.export.Dim.AUTO}})
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    mask = torch.ones(2, 700, dtype=torch.int64)
    expected, rounded = Slopes()(mask)
    got = session.run_with_ort_values(None, {"mask": ort.OrtValue.ortvalue_from_numpy(mask.numpy())})
    np.testing.assert_array_equal(got[0].numpy(), expected.detach().numpy())
    assert got[1].element_type() == 16 and got[1].shape() == list(rounded.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_in_bfloat16_stays_so(dtype: torch.dtype) -> None:
    module, given = Slopes().to(dtype), (torch.ones(2, 6, dtype=torch.int64),)
    program = without_bfloat16_arithmetic(torch.export.export(module, given))
    widths = {node.meta["val"].dtype for node in program.graph.nodes if node.target is torch.ops.aten.mul.Tensor}
    assert widths == {dtype}
    assert torch.equal(program.module()(*given)[0], module(*given)[0])
