"""Hidden states along the weights, hidden states with magnitudes between usual and quiet ones, and equal sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_spec, weights_for

from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.aligned import MOST, directions_of
from posexport.verify.cases import Case, make_cases

Array = np.ndarray[Any, Any]
DECODER: dict[str, Any] = {"causal": True, "kv_cache": "concat", "padding_mask": True}
SPECS: dict[str, Spec] = {
    "bare": small_spec("rope", **DECODER),
    "normed": small_spec("t5", block="transformer", norm_type="rmsnorm", scale=1.0),
    "grouped": small_spec("alibi", block="transformer", num_kv_heads=2, **DECODER),
    "stack": small_spec("rope", block="transformer", mlp="swiglu", layers=2, causal=True),
    "half": small_spec("rope", block="transformer", dtype="fp16", scale=1.0),
    "cross": small_spec("none", cross=True),
}


def arrays_of(weights: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: tensor.float().numpy() for name, tensor in weights.items()}


@cache
def cases_of(spec: Spec, seed: int = 0) -> list[Case]:
    directions = directions_of(spec, arrays_of(weights_for(spec)).get)
    return make_cases(spec, seed, bounds_of(graph_inputs(spec), {}), directions=directions)


def is_along(case: Case) -> bool:
    return "along weights" in case.name or "aligned" in case.name


def logits(spec: Spec, weights: dict[str, torch.Tensor], case: Case) -> Array:
    """scale * q_i . k_j of the first layer without positions, computed from the formulas: [batch, heads, tokens,
    keys]."""
    prefix = "layers.0." if spec.layers > 1 else ""
    values = {name: array.double().numpy() for name, array in weights.items()}
    states = case.arrays["hidden_states"].astype(np.float64)
    if spec.norm == "pre":
        if spec.norm_type == "layernorm":
            states = states - states.mean(-1, keepdims=True)
        states = states / np.sqrt((states**2).mean(-1, keepdims=True) + 1e-6)
        states = states * values[f"{prefix}input_layernorm.weight"]
    of_keys = case.arrays["encoder_hidden_states"].astype(np.float64) if spec.cross else states
    q = (states @ values[f"{prefix}q_proj.weight"].T).reshape(*states.shape[:2], spec.num_heads, -1)
    k = (of_keys @ values[f"{prefix}k_proj.weight"].T).reshape(*of_keys.shape[:2], spec.num_kv_heads, -1)
    k = np.repeat(k, spec.num_heads // spec.num_kv_heads, 2)
    made: Array = spec.scale * np.einsum("bshd,bthd->bhst", q, k)
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPECS)
def test_logits_of_tokens_along_weights_are_many_times_those_of_others(name: str) -> None:
    spec, weights = SPECS[name], weights_for(SPECS[name])
    cases = cases_of(spec)
    sizes: dict[bool, list[float]] = {True: [], False: []}
    lowest = []
    for case in cases:
        along = is_along(case)
        plain = case.name.startswith("consecutive")
        if along or plain:
            found = logits(spec, weights, case)
            sizes[along].append(float(np.abs(found).max()))
            if along:
                lowest.append(float(found.min()))
    assert len(sizes[True]) >= 5
    most = MOST[spec.dtype]
    assert max(sizes[True]) > min(2.0 * max(sizes[False]), 0.5 * most)
    assert max(sizes[True]) < 2.5 * most + max(sizes[False])
    assert min(lowest) < -min(max(sizes[False]), 0.3 * most)


def test_tokens_along_weights_are_of_ordinary_size() -> None:
    for case in cases_of(SPECS["normed"]):
        if is_along(case):
            states = case.arrays["hidden_states"]
            assert 0.5 < float(np.sqrt(np.mean(states**2))) < 1.5
            assert float(np.abs(states).max()) < 10


def test_single_tokens_see_logits_far_below_zero_and_far_above() -> None:
    spec = SPECS["normed"]
    weights = weights_for(spec)
    own = [
        logits(spec, weights, case)[:, :, 0, 0] for case in cases_of(spec) if is_along(case) and case.sizes["seq"] == 1
    ]
    assert min(each.min() for each in own) < -8 and max(each.max() for each in own) > 8


def test_later_layers_of_a_stack_have_tokens_along_their_weights() -> None:
    """Some rows follow the weights of the last of four layers. They are so large that earlier layers hardly change
    them."""
    spec = small_spec("none", block="transformer", norm_type="rmsnorm", layers=4)
    weights = arrays_of(weights_for(spec))
    queries, keys = (
        weights[f"layers.3.{name}.weight"] * weights["layers.3.input_layernorm.weight"] for name in ("q_proj", "k_proj")
    )
    largest = {True: 0.0, False: 0.0}
    for case in cases_of(spec):
        states = case.arrays["hidden_states"].astype(np.float64)
        large = np.sqrt((states**2).mean((1, 2))) > 10
        if not (is_along(case) and large.any()) and not case.name.startswith("consecutive"):
            continue
        states = states[large] if is_along(case) else states
        states /= np.sqrt((states**2).mean(-1, keepdims=True))
        q, k = ((states @ matrix.T).reshape(*states.shape[:2], spec.num_heads, -1) for matrix in (queries, keys))
        found = spec.scale * np.abs(np.einsum("bshd,bthd->bhst", q, k)).max()
        largest[is_along(case)] = max(largest[is_along(case)], float(found))
    assert largest[True] > 1.5 * largest[False] > 0


@pytest.mark.parametrize("spoiled", ["q_proj.weight", "k_proj.weight", "mlp.fc1.weight"])
def test_weights_that_are_no_numbers_have_no_directions(spoiled: str) -> None:
    spec = SPECS["normed"]
    weights = arrays_of(weights_for(spec))
    weights[spoiled] = np.full_like(weights[spoiled], np.nan)
    assert directions_of(spec, weights.get) is None
    del weights[spoiled]
    assert directions_of(spec, weights.get) is None


def test_rows_of_the_mlp_are_met() -> None:
    spec = SPECS["normed"]
    rows = weights_for(spec)["mlp.fc1.weight"].double().numpy()
    rows = rows * weights_for(spec)["post_attention_layernorm.weight"].double().numpy()
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    best = 0.0
    for case in cases_of(spec):
        if is_along(case):
            states = case.arrays["hidden_states"].astype(np.float64).reshape(-1, spec.hidden_size)
            best = max(best, float((states @ rows.T / np.linalg.norm(states, axis=1, keepdims=True)).max()))
    assert best > 0.95


def _has_size(low: float, high: float, case: Case, past: Array) -> bool:
    size = float(np.sqrt((case.arrays["hidden_states"].astype(np.float64) ** 2).mean()))
    return low < size < high


BETWEEN = ((0.003, 0.03), (0.03, 0.1), (0.1, 0.35))
CONDITIONS: dict[str, Callable[[Case, Array], bool]] = {
    **{f"sizes of {low} to {high}": partial(_has_size, low, high) for low, high in BETWEEN},
    "as many tokens as cached": lambda case, past: case.sizes["seq"] >= 8 and bool((past == case.sizes["seq"]).any()),
    "as many tokens as rows": lambda case, past: case.sizes["seq"] == case.sizes["batch"] >= 5,
    "as many rows as cached": lambda case, past: case.sizes["batch"] >= 5 and bool((past == case.sizes["batch"]).any()),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_cache", ["concat", "shared"])
@pytest.mark.parametrize("block", ["attention", "transformer"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_every_seed_has_sizes_that_are_alike(seed: int, block: str, kv_cache: str) -> None:
    cases = cases_of(small_spec("rope", block=block, kv_cache=kv_cache, causal=True, padding_mask=True), seed)
    pasts = [
        case.arrays.get("write_indices", np.full(case.sizes["batch"], case.sizes.get("past_seq", 0))) for case in cases
    ]
    for name, condition in CONDITIONS.items():
        assert any(map(condition, cases, pasts)), name


def test_every_head_of_many_has_tokens_along_its_weights() -> None:
    spec = small_spec("none", hidden_size=64, num_heads=32, block="transformer", norm_type="rmsnorm")
    weights = weights_for(spec)
    largest = {True: np.zeros(32), False: np.zeros(32)}
    for case in cases_of(spec):
        if is_along(case) or case.name.startswith("consecutive"):
            found = np.abs(logits(spec, weights, case)).max((0, 2, 3))
            largest[is_along(case)] = np.maximum(largest[is_along(case)], found)
    assert (largest[True] > 1.2 * largest[False]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("block", ["attention", "transformer"])
def test_each_layer_of_a_stack_has_large_numbers_in_its_cache(block: str, dtype: str) -> None:
    spec = small_spec("rope", block=block, layers=4, dtype=dtype, causal=True, kv_cache="concat")
    for side, least in (("past_key", 25), ("past_value", 50)):
        for layer in range(4):
            name = f"{side}.{layer}"
            assert any(np.abs(case.arrays[name].astype(np.float64)).max(initial=0) > least for case in cases_of(spec))


@pytest.mark.slow
def test_outliers_are_smaller_in_half_precision_where_keys_grow() -> None:
    for name, most in (("xpos", 60.0), ("rope", np.inf)):
        cases = cases_of(small_spec(name, dtype="fp16", causal=True, kv_cache="concat"))
        found = max(np.abs(case.arrays["hidden_states"]).max() for case in cases if "outlier" in case.name)
        assert 20 < found < most
