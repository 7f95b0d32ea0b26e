"""Biases of scores whose queries and keys are on the grid of an image, as in SAM, ViTDet and MViT.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

HEADS, SIZE, HIDDEN, SIDES = 4, 8, 32, (3, 5)
TOKENS = SIDES[0] * SIDES[1]


def model_of(lead: Sequence[int], *, features: bool, swapped: bool = False) -> onnx.ModelProto:
    """Attention whose scores are [*lead, 3, 5, 3, 5], with biases by row and by column of the keys.

    The biases are computed from the queries (`features`) or read from a table. `swapped` adds them to the axes of the
    other grid.
    """
    g = Graph()
    packed = g.op("MatMul", "features", g.random("qkv", HIDDEN, 3 * HIDDEN))
    split = g.op("Reshape", packed, g.constant([0, TOKENS, 3, HEADS, SIZE]))
    heads = g.op("Reshape", g.op("Transpose", split, perm=[2, 0, 3, 1, 4]), g.constant([3, *lead, TOKENS, SIZE]))
    q, k, v = (g.op("Gather", heads, g.constant(at), axis=0) for at in range(3))
    rank = len(lead) + 2
    keys = g.op("Transpose", k, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = g.op("MatMul", g.op("Mul", q, g.constant(SIZE**-0.5, np.float32)), keys)
    scores = g.op("Reshape", scores, g.constant([*lead, *SIDES, *SIDES]))
    for axis, side in enumerate(SIDES):
        if features:
            bias = g.op("MatMul", q, g.random(f"by_axis_{axis}", SIZE, side))
            bias = g.op("Reshape", bias, g.constant([*lead, *SIDES, side]))
        else:
            bias = g.random(f"by_axis_{axis}", *[1] * len(lead), *SIDES, side)
        bias = g.op("Unsqueeze", bias, g.constant([-1 if axis == 0 else -2]))
        if swapped:
            first = [*range(len(lead))]
            bias = g.op("Transpose", bias, perm=[*first, *(len(lead) + at for at in (2, 3, 0, 1))])
        scores = g.op("Add", scores, bias)
    flat = g.op("Reshape", scores, g.constant([*lead, TOKENS, TOKENS]))
    mixed = g.op("MatMul", g.op("Softmax", flat, axis=-1), v)
    rows = g.op("Reshape", mixed, g.constant([-1, HEADS, TOKENS, SIZE]))
    tokens = g.op("Reshape", g.op("Transpose", rows, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    g.op("MatMul", tokens, g.random("o_proj", HIDDEN, HIDDEN), name="output")
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", TOKENS, HIDDEN])
        for name in ("features", "output")
    ]
    graph = helper.make_graph(g.nodes, "main_graph", values[:1], values[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


LEADS = {"rows and heads in one axis": (-1,), "rows and heads": (-1, HEADS)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("lead", "features", "swapped", "form"),
    [*itertools.product(LEADS, [True, False], [False, True], ["native", "contrib"])],
)
def test_a_bias_on_a_grid_is_one_of_the_scores(lead: str, features: bool, swapped: bool, form: str) -> None:
    model = model_of(LEADS[lead], features=features, swapped=swapped)
    done, proto = rewritten_model(model, form=form, target="ort")
    (site,) = done.sites
    assert (site.state, site.reason) == (REWRITTEN, None)
    for batch in (1, 3):
        given = {"features": np.random.default_rng(batch).standard_normal((batch, TOKENS, HIDDEN)).astype(np.float32)}
        before, after = run(model, given)["output"], run(proto, given)["output"]
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * float(np.abs(before).max()))
