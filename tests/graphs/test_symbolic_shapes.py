"""Symbolic shapes and numbers are right for inputs of other sizes.

The oracle is ONNX Runtime, which runs each graph at several sizes. A fixed size must be the same at all of them, and
equal symbolic sizes must be equal numbers at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attention_graphs as graphs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from small_graphs import Graph, decoder

from posexport.graphs import shape_rules
from posexport.graphs import view as view_module
from posexport.graphs.symbolic_sizes import Size
from posexport.graphs.view import View, view_of

Array = np.ndarray[Any, np.dtype[Any]]
Values = dict[str, Array]

HIDDEN = 24
TRIES = [(2, 3), (5, 4), (1, 11), (4, 600), (3, 1)]
"""Batch and tokens."""

Body = Callable[[Graph], None]


def _many(g: Graph) -> str:
    return g.length("features", 1)


def _scalar(g: Graph, value: str) -> str:
    return g.op("Squeeze", value, g.constant([0]))


def layouts(g: Graph) -> None:
    split = g.op("Reshape", "features", g.constant([0, 0, 4, -1]))
    heads = g.op("Transpose", split, perm=[0, 2, 1, 3])
    g.op("Reshape", heads, g.op("Concat", g.constant([-1]), _many(g), g.constant([6]), axis=0))
    g.op("Flatten", heads, axis=2)
    g.op("Squeeze", g.op("Unsqueeze", heads, g.constant([0, -1])), g.constant([0]))
    wide = g.op("Unsqueeze", heads, g.constant([2]))
    shape = g.op("Concat", g.op("Shape", heads, end=2), g.constant([3]), g.op("Shape", heads, start=2), axis=0)
    g.op("Reshape", g.op("Expand", wide, shape), g.constant([0, 12, -1, 6]))
    g.op("Tile", heads, g.constant([1, 2, 1, 3]))
    g.op("Concat", heads, g.op("Slice", heads, g.constant([-1]), g.constant([2**31]), g.constant([2])), axis=2)
    g.op("Pad", heads, g.constant([0, 0, 2, 0, 0, 0, 1, 0]))


def by_minimum(g: Graph) -> None:
    """Lengths that are equal only in short rows."""
    bounded = g.op("Min", _many(g), g.constant([8]))
    g.op("Slice", "features", g.constant([0]), bounded, g.constant([1]))
    g.op("Slice", "features", g.constant([-8]), g.constant([2**31]), g.constant([1]))
    rest = g.op("Sub", _many(g), bounded)
    g.parts("Split", 2, "features", g.op("Concat", rest, bounded, axis=0), axis=1)
    g.op("ConstantOfShape", g.op("Max", g.constant([1]), g.op("Div", _many(g), g.constant([8]))))
    long = g.op("Greater", _many(g), g.constant([8]))
    heads = g.op("Where", long, g.constant([2]), g.constant([4]))
    g.op("Reshape", "features", g.op("Concat", g.constant([0, 0]), heads, g.constant([-1]), axis=0))
    g.op("Where", g.op("Equal", _many(g), g.constant([3])), g.constant([1]), g.constant([2]))
    g.op("Mod", _many(g), g.constant([4]))


def arithmetic(g: Graph) -> None:
    many, rows = _many(g), g.length("features", 0)
    size = g.op("Size", "features")
    g.op("Div", size, g.op("Mul", g.op("Mul", many, rows), g.constant([HIDDEN])))
    g.op("Sub", g.op("Add", many, rows), many)
    g.op("Div", g.op("Add", many, g.constant([7])), g.constant([4]))
    g.op("Div", g.op("Div", many, g.constant([2])), g.constant([2]))
    g.op("Div", many, g.constant([4]))
    g.op("Div", g.op("Sub", many, g.constant([6])), g.constant([4]))
    g.op("ReduceProd", g.op("Shape", "features"), keepdims=0)
    g.op("Neg", many)
    picked = g.op("Where", g.op("Equal", many, g.constant([-1])), g.constant([1]), many)
    g.op("Expand", g.constant([1.0], np.float32), picked)
    counted = g.op("Range", g.constant(0), _scalar(g, many), g.constant(1))
    g.op("Unsqueeze", counted, g.constant([1]))
    halves = g.op("Cast", _scalar(g, many), to=TensorProto.FLOAT)
    g.op("Range", g.constant(0.5, np.float32), halves, g.constant(1.0, np.float32))
    g.op("Not", g.op("Less", many, g.constant([0])))
    g.op("And", g.op("Greater", many, g.constant([-3])), g.op("Greater", many, g.constant([4])))
    g.op("Sign", many)
    g.op("Gather", g.op("Shape", "features"), g.constant([-1, 0]))


def convolved(g: Graph) -> None:
    rows = g.op("Transpose", "features", perm=[0, 2, 1])
    padded = g.op("Pad", rows, g.constant([0, 0, 16, 0, 0, 16]))
    once = g.op("Conv", padded, g.random("first", 6, HIDDEN, 8), strides=[4])
    twice = g.op("Conv", once, g.random("second", 6, 6, 3), strides=[2], pads=[1, 0])
    for pool, how in (
        ("MaxPool", {"dilations": [2]}),
        ("AveragePool", {"pads": [1, 0]}),
        ("MaxPool", {"ceil_mode": 1}),
    ):
        g.op("Relu", g.op(pool, twice, kernel_shape=[2], strides=[2], **how))
    g.op("Slice", twice, g.constant([0]), g.constant([-1]), g.constant([2]))
    length = g.op("Sub", g.op("Div", g.op("Add", _many(g), g.constant([32])), g.constant([8])), g.constant([1]))
    g.op("ConstantOfShape", length)


def convolved_tokens(g: Graph) -> None:
    """The graph computes the output length of convolutions before them.

    It is below 0 for inputs that are too short for the convolutions, where Div rounds up.
    """
    left = g.op("Div", g.op("Add", g.op("Mul", _many(g), g.constant([HIDDEN])), g.constant([-31])), g.constant([12]))
    tokens = g.op("Add", left, g.constant([1]))
    g.op("ConstantOfShape", tokens)
    samples = g.op("Reshape", "features", g.constant([0, 1, -1]))
    once = g.op("Conv", samples, g.random("first", 6, 1, 13), strides=[6])
    twice = g.op("Conv", once, g.random("second", 6, 6, 4), strides=[2])
    g.op("Reshape", twice, g.op("Concat", g.constant([0, -1]), tokens, axis=0))


def pooled_tokens(g: Graph) -> None:
    """As `convolved_tokens`, with a pooling."""
    left = g.op("Div", g.op("Add", g.op("Mul", _many(g), g.constant([HIDDEN])), g.constant([-19])), g.constant([12]))
    tokens = g.op("Add", left, g.constant([1]))
    g.op("Relu", g.op("ConstantOfShape", tokens))
    samples = g.op("Reshape", "features", g.constant([0, 1, -1]))
    once = g.op("Conv", samples, g.random("first", 6, 1, 13), strides=[6])
    pooled = g.op("AveragePool", once, kernel_shape=[2], strides=[2])
    g.op("Relu", g.op("Reshape", pooled, g.op("Concat", g.constant([0, -1]), tokens, axis=0)))


def products(g: Graph) -> None:
    other = g.op("Transpose", "features", perm=[0, 2, 1])
    scores = g.op("MatMul", "features", other)
    g.op("Einsum", "features", "features", equation="bsd,btd->bst")
    g.op("Einsum", "features", "features", equation="bsd,bsd->bd")
    g.op("ReduceMean", scores, g.constant([-1]), keepdims=0)
    g.op("ArgMax", scores, axis=1, keepdims=1)
    g.op("Add", scores, g.op("ReduceSum", "features", g.constant([2])))
    g.parts("TopK", 2, "features", g.constant([3]), axis=-1)
    index = g.op("Range", g.constant(0), _scalar(g, _many(g)), g.constant(1))
    g.op("Gather", "features", index, axis=1)
    g.op("GatherND", "features", g.op("Unsqueeze", g.op("ArgMax", "features", axis=0, keepdims=0), g.constant([2])))
    g.op("OneHot", index, g.constant(7), g.constant([0.0, 1.0], np.float32))
    g.op("Trilu", scores)
    g.op("CumSum", "features", g.constant(1))


def operators(g: Graph) -> None:
    """Attention operators, embeddings, and weights of few bits. ONNX's Attention needs opset 23."""
    q, k, v = (g.op("MatMul", "features", g.random(name, HIDDEN, 24)) for name in "qkv")
    wide = g.op("MatMul", "features", g.random("wide", HIDDEN, 48))
    more = g.op("Add", g.op("Attention", q, k, wide, q_num_heads=4, kv_num_heads=4), g.random("more", 48))
    split = [g.op("Reshape", one, g.constant([0, 0, 4, -1])) for one in (q, k, wide)]
    g.op("Attention", *(g.op("Transpose", one, perm=[0, 2, 1, 3]) for one in split))
    g.op("MultiHeadAttention", q, k, wide, domain="com.microsoft", num_heads=4)
    g.op("MultiHeadAttention", q, k, v, domain="com.microsoft", num_heads=3)
    weights, bias = g.random("packed", HIDDEN, 72), g.random("bias", 72)
    g.op("Attention", "features", weights, bias, domain="com.microsoft", num_heads=4)
    rows, last = g.length("features", 0), g.op("Sub", _many(g), g.constant([1]))
    lasts = g.op("Cast", g.op("Expand", last, rows), to=TensorProto.INT32)
    total = g.op("Cast", _scalar(g, _many(g)), to=TensorProto.INT32)
    heads = {"domain": "com.microsoft", "num_heads": 4, "kv_num_heads": 2}
    grouped = g.op("MatMul", "features", g.random("grouped", HIDDEN, 64))
    g.op("GroupQueryAttention", grouped, "", "", "", "", lasts, total, **heads)
    half = g.op("MatMul", "features", g.random("half", HIDDEN, 16))
    g.op("GroupQueryAttention", g.op("MatMul", more, g.random("q2", 48, 32)), half, half, "", "", lasts, total, **heads)
    packed = g.weight("bytes", np.full((16, 2, 8), 0x7A, np.uint8))
    scales = g.constant(np.ones(32), np.float32)
    g.op("MatMulNBits", "features", packed, scales, domain="com.microsoft", bits=4, block_size=16, K=HIDDEN, N=16)
    integers, few = g.weight("integers", np.full((HIDDEN, 6), 7, np.uint8)), g.constant([0.5], np.float32)
    g.op("DynamicQuantizeMatMul", "features", integers, few, domain="com.microsoft")
    whole = g.parts("DynamicQuantizeLinear", 3, "features")
    g.op("MatMulIntegerToFloat", whole[0], integers, whole[1], few, whole[2], domain="com.microsoft")
    one = g.constant(0.5, np.float32)
    quantised, other = [whole[0], one, g.constant(7, np.uint8)], [integers, one, g.constant(9, np.uint8)]
    out = [g.constant(0.1, np.float32), g.constant(3, np.uint8)]
    added = g.op("QLinearAdd", *quantised, *quantised, *out, domain="com.microsoft")
    g.op("QLinearSigmoid", added, *quantised[1:], *out, domain="com.microsoft")
    g.op("QLinearConcat", *out, *quantised, added, *out, domain="com.microsoft", axis=1)
    flat = g.op("Reshape", added, g.constant([-1, HIDDEN]))
    g.op("QGemm", flat, one, out[1], *other, "", *out, domain="com.microsoft")
    rows_of_bytes = g.weight("rows", np.full((HIDDEN, 16), 0x7A, np.uint8))
    scale = g.constant(np.ones((HIDDEN, 2)), np.float32)
    places = g.op("ArgMax", "features", axis=2, keepdims=0)
    options = {"bits": 4, "block_size": 16, "quantize_axis": 1}
    g.op("GatherBlockQuantized", rows_of_bytes, places, scale, domain="com.microsoft", **options)
    g.parts("LSTM", 2, "features", g.random("w", 1, 28, HIDDEN), g.random("r", 1, 28, 7), hidden_size=7)
    g.op(
        "GRU",
        "features",
        g.random("w2", 2, 21, HIDDEN),
        g.random("r2", 2, 21, 7),
        hidden_size=7,
        direction="bidirectional",
    )
    ids = g.op("Cast", g.op("ArgMax", "features", axis=2, keepdims=0), to=TensorProto.INT32)
    tables = [g.random("words", HIDDEN, 8), g.random("positions", 1000, 8)]
    norm = [g.constant(np.ones(8), np.float32), g.constant(np.zeros(8), np.float32)]
    g.parts("EmbedLayerNormalization", 2, ids, "", *tables, "", *norm, domain="com.microsoft")
    scale = g.constant(np.ones(HIDDEN), np.float32)
    names = ["normed", "", "", "total"]
    g.nodes.append(helper.make_node("SkipSimplifiedLayerNormalization", [q, k, scale], names, domain="com.microsoft"))


def written(body: Body) -> onnx.ModelProto:
    g = Graph()
    body(g)
    names = [name for node in g.nodes for name in node.output if name]
    read = [g.op("Identity", name) for name in names]  # An unread value has no shape.
    g.op("Identity", "features", name="output")
    features, output = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    )
    graph = helper.make_graph(g.nodes, "main_graph", [features], [output], g.weights)
    opsets = [("", 23 if body is operators else 18), ("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*one) for one in opsets], ir_version=9)
    onnx.checker.check_model(model, full_check=body is not operators)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in read)
    return model


def _values(model: onnx.ModelProto, arrays: Values) -> Values:
    """Every value of a graph."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    del whole.graph.output[:]
    names = [name for node in whole.graph.node for name in node.output if name]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    return {**arrays, **dict(zip(names, session.run(names, arrays), strict=True))}


def _sizes(view: View, values: Values) -> Iterator[tuple[str, Size, int]]:
    """Each symbolic length and number, with its name and its actual value."""
    for name, value in view.flow.values.items():
        if name not in values or value.is_initializer() or not value.uses():
            continue
        array = values[name]
        shape = view.probe.shapes.of(value)
        assert len(shape) == array.ndim, name
        yield from ((f"{name} axis {axis}", *pair) for axis, pair in enumerate(zip(shape, array.shape, strict=True)))
        numbers = view.probe.shapes.numbers(value)
        if numbers is not None:
            pairs = zip(numbers, array.reshape(-1).tolist(), strict=True)
            yield from ((f"{name} number {at}", *pair) for at, pair in enumerate(pairs))


def faults(view: View, tries: list[Values]) -> list[str]:
    """Lengths and numbers that differ from their symbolic sizes."""
    found = []
    for values in tries:
        known: dict[Size, tuple[str, int]] = {}
        for place, size, number in _sizes(view, values):
            _, same = known.setdefault(size, (place, number))
            if number != same or (size.is_fixed and number != size.number):
                found.append(f"{place}: {size} is {number} and {same}")
    return found


def fixed_values(view: View, tries: list[Values]) -> list[str]:
    """The values in `fixed` that differ between inputs."""
    return [
        value.name or ""
        for value in view.probe.fixed
        if value.name in tries[0] and not all(np.array_equal(one[value.name], tries[0][value.name]) for one in tries)
    ]


def _features(batch: int, seq: int) -> Values:
    return {"features": np.random.default_rng(batch).standard_normal((batch, seq, HIDDEN)).astype(np.float32)}


BODIES = [layouts, by_minimum, arithmetic, convolved, convolved_tokens, pooled_tokens, products]


@pytest.mark.parametrize("body", BODIES)
def test_of_every_operator(body: Body) -> None:
    model = written(body)
    taken = [sizes for sizes in TRIES if sizes[1] > 1 or body not in (convolved_tokens, pooled_tokens)]
    tries = [_values(model, _features(*sizes)) for sizes in taken]
    view = view_of(ir.from_proto(model))
    assert faults(view, tries) == []
    assert fixed_values(view, tries) == []


@pytest.mark.parametrize("body", [layouts, arithmetic, convolved, convolved_tokens, pooled_tokens, products])
def test_lengths_are_polynomials(body: Body) -> None:
    """Every operator of these graphs has a rule."""
    view = view_of(ir.from_proto(written(body)))
    keys = {number: key for key, number in view.probe.shapes.symbols._numbers.items()}
    shapes = [view.probe.shapes.of(value) for value in view.flow.values.values() if value.uses()]
    kinds = {keys[symbol][0] for shape in shapes for size in shape for symbol in size.symbols}  # type: ignore[index]
    assert kinds <= {"dimension", "sum", "floor quotient", "MaxPool"}


def test_of_operators_that_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "expand", lambda *_, **__: [])
    model = written(operators)
    view = view_of(ir.from_proto(model))
    assert faults(view, [_values(model, _features(*sizes)) for sizes in TRIES]) == []
    keys = {number: key for key, number in view.probe.shapes.symbols._numbers.items()}
    values = [
        one for one in view.flow.values.values() if one.uses() and (one.index() in (None, 0) or one.name == "total")
    ]
    for value in values:
        unknown = {keys[symbol] for size in view.probe.shapes.of(value) for symbol in size.symbols}
        assert {key[0] for key in unknown} <= {"dimension", "sum"}, value  # type: ignore[index]


def test_of_a_decoder() -> None:
    model = decoder()
    tries = []
    for batch, seq, past in [(2, 3, 5), (3, 4, 0), (1, 1, 300)]:
        arrays = {
            "input_ids": np.ones((batch, seq), np.int64),
            "attention_mask": np.ones((batch, past + seq), np.int64),
            "position_ids": np.tile(np.arange(past, past + seq), (batch, 1)),
        }
        for kind in ("key", "value"):
            arrays[f"past_key_values.0.{kind}"] = np.zeros((batch, 2, past, 8), np.float32)
        tries.append(_values(model, arrays))
    view = view_of(ir.from_proto(model))
    assert faults(view, tries) == []
    assert fixed_values(view, tries) == []


def test_of_fixed_inputs() -> None:
    """If all inputs have fixed sizes, all values have."""
    view = view_of(ir.from_proto(graphs.attention(fixed=(2, 6), add=[graphs.visible()])))
    assert all(size.is_fixed for value in view.flow.values.values() for size in view.probe.shapes.of(value))


def test_a_wrong_rule_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(by_minimum)
    tries = [_values(model, _features(*sizes)) for sizes in TRIES]
    monkeypatch.setitem(shape_rules._RULES, "Slice", shape_rules._like_first)
    assert faults(view_of(ir.from_proto(model)), tries) != []
