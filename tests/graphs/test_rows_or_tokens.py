"""Features with two axes, as patches of an image: the attention decides whether the first is tokens, not its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto
from small_graphs import HEADS, HIDDEN, SIZE, Graph, _info, _model, run

from posexport.artifact.graph_file import read_graph
from posexport.bench.timed_graph import timed_graph
from posexport.errors import Reason
from posexport.export.triton.served_graph import served_graph
from posexport.graphs import told_roles
from posexport.graphs.inspection import Inspection
from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import rewrite_model
from posexport.verify.graph.subject import read_file, read_subject


def patches(dim: str, rows: bool = False, x: str = "x") -> onnx.ModelProto:
    """Attention between `dim` patches `x`, or with `rows` between the heads of each row."""
    g = Graph()
    perm = [0, 1, 2] if rows else [1, 0, 2]

    def heads(part: str) -> str:
        split = g.op("Reshape", g.op("MatMul", x, g.random(part, HIDDEN, HIDDEN)), g.constant([-1, HEADS, SIZE]))
        return g.op("Transpose", split, perm=perm)

    q, k, v = heads("q"), heads("k"), heads("v")
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.constant(0.3, np.float32))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=perm)
    g.op("Reshape", out, g.constant([-1, HIDDEN]), name="y")
    inputs, outputs = ([_info(name, TensorProto.FLOAT, dim, HIDDEN)] for name in (x, "y"))
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


def axes_in(reader: str, path: Path) -> Any:
    """The axes of the features for verify, bench and package."""
    if reader == "verify":
        return read_subject(read_file(path)).roles()["features"].axes
    graph = read_graph(path)
    roles = timed_graph(graph, {}).roles if reader == "bench" else served_graph(graph).roles
    return roles["features"].axes  # type: ignore[index]


@pytest.mark.parametrize("rows", [False, True])
def test_all_commands_read_the_same_axes(rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked, inspect = tmp_path / "patches.onnx", list[str](), told_roles.inspect_graph
    onnx.save(patches("n", rows, "features"), path)
    monkeypatch.setattr(told_roles, "_KNOWN", {})
    monkeypatch.setattr(
        told_roles, "inspect_graph", lambda *given, **named: asked.append("") or inspect(*given, **named)
    )
    found = [axes_in(reader, path) for reader in ("verify", "bench", "package")]
    assert found == [(AXES["n", rows], HIDDEN)] * 3
    assert len(asked) == 1  # The graph is evaluated only once.


def test_names_that_tell_need_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "patches.onnx"
    onnx.save(patches("seq_len", x="features"), path)
    monkeypatch.setattr(told_roles, "inspect_graph", None)
    assert axes_in("verify", path) == ("seq", HIDDEN)


def test_a_graph_that_cannot_be_evaluated_has_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "patches.onnx"
    onnx.save(patches("n", x="features"), path)
    failed = Inspection(roles={"features": None}, reason=Reason("crashed", "it crashed"))
    monkeypatch.setattr(told_roles, "_KNOWN", {})
    monkeypatch.setattr(told_roles, "inspect_graph", lambda *given, **named: failed)
    assert axes_in("verify", path) == ("batch", HIDDEN)
