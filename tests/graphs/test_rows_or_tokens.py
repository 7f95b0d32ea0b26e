"""Features of two axes, as patches of a picture: the first is that of tokens where attention says so, not its name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto
from small_graphs import HEADS, HIDDEN, SIZE, Graph, _info, _model, run

from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import rewrite_model


def patches(dim: str, rows: bool = False) -> onnx.ModelProto:
    """Attention of `dim` patches to each other, or, with `rows`, of the heads of each row."""
    g = Graph()
    perm = [0, 1, 2] if rows else [1, 0, 2]

    def heads(part: str) -> str:
        split = g.op("Reshape", g.op("MatMul", "x", g.random(part, HIDDEN, HIDDEN)), g.constant([-1, HEADS, SIZE]))
        return g.op("Transpose", split, perm=perm)

    q, k, v = heads("q"), heads("k"), heads("v")
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.constant(0.3, np.float32))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=perm)
    g.op("Reshape", out, g.constant([-1, HIDDEN]), name="y")
    inputs, outputs = ([_info(name, TensorProto.FLOAT, dim, HIDDEN)] for name in "xy")
    return _model(g, inputs, outputs, 18)


AXES = {("n", False): "seq", ("n", True): "batch", ("seq_len", False): "seq", ("batch", True): "batch"}


@pytest.mark.parametrize(("dim", "rows"), AXES)
def test_the_first_axis_is_what_attention_contracts(dim: str, rows: bool) -> None:
    view = view_of(ir.from_proto(patches(dim, rows)), {"x": "features"})
    assert view.roles["x"].axes == (AXES[dim, rows], HIDDEN)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_attention_of_patches_is_rewritten(form: str) -> None:
    model = patches("n")
    done = rewrite_model(ir.from_proto(model), form=form, roles={"x": "features"})
    assert [site.state for site in done.sites] == ["rewritten"]
    for count in (1, 7):
        given = {"x": np.random.default_rng(0).standard_normal((count, HIDDEN)).astype(np.float32)}
        np.testing.assert_allclose(run(ir.to_proto(done.model), given)["y"], run(model, given)["y"], atol=1e-5)
