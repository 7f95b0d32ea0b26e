"""Attention beside an operator that posexport cannot evaluate: it is rewritten, and the operator is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.graphs.attention.attention import Attention
from posexport.graphs.cases import cases_of
from posexport.graphs.inspection import inspected
from posexport.graphs.load import live
from posexport.graphs.view import view_of
from posexport.rewrite.evidence import evidence_of
from posexport.rewrite.rewriter import rewrite_model
from posexport.rewrite.whole import whole_evidence

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE

Array = np.ndarray[Any, Any]


def model_with(kind: str, *, stated: Any = ("batch", "seq", WIDTH), scale: float = SIZE**-0.5) -> onnx.ModelProto:
    """Attention, then an operator of com.microsoft or of an unknown domain, then attention."""
    rng = np.random.default_rng(0)
    g = Graph()
    const, op = g.constant, g.op

    def attention(x: str) -> str:
        sides = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            made = op("MatMul", x, const(rng.standard_normal((WIDTH, WIDTH)) / 6, np.float32))
            sides.append(op("Transpose", op("Reshape", made, const([0, 0, HEADS, SIZE])), perm=perm))
        scores = op("Mul", op("MatMul", sides[0], sides[1]), const(scale, np.float32))
        out = op("Transpose", op("MatMul", op("Softmax", scores, axis=-1), sides[2]), perm=[0, 2, 1, 3])
        return op("Add", x, op("Reshape", out, const([0, 0, WIDTH])))

    x = attention("hidden_states")
    if kind == "QAttention":
        q = op("DynamicQuantizeLinear", x)
        g.nodes[-1].output.extend(["q_scale", "q_zero"])
        packed = const(rng.integers(-100, 100, (WIDTH, 3 * WIDTH)), np.int8)
        # several zero points, which posexport does not read
        bias, zero = const(np.zeros(3 * WIDTH), np.float32), const(np.zeros(3 * WIDTH), np.int8)
        read = [q, packed, bias, "q_scale", const(0.001, np.float32), "", "q_zero", zero]
        g.nodes.append(helper.make_node(kind, read, ["mixed"], "other", domain="com.microsoft", num_heads=HEADS))
    else:
        g.nodes.append(helper.make_node(kind, [x], ["mixed"], "other", domain="of.nobody"))
    known = [helper.make_tensor_value_info("mixed", TensorProto.FLOAT, stated)] if stated else []
    y = attention(op("Tanh", "mixed"))
    op("Identity", y, name="output")
    shape = ("batch", "seq", WIDTH)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("hidden_states", "output")]
    graph = helper.make_graph(g.nodes, "beside", infos[:1], infos[1:], g.weights, value_info=known)
    domains = [helper.make_opsetid(name, 1) for name in ("com.microsoft", "of.nobody")]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), *domains], ir_version=9)


def run(model: onnx.ModelProto, features: Array) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    out: Array = session.run(None, {"hidden_states": features})[0]
    return out


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_attention_before_and_behind_is_rewritten(form: str) -> None:
    model = model_with("QAttention")
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    found = [(site.state, site.reason and site.reason.code) for site in done.sites]
    assert found == [("rewritten", None), ("kept", "operator"), ("rewritten", None)]
    after = ir.to_proto(done.model)
    assert sum(node.op_type == "QAttention" for node in after.graph.node) == 1
    for shape in ((2, 7, WIDTH), (1, 1, WIDTH), (3, 20, WIDTH)):
        features = np.random.default_rng(shape[1]).standard_normal(shape).astype(np.float32)
        before = run(model, features)
        # The quantised values in between may differ by one step.
        np.testing.assert_allclose(run(after, features), before, rtol=0, atol=2e-2)
        assert np.abs(run(after, features) - before).mean() < 1e-3


def test_the_whole_command_says_what_was_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    path, out = helpers.saved(tmp_path, model_with("Mixer")), tmp_path / "out.onnx"
    states = [one["state"] for one in inspected(read_with_weights_on_disk(path), {}).attentions]
    assert states == ["recognised", "recognised"]
    result = helpers.rewritten(path, out, form="native", target="ort")
    assert [one["state"] for one in result.attentions] == ["rewritten", "rewritten"]
    assert result.whole is not None and result.whole.cases and result.whole.untested is None
    kinds = [node.op_type for node in onnx.load(out).graph.node]
    assert kinds.count("Mixer") == 1 and kinds.count("Attention") == 2


def test_an_operator_whose_output_has_no_stated_size_leaves_all(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, model_with("Mixer", stated=None))
    found = inspected(read_with_weights_on_disk(path), {})
    assert found.reason is not None and found.reason.code == "not-evaluated"


@pytest.mark.parametrize(
    "stated", [("seq", "batch", WIDTH), ("batch", "other", WIDTH), ("batch", "seq", WIDTH + 1), (None, None, WIDTH)]
)
def test_sizes_that_are_not_those_of_tokens_rewrite_nothing_wrong(stated: Any, tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, model_with("Mixer", stated=stated))
    assert inspected(read_with_weights_on_disk(path), {}).reason is not None


def test_a_wrong_rewrite_beside_it_is_seen() -> None:
    view = view_of(ir.from_proto(model_with("Mixer")))
    wrong = live(ir.from_proto(model_with("Mixer", scale=0.4)))
    chosen = [one for one in view.attentions if isinstance(one, Attention)]
    cases = cases_of(view.roles, 0)
    found = evidence_of(view.model, wrong, chosen, cases)
    assert len(found) == 2 and not any(one.agrees for one in found.values())
    whole = whole_evidence(view.model, wrong, cases)
    assert whole.problem is not None
    same = whole_evidence(view.model, live(ir.from_proto(model_with("Mixer"))), cases)
    assert same.problem is None and same.cases and same.error == 0.0


def test_what_the_operator_reads_is_compared_too() -> None:
    """Only the attention before the operator differs. No output shows this, because the operator's output is drawn."""
    right, wrong = (ir.from_proto(model_with("Mixer")) for _ in range(2))
    node = next(node for node in wrong.graph if node.op_type == "Mul")
    node.replace_input_with(1, ir.Value(name="more", const_value=ir.tensor([0.4], name="more")))
    wrong.graph.register_initializer(node.inputs[1])
    whole = whole_evidence(live(right), live(wrong), cases_of(view_of(ir.from_proto(model_with("Mixer"))).roles, 0))
    assert whole.problem is not None
