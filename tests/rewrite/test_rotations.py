"""Rotations of unusual pairs, and of parts of queries and keys, become rotary operators with the same results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from attention_graphs import HEADS, SIZE, Rotate, Writer, attention, rotation, visible
from rotation_graphs import (
    assigned,
    becoming_halves,
    by_partners,
    by_parts,
    cut_table,
    normed,
    part,
    sliced,
    still_at_first,
)

from posexport.graphs.attention.pairings import Pairs
from posexport.graphs.view import view_of
from posexport.rewrite.result import ALREADY
from posexport.rewrite.rewriter import rewrite_model

Array = np.ndarray[Any, Any]

FOUR = np.array([1.0, 0.3, 0.1, 0.03])
EIGHT = 10_000.0 ** (-np.arange(8) / 8)


def of_pairs(size: int, pairs: list[tuple[int, int]], frequencies: Array) -> Rotate:
    """A rotation of these pairs of a head; the other features are not rotated."""
    partners, own = list(range(size)), np.zeros(size)
    for (a, b), frequency in zip(pairs, frequencies, strict=True):
        partners[a], partners[b] = b, a
        own[[a, b]] = frequency
    return by_partners(partners, own)


def runs(start: int, *sizes: int) -> list[tuple[int, int]]:
    pairs = []
    for size in sizes:
        pairs += [(start + i, start + size + i) for i in range(size)]
        start += 2 * size
    return pairs


WHOLE = {
    "the last features": (of_pairs(SIZE, runs(8, 4), FOUR), Pairs(interleaved=False, runs=(4,), start=8)),
    "the last features, interleaved": (
        of_pairs(SIZE, [(8, 9), (10, 11), (12, 13), (14, 15)], FOUR),
        Pairs(interleaved=True, runs=(4,), start=8),
    ),
    "the last features become halves": (
        by_parts(lambda g, heads: sliced(g, heads, 0, 8), becoming_halves(FOUR, 8)),
        Pairs(interleaved=False, runs=(4,), start=8, sorted=True),
    ),
    "the middle": (of_pairs(SIZE, runs(4, 4), FOUR), Pairs(interleaved=False, runs=(4,), start=4)),
    "the fast half of a head": (
        of_pairs(SIZE, [(0, 8), (1, 9), (2, 10), (3, 11)], FOUR),
        Pairs(interleaved=False, runs=(8,)),
    ),
    "runs of different lengths": (of_pairs(SIZE, runs(0, 2, 3, 3), EIGHT), Pairs(interleaved=False, runs=(2, 3, 3))),
    "equal runs and others": (of_pairs(SIZE, runs(0, 2, 2), FOUR), Pairs(interleaved=False, runs=(2, 2))),
    "interleaved pairs that become halves": (
        by_parts(becoming_halves(EIGHT)),
        Pairs(interleaved=False, runs=(8,), sorted=True),
    ),
    "a table that is cut": (cut_table(EIGHT), Pairs(interleaved=True, runs=(8,))),
    "a pair that stands still on short rows": (still_at_first(EIGHT), Pairs(interleaved=True, runs=(8,))),
    "features that are assigned": (assigned(EIGHT), Pairs(interleaved=True, runs=(8,))),
}
"""Rotations of whole queries and keys, with their pairs."""


def still(g: Writer, heads: str) -> str:
    return sliced(g, heads, 8, SIZE)


IN_PARTS = {
    "a part beside a still one": normed(by_parts(part(0, 8, FOUR), still)),
    "a norm behind it": normed(rotation(EIGHT)),
}
"""Rotations of values from which queries and keys are computed."""


def rewritten(rotate: Rotate, form: str) -> tuple[onnx.ModelProto, onnx.ModelProto, Any]:
    model = attention(rotate=rotate, add=[visible()])
    result = rewrite_model(ir.from_proto(model), form=form, target="ort")
    return model, ir.to_proto(result.model), result


def outputs(model: onnx.ModelProto, past: int = 0) -> Array:
    rng = np.random.default_rng(3)
    inputs = {
        "hidden_states": rng.standard_normal((3, 6, HEADS * SIZE)).astype(np.float32),
        "position_ids": np.arange(6) + np.array([[0], [7], [900]]),
    }
    if past:
        cache = rng.standard_normal((2, 3, HEADS, past, SIZE)).astype(np.float32)
        inputs |= dict(zip(("past_key", "past_value"), cache, strict=True))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(["output"], {one.name: inputs[one.name] for one in session.get_inputs()})
    return np.asarray(output)


def count(model: onnx.ModelProto, name: str) -> int:
    return sum(node.op_type == name for node in model.graph.node)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("form", "name"), [*itertools.product(["native", "contrib"], [*WHOLE, *IN_PARTS])])
def test_they_become_rotary_operators(name: str, form: str) -> None:
    rotate = WHOLE[name][0] if name in WHOLE else IN_PARTS[name]
    model, new, result = rewritten(rotate, form)
    (site,) = result.sites
    assert site.state == "rewritten" and site.evidence.agrees
    assert count(new, "RotaryEmbedding") >= 2
    assert count(new, "Softmax") == 0
    want, have = outputs(model), outputs(new)
    assert want.shape == have.shape and np.isfinite(have).all()
    assert np.abs(want - have).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("name", WHOLE)
def test_pairs_are_found(name: str) -> None:
    rotate, pairs = WHOLE[name]
    (one,) = view_of(ir.from_proto(attention(rotate=rotate))).attentions
    assert one.state == "recognised"
    assert [side.rotary.pairs for side in (one.q, one.k)] == [pairs, pairs]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_are_found(name: str) -> None:
    (one,) = view_of(ir.from_proto(attention(rotate=IN_PARTS[name]))).attentions
    assert one.state == "recognised"
    assert one.q.rotary is None and one.q.turns and one.k.turns  # type: ignore[union-attr]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*WHOLE, *IN_PARTS])
def test_a_second_time_changes_nothing(name: str) -> None:
    rotate = WHOLE[name][0] if name in WHOLE else IN_PARTS[name]
    _, new, _ = rewritten(rotate, "native")
    again = rewrite_model(ir.from_proto(new), form="native", target="ort")
    assert not again.changed and [site.reason.code for site in again.sites if site.reason] == [ALREADY]


def not_mutual(g: Any, heads: str, queries: bool) -> str:
    """Three features that are mixed in a ring, which is not a rotation of pairs."""
    ring = [1, 2, 0, *range(3, SIZE)]
    return by_partners(ring, np.r_[np.full(3, 0.5), np.zeros(SIZE - 3)], np.ones(SIZE))(g, heads, queries)


WRONG = {
    "mirrored": by_partners([1, 0, *range(2, SIZE)], np.r_[0.5, 0.5, np.zeros(SIZE - 2)], np.ones(SIZE)),
    "another frequency in a pair": by_partners([1, 0, *range(2, SIZE)], np.r_[0.5, 0.4, np.zeros(SIZE - 2)]),
    "three in a ring": not_mutual,
    "features that are added": assigned(EIGHT, zeros=False, reduction="add"),
}
"""Functions that are not rotations of pairs."""


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_rotation_is_none(name: str) -> None:
    model, new, result = rewritten(WRONG[name], "native")
    assert count(new, "RotaryEmbedding") == 0
    assert [site.state for site in result.sites] == ["rewritten"]  # only the products
    assert np.abs(outputs(model) - outputs(new)).max() <= 1e-5 * np.abs(outputs(model)).max()


def of_values(g: Writer, scores: str) -> str:
    """A bias computed from the cached and new values."""
    sums = g.op("ReduceSum", "present_value", g.const([-1]), keepdims=0)
    return g.op("Add", scores, g.op("Unsqueeze", sums, g.const([2])))


def test_a_bias_of_the_cached_values_leaves_the_cache_outside() -> None:
    model = attention(rotate=rotation(EIGHT), add=[of_values, visible()], cached=True)
    result = rewrite_model(ir.from_proto(model), form="native", target="ort")
    (site,) = result.sites
    assert site.state == "rewritten" and site.evidence is not None and site.evidence.agrees and site.reason is None
    new = ir.to_proto(result.model)
    assert count(new, "RotaryEmbedding") == 2 and count(new, "Attention") == 1 and count(new, "Concat") >= 2
    want, have = (outputs(one, past=5) for one in (model, new))
    assert np.abs(want - have).max() <= 1e-5 * np.abs(want).max()
