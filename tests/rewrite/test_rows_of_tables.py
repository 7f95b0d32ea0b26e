"""Attention along the rows of a table [B, R, S, D], with scores of five axes, as in AlphaFold's triangle attention.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Array, Graph, run

from posexport.rewrite.rewriter import REWRITTEN

HEADS, SIZE, HIDDEN = 4, 8, 32


def of_rows(g: Graph) -> str:
    """A mask of the keys of each row, [B, R, 1, 1, S]."""
    hidden = g.op("Mul", g.op("Sub", "mask", g.constant(1.0, np.float32)), g.constant(1e9, np.float32))
    return g.op("Unsqueeze", hidden, g.constant([2, 3]))


def of_pairs(g: Graph) -> str:
    """A bias for each pair of columns, equal in all rows: [B, 1, N, S, S]."""
    first = g.op("Gather", "features", g.constant(0), axis=1)
    bias = g.op("MatMul", first, g.random("bias", HIDDEN, HEADS))
    turned = g.op("Transpose", bias, perm=[0, 2, 1])
    return g.op("Unsqueeze", g.op("Unsqueeze", turned, g.constant([2])), g.constant([1]))


def of_distance(g: Graph) -> str:
    """A bias by distance, [S, S]."""
    places = g.op("Range", g.constant(0), g.op("Squeeze", g.length("features", 2)), g.constant(1))
    distance = g.op("Abs", g.op("Sub", places, g.op("Unsqueeze", places, g.constant([1]))))
    return g.op("Mul", g.op("Cast", distance, to=TensorProto.FLOAT), g.constant(-0.3, np.float32))


ADDED = {"rows": [of_rows], "pairs": [of_pairs], "distance": [of_distance], "all": [of_rows, of_pairs, of_distance]}


def table(name: str) -> onnx.ModelProto:
    g = Graph()

    def heads(side: str, last: list[int]) -> str:
        projected = g.op("MatMul", "features", g.random(side, HIDDEN, HIDDEN))
        return g.op("Transpose", g.op("Reshape", projected, g.constant([0, 0, 0, HEADS, SIZE])), perm=[0, 1, 3, *last])

    scores = g.op("MatMul", heads("q", [2, 4]), heads("k", [4, 2]))
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    for added in ADDED[name]:
        scores = g.op("Add", scores, added(g))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), heads("v", [2, 4]))
    tokens = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 1, 3, 2, 4]), g.constant([0, 0, 0, HIDDEN]))
    g.op("MatMul", tokens, g.random("o", HIDDEN, HIDDEN), name="output")
    axes = ["batch", "rows", "columns"]
    shapes = {"features": [*axes, HIDDEN], "mask": axes}
    inputs = [helper.make_tensor_value_info(one, TensorProto.FLOAT, shape) for one, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, [*axes, HIDDEN])]
    graph = helper.make_graph(g.nodes, "table", inputs if "rows" in name or name == "all" else inputs[:1], outputs)
    graph.initializer.extend(g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("added", ADDED)
def test_rows_of_a_table_are_rows(added: str, form: str) -> None:
    model = table(added)
    given = dict.fromkeys((one.name for one in model.graph.input), "features")
    done, proto = rewritten_model(model, form=form, target="ort", roles=given)
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    rng = np.random.default_rng(0)
    for batch, rows, columns in ((2, 3, 5), (1, 4, 1), (3, 1, 6)):
        arrays: dict[str, Array] = {
            "features": rng.standard_normal((batch, rows, columns, HIDDEN)).astype(np.float32),
            "mask": (rng.random((batch, rows, columns)) < 0.7).astype(np.float32),
        }
        arrays["mask"][..., 0] = 1
        arrays = {name: arrays[name] for name in given}
        want, have = (run(one, arrays)["output"] for one in (model, proto))
        np.testing.assert_allclose(have, want, rtol=0, atol=3e-6)
