"""Opsets of rewritten graphs: what operators mean must not change with them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from helpers import open_ort

from posexport.errors import RequestError
from posexport.rewrite.opset import converted

GROUPS = """
<ir_version: 8, opset_import: ["" : 18]>
agraph (float[%s] x) => (float y)
<float[2] scale = {1.0, 3.0}, float[2] bias = {0.5, -0.5}, int64[3] sizes = {0, 4, -1}>
{
    z = Relu (x)
    grouped = GroupNormalization <num_groups: int = 2, epsilon: float = 0.0001> (z, scale, bias)
    y = ReduceSum <keepdims: int = 0> (grouped)
}
"""


def grouped(dims: str) -> ir.Model:
    return ir.from_onnx_text(GROUPS % dims)


def test_scales_of_groups_become_those_of_channels() -> None:
    """The converter needs to know how many channels there are: it is asked of onnx, where the file doesn't say it."""
    made = converted(grouped("batch, 4, 3"), "native", "portable", None)
    assert made.opset_imports[""] == 23
    x = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    groups = np.maximum(x, 0).reshape(2, 2, 6).astype(np.float64)
    centred = groups - groups.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-4)
    wanted = (normal * np.array([1.0, 3.0])[:, None] + np.array([0.5, -0.5])[:, None]).sum()
    (found,) = open_ort(made)({"x": x}).values()
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_count_of_channels_that_nobody_knows_is_refused() -> None:
    with pytest.raises(RequestError, match=r"GroupNormalization means something else from 21 on"):
        converted(grouped("batch, channels, 3"), "native", "portable", None)
    assert converted(grouped("batch, channels, 3"), "decomposed", "portable", None).opset_imports[""] == 18
