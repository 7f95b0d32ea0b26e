"""Integers that overflow their dtype for long rows are not multiples of a length: a graph may branch on them.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, SIZE, Writer, attention
from onnx import TensorProto
from rewrite_helpers import rewritten_model
from small_graphs import run

from posexport.graphs.view import view_of

FACTOR = 2**24
"""Times 128 tokens, this overflows int32 to -2^31."""


def one_key_of_long_rows(kind: int, factor: int) -> onnx.ModelProto:
    """Attention that sees only the first key if the number of tokens times `factor` overflows below 0."""
    model, g, dtype = attention(), Writer(), np.int32 if kind == TensorProto.INT32 else np.int64
    scores, result = (node for node in model.graph.node if node.op_type == "MatMul" and "transpose" in node.input[1])
    length = g.op("Shape", "hidden_states", start=1, end=2)
    many = g.op("Mul", g.op("Cast", length, to=kind), g.const([factor], dtype))
    kept = g.op("Where", g.op("Less", many, g.const([0], dtype)), g.const([1]), length)
    for product, axis in ((scores, 3), (result, 2)):
        product.input[1] = g.op("Slice", product.input[1], g.const([0]), kept, g.const([axis]))
    renamed = {weight.name: f"new_{weight.name}" for weight in g.weights}
    for weight in g.weights:
        weight.name = renamed[weight.name]
    for node in g.nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.name = f"new_{node.name}"
    model.graph.initializer.extend(g.weights)
    model.graph.node.extend(g.nodes)
    inner = ir.from_proto(model)
    inner.graph.sort()
    return ir.to_proto(inner)


def number(model: onnx.ModelProto, kind: str) -> list[int] | None:
    """The known integers of the first node of a kind."""
    view = view_of(ir.from_proto(model))
    node = next(node for node in view.model.graph if node.op_type == kind)
    return view.probe.shapes.whole_numbers(node.outputs[0])


def test_what_a_dtype_holds_is_known() -> None:
    assert number(one_key_of_long_rows(TensorProto.INT64, FACTOR), "Less") == [0]
    assert number(one_key_of_long_rows(TensorProto.INT32, 64), "Less") == [0]
    assert number(one_key_of_long_rows(TensorProto.INT32, FACTOR), "Less") is None
    assert number(one_key_of_long_rows(TensorProto.INT64, 2**52), "Less") is None


@pytest.mark.parametrize("form", ["native", "function"])
def test_a_choice_by_what_overflows_stays(form: str) -> None:
    model = one_key_of_long_rows(TensorProto.INT32, FACTOR)
    _, after = rewritten_model(model, form=form, target="ort")
    for seq in (7, 127, 128, 200):
        features = np.random.default_rng(seq).standard_normal((2, seq, HEADS * SIZE)).astype(np.float32)
        want, have = (run(one, {"hidden_states": features})["output"] for one in (model, after))
        np.testing.assert_allclose(have, want, atol=2e-5)
