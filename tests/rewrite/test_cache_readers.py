"""Caches that become buffers though more than one attention reads them, or none directly.

Nodes that nothing reads don't matter. What else reads a buffer reads its used part. The oracle is ONNX Runtime on the
graph before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from descriptions import described
from onnx import TensorProto, helper, numpy_helper
from rewrite_helpers import feeds, rewritten_model
from small_graphs import HEADS, HIDDEN, KV_HEADS, SIZE, Graph, decoder, run

from posexport.graphs.cases import cases_of
from posexport.rewrite.rewriter import KEPT, REWRITTEN
from posexport.rewrite.whole import whole_evidence

Array = np.ndarray[Any, Any]

FORMS = ("native", "contrib", "function")
ALL_FORMS = (*FORMS, "decomposed")

SIZES = [(1, 1, 9), (2, 6, 0), (1, 4, 13)]
"""Rows, tokens and cached tokens. GroupQueryAttention accepts several tokens after cached ones only for one row."""

PASTS = ("past_key_values.0.key", "past_key_values.0.value")

ROOM = 24
"""The length of a buffer in tokens."""


def with_nodes(model: onnx.ModelProto, *nodes: onnx.NodeProto, **weights: Array) -> onnx.ModelProto:
    """A graph with more nodes, sorted topologically."""
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    inner = ir.from_proto(model)
    inner.graph.sort()
    return ir.to_proto(inner)


def read(model: onnx.ModelProto, what: str) -> str:
    """The name of a value: the scores, the input or output of the softmax, all keys, or the cached keys."""
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    product = next(node for node in model.graph.node if node.op_type == "MatMul" and "transpose" in node.input[1])
    names = {"scores": product.output[0], "logits": softmax.input[0], "weights": softmax.output[0]}
    return names.get(what, {"keys": "present.0.key", "cached": "past_key_values.0.key"}.get(what, what))


WHAT = ("scores", "logits", "weights", "keys", "cached")


def with_dead_nodes(what: str) -> onnx.ModelProto:
    """A decoder with two nodes after a value whose result nothing reads."""
    model = decoder()
    value = read(model, what)
    return with_nodes(
        model,
        helper.make_node("Mul", [value, "unread"], ["dead_0"], name="dead_0"),
        helper.make_node("Sqrt", ["dead_0"], ["dead_1"], name="dead_1"),
        unread=np.float32(3),
    )


def buffers_of(inputs: dict[str, Array], past: int) -> dict[str, Array]:
    """Inputs whose caches are buffers with ROOM places; the free ones hold large numbers."""
    free = ((0, 0), (0, 0), (0, ROOM - past), (0, 0))
    return {
        name: np.pad(array, free, constant_values=99) if name.startswith("past") else array
        for name, array in inputs.items()
    }


def check_shared(before: onnx.ModelProto, after: onnx.ModelProto, grown: bool = False) -> None:
    """A graph with buffers (or, if `grown`, with caches that grow) has the outputs of one with caches that grow."""
    dtypes = {
        value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in before.graph.input
    }
    layers = sum(value.name.endswith(".key") for value in before.graph.input)
    for rows, seq, past in SIZES:
        inputs = feeds(rows, seq, past, layers)
        inputs["attention_mask"][:] = 1
        inputs = {name: array.astype(dtypes[name]) for name, array in inputs.items()}
        want, have = run(before, inputs), run(after, inputs if grown else buffers_of(inputs, past))
        for name, value in want.items():
            part = have[name][:, :, : past + seq] if name.startswith("present") else have[name]
            np.testing.assert_allclose(part, value, atol=2e-5, rtol=1e-5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("form", "what"), [*itertools.product(FORMS, WHAT)])
def test_nodes_that_nothing_reads_keep_no_cache_from_being_shared(what: str, form: str) -> None:
    model = with_dead_nodes(what)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    check_shared(model, after)
    kept = {weight.name for weight in after.graph.initializer}
    assert {weight.name for weight in model.graph.initializer if weight.name.endswith(".weight")} <= kept


@pytest.mark.parametrize("what", WHAT)
def test_nodes_that_nothing_reads_say_nothing_of_attention(what: str) -> None:
    assert described(with_dead_nodes(what)) == described(decoder())


def test_attention_that_nothing_reads_is_none() -> None:
    model = decoder(layers=2)
    ends = next(node for node in model.graph.node if "logits" in node.output)
    first = next(node for node in model.graph.node if node.op_type == "Add" and node.output[0] == ends.input[0])
    ends.input[0] = first.input[0]  # the output of the first layer
    for output in [output for output in model.graph.output if output.name.startswith("present.1")]:
        model.graph.output.remove(output)
    done, _ = rewritten_model(model, form="native", target="ort")
    assert [site.attention.name for site in done.sites] == ["node_attention_0"]


def summed(of: str) -> onnx.ModelProto:
    """A decoder with an output that is computed from a cache."""
    model = decoder()
    model.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, []))
    return with_nodes(model, helper.make_node("ReduceSum", [read(model, of)], ["sum"], name="summed", keepdims=0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", ["keys", "cached"])
def test_what_else_reads_a_buffer_reads_its_used_part(of: str, form: str) -> None:
    model = summed(of)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    check_shared(model, after)


def read_again() -> onnx.ModelProto:
    """A decoder whose second layer reads the keys of the first layer's cache, each minus the one before it."""
    model = decoder(layers=2, one_cache=True)
    places = [at for at, node in enumerate(model.graph.node) if "present.0.key" in node.input]
    weights = {"begin": np.array([0]), "last": np.array([-1]), "tokens": np.array([2])}
    model.graph.node[places[-1]].input[0] = "changed"
    zeros = np.zeros((1, KV_HEADS, 1, SIZE), np.float32)
    return with_nodes(
        model,
        helper.make_node("Slice", ["present.0.key", "begin", "last", "tokens"], ["front"], name="front"),
        helper.make_node("Shape", ["present.0.key"], ["rows"], name="rows", start=0, end=1),
        helper.make_node("Concat", ["rows", "rest"], ["one"], name="one", axis=0),
        helper.make_node("Expand", ["zeros", "one"], ["first"], name="first"),
        helper.make_node("Concat", ["first", "front"], ["before"], name="before", axis=2),
        helper.make_node("Sub", ["present.0.key", "before"], ["changed"], name="changed"),
        zeros=zeros,
        rest=np.array([KV_HEADS, 1, SIZE]),
        **weights,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "kv_cache"), [*itertools.product(["native", "contrib"], ["shared", None])])
def test_a_layer_may_read_the_cache_of_another_in_its_own_way(form: str, kv_cache: str | None) -> None:
    model = read_again()
    done, after = rewritten_model(model, form=form, target="ort", kv_cache=kv_cache)
    assert [site.state for site in done.sites] == [REWRITTEN, REWRITTEN]
    check_shared(model, after, grown=kv_cache is None)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_shapes_of_repeated_keys_are_no_readers(form: str) -> None:
    """A Shape of the repeated keys, as TorchScript writes it, gives the number of tokens, not the buffer length."""
    model = decoder()
    product = next(node for node in model.graph.node if node.op_type == "MatMul" and node.input[0] == "attention_0")
    model.graph.output.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [4]))
    model = with_nodes(
        model,
        helper.make_node("Shape", [product.input[1]], ["repeated"], name="repeated"),
        helper.make_node("Identity", ["repeated"], ["sizes"], name="sizes"),
    )
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN], done.sites[0].reason
    check_shared(model, after)
    assert after.graph.output[-1].name == "sizes"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_layers_may_share_a_buffer(form: str) -> None:
    model = decoder(layers=3, one_cache=True)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN] * 3
    check_shared(model, after)


def latents() -> onnx.ModelProto:
    """Attention as in DeepSeek: keys and values are computed from cached latents, and part of the keys is cached as it
    is, as one head for all. There is no mask, so nothing states the number of cached tokens."""
    g = Graph()
    size, rank, part = 8, 6, 4

    def by_heads(name: str, of: str, width: int, features: int) -> str:
        split = g.op("MatMul", of, g.random(name, width, HEADS * features))
        return g.op("Transpose", g.op("Reshape", split, g.constant([0, 0, HEADS, features])), perm=[0, 2, 1, 3])

    def cached(name: str, features: int) -> str:
        new = g.op("Unsqueeze", g.op("MatMul", "features", g.random(name, HIDDEN, features)), g.constant([1]))
        return g.op("Concat", f"past_{name}", new, axis=2, name=f"present_{name}")

    low, alike = cached("key", rank), cached("value", part)
    q, low = by_heads("q", "features", HIDDEN, size + part), g.op("Squeeze", low, g.constant([1]))
    k, v = by_heads("k", low, rank, size), by_heads("v", low, rank, size)
    shape = g.op("Concat", g.op("Shape", k, start=0, end=3), g.constant([part]), axis=0)
    k = g.op("Concat", k, g.op("Expand", alike, shape), axis=3)
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(0.3, np.float32))
    merged = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.op("Reshape", merged, g.constant([0, 0, HEADS * size]), name="output")
    return _with_caches(g, HEADS * size, key=(1, rank), value=(1, part))


def two_readers() -> onnx.ModelProto:
    """Attention twice over one cache; the second reads the result of the first."""
    g = Graph()

    def by_heads(name: str, of: str) -> str:
        split = g.op("Reshape", g.op("MatMul", of, g.random(name, HIDDEN, HIDDEN)), g.constant([0, 0, HEADS, SIZE]))
        return g.op("Transpose", split, perm=[0, 2, 1, 3])

    def attended(q: str, name: str) -> str:
        scores = g.op("MatMul", q, g.op("Transpose", "present_key", perm=[0, 1, 3, 2]))
        scaled = g.op("Mul", scores, g.constant(0.35, np.float32))
        out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scaled, axis=-1), "present_value"), perm=[0, 2, 1, 3])
        return g.op("Reshape", out, g.constant([0, 0, HIDDEN]), name=name)

    for name in ("key", "value"):
        g.op("Concat", f"past_{name}", by_heads(name, "features"), axis=2, name=f"present_{name}")
    first = attended(by_heads("q", "features"), "first")
    attended(by_heads("q2", g.op("Add", first, "features")), "output")
    return _with_caches(g, HIDDEN, key=(HEADS, SIZE), value=(HEADS, SIZE))


def _with_caches(g: Graph, width: int, **caches: tuple[int, int]) -> onnx.ModelProto:
    """A graph from `features` to `output` [batch, seq, width] with caches of these heads and sizes."""
    dims: dict[str, list[str | int]] = {"features": ["batch", "seq", HIDDEN], "output": ["batch", "seq", width]}
    for name, (heads, size) in caches.items():
        dims |= {f"past_{name}": ["batch", heads, "past", size], f"present_{name}": ["batch", heads, "total", size]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, dim) for name, dim in dims.items()}
    inputs, outputs = (
        [values[first], *(values[f"{prefix}_{name}"] for name in caches)]
        for first, prefix in (("features", "past"), ("output", "present"))
    )
    graph = helper.make_graph(g.nodes, "graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "form"), [*itertools.product([latents, two_readers], ALL_FORMS)])
def test_the_number_of_cached_tokens_may_be_an_input(make: Callable[[], onnx.ModelProto], form: str) -> None:
    model = make()
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert {site.state for site in done.sites} == {REWRITTEN}
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    rng = np.random.default_rng(3)
    for rows, seq, past in SIZES:
        inputs = {"features": rng.standard_normal((rows, seq, HIDDEN)).astype(np.float32)}
        for name in ("past_key", "past_value"):
            _, heads, _, size = shapes[name]
            inputs[name] = rng.standard_normal((rows, heads, past, size)).astype(np.float32)
        want = run(model, inputs)
        have = run(after, buffers_of(inputs, past) | {"past_sequence_length": np.array([past])})
        np.testing.assert_allclose(have["output"], want["output"], atol=2e-5)
        for name in ("present_key", "present_value"):
            np.testing.assert_allclose(have[name][:, :, : past + seq], want[name], atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "layers"), [*itertools.product(ALL_FORMS, [1, 2])])
def test_attention_that_stays_reads_the_used_part_of_its_buffer(form: str, layers: int) -> None:
    """Also if no attention has the form."""
    model = decoder(layers=layers)
    weights = f"attention_{layers - 1}"
    product = next(node for node in model.graph.node if node.input[0] == weights)
    product.input[0] = "changed"
    model = with_nodes(
        model,
        helper.make_node("Mul", [weights, weights], ["squares"], name="squares"),
        helper.make_node("Add", ["squares", weights], ["changed"], name="changed"),
    )
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN, KEPT][-layers:] and done.changed
    check_shared(model, after)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "operators"), [*itertools.product(["native", "contrib"], [False, True])])
def test_attention_that_is_not_chosen_has_a_buffer_too(form: str, operators: bool) -> None:
    """As plain nodes, or as the operators of another form, which have their caches inside."""
    model = decoder(layers=2)
    if operators:
        _, model = rewritten_model(model, form="contrib" if form == "native" else "native", target="ort")
    first = rewritten_model(model, form="decomposed")[0].sites[0].attention.name
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared", only=[first])
    assert [site.state for site in done.sites] == [REWRITTEN, KEPT]
    check_shared(model, after)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_caches_may_have_another_dtype_than_the_products(form: str) -> None:
    """As in GPT-J of float16: its scores are float32."""
    model = decoder()
    casts = []
    for kind in ("key", "value"):
        present = f"present.0.{kind}"
        for node in model.graph.node:
            names = [f"wide.{kind}" if name == present else name for name in node.input]
            if present in node.output:
                casts.append(helper.make_node("Cast", [names[1]], [f"half.{kind}"], to=TensorProto.FLOAT16))
                names[1] = f"half.{kind}"
            node.input[:] = names
        casts.append(helper.make_node("Cast", [present], [f"wide.{kind}"], to=TensorProto.FLOAT))
    for value in (*model.graph.input, *model.graph.output):
        if "present" in value.name or "past" in value.name:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    model = with_nodes(model, *casts)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    check_shared(model, after)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_padding_weighs_nothing_that_a_buffer_happens_to_contain(form: str) -> None:
    """Padding sees no key. What it gives goes into the scale of dynamic quantisation, and may overflow in float16."""
    model = decoder(layers=2)
    _, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    for rows, seq, past in SIZES:
        inputs = feeds(rows, seq, past, 2)
        want, have = run(model, inputs), run(after, buffers_of(inputs, past))
        np.testing.assert_allclose(have["logits"], want["logits"], atol=2e-5, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_casts_may_be_around_the_appending(form: str) -> None:
    """As in a file that was converted to float16, whose inputs and outputs stay float32."""
    model = decoder(layers=2)
    casts = []
    kinds = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    for kind in kinds:
        present, half = f"present.{kind}", f"half.{kind}"
        joint = next(node for node in model.graph.node if present in node.output)
        for node in model.graph.node:
            node.input[:] = [f"wide.{kind}" if name == present else name for name in node.input]
        for at, name in enumerate(joint.input):
            casts.append(helper.make_node("Cast", [name], [f"{half}.{at}"], to=TensorProto.FLOAT16))
            joint.input[at] = f"{half}.{at}"
        joint.output[0] = half
        casts += [helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT) for name in (present, f"wide.{kind}")]
    model = with_nodes(model, *casts)
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN] * 2
    check_shared(model, after)


def test_the_cache_of_a_window_is_no_buffer() -> None:
    """Its oldest tokens are dropped, so new ones don't always go after the cached ones."""
    model = decoder()
    for kind in ("key", "value"):
        for node in model.graph.node:
            names = [f"all.{kind}" if name == f"present.0.{kind}" else name for name in (*node.input, *node.output)]
            node.input[:], node.output[:] = names[: len(node.input)], names[len(node.input) :]
    last = {"begin": np.array([-7]), "end": np.array([2**31 - 1]), "tokens": np.array([2])}
    kinds = ("key", "value")
    nodes = [helper.make_node("Slice", [f"all.{kind}", *last], [f"present.0.{kind}"]) for kind in kinds]
    done, _ = rewritten_model(with_nodes(model, *nodes, **last), form="native", target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [KEPT] and not done.changed
    assert [site.reason and site.reason.code for site in done.sites] == ["cache-kind"]


@pytest.mark.parametrize("name", ["present.0.key", "logits"])
def test_what_is_returned_must_be_the_whole_buffer(name: str) -> None:
    """Planted faults: only a part of a buffer, or of another output, is returned."""
    done, after = rewritten_model(decoder(), form="contrib", target="ort", kv_cache="shared")
    evidence = whole_evidence(done.original, done.model, cases_of(done.roles, 0), PASTS)
    assert evidence.problem is None and evidence.cases
    for node in after.graph.node:
        node.output[:] = ["whole" if output == name else output for output in node.output]
    limits = {"begin": np.array([0]), "used": np.array([4]), "tokens": np.array([2])}
    cut = helper.make_node("Slice", ["whole", *limits], [name], name="cut")
    wrong = ir.from_proto(with_nodes(after, cut, **limits))
    problem = whole_evidence(done.original, wrong, cases_of(done.roles, 0), PASTS).problem
    assert problem is not None and f"output {name!r} has shape" in str(problem)
