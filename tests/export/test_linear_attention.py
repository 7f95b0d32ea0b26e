"""Replacements of transformers' functions of linear attention against the originals, in one pass and in steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run_ort
from torch import Tensor, nn

from posexport.custom_ops import linear_attention
from posexport.export.linear_attention import _FUNCTIONS, linear_attention_as_operator
from posexport.export.modules import export_any

pytest.importorskip("transformers")

from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.zamba2 import modeling_zamba2 as zamba

BATCH, TOKENS, HEADS, SIZE, WIDE = 2, 70, 4, 8, 6
LIMITS = (0.3, 1.5)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(3)


def delta(key_heads: int, tokens: int, rates: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of the gated delta rule."""
    return {
        "query": normal(BATCH, tokens, key_heads, SIZE),
        "key": normal(BATCH, tokens, key_heads, SIZE),
        "value": normal(BATCH, tokens, HEADS, WIDE),
        "g": -normal(BATCH, tokens, *rates).abs(),
        "beta": normal(BATCH, tokens, HEADS).sigmoid(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


STATE = normal(BATCH, HEADS, SIZE, WIDE)


@pytest.mark.parametrize("state", [None, STATE])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_gated_delta_rule(key_heads: int, state: Tensor | None) -> None:
    given = delta(key_heads, TOKENS, (HEADS,)) | {"initial_state": state}
    check(qwen.torch_chunk_gated_delta_rule, given)
    check(qwen.torch_chunk_gated_delta_rule, given | {"use_qk_l2norm_in_kernel": False, "key": given["key"] / SIZE})


@pytest.mark.parametrize("state", [None, STATE])
def test_delta_rule_with_a_decay_of_each_feature(state: Tensor | None) -> None:
    check(kimi.chunk_kimi_delta_attention, delta(HEADS, TOKENS, (HEADS, SIZE)) | {"initial_state": state})


def mamba(tokens: int) -> dict[str, Any]:
    """Arguments of Mamba-2 for 2 groups of heads."""
    return {
        "hidden_states": normal(BATCH, tokens, HEADS, WIDE),
        "dt": normal(BATCH, tokens, HEADS),
        "A": -normal(HEADS).exp(),
        "B": normal(BATCH, tokens, 2, SIZE),
        "C": normal(BATCH, tokens, 2, SIZE),
        "chunk_size": 32,
        "D": normal(HEADS),
        "dt_bias": normal(HEADS),
        "dt_softplus": True,
        "return_final_states": True,
    }


KEPT = normal(BATCH, HEADS, WIDE, SIZE)


@pytest.mark.parametrize("state", [None, KEPT])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), LIMITS])
def test_state_space(state: Tensor | None, limits: tuple[float, float]) -> None:
    check(bamba.mamba2_chunk_scan, mamba(TOKENS) | {"initial_states": state, "dt_limit": limits})


def selective(tokens: int) -> dict[str, Any]:
    """Arguments of Mamba."""
    return {
        "hidden_states": normal(BATCH, WIDE, tokens),
        "dt": normal(BATCH, WIDE, tokens),
        "A": -normal(WIDE, SIZE).exp(),
        "B": normal(BATCH, SIZE, tokens),
        "C": normal(BATCH, SIZE, tokens),
        "D": normal(WIDE),
        "z": normal(BATCH, WIDE, tokens),
        "delta_bias": normal(WIDE),
        "delta_softplus": True,
        "return_last_state": True,
    }


def test_selective_scan() -> None:
    given = selective(TOKENS)
    check(jamba.mamba_selective_scan, given)
    plain = {name: given[name] for name in ("hidden_states", "A", "B", "C")} | {"dt": given["dt"].abs()}
    torch.testing.assert_close(
        _FUNCTIONS["mamba_selective_scan"](**plain), jamba.mamba_selective_scan(**plain), atol=1e-4, rtol=0
    )


def test_states_are_given_only_where_they_are_asked_for() -> None:
    asked = mamba(5)
    read, _ = _FUNCTIONS["mamba2_chunk_scan"](**asked)
    assert torch.equal(_FUNCTIONS["mamba2_chunk_scan"](**asked | {"return_final_states": False}), read)
    made = _FUNCTIONS["torch_chunk_gated_delta_rule"](**delta(HEADS, 5, (HEADS,)) | {"output_final_state": False})
    assert made[1] is None


@pytest.mark.parametrize("limits", [(0.0, float("inf")), LIMITS])
def test_one_token_behind_others_has_no_limits(limits: tuple[float, float]) -> None:
    """This is as in transformers' function for one step and in the kernels that it replaces."""
    given = mamba(1)
    state = KEPT.clone()
    wanted = zamba.mamba2_selective_state_update(
        state,
        given["hidden_states"][:, 0],
        given["dt"].transpose(1, 2).expand(-1, -1, WIDE),
        given["A"][:, None, None].expand(-1, WIDE, SIZE),
        given["B"][:, 0],
        given["C"][:, 0],
        given["D"][:, None].expand(-1, WIDE),
        dt_bias=given["dt_bias"][:, None].expand(-1, WIDE),
        dt_softplus=True,
    )
    read, after = _FUNCTIONS["mamba2_chunk_scan"](**given | {"initial_states": KEPT, "dt_limit": limits})
    torch.testing.assert_close(read[:, 0], wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(after, state, atol=1e-5, rtol=0)


def check(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Asserts that the replacement of a function gives the same results, also in half precision."""
    own = _FUNCTIONS[function.__name__]
    for read, wanted in zip(own(**given), function(**given), strict=True):
        assert (read.shape, read.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(read, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)
    half = {name: value.half() if name in ("query", "key", "value") else value for name, value in given.items()}
    assert [each.dtype for each in own(**half)] == [each.dtype for each in function(**half)]


def test_functions_are_there_again_behind_the_trace() -> None:
    class Model(nn.Module):
        pass

    Model.__module__ = qwen.__name__
    before = qwen.torch_chunk_gated_delta_rule
    with linear_attention_as_operator(nn.Sequential(Model(), Model())):
        assert qwen.torch_chunk_gated_delta_rule is _FUNCTIONS["torch_chunk_gated_delta_rule"]
    assert qwen.torch_chunk_gated_delta_rule is before


class Decaying(nn.Module):
    """The final state, from a state of ones, after tokens with little decay."""

    def forward(self, gates: Tensor) -> Tensor:
        heads = gates.shape[2]
        nothing = torch.zeros_like(gates)
        state = torch.ones(gates.shape[0], heads, 1, 1)
        return linear_attention(nothing, nothing, nothing, state, -5 * torch.sigmoid(gates))[1]


def test_decays_of_a_sigmoid_are_exact_in_onnx_runtime() -> None:
    """ONNX Runtime's Sigmoid has errors of 1e-7, which add up over many tokens."""
    gates = np.full((1, 300, 2), (-8, -12), np.float32)
    made = run_ort(export_any(Decaying(), torch.from_numpy(gates)).model, {"gates": gates})["output"]
    wanted = np.exp(-5 * (1 / (1 + np.exp(-gates.astype(np.float64)))).sum(1))
    np.testing.assert_allclose(made.reshape(1, 2), wanted, rtol=2e-5)
