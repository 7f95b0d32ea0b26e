"""Opsets of rewritten graphs: a conversion must not change what operators compute."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import small_graphs
from helpers import open_ort
from rewrite_helpers import feeds, rewritten_model

from posexport.errors import RequestError
from posexport.rewrite.opset import LATEST, converted
from posexport.rewrite.result import KEPT, REWRITTEN
from posexport.spec.forms import FORMS

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
    """The converter needs the number of channels: onnx's shape inference gives it if the file does not."""
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
    """Softmax is the same in these opsets. onnxscript's converter accepts only functions of the graph's own opset."""
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


def of_functions(outer: int, inner: int, body: str) -> ir.Model:
    """A graph of opset `outer` with one call of a function of opset `inner`."""
    return ir.from_onnx_text(
        f'<ir_version: 9, opset_import: ["" : {outer}, "own" : 1]>'
        "agraph (float[2, 3, 4] x) => (float y) { z = own.part (x) y = ReduceSum <keepdims: int = 0> (z) }"
        f'<domain: "own", opset_import: ["" : {inner}]> part (a) => (b) {{ {body} }}'
    )


ADDED = {
    "dtypes": "s = Transpose <perm: ints = [0, 2, 1]> (a) b = Identity (s)",
    "an attribute": "s = Shape (a) b = Reshape (a, s)",
    "an input": "p = Constant <value_ints: ints = [0, 0, 0, 1, 1, 1]> () b = Pad (a, p)",
    "parts": "p = Constant <value_ints: ints = [1, 2]> () c, b = Split <axis: int = 1> (a, p)",
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize(("outer", "inner"), [(18, 13), (18, 23), (17, 21)])
def test_functions_of_operators_to_which_an_opset_only_added_are_put_in_place(
    name: str, outer: int, inner: int
) -> None:
    model = of_functions(outer, inner, ADDED[name])
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    before = open_ort(of_functions(outer, outer, ADDED[name]))({"x": x})
    made = converted(model, "native", "portable", None)
    assert not made.functions and made.opset_imports[""] == 23
    assert open_ort(made)({"x": x})["y"] == pytest.approx(before["y"], rel=1e-5)


CHANGED = {
    "default": (18, 11, "b = Softmax (a)"),
    "axis": (18, 11, "b = LogSoftmax <axis: int = 1> (a)"),
    "attribute": (18, 13, "b = ReduceMean <axes: ints = [1]> (a)"),
    "input": (17, 18, "p = Constant <value_ints: ints = [1]> () b = ReduceMean (a, p)"),
    "number of parts": (18, 13, "c, b = Split <axis: int = 2> (a)"),
    "not there": (18, 20, "b = Gelu (a)"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_functions_of_operators_that_changed_are_refused(name: str) -> None:
    """Such a file is not valid, and runtimes interpret it differently."""
    with pytest.raises(RequestError, match=r"the function 'part' has operators of another opset than the graph"):
        converted(of_functions(*CHANGED[name]), "native", "portable", None)


@pytest.mark.parametrize("opset", [25, LATEST])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_a_later_opset_keeps_its_own(form: str, opset: int) -> None:
    model = small_graphs.decoder(opset=opset)
    model.ir_version = 11
    done, made = rewritten_model(model, form=form, target="portable" if form != "contrib" else "ort")
    assert [one.state for one in done.sites] == [KEPT if form == "decomposed" else REWRITTEN]
    assert {entry.version for entry in made.opset_import if not entry.domain} == {opset}
    given = feeds(2, 3, 4)
    expected, actual = (small_graphs.run(one, given) for one in (model, made))
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=2e-5 * float(np.abs(array).max()))


def test_opsets_that_runtimes_do_not_take_are_refused() -> None:
    late, later = (ir.from_proto(small_graphs.decoder(opset=LATEST + more)) for more in (0, 1))
    with pytest.raises(RequestError, match=f"the file is of opset {LATEST + 1}: rewritten files have {LATEST} at most"):
        converted(later, "decomposed", "portable", None)
    with pytest.raises(RequestError, match=f"opset is {LATEST}: native is written in opsets 23 to 24"):
        converted(late, "native", "tensorrt", None)
    with pytest.raises(RequestError, match="opset is 25: native is written in opsets 23 to 24"):
        converted(ir.from_proto(small_graphs.decoder(opset=24)), "native", "portable", 25)
