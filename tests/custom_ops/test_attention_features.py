"""Caches, padding, encoders, norms of heads, capped logits and sinks. The torch block and its graphs are compared with
the oracle, which computes the papers' formulas in numpy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import torch
from helpers import Array, as_float64, open_ort, small_spec, weights_for

from posexport.export import export
from posexport.models.block import build_block
from posexport.spec.contract import bounds_of, graph_inputs, graph_outputs
from posexport.spec.spec import Spec
from posexport.verify.cases import make_cases

GROWN, SHARED = {"kv_cache": "concat", "causal": True}, {"kv_cache": "shared", "causal": True}
PADDED, GROUPS = {"padding_mask": True}, {"num_kv_heads": 2}
SPECS: dict[str, dict[str, Any]] = {
    "padding": {"encoding": "none", **PADDED},
    "padding-causal": {"encoding": "rope", **PADDED, "causal": True, "window": 4},
    "padding-bias": {"encoding": "t5", **PADDED, "num_buckets": 8, "max_distance": 20},
    "grown": {"encoding": "rope", **GROWN, **GROUPS},
    "grown-both-ways": {"encoding": "none", "kv_cache": "concat"},
    "grown-window": {"encoding": "rope2d", **GROWN, **PADDED, "window": 5},
    "grown-alibi": {"encoding": "alibi", **GROWN, **PADDED},
    "grown-t5": {"encoding": "t5", **GROWN, **GROUPS, "num_buckets": 8, "max_distance": 20},
    "grown-relative": {"encoding": "relative", **GROWN, **PADDED},
    "grown-input": {"encoding": "learned", **GROWN, **PADDED, "layers": 2, "block": "transformer"},
    "shared": {"encoding": "rope", **SHARED, **PADDED, **GROUPS},
    "shared-both-ways": {"encoding": "sinusoidal", "kv_cache": "shared", "window": 6},
    "shared-alibi": {"encoding": "alibi", **SHARED},
    "shared-relative": {"encoding": "relative", **SHARED, **PADDED, "table": "learned", "max_distance": 9},
    "cross": {"encoding": "sinusoidal", "cross": True, **PADDED},
    "cross-t5": {"encoding": "t5", "cross": True, **GROUPS},
    "norm": {"encoding": "rope", "qk_norm": True, "norm_eps": 1e-3},
    "norm-cached": {"encoding": "rope", **GROWN, "qk_norm": True, "layout": "half"},
    "cap": {"encoding": "none", "softcap": 0.7, "causal": True},
    "cap-bias": {"encoding": "alibi", **GROWN, **PADDED, "softcap": 1.5},
    "sinks": {"encoding": "none", "sinks": True, **PADDED},
    "sinks-relative": {"encoding": "relative", "sinks": True, "softcap": 2.0},
    "everything": {
        "encoding": "rope", **SHARED, **PADDED, **GROUPS, "qk_norm": True, "softcap": 2.0, "sinks": True, "window": 20,
        "bias": True,
    },
}  # fmt: skip
RUNS = ("offset", "consecutive", "scattered", "loud", "step", "prefill")
"""The cases of verify with small sizes, and with positions for which fp32 has accurate angles."""

BOUNDS = {"fp32": 5e-5, "fp16": 1e-2}


def _inputs(spec: Spec) -> list[tuple[str, dict[str, Array]]]:
    made = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}))
    return [(each.name, each.arrays) for each in made if each.name.split(" [")[0] in RUNS]


def _run_block(spec: Spec, inputs: dict[str, Array]) -> dict[str, Array]:
    """Every output of the torch block in float64."""
    tensors = (torch.from_numpy(array) for array in inputs.values())
    block = build_block(spec, weights_for(spec), torch.float64)
    made = block(*(each.double() if each.is_floating_point() else each for each in tensors))
    values = made if isinstance(made, tuple) else (made,)
    return {name: value.numpy() for name, value in zip(graph_outputs(spec), values, strict=True)}


def _off(made: dict[str, Array], wanted: dict[str, Array]) -> float:
    """The largest error of any output, relative to its largest value."""
    assert list(made) == list(wanted)
    found = []
    for name, array in wanted.items():
        assert made[name].shape == array.shape, name
        found.append(float(np.abs(made[name].astype(np.float64) - array).max() / max(1.0, np.abs(array).max())))
    return max(found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SPECS)
def test_the_block_equals_the_formula(name: str) -> None:
    spec = small_spec(**SPECS[name])
    for case, inputs in _inputs(spec):
        wanted = oracles.outputs(spec, as_float64(weights_for(spec)), inputs)
        assert _off(_run_block(spec, inputs), wanted) < 1e-11, case


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            (name, "fp32") if at % 6 == 0 else pytest.param(name, "fp32", marks=pytest.mark.slow)
            for at, name in enumerate(SPECS)
        ),
        *(pytest.param(name, "fp16", marks=pytest.mark.slow) for name in list(SPECS)[::2]),
    ],
)
def test_the_graph_equals_the_formula(name: str, dtype: str) -> None:
    spec = small_spec(**SPECS[name], dtype=dtype)
    run = open_ort(export(spec, weights_for(spec)))
    for case, inputs in _inputs(spec):
        wanted = oracles.outputs(spec, as_float64(weights_for(spec)), inputs)
        assert _off(run(inputs), wanted) < BOUNDS[dtype], case


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "padding": ("padding-causal", {"window": 5}),
    "corner": ("grown-both-ways", {"causal": True}),
    "window": ("grown-window", {"window": 6}),
    "buckets": ("grown-t5", {"max_distance": 24}),
    "shared": ("shared-both-ways", {"window": 5}),
    "norm": ("norm", {"qk_norm": False, "norm_eps": None}),
    "epsilon": ("norm", {"norm_eps": 1e-2}),
    "cap": ("cap", {"softcap": 0.8}),
    "no cap": ("cap-bias", {"softcap": None}),
    "sinks": ("sinks", {"sinks": False}),
    "sinks beside a cap": ("sinks-relative", {"softcap": 2.5}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_the_oracle_tells_every_option_apart(name: str) -> None:
    """A wrong option gives errors far above the bounds, so the bounds are a real check."""
    right, fault = FAULTS[name]
    spec, wrong = small_spec(**SPECS[right]), small_spec(**{**SPECS[right], **fault})
    weights = as_float64(weights_for(spec))
    found = [_off(oracles.outputs(wrong, weights, inputs), _run_block(spec, inputs)) for _, inputs in _inputs(spec)]
    assert max(found) > 10 * BOUNDS["fp32"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["padding", "sinks", "grown-alibi", "everything"])
def test_a_query_that_sees_nothing_gets_zeros(name: str) -> None:
    """So the output is the projection of zeros: its bias, or zero."""
    spec = small_spec(**SPECS[name])
    (_, inputs), *_ = (each for each in _inputs(spec) if each[0].startswith("scattered"))
    assert not inputs["attention_mask"][-1].any()
    nothing = as_float64(weights_for(spec)).get("o_proj.bias", np.zeros(1))
    for made in (_run_block(spec, inputs), open_ort(export(spec, weights_for(spec)))(inputs)):
        np.testing.assert_allclose(made["output"][-1], np.broadcast_to(nothing, made["output"][-1].shape), atol=1e-7)
        assert (np.abs(made["output"][0]) > 1e-3).any()
