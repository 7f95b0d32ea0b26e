"""Rewrites of keys that are rotated after the cache, and of heads that are rotated twice.

The oracle is ONNX Runtime with the original graph, at sizes that the rewrite did not try.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, SIZE, attention
from late_rotation_graphs import AGAIN, keys_turn_late, latent
from rewrite_helpers import rewritten_model
from small_graphs import run

from posexport.rewrite.angles.rewriter import rewrite_exactly
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.rewriter import REWRITTEN

Array = np.ndarray[Any, Any]

SIZES = [(1, 1, 9), (2, 6, 0), (3, 4, 13)]
"""Rows, tokens and cached tokens."""


def arrays(model: onnx.ModelProto, batch: int, seq: int, past: int) -> dict[str, Array]:
    """Inputs with sizes by the names of their dimensions; positions are consecutive."""
    rng, sizes = np.random.default_rng(seq), {"batch": batch, "seq": seq, "past": past}
    made: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        made[value.name] = rng.standard_normal(shape).astype(np.float32)
    if "position_ids" in made:
        made["position_ids"] = np.tile(np.arange(past, past + seq), (batch, 1))
    return made


def check_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    for sizes in SIZES:
        feeds = arrays(before, *sizes)
        want, have = run(before, feeds), run(after, feeds)
        for name, value in want.items():
            np.testing.assert_allclose(have[name], value, atol=2e-5)


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    ("form", "repeated_first", "given"),
    [*itertools.product(["native", "contrib", "function"], [False, True], [False, True])],
)
def test_keys_that_turn_behind_their_cache(form: str, repeated_first: bool, given: bool) -> None:
    model = keys_turn_late(2, repeated_first=repeated_first, given=given)
    done, after = rewritten_model(model, form=form, target="portable" if form == "function" else "ort")
    (site,) = done.sites
    assert site.state == REWRITTEN and getattr(site.attention, "num_kv_heads", 0) == 2
    check_same(model, after)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_their_caches_may_be_buffers(form: str) -> None:
    """All keys turn at each step: those in the used part of the buffer."""
    model, room = keys_turn_late(2), 24
    done, after = rewritten_model(model, form=form, target="ort", kv_cache="shared")
    assert [site.state for site in done.sites] == [REWRITTEN]
    for batch, seq, past in SIZES:
        feeds = arrays(model, batch, seq, past)
        free = ((0, 0), (0, 0), (0, room - past), (0, 0))
        buffers = {name: np.pad(a, free, constant_values=99) if "past" in name else a for name, a in feeds.items()}
        buffers["past_sequence_length"] = np.array([past])
        want, have = run(model, feeds), run(after, buffers)
        for name, value in want.items():
            part = have[name][:, :, : past + seq] if value.ndim == 4 else have[name]
            np.testing.assert_allclose(part, value, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("repeated_first", [False, True])
def test_their_angles_become_exact(repeated_first: bool) -> None:
    model = keys_turn_late(2, repeated_first=repeated_first)
    done = rewrite_exactly(ir.from_proto(model), RewriteOptions(form="native", target="ort", angles="exact"))
    (site,) = done.sites
    assert site.angles is not None and (site.angles.state, site.angles.positions) == ("exact", 2**24 - 1)
    check_same(model, ir.to_proto(done.model))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("form", "name"), [*itertools.product(["decomposed", "native"], AGAIN)])
def test_what_turns_twice_is_not_called_exact(name: str, form: str) -> None:
    """Otherwise only one of the two rotations would have exact angles."""
    model = attention(rotate=AGAIN[name])
    done = rewrite_exactly(ir.from_proto(model), RewriteOptions(form=form, target="ort", angles="exact"))
    (site,) = done.sites
    assert site.angles is not None and site.angles.state == "parity" and not site.angles.changed
    assert site.angles.reason is not None and site.angles.reason.code == "angles-elsewhere"
    after = ir.to_proto(done.model)
    for batch, seq in ((1, 1), (2, 7)):
        places = np.arange(2**20, 2**20 + seq)[None] + np.zeros((batch, 1), np.int64)
        features = np.random.default_rng(seq).standard_normal((batch, seq, HEADS * SIZE)).astype(np.float32)
        feeds = {"hidden_states": features, "position_ids": places % 60 if name == "by a table" else places}
        np.testing.assert_allclose(run(after, feeds)["output"], run(model, feeds)["output"], atol=2e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_parts_that_turn(cached: bool) -> None:
    model = latent(cached=cached)
    done, after = rewritten_model(model, form="native", target="ort")
    assert [site.state for site in done.sites] == [REWRITTEN]
    check_same(model, after)
