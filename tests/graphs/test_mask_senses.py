"""Masks that hide keys where they are true, and masks that are equal for all queries.

They are drawn in the sense of the graph, with more than one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from descriptions import described
from small_graphs import HEADS, HIDDEN, SIZE, Graph, _info, _model

from posexport.artifact.graph_file import read_graph
from posexport.graphs.cases import cases_of
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.inspection import inspected
from posexport.graphs.mask_senses import HIDES, SHOWS, sense_of
from posexport.graphs.roles import roles_of
from posexport.rewrite.rewriter import rewrite_model
from posexport.rewrite.whole import whole_evidence

FLOAT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL

SENSES = {
    "hides": ("y = Where (m, low, x)", HIDES),
    "added": ("a = Where (m, low, zero) y = Add (a, x)", HIDES),
    "not": ("n = Not (m) y = Where (n, x, low)", HIDES),
    "laid out": ("u = Unsqueeze (m, axis) y = Where (u, low, x)", HIDES),
    "shows": ("y = Where (m, x, low)", SHOWS),
    "not that hides": ("n = Not (m) y = Where (n, low, x)", SHOWS),
    "with others": ("a = And (later, m) y = Where (a, x, low)", SHOWS),
    "beside others": ("a = Concat <axis: int = 0> (later, m) y = Where (a, low, x)", HIDES),
    "padded": ("a = Pad (m, axis) y = Where (a, low, x)", HIDES),
    "chosen": ("a = Gather (m, axis) n = Not (a) y = Where (n, low, x)", SHOWS),
    "an index": ("c = Cast <to: int = 7> (m) a = Gather (x, c) y = Add (a, x)", None),
    "both": ("a = Where (m, x, low) y = Where (m, low, a)", None),
    "small": ("y = Where (m, small, x)", None),
    "read": ("c = Cast <to: int = 1> (m) y = Add (c, x)", None),
}
NUMBERS = {
    "times": ("a = Mul (m, low) y = Add (a, x)", HIDES),
    "one less": ("n = Sub (one, m) a = Mul (n, low) y = Add (a, x)", SHOWS),
    "less one": ("n = Sub (m, one) a = Mul (n, high) y = Add (a, x)", SHOWS),
    "less one, low": ("n = Sub (m, one) a = Mul (n, low) y = Add (a, x)", None),
    "is zero": ("e = Equal (m, zero) y = Where (e, low, x)", SHOWS),
    "is one": ("e = Equal (m, one) y = Where (e, low, x)", HIDES),
    "is more": ("e = Greater (m, zero) y = Where (e, x, low)", SHOWS),
    "is more than one": ("e = Greater (m, one) y = Where (e, x, low)", None),
    "two less": ("n = Sub (two, m) a = Mul (n, low) y = Add (a, x)", None),
    "the least of two": (
        "l = Cast <to: int = 1> (later) a = Min (m, l) n = Sub (one, a) c = Mul (n, low) y = Add (c, x)",
        SHOWS,
    ),
    "half": ("h = Mul (m, half) n = Sub (half, h) a = Mul (n, low) y = Add (a, x)", SHOWS),
    "a mask in between": (
        "b = Cast <to: int = 9> (m) a = And (later, b) f = Cast <to: int = 1> (a) "
        "n = Sub (one, f) c = Mul (n, low) y = Add (c, x)",
        SHOWS,
    ),
}


@pytest.mark.parametrize(("kind", "name"), [*((BOOL, name) for name in SENSES), *((FLOAT, name) for name in NUMBERS)])
def test_what_a_truth_value_does(kind: int, name: str) -> None:
    body, sense = (SENSES if kind == BOOL else NUMBERS)[name]
    model = ir.from_onnx_text(
        f'<ir_version: 9, opset_import: ["" : 18]> agraph ({"bool" if kind == BOOL else "float"}[b, 1, s, t] m, '
        "float[b, 4, s, t] x, bool[s, t] later) => (float y) <float low = {-1e9}, float zero = {0}, float small = {-5},"
        " float one = {1}, float two = {2}, float half = {0.5}, float high = {1e4}, int64[1] axis = {0}> "
        f"{{ {body} }}"
    )
    assert sense_of(model.graph.inputs[0]) == sense


def masked(how: str, *shape: int | str, causal: bool = False) -> onnx.ModelProto:
    """An encoder with a mask of this shape."""
    g = Graph()

    def heads(part: str) -> str:
        split = g.op("Reshape", g.op("MatMul", "hidden_states", g.random(part, HIDDEN, HIDDEN)), heads_shape)
        return g.op("Transpose", split, perm=[0, 2, 1, 3])

    heads_shape, low = g.constant([0, 0, HEADS, SIZE]), g.constant(-1e9, np.float32)
    q, k, v = heads("q"), heads("k"), heads("v")
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(0.3, np.float32))
    if causal:
        from small_graphs import causal as seen_before

        scores = g.op("Where", seen_before(g, scores), scores, low)
    if how in ("added", "hidden in floats"):
        added = g.op("Mul", "attention_mask", low) if how != "added" else "attention_mask"
        scores = g.op("Add", scores, added)
    else:
        mask = g.op("Cast", "attention_mask", to=BOOL) if "floats" in how else "attention_mask"
        scores = g.op("Where", mask, *((scores, low) if "shown" in how else (low, scores)))
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.op("Reshape", out, g.constant([0, 0, HIDDEN]), name="y")
    inputs = [_info("hidden_states", FLOAT, "batch", "seq", HIDDEN)]
    inputs.append(_info("attention_mask", FLOAT if how in ("added", *FLOATS) else BOOL, *shape))
    return _model(g, inputs, [_info("y", FLOAT, "batch", "seq", HIDDEN)], 18)


FLOATS = ["shown in floats", "hidden in floats"]

SHAPES = [("batch", 1, 1, "seq"), ("batch", 1, "seq", "seq"), (1, 1, 1, "seq"), ("batch", 1, 1, "keys")]


def drawn(model: onnx.ModelProto) -> Iterator[DrawnInputs]:
    yield from cases_of(roles_of(ir.from_proto(model)), 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["added", "shown", "hidden", *FLOATS])
def test_masks_are_drawn_at_many_tokens_and_hide_some_keys_of_each_row_not_all(
    how: str, shape: tuple[int | str, ...]
) -> None:
    tokens, hides = set[int](), False
    for case in drawn(masked(how, *shape)):
        mask, tokens = case.arrays["attention_mask"], tokens | {case.arrays["hidden_states"].shape[1]}
        hidden = ~mask.astype(bool)
        seen = mask > -1e3 if how == "added" else hidden if "hidden" in how else ~hidden
        assert how == "added" or {*np.unique(mask).tolist()} <= {0.0, 1.0}
        assert seen.shape[-1] == case.arrays["hidden_states"].shape[1] and seen.any(-1).all()
        hides |= not seen.all()
    assert len(tokens) > 3 and hides


@pytest.mark.parametrize(("shape", "kind"), [(SHAPES[0], "none"), (SHAPES[1], "input")])
@pytest.mark.parametrize("how", ["added", "shown", "hidden", *FLOATS])
def test_attention_is_described_and_rewritten(
    how: str, shape: tuple[int | str, ...], kind: str, tmp_path: Path
) -> None:
    model, path = masked(how, *shape), tmp_path / "masked.onnx"
    onnx.save(model, path)
    (found,) = inspected(read_graph(path), {}).attentions
    mask = found["mask"]
    assert (mask["kind"], mask["padding"] or mask.get("inputs")) == (kind, ["attention_mask"])
    done = rewrite_model(ir.from_proto(model), form="native")
    assert [site.state for site in done.sites] == ["rewritten"]


def test_a_planted_mask_of_later_keys_is_seen() -> None:
    """With one token, this mask has no effect."""
    one, other = (ir.from_proto(masked("added", *SHAPES[0], causal=causal)) for causal in (False, True))
    evidence = whole_evidence(one, other, list(drawn(masked("added", *SHAPES[0]))))
    assert evidence.problem is not None


def test_a_mask_that_is_repeated_for_each_head() -> None:
    """Scores [B * N, S, T] with a mask [B, S, T] of floats: each element is an element of all heads."""
    model = masked("shown in floats", "batch", "seq", "seq")
    (where,) = [node for node in model.graph.node if node.op_type == "Where"]
    g = Graph(1)
    four = g.op(
        "Expand",
        g.op("Unsqueeze", where.input[0], g.weight("axis", np.array([1]))),
        g.weight("heads", np.array([1, HEADS, 1, 1])),
    )
    where.input[0] = four
    at = [*model.graph.node].index(where)
    nodes = [*model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *g.nodes, *nodes[at:]])
    model.graph.initializer.extend(g.weights)
    found = described(model)["mask"]
    assert (found["kind"], found.get("inputs")) == ("input", ["attention_mask"])
