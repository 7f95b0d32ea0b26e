"""Graphs of unusual dtypes, outputs and operators: the smallest attention, float64, sequences, unknown operators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto, helper
from small_graphs import Graph, run

from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model
from posexport.runtimes import RUNTIMES
from posexport.verify.graph.subject import GraphSubject, read_file, read_subject
from posexport.verify.result import FAILED, NOT_RUN, Verdict
from posexport.verify.rewritten import QUANTISED, _beside_the_original, _is_no_worse
from posexport.verify.side_by_side import DIFFERS, FAILS, side_by_side

HEADS, SIZE = 2, 8
HIDDEN = HEADS * SIZE


def model_of(
    g: Graph,
    outputs: dict[str, Any],
    *,
    inputs: dict[str, Any] | None = None,
    dtype: int = TensorProto.FLOAT,
    opset: int = 18,
) -> onnx.ModelProto:
    inputs = inputs or {"features": ["batch", "seq", HIDDEN]}
    infos = [
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in values.items()]
        for values in (inputs, outputs)
    ]
    graph = helper.make_graph(g.nodes, "main_graph", *infos, g.weights)
    domains = {node.domain for node in g.nodes} - {""}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=imports)
    model.ir_version = 10
    return model


def heads_of(g: Graph, name: str) -> str:
    split = g.op("Reshape", g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN)), g.constant([0, 0, HEADS, SIZE]))
    return g.op("Transpose", split, perm=[0, 2, 1, 3])


def attended(g: Graph, q: str, k: str, v: str, output: str = "mixed") -> str:
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = g.op("Softmax", g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32)), axis=-1)
    return g.op("MatMul", weights, v, name=output)


def merged(g: Graph, mixed: str, name: str = "output") -> str:
    return g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]), name=name)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_the_product_with_values_may_be_an_output(form: str) -> None:
    """The smallest possible attention."""
    g = Graph()
    attended(g, "q", "k", "v")
    shape = ["batch", HEADS, "seq", SIZE]
    model = model_of(g, {"mixed": shape}, inputs={"q": shape, "k": shape, "v": shape})
    done = rewrite_model(
        ir.from_proto(model), form=form, target="ort", roles=dict.fromkeys(("q", "k", "v"), "features")
    )
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, HEADS, 5, SIZE)).astype(np.float32) for name in "qkv"}
    np.testing.assert_allclose(run(ir.to_proto(done.model), arrays)["mixed"], run(model, arrays)["mixed"], atol=2e-6)


def test_native_alone_takes_float64() -> None:
    g = Graph()
    merged(g, attended(g, heads_of(g, "q"), heads_of(g, "k"), heads_of(g, "v")))
    for tensor in g.weights:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float64), tensor.name))
    model = model_of(g, {"output": ["batch", "seq", HIDDEN]}, dtype=TensorProto.DOUBLE)
    native = rewrite_model(ir.from_proto(model), form="native", target="ort")
    assert [site.state for site in native.sites] == [REWRITTEN]
    for form, start in (("contrib", model), ("function", model), ("decomposed", ir.to_proto(native.model))):
        (site,) = rewrite_model(ir.from_proto(start), form=form, target="ort").sites
        assert site.reason is not None
        assert (site.state, site.reason.code) == (KEPT, "form"), form


def in_sequence(g: Graph, sizes: Any, places: tuple[int, int, int]) -> onnx.ModelProto:
    """Queries, keys and values are parts of one projection, as torch exports chunk without optimisations."""
    projected = g.op("MatMul", "features", g.random("qkv", HIDDEN, 3 * HIDDEN))
    parts = g.op("SplitToSequence", projected, sizes, axis=-1)
    q, k, v = (
        g.op("Transpose", g.op("Reshape", part, g.constant([0, 0, HEADS, SIZE])), perm=[0, 2, 1, 3])
        for part in (g.op("SequenceAt", parts, g.constant(place)) for place in places)
    )
    merged(g, attended(g, q, k, v))
    model = model_of(g, {"output": ["batch", "seq", HIDDEN]})
    onnx.checker.check_model(model)
    return model


def numbers_in_sequence(model: onnx.ModelProto, features: np.ndarray[Any, Any], places: tuple[int, int, int]) -> Any:
    """The same in numpy."""
    (weight,) = [onnx.numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "qkv"]
    parts = np.split(features.astype(np.float64) @ weight, 3, axis=-1)
    q, k, v = (parts[place].reshape(*features.shape[:2], HEADS, SIZE).transpose(0, 2, 1, 3) for place in places)
    powers = np.exp(q @ k.transpose(0, 1, 3, 2) * SIZE**-0.5)
    mixed = powers / powers.sum(-1, keepdims=True) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(features.shape)


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("places", [(0, 1, 2), (2, 0, 1), (1, 1, 2)])
@pytest.mark.parametrize("sizes", [HIDDEN, [HIDDEN] * 3], ids=["of one length", "of stated lengths"])
def test_parts_of_a_sequence_are_what_they_are_parts_of(sizes: Any, places: tuple[int, int, int], form: str) -> None:
    """Also if one part is used for two of queries, keys and values."""
    g = Graph()
    model = in_sequence(g, g.constant(sizes), places)
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    assert "SplitToSequence" not in {node.op_type for node in done.model.graph}
    features = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    actual = run(ir.to_proto(done.model), {"features": features})["output"]
    np.testing.assert_allclose(actual, numbers_in_sequence(model, features, places), rtol=0, atol=1e-5)


def test_parts_of_lengths_that_are_computed_are_a_reason() -> None:
    g = Graph()
    length = g.op("Sub", g.op("Size", g.constant([0] * (HIDDEN + 1))), g.constant(1))
    model = in_sequence(g, length, (0, 1, 2))
    (site,) = rewrite_model(ir.from_proto(model), form="native", target="ort").sites
    assert site.state == REWRITTEN or (site.reason is not None and site.reason.code == "not-evaluated")


@pytest.mark.parametrize("size", [8, 80])
@pytest.mark.parametrize("form", ["decomposed", "function", "native"])
def test_an_operator_in_float16_of_any_head_size(form: str, size: int) -> None:
    """float16 cannot represent its scale, and the graph does not state that its inputs are float16."""
    g = Graph()
    projected = [g.op("MatMul", "features", g.random(name, HIDDEN, HEADS * size)) for name in "qkv"]
    g.nodes.append(
        helper.make_node(
            "MultiHeadAttention", projected, ["mixed"], "attention", domain="com.microsoft", num_heads=HEADS
        )
    )
    g.op("Identity", "mixed", name="output")
    for tensor in g.weights:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    model = model_of(g, {"output": ["batch", "seq", HEADS * size]}, dtype=TensorProto.FLOAT16)
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    features = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float16)
    expected, actual = (run(one, {"features": features})["output"] for one in (model, ir.to_proto(done.model)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-2)


def unknown_output(g: Graph, source: str) -> None:
    """An output by an operator that only ONNX Runtime computes."""
    g.nodes.append(
        helper.make_node(
            "ExpandDims", [source, g.weight("axis", np.array(0, np.int32))], ["other"], domain="com.microsoft"
        )
    )


def test_outputs_without_a_float64_value_are_named_and_run_beside_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.in_process(monkeypatch)
    g = Graph()
    unknown_output(g, merged(g, attended(g, heads_of(g, "q"), heads_of(g, "k"), heads_of(g, "v"))))
    model = model_of(g, {"output": ["batch", "seq", HIDDEN], "other": [1, "batch", "seq", HIDDEN]})
    path, out = helpers.saved(tmp_path, model), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", target="ort")
    assert result.whole is not None
    assert result.whole.left == ("other",)
    runtime = RUNTIMES["ort-cpu"]
    found = side_by_side(subject_of(path), out, runtime, 60)
    assert found.problem is None
    assert found.cases >= 3
    assert found.error <= 1e-4
    wrong = onnx.load(out)
    scale = next(one for node in wrong.graph.node for one in node.attribute if one.name == "scale")
    scale.f *= 1.5
    onnx.save(wrong, tmp_path / "wrong.onnx")
    problem = side_by_side(subject_of(path), tmp_path / "wrong.onnx", runtime, 60).problem
    assert problem is not None
    assert problem.code == DIFFERS
    wrong.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(wrong, tmp_path / "broken.onnx")
    problem = side_by_side(subject_of(path), tmp_path / "broken.onnx", runtime, 60).problem
    assert problem is not None
    assert problem.code == FAILS


def subject_of(path: Path) -> GraphSubject:
    return read_subject(read_file(path))


def verdict(error: float | None, code: str = "over-limit") -> Verdict:
    from posexport.verify.result import Comparison

    worst = None if error is None else Comparison(case="a", output="b", state=FAILED, max_error=error)
    return Verdict(artifact="a", runtime="ort-cpu", state=FAILED, reason="r", reason_code=code, worst=worst)


def test_a_failure_of_the_original_excuses_no_larger_one() -> None:
    assert _is_no_worse(verdict(1e-3), verdict(1e-3))
    assert _is_no_worse(verdict(None, "crashed"), verdict(None, "crashed"))
    assert not _is_no_worse(verdict(1.0), verdict(1e-3))
    assert not _is_no_worse(verdict(None, "failed"), verdict(1e-8))
    assert not _is_no_worse(verdict(1e-3, "not-finite"), verdict(1e-3))


def quantised(g: Graph, x: str) -> str:
    """x rounded to steps of 1/16."""
    step, zero = g.constant(1 / 16, np.float32), g.weight("zero", np.array(0, np.int8))
    return g.op("DequantizeLinear", g.op("QuantizeLinear", x, step, zero), step, zero)


@pytest.mark.parametrize("fault", [False, True])
def test_one_rounding_of_a_quantised_file_is_no_fault(
    fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.in_process(monkeypatch)
    g = Graph()
    mixed = attended(g, heads_of(g, "q"), heads_of(g, "k"), heads_of(g, "v"))
    g.op("MatMul", quantised(g, merged(g, mixed, "rows")), g.random("o", HIDDEN, HIDDEN), name="output")
    path, out = helpers.saved(tmp_path, model_of(g, {"output": ["batch", "seq", HIDDEN]})), tmp_path / "out.onnx"
    helpers.rewritten(path, out, form="native", target="ort")
    assert subject_of(path).is_quantised
    if fault:
        wrong = onnx.load(out)
        next(one for node in wrong.graph.node for one in node.attribute if one.name == "scale").f *= 1.5
        onnx.save(wrong, out)
    made: Any = SimpleNamespace(path=out, target=out, options=RewriteOptions(form="native", target="ort"))
    rows = {name: RUNTIMES[name] for name in ("ort-cpu", "onnx-reference")}
    found = _beside_the_original(path, made, rows, dict.fromkeys(rows, verdict(1e-2)))
    assert {one.state for one in found.values()} == {FAILED if fault else NOT_RUN}
    assert fault or {one.reason_code for one in found.values()} == {QUANTISED}


def test_functions_that_are_there_keep_their_bodies() -> None:
    """Two layers become functions, one after the other, with different attributes."""
    g = Graph()

    def layer(x: str, number: int, cap: float) -> str:
        q, k, v = (
            g.op(
                "Transpose",
                g.op(
                    "Reshape",
                    g.op("MatMul", x, g.random(f"{name}{number}", HIDDEN, HIDDEN)),
                    g.constant([0, 0, HEADS, SIZE]),
                ),
                perm=[0, 2, 1, 3],
            )
            for name in "qkv"
        )
        scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(0.25, np.float32))
        if cap:
            number_of = g.constant(cap, np.float32)
            scores = g.op("Mul", g.op("Tanh", g.op("Div", scores, number_of)), number_of)
        return merged(g, g.op("MatMul", g.op("Softmax", scores, axis=-1), v), f"layer{number}")

    g.op("Identity", layer(layer("features", 0, 0.0), 1, 0.5), name="output")
    model = model_of(g, {"output": ["batch", "seq", HIDDEN]})
    names = [node.name for node in model.graph.node if node.op_type == "Softmax"]
    first = rewrite_model(ir.from_proto(model), form="function", target="ort", only=names[:1])
    second = rewrite_model(first.model, form="function", target="ort", only=names[1:])
    assert [one.state for one in second.sites].count(REWRITTEN) == 1
    features = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    expected, actual = (run(one, {"features": features})["output"] for one in (model, ir.to_proto(second.model)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    bodies = [function.name for function in second.model.functions.values()]
    assert len(bodies) == len(set(bodies)) == 2


def test_weights_that_are_divided_by_their_sum_again_are_listed() -> None:
    """The mask comes after the softmax instead of before it."""
    g = Graph()
    q, k, v = (heads_of(g, name) for name in "qkv")
    weights = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    weights = g.op("Mul", weights, g.op("Unsqueeze", "attention_mask", g.constant([1, 2])))
    weights = g.op("Div", weights, g.op("ReduceSum", weights, g.constant([-1])))
    g.op("MatMul", weights, v, name="mixed")
    shapes = {"features": ["batch", "seq", HIDDEN], "attention_mask": ["batch", "seq"]}
    model = model_of(g, {"mixed": ["batch", HEADS, "seq", SIZE]}, inputs=shapes)
    (site,) = rewrite_model(ir.from_proto(model), form="native", target="ort").sites
    assert site.state == KEPT and site.reason is not None and site.reason.code == "weights"


@pytest.mark.parametrize("without", ["queries", "keys", "all"])
def test_attention_without_tokens_has_a_reason(without: str) -> None:
    g = Graph()
    nothing = g.op("Slice", "features", *(g.constant([at]) for at in (0, 0, 1)))
    names = {"queries": "q", "keys": "kv", "all": "qkv"}[without]

    def heads(name: str) -> str:
        source = nothing if name in names else "features"
        rows = g.op("MatMul", source, g.random(name, HIDDEN, HIDDEN))
        sizes = g.op("Concat", g.op("Shape", rows, end=2), g.constant([HEADS, SIZE]), axis=0)
        return g.op("Transpose", g.op("Reshape", rows, sizes, allowzero=1), perm=[0, 2, 1, 3])

    attended(g, *(heads(name) for name in "qkv"))
    model = model_of(g, {"mixed": ["batch", HEADS, None, SIZE]})
    (site,) = rewrite_model(ir.from_proto(model), form="native", target="ort").sites
    assert site.reason is not None and (site.state, site.reason.code) == (KEPT, "empty")
