"""Traps in TensorRT's parser: graphs that it changes without an error, that it refuses, or that crash it.

The runtime tensorrt-import evaluates the network that the parser made and so shows what it understood. (Functions named
like operators, overloads, windows and lengths of keys are in test_trt_import.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from form_helpers import errors, small_cases
from helpers import small_spec, weights_for
from trap_helpers import FLAT, GROUP, HEADS, LENGTHS, MULTI, OUT, PAST, PRESENT, SAME, SIZES, corner, formula
from trt_helpers import needs_rtx
from trt_import_helpers import graph, imported, inputs_for, on_ort

from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.export import export
from posexport.runtimes.tensorrt import interpreter

pytestmark = needs_rtx


@pytest.mark.parametrize("call", [f"Attention<{HEADS}, is_causal = 1>", f"{MULTI}, unidirectional = 1>"])
def test_causality_counts_from_the_first_key(call: str, tmp_path: Path) -> None:
    model = graph(f"({FLAT}) {OUT} {{ y = {call}(q, k, v) }}")
    inputs = inputs_for(model, SIZES, {})
    found = imported(model, tmp_path).run(inputs)["y"]
    q, k, v = (inputs[name] for name in "qkv")
    seen = np.tri(3, 7, dtype=bool)
    np.testing.assert_allclose(found, formula(q, k, v, seen), atol=1e-5)
    assert np.abs(found - formula(q, k, v, corner(3, 7))).max() > 0.05


def test_an_attribute_that_a_call_lacks_is_made_up(tmp_path: Path) -> None:
    """A function passes on its attribute `axis`, but the call has none. onnx's checker and ONNX Runtime refuse that."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23, "posexport": 1]> made (float[b,s] x) => (float[i,j] y) '
        '{ y = posexport.Beside(x) } <domain: "posexport", opset_import: ["": 23]> Beside <axis> (x) => (y) '
        "{ y = Concat<axis: int = @axis>(x, x) }"
    )
    inputs = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert imported(model, tmp_path).run(inputs)["y"].shape == (4, 3)
    with pytest.raises(Exception, match="axis"):
        on_ort(model, inputs)


def test_an_operator_of_a_later_opset_is_taken(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 22, "posexport": 1]> made (float[b,4,s,8] x) => (float[i,j,k,l] y) '
        '{ y = posexport.Self(x) } <domain: "posexport", opset_import: ["": 23]> Self (x) => (y) '
        "{ y = Attention(x, x, x) }"
    )
    inputs = inputs_for(model, SIZES, {})
    assert imported(model, tmp_path).run(inputs)["y"].shape == inputs["x"].shape
    with pytest.raises(Exception, match="Attention"):
        on_ort(model, inputs)


FUNCTIONS: list[dict[str, Any]] = [
    {"encoding": "rope", "num_kv_heads": 2, "kv_cache": "shared", "padding_mask": True, "causal": True},
    {"encoding": "relative", "cross": False, "sinks": True, "softcap": 2.0, "layers": 2, "block": "transformer"},
]


@pytest.mark.slow
@pytest.mark.parametrize("over", FUNCTIONS)
def test_functions_of_ours_leave_nothing_to_be_made_up(over: dict[str, Any]) -> None:
    """Attributes are written into bodies, no input is left out, imports agree, and overloads have different names."""
    spec = small_spec(**over)
    model = export(spec, weights_for(spec), form="function", opset=20)
    assert len(model.functions) >= 3
    for function in model.functions.values():
        assert not function.attributes
        assert not function.overload
        assert set(function.opset_imports.items()) <= {("", 20), ("posexport", 1)}
        assert not any(each.ref_attr_name for node in function for each in node.attributes.values())
    for node in model.graph:
        if node.domain == "posexport":
            assert not node.attributes
            assert all(value is not None for value in node.inputs)


OURS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("native", {"kv_cache": "concat", "causal": True}, {}),
    ("contrib", {"kv_cache": "concat", "causal": True, "num_kv_heads": 2}, {}),
    ("native", {"causal": True, "window": 3}, {}),
    ("contrib", {"window": 2, "padding_mask": True, "sinks": True}, {}),
    ("native", {"kv_cache": "shared", "causal": True, "padding_mask": True}, {"max_seq": 64}),
    ("native", {"encoding": "rope2d", "layout": "half", "qk_norm": True, "kv_cache": "shared"}, {}),
    ("contrib", {"encoding": "rope", "num_kv_heads": 2, "causal": True}, {}),
    ("function", {"encoding": "rope", "num_kv_heads": 2, "kv_cache": "shared", "causal": True, "softcap": 2.0}, {}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "over", "fixed"), OURS)
def test_a_block_of_ours_is_understood(form: str, over: dict[str, Any], fixed: dict[str, int], tmp_path: Path) -> None:
    spec = small_spec(**{"encoding": "none", **over})
    path = tmp_path / "block.onnx"
    write_onnx(export(spec, weights_for(spec), form=form, **fixed), path)
    found = errors(spec, interpreter.load(path, {}).run, small_cases(spec, form, **fixed))
    assert len(found) >= 3
    assert {name: off for name, off in found.items() if off > 5e-5} == {}


HEAD, KEYS4 = (
    "float[b,4,s,8] q, float[b,4,t,8] k, float[b,4,t,8] v",
    "float[b,s,32] q, float[b,4,t,8] k, float[b,4,t,8] v",
)
REFUSED: dict[str, tuple[str, str]] = {
    "a mask beside causality": (
        f"({FLAT}, float[s,t] g) {OUT} {{ y = Attention<{HEADS}, is_causal = 1>(q, k, v, g) }}",
        "mask cannot be used together with CausalMaskKind",
    ),
    "a past of Attention": (
        f"({SAME}, {PAST}) {PRESENT} {{ y, x, z = Attention<{HEADS}>(q, k, v, , pk, pv) }}",
        "only supports Attention nodes with one output|Setting past_key",
    ),
    "a softcap": (
        f"({FLAT}) {OUT} {{ y = Attention<{HEADS}, softcap = 2.0>(q, k, v) }}",
        "Setting softcap is not supported",
    ),
    "values of another width": (
        "(float[b,4,s,8] q, float[b,4,t,8] k, float[b,4,t,6] v) => (float[i,j,l,m] y) { y = Attention(q, k, v) }",
        "must have the same head dimension",
    ),
    "a past of MultiHeadAttention": (
        f"({SAME}, {PAST}) {PRESENT} {{ y, x, z = {MULTI}>(q, k, v, , , , pk, pv) }}",
        "single context output|past_key",
    ),
    "padding of MultiHeadAttention": (
        f"({FLAT}, int32[b,t] g) {OUT} {{ y = {MULTI}>(q, k, v, , g) }}",
        "key_padding_mask input is not supported",
    ),
    "a mask beside unidirectional": (
        f"({FLAT}, float[b,4,s,t] g) {OUT} {{ y = {MULTI}, unidirectional = 1>(q, k, v, , , g) }}",
        "mask cannot be used together with CausalMaskKind",
    ),
    "keys by heads": (
        f"({KEYS4}) {OUT} {{ y = {MULTI}>(q, k, v) }}",
        "only supports 3D explicit query, key, and value",
    ),
    "GroupQueryAttention": (
        f"({SAME}, {PAST}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}, scale = 0.3>(q, k, v, pk, pv, n, a) }}",
        "GroupQueryAttention",
    ),
    "a buffer of any length": (
        "(float[b,4,m,8] c, float[b,4,s,8] u, int64[b] w) => (float[i,j,k,l] y) "
        "{ y = TensorScatter<axis = 2>(c, u, w) }",
        "must have a static sequence length",
    ),
    "a buffer that goes round": (
        "(float[b,4,9,8] c, float[b,4,s,8] u, int64[b] w) => (float[i,j,k,l] y) "
        '{ y = TensorScatter<axis = 2, mode = "circular">(c, u, w) }',
        "TensorScatter.*linear",
    ),
}
"""Graphs and words of the parser's refusal. The targets `portable` and `tensorrt` avoid these graphs."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_parser_refuses(name: str, tmp_path: Path) -> None:
    text, said = REFUSED[name]
    with pytest.raises(RequestError, match=said):
        imported(graph(text, 24), tmp_path)


def test_a_function_that_calls_itself_is_refused(tmp_path: Path) -> None:
    """The parser crashes on it (SIGSEGV), so the file is checked before."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "posexport": 1]> made (float[b] x) => (float[b] y) '
        '{ y = posexport.Again(x) } <domain: "posexport", opset_import: ["": 20, "posexport": 1]> Again (x) => (y) '
        "{ y = posexport.Again(x) }"
    )
    path = tmp_path / "loop.onnx"
    onnx.save(model, path)
    with pytest.raises(RequestError, match="a function 'Again' that calls itself"):
        interpreter.load(path, {})
