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


CALL = """
<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
agraph (float[batch, 4] x) => (float[batch, 4] y) { y = own.soft (x) }
<domain: "own", opset_import: ["" : %d]> soft (a) => (b) { b = Softmax (a) }
"""


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_functions_of_another_opset_are_put_in_place_first(opset: int) -> None:
    """Softmax is the same in all of them; onnxscript's converter takes functions of the graph's own opset alone."""
    made = converted(ir.from_onnx_text(CALL % opset), "native", "portable", None)
    assert [node.op_type for node in made.graph] == ["Softmax"] and made.opset_imports[""] == 23
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    (found,) = open_ort(made)({"x": x}).values()
    powers = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=1e-5)


def test_a_function_that_means_something_else_is_named() -> None:
    """Before opset 13, Softmax was over all axes from the second on."""
    with pytest.raises(RequestError, match=r"the function 'soft' has operators of another opset than the graph"):
        converted(ir.from_onnx_text(CALL % 11), "native", "portable", None)
    assert converted(ir.from_onnx_text(CALL % 11), "decomposed", "portable", None).opset_imports[""] == 18
