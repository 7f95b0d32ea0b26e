"""Every encoding and block against the oracle: the papers' formulas in numpy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle_scores
import oracles
import pytest
from helpers import CASES, KINDS, MORE_CASES, as_float64, case, inputs_for, run_block, small_spec, weights_for
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.models.biases import alibi_slopes, t5_buckets
from posexport.spec.spec import Spec

LENGTHS = ((1, 1), (1, 5), (2, 7), (3, 12))

BLOCKS: dict[str, dict[str, Any]] = {
    "pre-layernorm-gelu": {"encoding": "rope"},
    "post-layernorm-gelu": {"encoding": "learned", "norm": "post", "bias": True},
    "pre-rmsnorm-swiglu": {
        "encoding": "rope",
        "layout": "half",
        "norm_type": "rmsnorm",
        "mlp": "swiglu",
        "causal": True,
    },
    "post-rmsnorm-swiglu": {"encoding": "sinusoidal", "norm": "post", "norm_type": "rmsnorm", "mlp": "swiglu"},
    "three-layers": {"encoding": "t5", "num_buckets": 8, "max_distance": 9, "layers": 3},
    "relative-layers": {"encoding": "relative", "layers": 2, "intermediate_size": 20, "norm_eps": 1e-3},
}


def difference(spec: Spec, batch: int, seq: int, kind: str, dtype: str = "fp64", seed: int = 0) -> float:
    """The largest error of the torch block, relative to the largest output."""
    weights, inputs = weights_for(spec, seed), inputs_for(spec, batch, seq, kind, seed)
    wanted = oracles.block(spec, as_float64(weights), inputs)
    made = run_block(spec, weights, inputs, dtype)
    assert made.shape == wanted.shape
    return float(np.abs(made - wanted).max() / max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("name", CASES)
def test_block_equals_the_formula(name: str) -> None:
    for batch, seq in LENGTHS:
        for kind in KINDS:
            assert difference(case(name), batch, seq, kind) < 1e-11, (batch, seq, kind)


@pytest.mark.parametrize("name", CASES)
def test_fp32_stays_within_its_rounding(name: str) -> None:
    for kind in KINDS:
        # Angles are fp32: at position 2000, their error is at most 2000 * 2^-24.
        assert difference(case(name), 2, 9, kind, "fp32") < 2e-4
    assert difference(case(name), 2, 9, "consecutive", "fp32") < 5e-6


@pytest.mark.parametrize("name", CASES)
def test_half_precision_stays_close_far_from_the_start(name: str) -> None:
    """Angles in half precision would be off by radians here. Only the rounding of weights and values is left."""
    for dtype, bound in (("fp16", 6e-3), ("bf16", 5e-2)):
        assert difference(case(name), 2, 9, "offset", dtype) < bound


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MORE_CASES)
def test_more_blocks_equal_the_formula_in_every_dtype(name: str) -> None:
    for (batch, seq), kind in zip((*LENGTHS, (2, 9)), KINDS, strict=True):
        assert difference(case(name), batch, seq, kind) < 1e-11, (batch, seq, kind)
    for kind in ("gaps", "offset"):
        assert difference(case(name), 2, 9, kind, "fp32") < 5e-4
    assert difference(case(name), 2, 9, "consecutive", "fp32") < 1e-5
    if not name.startswith("rope-mixed"):  # Its frequencies are weights, which are rounded here.
        for dtype, bound in (("fp16", 1e-2), ("bf16", 8e-2)):
            assert difference(case(name), 2, 9, "offset", dtype) < bound


@pytest.mark.parametrize("name", BLOCKS)
def test_transformer_block_equals_the_formula(name: str) -> None:
    spec = small_spec(block="transformer", **BLOCKS[name])
    for kind in ("consecutive", "uneven"):
        assert difference(spec, 2, 6, kind) < 1e-11
    assert difference(spec, 2, 6, "consecutive", "fp32") < 1e-5


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("encoding", ["none", "learned", "sinusoidal", "rope"])
def test_vocabulary_and_its_scale(encoding: str, scale: bool) -> None:
    assert difference(small_spec(encoding, vocab_size=11, scale_embedding=scale, layers=2), 2, 6, "shuffled") < 1e-11


def test_scale_is_a_factor_on_the_logits_but_not_on_biases() -> None:
    for encoding in ("none", "alibi", "t5", "relative", "rope"):
        assert difference(small_spec(encoding, scale=1.0), 2, 6, "gaps") < 1e-11


@pytest.mark.parametrize(
    ("encoding", "fault"),
    [
        ("rope", {"layout": "half"}),
        ("rope", {"theta": 9_000.0}),
        ("rope", {"rotary_dim": 6}),
        ("rope2d", {"layout": "half"}),
        ("sinusoidal", {"order": "cos-sin"}),
        ("sinusoidal", {"layout": "half"}),
        ("t5", {"max_distance": 64}),
        ("relative", {"theta": 100.0}),
        ("none", {"causal": True}),
        ("none", {"window": 3}),
        ("none", {"scale": 0.3}),
    ],
)
def test_the_oracle_tells_every_option_apart(encoding: str, fault: dict[str, Any]) -> None:
    """A planted fault in any option exceeds the bound above by far."""
    spec, wrong = small_spec(encoding), small_spec(encoding, **fault)
    inputs = inputs_for(spec, 2, 40, "shuffled")
    wanted = oracles.block(wrong, as_float64(weights_for(spec)), inputs)
    assert np.abs(run_block(spec, weights_for(spec), inputs) - wanted).max() > 1e-4


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_sizes_and_positions(data: st.DataObject) -> None:
    encoding = data.draw(
        st.sampled_from(["none", "learned", "sinusoidal", "relative", "t5", "rope", "rope2d", "alibi"])
    )
    heads_per_group, num_kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    head_dim = 4 * data.draw(st.integers(1, 3))
    over: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "num_heads": heads_per_group * num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": 2 * data.draw(st.integers(1, 9)),
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.none() | st.integers(1, 6)),
        "bias": data.draw(st.booleans()),
    }
    if encoding in ("rope", "rope2d"):
        over["layout"] = data.draw(st.sampled_from(["interleaved", "half"]))
        over["theta"] = data.draw(st.floats(1.5, 1e6))
    if encoding == "rope":
        over["rotary_dim"] = data.draw(st.none() | st.integers(1, head_dim // 2).map(lambda half: 2 * half))
    if encoding == "relative" and data.draw(st.booleans()):
        over |= {"table": "learned", "max_distance": data.draw(st.integers(1, 30))}
    if encoding == "t5":
        over["num_buckets"] = 4 * data.draw(st.integers(1, 8))
        over["max_distance"] = over["num_buckets"] + data.draw(st.integers(0, 200))
    spec = small_spec(encoding, **over)
    batch, seq = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    assert difference(spec, batch, seq, data.draw(st.sampled_from(KINDS)), seed=data.draw(st.integers(0, 99))) < 1e-10


def test_alibi_slopes_are_the_authors() -> None:
    for heads in range(1, 41):
        assert alibi_slopes(heads) == pytest.approx(oracle_scores.alibi_slopes(heads), rel=1e-12), heads


@given(quarter=st.integers(1, 24), beyond=st.integers(1, 300), bidirectional=st.booleans())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_t5_buckets_are_the_papers_and_monotone(quarter: int, beyond: int, bidirectional: bool) -> None:
    num_buckets = 4 * quarter
    max_distance = num_buckets // (4 if bidirectional else 2) + beyond
    made = t5_buckets(num_buckets, max_distance, bidirectional)
    offsets = range(-max_distance, max_distance + 1)
    assert made == [oracle_scores.t5_bucket(offset, num_buckets, max_distance, bidirectional) for offset in offsets]
    backwards, forwards = made[: max_distance + 1][::-1], made[max_distance + 1 :]
    assert backwards == sorted(backwards)
    assert forwards == sorted(forwards)
    assert max(made) == num_buckets - 1
    # Every distance beyond the ends of the table has the last bucket of its side.
    for far in (max_distance + 1, 10 * max_distance):
        assert oracle_scores.t5_bucket(-far, num_buckets, max_distance, bidirectional) == made[0]
        assert oracle_scores.t5_bucket(far, num_buckets, max_distance, bidirectional) == made[-1]
