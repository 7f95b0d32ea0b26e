"""Multi-query attention whose query heads are folded into the token axis, as in exports of GPTBigCode.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.graphs.attention.attention import Attention
from posexport.rewrite.evidence import LIMIT
from posexport.rewrite.rewriter import REWRITTEN

HEADS, SIZE, HIDDEN = 3, 8, 24
LOW = -1e9


@attrs.frozen(kw_only=True)
class Style:
    """How heads are folded.

    - `heads_first`: queries are [B, N*S, D] instead of [B, S*N, D].
    - `until_values`: the mask and the softmax also have folded heads.
    - `key_axis`: the keys have an axis for the key head.
    - `fault`: the values are read as keys.
    """

    heads_first: bool = False
    until_values: bool = False
    key_axis: bool = False
    cache: bool = False
    fault: bool = False


STYLES = {
    "tokens first": Style(),
    "heads first": Style(heads_first=True),
    "tokens first, folded softmax": Style(until_values=True),
    "heads first, folded softmax": Style(heads_first=True, until_values=True, key_axis=True),
    "tokens first, cache": Style(cache=True),
    "heads first, cache, key axis": Style(heads_first=True, cache=True, key_axis=True),
}


def model_of(style: Style) -> onnx.ModelProto:
    """Causal attention over features [batch, seq, HIDDEN], with padding."""
    g, x = Graph(), "features"
    q, k, v = (
        g.op("MatMul", x, g.random(name, HIDDEN, size * SIZE)) for name, size in zip("qkv", (HEADS, 1, 1), strict=True)
    )
    info, axis = helper.make_tensor_value_info, [1] if style.key_axis else []
    if axis:
        k, v = (g.op("Unsqueeze", one, g.constant(axis)) for one in (k, v))
    inputs, outputs = list[onnx.ValueInfoProto](), list[onnx.ValueInfoProto]()
    if style.cache:
        names = [f"past_key_values.0.{kind}" for kind in ("key", "value")]
        k, v = (
            g.op("Concat", past, new, axis=1 + len(axis), name=past.replace("past_key_values", "present"))
            for past, new in zip(names, (k, v), strict=True)
        )
        inputs += [info(name, TensorProto.FLOAT, ["batch", *axis, "past", SIZE]) for name in names]
        outputs += [info(name, TensorProto.FLOAT, ["batch", *axis, "total", SIZE]) for name in (k, v)]
    rows, seq, keys = g.length(x, 0), g.length(x, 1), g.length(k, 1 + len(axis))
    folded = g.op("Mul", seq, g.constant([HEADS]))
    apart = [g.constant([HEADS]), seq] if style.heads_first else [seq, g.constant([HEADS])]
    if style.heads_first:
        q = g.op("Transpose", g.op("Reshape", q, g.constant([0, 0, HEADS, SIZE])), perm=[0, 2, 1, 3])
    one = [g.constant(axis)] if axis else []
    q = g.op("Reshape", q, g.op("Concat", rows, *one, folded, g.constant([SIZE]), axis=0))
    of_keys = v if style.fault else k
    turned = g.op("Transpose", of_keys, perm=[0, 1, 3, 2] if axis else [0, 2, 1])
    scores = g.op("Mul", g.op("MatMul", q, turned), g.constant(SIZE**-0.5, np.float32))
    wide, narrow = g.op("Concat", rows, *apart, keys, axis=0), g.op("Concat", rows, *one, folded, keys, axis=0)
    seen = g.op("Unsqueeze", visible(g, seq, keys), g.constant([1 if style.heads_first else 2]))
    if style.until_values:
        seen = g.op("Reshape", g.op("Expand", seen, wide), narrow)
    else:
        scores = g.op("Reshape", scores, wide)
    weights = g.op("Softmax", g.op("Where", seen, scores, g.constant(LOW, np.float32)), axis=-1)
    mixed = g.op("MatMul", weights if style.until_values else g.op("Reshape", weights, narrow), v)
    if style.heads_first:
        split = g.op("Reshape", mixed, g.op("Concat", rows, *apart, g.constant([SIZE]), axis=0))
        mixed = g.op("Transpose", split, perm=[0, 2, 1, 3])
    mixed = g.op("Reshape", mixed, g.op("Concat", rows, seq, g.constant([HEADS * SIZE]), axis=0))
    g.op("MatMul", mixed, g.random("o", HEADS * SIZE, HIDDEN), name="output")
    features, output = (info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN]) for name in ("features", "output"))
    mask = info("attention_mask", TensorProto.INT64, ["batch", "total" if style.cache else "seq"])
    graph = helper.make_graph(g.nodes, "main_graph", [features, mask, *inputs], [output, *outputs], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def visible(g: Graph, seq: str, keys: str) -> str:
    """Which keys each query sees: bool [B, S, T]."""
    places = g.op("Range", g.constant(0), g.op("Squeeze", keys), g.constant(1))
    first = g.op("Squeeze", g.op("Sub", keys, seq))
    queries = g.op("Unsqueeze", g.op("Range", first, g.op("Squeeze", keys), g.constant(1)), g.constant([1]))
    valid = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.constant([1])), to=TensorProto.BOOL)
    return g.op("And", g.op("LessOrEqual", places, queries), valid)


def agrees(style: Style, before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    rng = np.random.default_rng(3)
    for batch, seq, past in ((1, 1, 4), (2, 7, 0), (3, 4, 6)):
        past = past if style.cache else 0
        mask = np.ones((batch, past + seq), np.int64)
        mask[1:, : (past + seq) // 3] = 0
        arrays = {"features": rng.standard_normal((batch, seq, HIDDEN)).astype(np.float32), "attention_mask": mask}
        for kind in ("key", "value") if style.cache else ():
            shape = (batch, *([1] if style.key_axis else []), past, SIZE)
            arrays[f"past_key_values.0.{kind}"] = rng.standard_normal(shape).astype(np.float32)
        expected, actual = run(before, arrays), run(after, arrays)
        shown = mask[:, past:] == 1
        np.testing.assert_allclose(actual["output"][shown], expected["output"][shown], rtol=0, atol=2e-5)
        for name in expected.keys() - {"output"}:
            np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("form", "name"), [*itertools.product(["native", "contrib", "function"], STYLES)])
def test_folded_heads(form: str, name: str) -> None:
    style = STYLES[name]
    model = model_of(style)
    done, proto = rewritten_model(model, form=form, target="ort")
    (site,) = done.sites
    assert (site.state, site.reason) == (REWRITTEN, None)
    assert isinstance(site.attention, Attention)
    assert (site.attention.num_heads, site.attention.num_kv_heads) == (HEADS, 1)
    assert site.evidence is not None
    assert site.evidence.error <= LIMIT
    assert not any(node.op_type == "Softmax" for node in proto.graph.node)
    agrees(style, model, proto)


def test_a_fault_stays_a_fault() -> None:
    style = Style(fault=True)
    model = model_of(style)
    _, proto = rewritten_model(model, form="native", target="ort")
    agrees(style, model, proto)
    with pytest.raises(AssertionError):
        agrees(style, model_of(Style()), proto)
