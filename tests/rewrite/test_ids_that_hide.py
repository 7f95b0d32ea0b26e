"""Masks that a graph computes from its tokens: the tests of a rewrite draw padding tokens too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import small_graphs
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.describe import Describer
from posexport.graphs.cases import cases_of
from posexport.graphs.draw import Kinds, draw_inputs
from posexport.graphs.roles import roles_of
from posexport.graphs.view import view_of
from posexport.rewrite.evidence import evidence_of
from posexport.rewrite.rewriter import rewrite_model

pytestmark = pytest.mark.all_inputs

WORDS, WIDTH, HEADS = 30_000, 16, 2
SIZE = WIDTH // HEADS
PAD = 12_345

Array = np.ndarray[Any, Any]


def of_tokens(compare: str, number: Any, *, scatter: bool = False, picked: bool = False) -> onnx.ModelProto:
    """Attention that hides keys whose ids satisfy a comparison with `number`."""
    rng = np.random.default_rng(0)
    g = Graph()
    const, op = g.constant, g.op
    x = op("Gather", const(rng.standard_normal((WORDS, WIDTH)), np.float32), "input_ids")
    sides = []
    for _ in range(3):
        made = op("MatMul", x, const(rng.standard_normal((WIDTH, WIDTH)) / 4, np.float32))
        sides.append(op("Transpose", op("Reshape", made, const([0, 0, HEADS, SIZE])), perm=[0, 2, 1, 3]))
    hidden = op(compare, op("Cast", "input_ids", to=TensorProto.INT64), const(number))
    if scatter:
        op("NonZero", hidden)
    if picked:  # as transformers selects the padding of each key by row and position
        rows = op("Range", const(0), op("Squeeze", op("Shape", "input_ids", end=1)), const(1))
        hidden = op("GatherND", hidden, op("Unsqueeze", rows, const([1])))
    wide = op("Unsqueeze", hidden, const([1, 2]))
    added = op("Where", wide, const(-3.0e38, np.float32), const(0.0, np.float32))
    scores = op("Mul", op("MatMul", sides[0], op("Transpose", sides[1], perm=[0, 1, 3, 2])), const(0.3, np.float32))
    out = op("MatMul", op("Softmax", op("Add", scores, added), axis=-1), sides[2])
    out = op("Transpose", out, perm=[0, 2, 1, 3])
    op("Reshape", out, const([0, 0, WIDTH]), name="output")
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ("batch", "seq"))
    given = helper.make_tensor_value_info("output", TensorProto.FLOAT, ("batch", "seq", WIDTH))
    graph = helper.make_graph(g.nodes, "tokens", [ids], [given], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model: onnx.ModelProto, ids: Array) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    out: Array = session.run(None, {"input_ids": ids})[0]
    return out


@pytest.mark.parametrize(("compare", "number"), [("Equal", PAD), ("Less", 3), ("GreaterOrEqual", WORDS - 2)])
def test_ids_that_hide_keys_are_among_the_drawn_tokens(compare: str, number: int) -> None:
    roles = roles_of(ir.from_proto(of_tokens(compare, number)))
    assert roles["input_ids"].marks
    test = {"Equal": np.equal, "Less": np.less, "GreaterOrEqual": np.greater_equal}[compare]
    hidden = [test(case.arrays["input_ids"], number) for case in cases_of(roles, 0)]
    assert sum(bool(one.any()) for one in hidden) >= 5
    assert not any(one.all(-1).any() for one in hidden if one.shape[-1] > 2)


def test_short_rows_have_them_beside_a_key_that_is_seen() -> None:
    """In some rows, the last token is a padding token, but never if it is the only key of a query."""
    roles = roles_of(ir.from_proto(small_graphs.decoder()))
    roles = {**roles, "input_ids": attrs.evolve(roles["input_ids"], rows=WORDS, marks=(PAD,))}

    def hidden(seq: int, past: int) -> Array:
        sizes = {"batch": 16, "seq": seq, "past": past}
        drawn = draw_inputs(roles, sizes, np.random.default_rng(0), Kinds(marks=True))
        return np.asarray(drawn.arrays["input_ids"] == PAD)

    for seq, past in ((2, 0), (2, 5), (1, 5)):
        assert 0 < hidden(seq, past)[:, -1].sum() < 16
    assert not hidden(2, 0)[:, 0].any() and not hidden(1, 0).any()


def test_truths_that_are_picked_by_place_hide_keys_too() -> None:
    assert roles_of(ir.from_proto(of_tokens("Equal", PAD, picked=True)))["input_ids"].marks == (PAD,)


def test_tokens_that_place_others_are_not_drawn_more_often() -> None:
    roles = roles_of(ir.from_proto(of_tokens("Equal", PAD, scatter=True)))
    assert roles["input_ids"].marks == ()


def test_no_tokens_are_marked_unless_asked() -> None:
    roles = roles_of(ir.from_proto(of_tokens("Equal", PAD)))
    drawn = draw_inputs(roles, {"batch": 2, "seq": 20, "past": 0}, np.random.default_rng(0))
    assert PAD not in drawn.arrays["input_ids"]


@pytest.mark.parametrize("number", [0, PAD])
def test_padding_is_named_by_the_input_of_which_it_is_an_id(number: int) -> None:
    view = view_of(ir.from_proto(of_tokens("Equal", number)))
    (mask,) = (Describer(view).describe(one)["mask"] for one in view.attentions)
    assert (mask["kind"], mask["padding"]) == ("none", ["input_ids"])


def test_a_rewrite_that_loses_the_mask_is_seen() -> None:
    right = ir.from_proto(of_tokens("Equal", PAD))
    view = view_of(right)
    wrong = view.model.clone()
    for node in wrong.graph:  # a mask that does not hide keys
        if node.op_type == "Where":
            node.replace_input_with(1, node.inputs[2])
    chosen = [one for one in view.attentions if isinstance(one, Attention)]
    (found,) = evidence_of(view.model, wrong, chosen, cases_of(view.roles, 0)).values()
    assert found.cases and not found.agrees
    for role in view.roles.values():
        object.__setattr__(role, "marks", ())
    (blind,) = evidence_of(view.model, wrong, chosen, cases_of(view.roles, 0)).values()
    assert blind.agrees  # Without padding tokens, no difference shows.


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_the_rewritten_file_hides_padding_in_onnx_runtime(form: str, tmp_path: Path) -> None:
    model = of_tokens("Equal", PAD)
    found = rewrite_model(ir.from_proto(model), form=form)
    assert [site.state for site in found.sites] == ["rewritten"]
    ids = np.random.default_rng(1).integers(0, WORDS, (3, 9))
    ids[0, 5:], ids[1, 2] = PAD, PAD
    before, after = run(model, ids), run(ir.to_proto(found.model), ids)
    assert np.abs(before - after).max() < 1e-5
    shown = ids.copy()
    shown[ids == PAD] = 7
    assert np.abs(before - run(model, shown)).max() > 1e-2
