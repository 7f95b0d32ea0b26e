"""Properties of every encoding at all sizes: invariances, and keys that a query cannot see have no effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle_scores
import pytest
import torch
from helpers import CASES, Array, case, inputs_for, run_block, small_spec, weights_for
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport import custom_ops
from posexport.spec.spec import Spec

RELATIVE = ["rope", "rope-half", "rope-partial", "rope2d", "rope2d-half", "alibi", "t5", "relative", "relative-table"]
FREE = [name for name in CASES if not (case(name).causal or case(name).window)]
kinds = st.sampled_from(["gaps", "shuffled", "uneven"])


def run(spec: Spec, inputs: dict[str, Array]) -> Array:
    return run_block(spec, weights_for(spec), inputs)


@given(name=st.sampled_from(RELATIVE), kind=kinds, shift=st.integers(-1000, 1000), seed=st.integers(0, 20))
@settings(max_examples=60)
def test_only_distances_count(name: str, kind: str, shift: int, seed: int) -> None:
    spec = case(name)
    inputs = inputs_for(spec, 2, 6, kind, seed)
    moved = {**inputs, "position_ids": inputs["position_ids"] + shift}
    np.testing.assert_allclose(run(spec, moved), run(spec, inputs), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_absolute_encodings_do_see_a_shift(name: str) -> None:
    spec = case(name)
    inputs = inputs_for(spec, 2, 6)
    moved = {**inputs, "position_ids": inputs["position_ids"] + 1}
    assert np.abs(run(spec, moved) - run(spec, inputs)).max() > 1e-3


@given(name=st.sampled_from(FREE), kind=kinds, order=st.permutations(range(7)), seed=st.integers(0, 20))
@settings(max_examples=60)
def test_tokens_with_their_positions_may_come_in_any_order(name: str, kind: str, order: list[int], seed: int) -> None:
    spec = case(name)
    inputs = inputs_for(spec, 2, 7, kind, seed)
    mixed = {key: array[:, order] for key, array in inputs.items()}
    np.testing.assert_allclose(run(spec, mixed), run(spec, inputs)[:, order], atol=1e-11, rtol=0)


@given(name=st.sampled_from(list(CASES)), cut=st.integers(1, 6), seed=st.integers(0, 20))
@settings(max_examples=40)
def test_causal_means_that_later_tokens_change_nothing(name: str, cut: int, seed: int) -> None:
    spec = case(name, causal=True, **({"num_buckets": 8} if name.startswith("t5") else {}))
    inputs = inputs_for(spec, 2, 7, "uneven", seed)
    other = inputs_for(spec, 2, 7, "uneven", seed + 1000)
    changed = {key: np.concatenate([array[:, :cut], other[key][:, cut:]], 1) for key, array in inputs.items()}
    before, after = run(spec, inputs), run(spec, changed)
    np.testing.assert_allclose(after[:, :cut], before[:, :cut], atol=1e-12, rtol=0)
    assert np.abs(after[:, cut:] - before[:, cut:]).max() > 1e-3


@given(
    name=st.sampled_from(["none", "rope", "alibi", "t5", "relative"]),
    window=st.integers(1, 4),
    causal=st.booleans(),
    token=st.integers(0, 8),
)
@settings(max_examples=40)
def test_keys_outside_the_window_have_no_effect(name: str, window: int, causal: bool, token: int) -> None:
    spec = case(name, window=window, causal=causal)
    inputs = inputs_for(spec, 1, 9)
    changed = {**inputs, "hidden_states": inputs["hidden_states"].copy()}
    changed["hidden_states"][:, token] += 3.0
    moved = np.abs(run(spec, changed) - run(spec, inputs)).max((0, 2)) > 1e-9
    near = [i for i in range(9) if (0 <= i - token < window if causal else abs(i - token) < window)]
    assert list(np.flatnonzero(moved)) == near


@given(
    data=st.data(),
    layout=st.sampled_from([(True, 1), (False, 1), (False, 2)]),
    pairs=st.sampled_from([2, 4]),
    beyond=st.sampled_from([0, 3]),
)
def test_rotation_keeps_norms_and_what_it_does_not_turn(
    data: st.DataObject, layout: tuple[bool, int], pairs: int, beyond: int
) -> None:
    head_dim = 2 * pairs + beyond
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = torch.from_numpy(random.standard_normal((2, 5, 3 * head_dim)))
    positions = torch.from_numpy(random.integers(-1000, 1000, (2, 5)))
    cos, sin = custom_ops.sinusoids(positions, torch.from_numpy(random.random(pairs)), 1.0)
    interleaved, count = layout
    turned = custom_ops.rotate(x, cos, sin, head_dim, interleaved, [pairs // count] * count).unflatten(
        -1, (3, head_dim)
    )
    heads = x.unflatten(-1, (3, head_dim))
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1), atol=1e-12, rtol=0)
    assert torch.equal(turned[..., 2 * pairs :], heads[..., 2 * pairs :])
    assert not torch.allclose(turned, heads)


@given(heads=st.integers(1, 20), positions=st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=6, unique=True))
def test_alibi_lowers_the_score_with_distance(heads: int, positions: list[int]) -> None:
    slopes = torch.tensor(oracle_scores.alibi_slopes(heads), dtype=torch.float64)
    at = torch.tensor([positions])
    bias = custom_ops.alibi_bias(at, at, slopes, None)[0]
    assert (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert torch.equal(bias, bias.transpose(1, 2))
    near_to_far = (at[0] - at[0, 0]).abs().argsort()
    assert (bias[:, 0, near_to_far].diff(dim=-1) <= 0).all()
    assert (bias[:, 0, 1:] < 0).all()
    assert (bias.diff(dim=0) >= 0).all() or heads & (
        heads - 1
    )  # For a power of two, slopes decrease from head to head.


def test_grouped_queries_equal_repeated_keys() -> None:
    """Query head n reads key head n // (N/K), as in multi-head attention with repeated key heads."""
    for encoding in ("rope", "alibi", "t5"):
        grouped, full = small_spec(encoding, num_kv_heads=2), small_spec(encoding)
        weights = dict(weights_for(grouped))
        inputs = inputs_for(grouped, 2, 6, "gaps")
        repeated: dict[str, Any] = dict(weights)
        for name in ("k_proj.weight", "v_proj.weight"):
            repeated[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
        np.testing.assert_allclose(
            run_block(full, repeated, inputs), run_block(grouped, weights, inputs), atol=1e-12, rtol=0
        )


def test_rope2d_tells_columns_from_rows() -> None:
    spec = small_spec("rope2d")
    inputs = inputs_for(spec, 1, 6, "gaps")
    swapped = {**inputs, "position_ids": inputs["position_ids"][..., ::-1].copy()}
    assert np.abs(run(spec, swapped) - run(spec, inputs)).max() > 1e-3


def test_angles_refuse_half_precision() -> None:
    """A block that is cast to half precision as a whole would be wrong by radians, so it raises an error."""
    block_positions = torch.zeros(1, 2, dtype=torch.int64)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match=r"it must be torch.float32"):
            custom_ops.sinusoids(block_positions, torch.ones(2, dtype=dtype), 1.0)
