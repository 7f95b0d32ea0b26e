"""An attention operator with a wrong expansion stays, and other attention is still rewritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, SIZE, attention
from helpers import exported, small_spec
from onnx import TensorProto, helper, numpy_helper
from rewrite_helpers import rewritten_model
from small_graphs import run

from posexport.graphs import expand
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.operators import Call
from posexport.graphs.view import view_of
from posexport.rewrite.result import KEPT, REWRITTEN

EXPANSIONS = dict(expand.EXPANSIONS)

KINDS = {"MultiHeadAttention": ("com.microsoft", "MultiHeadAttention"), "Attention": ("", "Attention")}


def with_operators() -> onnx.ModelProto:
    """Attention that is written out, followed by one operator of each kind."""
    model = attention()
    mixed, weights = "output", np.random.default_rng(1).standard_normal((HEADS * SIZE, HEADS * SIZE)) / 8
    model.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), "mixing"))
    for kind, (domain, _) in KINDS.items():
        names = [f"{kind}_{side}" for side in "qkv"]
        nodes = [helper.make_node("MatMul", [mixed, "mixing"], [name], name=name) for name in names]
        sizes = {"num_heads": HEADS} if domain else {"q_num_heads": HEADS, "kv_num_heads": HEADS}
        nodes.append(helper.make_node(kind, names, [f"{kind}_out"], name=kind, domain=domain, **sizes))
        model.graph.node.extend(nodes)
        mixed = f"{kind}_out"
    model.graph.node.append(helper.make_node("MatMul", [mixed, "mixing"], ["mixed"]))
    model.graph.output[0].name = "mixed"
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)])
    return model


def no_product(call: Call) -> Sequence[ir.Value | None]:
    """A wrong expansion: a sum of shapes that do not match."""
    q = call.input(0)
    assert q is not None
    return [call.nodes.one("Add", q, call.nodes.constant([1.0] * (HEADS * SIZE - 1), ir.DataType.FLOAT))]


def too_short(call: Call) -> Sequence[ir.Value | None]:
    """A wrong expansion that can be evaluated, but not the nodes after it."""
    q = call.input(0)
    assert q is not None
    axes = call.nodes.constant([2])
    return [call.nodes.one("Slice", q, call.nodes.constant([0]), call.nodes.constant([5]), axes)]


def scaled(call: Call) -> Sequence[ir.Value | None]:
    """A wrong expansion: attention that is 1 % too large."""
    out, *others = EXPANSIONS["com.microsoft" if call.node.domain else "", call.node.op_type](call)
    assert out is not None
    return [call.nodes.one("Mul", out, call.nodes.constant(1.01, ir.DataType.FLOAT)), *others]


def without_softmax(call: Call) -> Sequence[ir.Value | None]:
    """A wrong expansion in which no attention is found."""
    value = call.input(2)
    assert value is not None
    return [call.nodes.one("Relu", value)]


@pytest.mark.parametrize("wrong", [scaled, without_softmax])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["decomposed", "contrib", "native"])
def test_other_numbers_are_seen_where_nothing_reads_them(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Call], Sequence[ir.Value | None]], kind: str, form: str
) -> None:
    """A graph with only the operator, whose result is an output."""
    domain, operator = KINDS[kind]
    sizes = {"num_heads": HEADS} if domain else {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HEADS * SIZE]) for name in "qkvy"]
    node = helper.make_node(operator, ["q", "k", "v"], ["y"], name="core", domain=domain, **sizes)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", info[:3], info[3:]), opset_imports=opsets, ir_version=10)
    options = {"form": form, "target": "ort", "roles": dict.fromkeys("qkv", "features")}
    sound, _ = rewritten_model(model, **options)
    assert [isinstance(one.attention, Attention) for one in sound.sites] == [True]
    monkeypatch.setitem(expand.EXPANSIONS, KINDS[kind], wrong)
    done, _ = rewritten_model(model, **options)
    assert not done.changed
    assert [(one.attention.name, one.reason and one.reason.code) for one in done.sites] == [("core", "operator")]
    assert "gives other numbers" in str(done.sites[0].reason)


@pytest.mark.parametrize("wrong", KINDS)
def test_only_operators_of_that_kind_stay(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setitem(expand.EXPANSIONS, KINDS[wrong], no_product)
    view = view_of(ir.from_proto(with_operators()))
    states = {one.name: isinstance(one, Attention) for one in view.attentions}
    assert [*states.values()].count(True) == 2
    (left,) = (one for one in view.attentions if isinstance(one, UnknownAttention))
    assert (left.name, left.reason.code) == (wrong, "operator")
    assert "what it was written out as can't be evaluated" in left.reason.text
    assert [one.node.op_type for one in view.expanded] == [kind for kind in KINDS if kind != wrong]


def test_the_rest_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is ONNX Runtime with the original graph."""
    monkeypatch.setitem(expand.EXPANSIONS, KINDS["MultiHeadAttention"], no_product)
    model = with_operators()
    done, proto = rewritten_model(model, form="native", target="ort")
    assert sorted(one.state for one in done.sites).count(REWRITTEN) >= 1
    assert [one.state for one in done.sites if one.attention.name == "MultiHeadAttention"] == [KEPT]
    given = {"hidden_states": np.random.default_rng(2).standard_normal((2, 7, HEADS * SIZE)).astype(np.float32)}
    (expected,), (actual,) = run(model, given).values(), run(proto, given).values()
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_where_the_fault_is_seen_later_all_operators_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expand.EXPANSIONS, KINDS["MultiHeadAttention"], too_short)
    view = view_of(ir.from_proto(with_operators()))
    assert [isinstance(one, Attention) for one in view.attentions] == [True, False, False]
    assert view.expanded == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("form", "cache"), [("native", None), ("contrib", None), ("contrib", "shared")])
def test_a_sound_operator_is_understood_in_every_dtype(dtype: str, form: str, cache: str | None) -> None:
    """Its scale, the root of 1 / 8, is rounded to the dtype. Free slots of buffers may have any values."""
    spec = small_spec("rope", dtype=dtype, causal=True, kv_cache=cache)
    assert spec.head_dim == 8
    (found,) = view_of(exported(spec, form, target="ort" if form == "contrib" else "portable")).attentions
    assert isinstance(found, Attention), found
