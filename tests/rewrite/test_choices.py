"""Attention in the bodies of an If that is one node among others and maps features to features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_graphs import HEADS, HIDDEN, SIZE, Graph, causal, run

from posexport.artifact.graph_file import read_graph
from posexport.graphs.inspection import inspected
from posexport.rewrite import branches
from posexport.rewrite.branches import rewrite_with_choices
from posexport.rewrite.files import rewrite_into
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import KEPT, REWRITTEN
from posexport.rewrite.rewriter import Rewritten


def attended(g: Graph, x: str, name: str, *, is_causal: bool, y: str | None = None) -> str:
    """Self-attention of the tokens `x`, or cross-attention to the tokens `y`."""

    def heads(source: str, part: str) -> str:
        weight = g.random(f"{name}.{part}", HIDDEN, HEADS * SIZE)
        split = g.op(
            "Reshape", g.op("MatMul", source, weight), g.constant([0, 0, HEADS, SIZE]), name=f"{name}.{part}.r"
        )
        return g.op("Transpose", split, perm=[0, 2, 1, 3], name=f"{name}.{part}.t")

    q, k, v = heads(x, "q"), heads(y or x, "k"), heads(y or x, "v")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2], name=f"{name}.kt"), name=f"{name}.s")
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32), name=f"{name}.scaled")
    if is_causal:
        least = g.constant(np.finfo(np.float32).min, np.float32)
        scores = g.op("Where", causal(g, scores), scores, least, name=f"{name}.masked")
    out = g.op("MatMul", g.op("Softmax", scores, axis=-1, name=f"{name}.weights"), v, name=f"{name}.out")
    merged = g.op("Transpose", out, perm=[0, 2, 1, 3], name=f"{name}.turned")
    return g.op("Reshape", merged, g.constant([0, 0, HEADS * SIZE]), name=f"{name}.flat")


def model(*, same_names: bool = False, both: bool = True) -> onnx.ModelProto:
    """An attention, then an If with two attentions (the one for long rows is causal), then a product."""
    g = Graph()
    x = g.op("Add", "x", attended(g, "x", "outside", is_causal=False), name="residual")
    bodies = {}
    for at, branch in enumerate(("then_branch", "else_branch")):
        inner = Graph(at + 1)
        if branch == "then_branch" or both:
            out = attended(inner, x, "in", is_causal=branch == "then_branch")
        else:
            out = inner.op("Relu", x)
        prefix = "body/" if same_names else f"{branch}/"
        own = {name for node in inner.nodes for name in node.output} | {weight.name for weight in inner.weights}
        for node in inner.nodes:
            node.name = prefix + node.name
            for names in (node.input, node.output):
                names[:] = [prefix + name if name in own else name for name in names]
        for weight in inner.weights:
            weight.name = prefix + weight.name
        value = helper.make_tensor_value_info(prefix + out, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        bodies[branch] = helper.make_graph(inner.nodes, branch, [], [value], inner.weights)
    length = g.op("Squeeze", g.length("x", 1), name="length")
    is_long = g.op("Greater", length, g.constant(4), name="is_long")
    g.nodes.append(helper.make_node("If", [is_long], ["chosen"], name="choice", **bodies))
    g.op("MatMul", g.op("Add", x, "chosen", name="sum"), g.random("head", HIDDEN, 7), name="y")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", HIDDEN])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", 7])]
    graph = helper.make_graph(g.nodes, "main", inputs, outputs, g.weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made, full_check=True)
    return made


OPTIONS: dict[str, Any] = {"roles": {"x": "features"}}


def written(before: onnx.ModelProto, **options: Any) -> tuple[Rewritten, onnx.ModelProto]:
    done = rewrite_with_choices(ir.from_proto(before), RewriteOptions(**OPTIONS, **options))
    return done, ir.to_proto(done.model)


def check_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Asserts that both graphs give the same results in ONNX Runtime, in both bodies."""
    onnx.checker.check_model(after, full_check=True)
    for shape in ((1, 1), (2, 9)):
        x = np.random.default_rng(0).standard_normal((*shape, HIDDEN)).astype(np.float32)
        np.testing.assert_allclose(run(after, {"x": x})["y"], run(before, {"x": x})["y"], atol=2e-5)


def softmaxes(model: onnx.ModelProto) -> int:
    bodies = [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]
    return sum(node.op_type == "Softmax" for graph in (model.graph, *bodies) for node in graph.node)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("same_names", [False, True])
@pytest.mark.parametrize("form", ["decomposed", "function", "native", "contrib"])
def test_bodies_get_the_form(form: str, same_names: bool) -> None:
    before = model(same_names=same_names)
    done, after = written(before, form=form)
    states = [(site.state, site.attention.layer) for site in done.sites]
    if form != "decomposed":
        assert states == [(REWRITTEN, 0), (REWRITTEN, 1), (REWRITTEN, 2)] and softmaxes(after) == 0
    check_same(before, after)
    again, same = written(after, form=form)
    assert same.SerializeToString() == after.SerializeToString() or not again.changed


def test_a_body_alone_gets_it_where_only_that_is_asked_for() -> None:
    before = model()
    done, after = written(before, form="native", only=("then_branch/node_in.weights",))
    assert {site.attention.name for site in done.sites if site.state == REWRITTEN} == {"then_branch/node_in.weights"}
    assert {site.reason.code for site in done.sites if site.reason} == {"not-chosen"}
    assert softmaxes(after) == 2
    check_same(before, after)


CROSS = """
<ir_version: 9, opset_import: ["" : 18]>
agraph (float[batch, seq, 16] x, float[batch, keys, 16] y, bool[batch, keys] seen)
    => (float[batch, seq, 16] z, float[batch, 2, keys, 8] k)
<int64[4] heads = {0, 0, 2, 8}, int64[3] flat = {0, 0, 16}, int64[2] axes = {1, 2}, float scale = {0.35},
 float least = {-3e38}, float zero = {0}, int64[1] last = {1}>
{
    q_heads = Reshape (x, heads)
    q = Transpose <perm: ints = [0, 2, 1, 3]> (q_heads)
    k_heads = Reshape (y, heads)
    k = Transpose <perm: ints = [0, 2, 1, 3]> (k_heads)
    keys_t = Transpose <perm: ints = [0, 1, 3, 2]> (k)
    hidden = Where (seen, zero, least)
    mask = Unsqueeze (hidden, axes)
    length = Shape <start: int = 1, end: int = 2> (x)
    several = Greater (length, last)
    z = If (several) <
        then_branch = many () => (float[batch, seq, 16] z_many) {
            scores = MatMul (q, keys_t)
            scaled = Mul (scores, scale)
            masked = Add (scaled, mask)
            weights = Softmax <axis: int = -1> (masked)
            out = MatMul (weights, k)
            turned = Transpose <perm: ints = [0, 2, 1, 3]> (out)
            z_many = Reshape (turned, flat)
        },
        else_branch = few () => (float[batch, seq, 16] z_few) { z_few = Identity (x) }
    >
}
"""


@pytest.mark.parametrize("form", ["function", "native", "contrib"])
def test_what_a_body_reads_of_the_graph_around_it_stays_there(form: str) -> None:
    """The mask and the keys, which are also an output, are computed outside the body."""
    before = onnx.parser.parse_model(CROSS)
    onnx.checker.check_model(before, full_check=True)
    roles = {"x": "features", "y": "encoder_features", "seen": "encoder_attention_mask"}
    done = rewrite_with_choices(ir.from_proto(before), RewriteOptions(form=form, roles=roles))
    after = ir.to_proto(done.model)
    assert [site.state for site in done.sites] == [REWRITTEN], done.sites[0].reason
    assert softmaxes(after) == 0 and [value.name for value in after.graph.output] == ["z", "k"]
    outside = [node.op_type for node in after.graph.node]
    assert outside.count("If") == 1 and not any("Attention" in kind for kind in outside)
    random = np.random.default_rng(0)
    for seq in (1, 3):
        given = {"x": random.standard_normal((2, seq, 16)).astype(np.float32)}
        given |= {"y": random.standard_normal((2, 5, 16)).astype(np.float32), "seen": np.arange(10).reshape(2, 5) != 9}
        for name, want in run(before, given).items():
            np.testing.assert_allclose(run(after, given)[name], want, atol=2e-5)


def test_a_body_without_attention_stays() -> None:
    before = model(both=False)
    done, after = written(before, form="contrib", target="ort")
    assert [site.state for site in done.sites] == [REWRITTEN, REWRITTEN]
    check_same(before, after)


def test_a_body_that_differs_stays_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = branches.put_back

    def wrong(model: ir.Model, body: Any, changed: ir.Model) -> ir.Model:
        made = put_back(model, body, changed)
        choice = next(node for node in made.graph if node.op_type == "If")
        graph = choice.attributes[body.branch].as_graph()
        (output,) = graph.outputs
        negated = ir.node("Neg", [output])
        graph.append(negated)
        graph.outputs[0] = negated.outputs[0]
        return made

    monkeypatch.setattr(branches, "put_back", wrong)
    before = model()
    done, after = written(before, form="native")
    assert [site.state for site in done.sites] == [REWRITTEN, KEPT, KEPT]
    assert {site.reason.code for site in done.sites[1:] if site.reason} == {"whole-graph-differs"}
    check_same(before, after)


def test_a_file_is_written_and_described(tmp_path: Path) -> None:
    path, made = tmp_path / "choice.onnx", tmp_path / "made"
    onnx.save(model(), path)
    found = inspected(read_graph(path), OPTIONS["roles"])
    assert [(one["state"], one["layer"]) for one in found.attentions] == [("recognised", at) for at in range(3)]
    assert {one["name"]: one["mask"]["kind"] for one in found.attentions} == {
        "node_outside.weights": "none",
        "then_branch/node_in.weights": "causal",
        "else_branch/node_in.weights": "none",
    }
    made.mkdir()
    result = rewrite_into(made, path, tmp_path / "new.onnx", RewriteOptions(form="native", **OPTIONS))
    assert [one["state"] for one in result.attentions] == [REWRITTEN] * 3
    check_same(onnx.load(path), onnx.load(made / "new.onnx"))


def test_weights_of_bodies_keep_their_bytes() -> None:
    before = model()
    _, after = written(before, form="native")

    def weights(graph: onnx.GraphProto) -> dict[str, bytes]:
        inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
        return {
            weight.name: numpy_helper.to_array(weight).tobytes()
            for one in (graph, *inner)
            for weight in one.initializer
            if weight.name.endswith(("in.q", "in.k", "in.v", "outside.q", "outside.k", "outside.v", "head"))
        }

    assert weights(before.graph) == weights(after.graph)
