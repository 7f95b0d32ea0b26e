"""Merged decoders as optimum writes them: one If with a body for a prompt without caches and one for a cached step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from small_graphs import SHAPES, decoder, inputs, run

from posexport.artifact.graph_file import read_graph
from posexport.graphs.branches import with_branch
from posexport.graphs.inspection import inspected
from posexport.rewrite import branches
from posexport.rewrite.branches import rewrite_branches
from posexport.rewrite.files import rewrite_into
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import ALREADY, KEPT, REWRITTEN
from posexport.rewrite.rewriter import Rewritten

LAYERS = 1


def merged(*, names: bool = True, opset: int = 18) -> onnx.ModelProto:
    """A merged decoder whose bodies read the weights of the outer graph.

    With `names`, the values of each body have their own names. Otherwise both bodies use the same names, and their
    outputs have those of the graph, as in optimum's files.
    """
    whole = decoder(layers=LAYERS, opset=opset)

    def body(label: str, has_cache: bool) -> onnx.GraphProto:
        graph, prefix = onnx.GraphProto(), f"{label}/" if names else ""
        graph.CopyFrom(whole.graph)
        given = {name for node in graph.node for name in node.output}
        for node in graph.node:
            if not has_cache and node.op_type == "Concat" and node.input[0].startswith("past"):
                node.CopyFrom(helper.make_node("Identity", [node.input[1]], node.output, name=node.name))
            node.name = f"{prefix}{node.name}"
            node.input[:] = [f"{prefix}{name}" if name in given else name for name in node.input]
            node.output[:] = [f"{prefix}{name}" for name in node.output]
        for value in graph.output:
            value.name = f"{prefix}{value.name}"
        return helper.make_graph(graph.node, label, [], graph.output)

    bodies = {"then_branch": body("with_past", True), "else_branch": body("no_past", False)}
    node = helper.make_node("If", ["use_cache_branch"], [value.name for value in whole.graph.output], **bodies)
    given = [*whole.graph.input, helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])]
    whole.graph.CopyFrom(helper.make_graph([node], "merged", given, whole.graph.output, whole.graph.initializer))
    if names:
        onnx.checker.check_model(whole, full_check=True)
    return whole


def written(model: onnx.ModelProto, **options: str) -> tuple[Rewritten, onnx.ModelProto]:
    """The result of rewriting a graph, and the new graph."""
    done = rewrite_branches(ir.from_proto(model), RewriteOptions(**options))
    return done, ir.to_proto(done.model)


def bodies(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    """The body with a cache, and the one without."""
    (node,) = model.graph.node
    return [attribute.g for attribute in sorted(node.attribute, key=lambda each: each.name, reverse=True)]


def check_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Asserts that both graphs give the same results in ONNX Runtime, in both bodies."""
    for batch, seq, past, left in SHAPES:
        given = inputs(batch, seq, past, left, LAYERS) | {"use_cache_branch": np.array([past > 0])}
        have = run(after, given)
        for name, want in run(before, given).items():
            rows = slice(left, None) if name == "logits" and not past else slice(None)
            np.testing.assert_allclose(have[name][:, rows], want[:, rows], atol=2e-5, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize(("form", "domain"), [("function", "posexport"), ("native", ""), ("contrib", "com.microsoft")])
def test_both_bodies_get_the_form(form: str, domain: str, names: bool) -> None:
    model = merged(names=names)
    done, after = written(model, form=form)
    assert [(site.state, site.attention.layer) for site in done.sites] == [
        (REWRITTEN, layer) for layer in range(2 * LAYERS)
    ]
    for body in bodies(after):
        own = [node.op_type for node in body.node if node.domain == domain and "Attention" in node.op_type]
        assert len(own) == LAYERS and "Softmax" not in [node.op_type for node in body.node]
        assert not any(weight.name.endswith(".weight") for weight in body.initializer)
    assert [value.name for value in after.graph.output] == [value.name for value in model.graph.output]
    read = {name for body in bodies(after) for node in body.node for name in node.input}
    assert {weight.name for weight in after.graph.initializer} <= read
    check_same(model, after)
    again, _ = written(after, form=form)
    assert not again.changed and {str(site.reason and site.reason.code) for site in again.sites} == {ALREADY}


def test_a_body_that_cannot_be_evaluated_stays() -> None:
    model = merged()
    _, body = bodies(model)
    body.node[0].op_type, body.node[0].domain = "Unheard", "someone.else"
    model.opset_import.append(helper.make_opsetid("someone.else", 1))
    done, after = written(model, form="native")
    assert [(site.state, site.reason and site.reason.code) for site in done.sites[:LAYERS]] == [
        (REWRITTEN, None)
    ] * LAYERS
    assert [(site.state, site.reason and site.reason.code) for site in done.sites[LAYERS:]] == [
        (KEPT, "not-evaluated")
    ] * LAYERS
    assert [node.op_type for node in bodies(after)[1].node] == [node.op_type for node in body.node]


def test_a_choice_without_attention_stays_whatever_its_inputs_are() -> None:
    value = helper.make_tensor_value_info("strange", TensorProto.INT64, [3, 2, 1, 1, 5])
    output = helper.make_tensor_value_info("y", TensorProto.INT64, [3, 2, 1, 1, 5])
    body = helper.make_graph([helper.make_node("Neg", ["strange"], ["y"])], "body", [], [output])
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [1])
    node = helper.make_node("If", ["flag"], ["y"], then_branch=body, else_branch=body)
    graph = helper.make_graph([node], "choice", [flag, value], [output])
    done, _ = written(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), form="native")
    assert not done.changed and not done.sites


def test_a_file_is_tested_by_both_bodies_and_described(tmp_path: Path) -> None:
    source, target = tmp_path / "merged.onnx", tmp_path / "new.onnx"
    onnx.save(merged(), source)
    (folder := tmp_path / "new").mkdir()
    result = rewrite_into(folder, source, target, RewriteOptions(form="contrib", target="ort"))
    assert result.whole is not None and result.whole.error is not None and result.whole.error < 1e-12
    described = [*result.attentions], [*inspected(read_graph(source), {}).attentions]
    for attentions in described:
        assert [one["layer"] for one in attentions] == [0, 1]
        assert [one["cache"] is not None for one in attentions] == [True, False]
        assert {one["encoding"]["name"] for one in attentions} == {"rope"}
        assert [one["name"].split("/")[0] for one in attentions] == ["with_past", "no_past"]


@pytest.mark.slow
def test_bodies_that_were_rewritten_wrongly_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "merged.onnx", tmp_path / "new.onnx"
    onnx.save(merged(), source)

    def always_then(model: ir.Model, name: str, branch: ir.Model) -> ir.Model:
        return with_branch(model, "then_branch", branch)

    monkeypatch.setattr(branches, "with_branch", always_then)
    result = rewrite_into(tmp_path, source, target, RewriteOptions(form="contrib"))
    assert not result.changed
    assert {(one["reason"] or {}).get("code") for one in result.attentions} == {"whole-graph-differs"}
