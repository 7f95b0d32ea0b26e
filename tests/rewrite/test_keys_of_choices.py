"""Keys and values that an If returns: both branches must split them into the same heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from small_graphs import Array, Graph, run

from posexport.graphs.view import view_of
from posexport.rewrite.branches import rewrite_with_choices
from posexport.rewrite.request import RewriteOptions

HIDDEN, HEADS, SIZE = 32, 4, 8
ROLES = {"features": "features", "encoded": "encoder_features"}

Lay = Callable[[Graph, str], str]


def by_heads(heads: int = HEADS, size: int = SIZE) -> Lay:
    """[batch, tokens, heads * size] to [batch, heads, tokens, size]."""

    def lay(g: Graph, x: str) -> str:
        return g.op("Transpose", g.op("Reshape", x, g.constant([0, -1, heads, size])), perm=[0, 2, 1, 3])

    return lay


def as_wide_as_long(g: Graph, x: str) -> str:
    """Heads whose size is the number of tokens, which is another layout."""
    sizes = g.op("Concat", g.length(x, 0), g.constant([HEADS, -1]), g.length(x, 1), axis=0)
    return g.op("Transpose", g.op("Reshape", x, sizes), perm=[0, 1, 3, 2])


def model(one: Lay, other: Lay, *, outside: bool = False, stated: bool = True) -> onnx.ModelProto:
    """Attention to the tokens themselves, or to encoder tokens if there are few tokens.

    The projections are in the branches. With `outside`, only the layouts are in the branches.
    """
    g = Graph()

    def projected(where: Graph, x: str, name: str) -> str:
        return where.op("MatMul", x, g.random(name, HIDDEN, HIDDEN))

    q = by_heads()(g, projected(g, "features", "q"))
    bodies = {}
    for branch, source, lay in (("then_branch", "features", one), ("else_branch", "encoded", other)):
        inner = Graph()
        made = {part: projected(g, source, f"{part}.{branch}") for part in "kv"} if outside else {}
        results = [lay(inner, made.get(part) or projected(inner, source, f"{part}.{branch}")) for part in "kv"]
        own = {name for node in inner.nodes for name in node.output} | {weight.name for weight in inner.weights}
        names = {name: f"{branch}/{name}" for name in own}
        for node in inner.nodes:
            node.name = f"{branch}/{node.name}"
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]
        for weight in inner.weights:
            weight.name = names[weight.name]
        shape = ["batch", HEADS, None, SIZE] if stated else None
        infos = [helper.make_tensor_value_info(names[name], TensorProto.FLOAT, shape) for name in results]
        bodies[branch] = helper.make_graph(inner.nodes, branch, [], infos, inner.weights)
    many = g.op("Greater", g.op("Squeeze", g.length("features", 1)), g.constant(4))
    g.nodes.append(helper.make_node("If", [many], ["k", "v"], name="choice", **bodies))
    weights = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", "k", perm=[0, 1, 3, 2])), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", weights, "v"), perm=[0, 2, 1, 3])
    g.op("Reshape", mixed, g.constant([0, 0, HIDDEN]), name="output")
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", length, HIDDEN])
        for name, length in (("features", "seq"), ("encoded", "encoder_seq"), ("output", "seq"))
    ]
    graph = helper.make_graph(g.nodes, "main", infos[:2], infos[2:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def given(tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(tokens)
    lengths = {"features": tokens, "encoded": 8}
    return {name: rng.standard_normal((2, length, HIDDEN)).astype(np.float32) for name, length in lengths.items()}


def rewritten(before: onnx.ModelProto, **options: Any) -> tuple[list[str | None], onnx.ModelProto]:
    """The reason code of each attention (None if it is rewritten), and the new graph."""
    done = rewrite_with_choices(ir.from_proto(before), RewriteOptions(roles=ROLES, **options))
    return [site.reason.code if site.reason else None for site in done.sites], ir.to_proto(done.model)


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_branches_with_the_same_heads(outside: bool, stated: bool, form: str) -> None:
    before = model(by_heads(), by_heads(), outside=outside, stated=stated)
    codes, after = rewritten(before, form=form, target="ort")
    assert codes == [None]
    assert "Softmax" not in {node.op_type for node in after.graph.node}
    for tokens in (1, 3, 9):
        arrays = given(tokens)
        actual, expected = (run(one, arrays)["output"] for one in (after, before))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", [False, True])
def test_a_branch_whose_lengths_decide_its_heads_stays(first: bool) -> None:
    """With 8 tokens, the heads of both branches have the same sizes."""
    lays = (as_wide_as_long, by_heads()) if first else (by_heads(), as_wide_as_long)
    codes, _ = rewritten(model(*lays, stated=False), form="native", target="ort")
    assert codes == ["heads"] or codes == []


def test_what_a_branch_requires_is_not_known_outside() -> None:
    """A branch splits tokens into pairs. Outside the branch, the number of tokens may still be odd."""

    def lay(g: Graph, x: str) -> str:
        pairs = g.op("Reshape", x, g.constant([0, -1, 2, HIDDEN]))
        return by_heads()(g, g.op("Reshape", pairs, g.constant([0, -1, HIDDEN])))

    shapes = view_of(ir.from_proto(model(lay, by_heads(), stated=False)), ROLES).probe.shapes
    assert shapes.symbols._exact == {}
