"""Heads on two axes, for key heads and for the query heads that share each: by a broadcasting MatMul and by Einsum.

Also Einsum with one key head that has no axis. The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.graphs.attention.attention import Attention
from posexport.rewrite.evidence import LIMIT
from posexport.rewrite.rewriter import KEPT, REWRITTEN

KEY_HEADS, GROUPS, SIZE, HIDDEN = 2, 3, 8, 24
HEADS = KEY_HEADS * GROUPS

Layer = Callable[[Graph, str], str]


def model_of(*layers: Layer) -> onnx.ModelProto:
    """A graph that applies layers one after the other to features [batch, seq, HIDDEN]."""
    g = Graph()
    x = "features"
    for layer in layers:
        x = g.op("Add", x, layer(g, x))
    g.op("Identity", x, name="output")
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    ]
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "seq"])
    graph = helper.make_graph(g.nodes, "main_graph", [values[0], mask], values[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def projected(g: Graph, x: str, name: str, *heads: int) -> str:
    """A projection [B, S, *heads, SIZE]."""
    weight = g.random(f"{name}_{len(g.weights)}", HIDDEN, int(np.prod(heads)) * SIZE)
    return g.op("Reshape", g.op("MatMul", x, weight), g.constant([0, 0, *heads, SIZE]))


def merged(g: Graph, mixed: str, perm: tuple[int, ...]) -> str:
    """The result of attention, transposed to [B, S, K, G, D] and reshaped to [B, S, HIDDEN]."""
    tokens = g.op("Reshape", g.op("Transpose", mixed, perm=list(perm)), g.constant([0, 0, HEADS * SIZE]))
    return g.op("MatMul", tokens, g.random(f"o_{len(g.weights)}", HEADS * SIZE, HIDDEN))


def weights_of(g: Graph, scores: str, *, per_head: bool = False, cap: bool = False, axes: int = 2) -> str:
    """Softmax of scores [B, K, G, S, T] with a causal and a padding mask, optionally with slopes per head or a cap.

    `axes` is the number of axes of the heads.
    """
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    if cap:
        five = g.constant(5.0, np.float32)
        scores = g.op("Mul", g.op("Tanh", g.op("Div", scores, five)), five)
    length = g.op("Squeeze", g.length("attention_mask", 1))
    places = g.op("Range", g.constant(0), length, g.constant(1))
    queries = g.op("Unsqueeze", places, g.constant([1]))
    if per_head:
        slopes = np.linspace(0.1, 0.6, HEADS, dtype=np.float32).reshape(1, KEY_HEADS, GROUPS, 1, 1)
        distance = g.op("Cast", g.op("Sub", places, queries), to=TensorProto.FLOAT)
        scores = g.op("Add", scores, g.op("Mul", distance, g.weight(f"slopes_{len(g.weights)}", slopes)))
    valid = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.constant([*range(1, axes + 2)])), to=TensorProto.BOOL)
    seen = g.op("And", g.op("LessOrEqual", places, queries), valid)
    return g.op("Softmax", g.op("Where", seen, scores, g.constant(-1e9, np.float32)), axis=-1)


def broadcast(g: Graph, x: str, *, per_head: bool = False, cap: bool = False, tiled: bool = False) -> str:
    """MatMul with five axes; with `tiled`, the axis of the groups comes before that of the key heads."""
    split, axis = ((GROUPS, KEY_HEADS), 1) if tiled else ((KEY_HEADS, GROUPS), 2)
    q = g.op("Transpose", projected(g, x, "q", *split), perm=[0, 2, 3, 1, 4])
    k = g.op("Transpose", projected(g, x, "k", KEY_HEADS), perm=[0, 2, 3, 1])
    v = g.op("Transpose", projected(g, x, "v", KEY_HEADS), perm=[0, 2, 1, 3])
    k, v = (g.op("Unsqueeze", value, g.constant([axis])) for value in (k, v))
    weights = weights_of(g, g.op("MatMul", q, k), per_head=per_head and not tiled, cap=cap)
    return merged(g, g.op("MatMul", weights, v), (0, 3, 1, 2, 4))


def einsum(g: Graph, x: str, *, scores: str, mixed: str, perm: tuple[int, ...], per_head: bool = False) -> str:
    """Einsum of queries [B, S, K, G, D] with keys and values [B, T, K, D]."""
    q = projected(g, x, "q", KEY_HEADS, GROUPS)
    k, v = projected(g, x, "k", KEY_HEADS), projected(g, x, "v", KEY_HEADS)
    weights = weights_of(g, g.op("Einsum", q, k, equation=scores), per_head=per_head)
    return merged(g, g.op("Einsum", weights, v, equation=mixed), perm)


def of_heads(
    g: Graph, x: str, *, scores: str, mixed: str, perm: tuple[int, ...] = (0, 2, 1, 3), key_heads: int = 1
) -> str:
    """Einsum of queries [B, N, S, D] with keys and values [B, T, D] of one head, or [B, N, T, D]."""
    q = g.op("Transpose", projected(g, x, "q", HEADS), perm=[0, 2, 1, 3])
    k, v = (projected(g, x, name, key_heads) for name in "kv")
    if key_heads == 1:
        k, v = (g.op("Squeeze", one, g.constant([2])) for one in (k, v))
    else:
        k, v = (g.op("Transpose", one, perm=[0, 2, 1, 3]) for one in (k, v))
    weights = weights_of(g, g.op("Einsum", *((k, q) if scores.startswith("bt") else (q, k)), equation=scores), axes=1)
    tokens = g.op("Transpose", g.op("Einsum", weights, v, equation=mixed), perm=list(perm))
    whole = g.op("Reshape", tokens, g.constant([0, 0, HEADS * SIZE]))
    return g.op("MatMul", whole, g.random(f"o_{len(g.weights)}", HEADS * SIZE, HIDDEN))


def queries_first(g: Graph, x: str, key_heads: int = 1) -> str:
    """Einsum with scores [B, S, N, T], as in DeepSeek's inference code."""
    q, (k, v) = projected(g, x, "q", HEADS), (projected(g, x, name, key_heads) for name in "kv")
    if key_heads == 1:
        k, v = (g.op("Squeeze", one, g.constant([2])) for one in (k, v))
    keys = "btd" if key_heads == 1 else "bthd"
    scores = g.op("Einsum", q, k, equation=f"bshd,{keys}->bsht")
    length = g.op("Squeeze", g.length("attention_mask", 1))
    places = g.op("Range", g.constant(0), length, g.constant(1))
    seen = g.op("LessOrEqual", places, g.op("Unsqueeze", places, g.constant([1, 2])))
    seen = g.op("And", seen, g.op("Cast", g.op("Unsqueeze", "attention_mask", g.constant([1, 2])), to=TensorProto.BOOL))
    scaled = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    weights = g.op("Softmax", g.op("Where", seen, scaled, g.constant(-1e9, np.float32)), axis=-1)
    mixed = g.op("Einsum", weights, v, equation=f"bsht,{keys}->bshd")
    return merged(g, mixed, (0, 1, 2, 3))


STYLES: dict[str, tuple[Layer, int]] = {
    "broadcast": (broadcast, KEY_HEADS),
    "broadcast, slopes": (lambda g, x: broadcast(g, x, per_head=True), KEY_HEADS),
    "broadcast, capped": (lambda g, x: broadcast(g, x, cap=True), KEY_HEADS),
    "broadcast, groups first": (lambda g, x: broadcast(g, x, tiled=True), HEADS),
    "einsum": (
        lambda g, x: einsum(g, x, scores="bskgd,btkd->bkgst", mixed="bkgst,btkd->bskgd", perm=(0, 1, 2, 3, 4)),
        KEY_HEADS,
    ),
    "einsum, slopes": (
        lambda g, x: einsum(
            g,
            x,
            scores="b s k g d, b t k d -> b k g s t",
            mixed="bkgst,btkd->bkgsd",
            perm=(0, 3, 1, 2, 4),
            per_head=True,
        ),
        KEY_HEADS,
    ),
    "einsum, groups first": (
        lambda g, x: einsum(g, x, scores="bskgd,btkd->bgkst", mixed="bgkst,btkd->bgksd", perm=(0, 3, 2, 1, 4)),
        HEADS,
    ),
    "one key head": (lambda g, x: of_heads(g, x, scores="bhsd,btd->bhst", mixed="bhst,btd->bhsd"), 1),
    "one key head, keys first": (
        lambda g, x: of_heads(g, x, scores="btd, bhsd -> bhst", mixed="bhst,btd->bshd", perm=(0, 1, 2, 3)),
        1,
    ),
    "one key head, queries before heads": (queries_first, 1),
    "queries before heads": (lambda g, x: queries_first(g, x, KEY_HEADS * GROUPS), HEADS),
    "an ellipsis": (
        lambda g, x: of_heads(g, x, scores="... s d, ... t d -> ... s t", mixed="...st,...td->...sd", key_heads=HEADS),
        HEADS,
    ),
    "an ellipsis for rows": (
        lambda g, x: einsum(
            g, x, scores="...skgd,...tkd->...kgst", mixed="...kgst,...tkd->...skgd", perm=(0, 1, 2, 3, 4)
        ),
        KEY_HEADS,
    ),
}
"""Each style, and the number of key heads that is found. If groups come first, other nodes repeat the key heads."""


def agrees(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    rng = np.random.default_rng(3)
    for batch, seq in ((1, 1), (2, 7), (3, 12)):
        mask = np.ones((batch, seq), np.int64)
        mask[1:, : seq // 3] = 0
        arrays = {"features": rng.standard_normal((batch, seq, HIDDEN)).astype(np.float32), "attention_mask": mask}
        expected, actual = run(before, arrays)["output"], run(after, arrays)["output"]
        assert expected.shape == actual.shape
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[mask == 1], expected[mask == 1], rtol=0, atol=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("form", "style"), [*itertools.product(["native", "contrib", "function"], STYLES)])
def test_heads_in_two_axes(style: str, form: str) -> None:
    layer, key_heads = STYLES[style]
    model = model_of(layer)
    done, proto = rewritten_model(model, form=form, target="ort")
    (site,) = done.sites
    assert (site.state, site.reason) == (REWRITTEN, None)
    assert isinstance(site.attention, Attention)
    assert (site.attention.num_heads, site.attention.num_kv_heads) == (HEADS, key_heads)
    assert site.evidence is not None
    assert site.evidence.error <= LIMIT
    assert not any(node.op_type in ("Softmax", "Einsum") for node in proto.graph.node)
    agrees(model, proto)


@pytest.mark.parametrize("style", ["broadcast", "einsum"])
def test_products_of_an_attention_that_stays_are_what_they_were(style: str) -> None:
    layer, _ = STYLES[style]
    model = model_of(layer, layer)
    first, second = [node.name for node in model.graph.node if node.op_type == "Softmax"]
    done, proto = rewritten_model(model, form="native", target="ort", only=(second,))
    assert [one.state for one in done.sites] == [KEPT, REWRITTEN]
    own = {node.name: node.SerializeToString() for node in model.graph.node}
    left = {node.name: node.SerializeToString() for node in proto.graph.node}
    stays = next(index for index, node in enumerate(model.graph.node) if node.name == first)
    products = [node.name for node in model.graph.node[: stays + 8] if node.op_type in ("MatMul", "Einsum")]
    assert len(products) >= 5
    assert {name: left[name] for name in products[:5]} == {name: own[name] for name in products[:5]}
    agrees(model, proto)


def test_a_fault_stays_a_fault() -> None:
    """The fault: the key heads of the values are in reverse order."""

    def wrong(g: Graph, x: str) -> str:
        q = projected(g, x, "q", KEY_HEADS, GROUPS)
        k, v = projected(g, x, "k", KEY_HEADS), projected(g, x, "v", KEY_HEADS)
        v = g.op("Gather", v, g.constant([1, 0]), axis=2)
        weights = weights_of(g, g.op("Einsum", q, k, equation="bskgd,btkd->bkgst"))
        return merged(g, g.op("Einsum", weights, v, equation="bkgst,btkd->bskgd"), (0, 1, 2, 3, 4))

    model = model_of(wrong)
    _, proto = rewritten_model(model, form="native", target="ort")
    agrees(model, proto)
    with pytest.raises(AssertionError):
        agrees(model_of(STYLES["einsum"][0]), proto)


def test_weights_that_a_branch_reads_too() -> None:
    """A product of the weights inside an If is not part of the attention around it."""

    def layer(g: Graph, x: str) -> str:
        mixed = broadcast(g, x)
        (weights,) = [node.output[0] for node in g.nodes if node.op_type == "Softmax"]
        inner = Graph()
        turned = inner.op("Transpose", weights, perm=[0, 1, 2, 4, 3], name="turned")
        factor = inner.op("ReduceMax", inner.op("MatMul", turned, weights), keepdims=0, name="factor")
        other = helper.make_node("Constant", [], ["other"], value_float=1.0)
        branches = [
            helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, [])])
            for nodes, name, out in ((inner.nodes, "then", factor), ([other], "else", "other"))
        ]
        many = g.op("Greater", g.op("Squeeze", g.length(x, 1)), g.constant(1))
        return g.op("Mul", mixed, g.op("If", many, then_branch=branches[0], else_branch=branches[1]))

    model = model_of(layer)
    done, proto = rewritten_model(model, form="native", target="ort")
    (site,) = done.sites
    assert isinstance(site.attention, Attention)
    assert (site.attention.num_heads, site.attention.num_kv_heads) == (HEADS, KEY_HEADS)
    agrees(model, proto)
