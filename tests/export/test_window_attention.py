"""Attention in windows, traced as attention under a mask, held to transformers' own pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posexport.export import window_attention
from posexport.export.window_attention import windows_as_masks

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def model() -> Any:
    """A model whose layers see two and four tokens on either side."""
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        **SIZES, vocab_size=40, max_position_embeddings=64, attention_window=[4, 8], pad_token_id=0
    )
    made = transformers.LongformerModel(config).eval()
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.5
    return made


def states(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(**given).last_hidden_state
    return made


def given(length: int, global_tokens: bool) -> dict[str, torch.Tensor]:
    """Two rows of a text; the second has padding on its right. Tokens of some places are global."""
    ids = torch.arange(3, 3 + 2 * length).remainder(37).add(3).reshape(2, length)
    mask = torch.ones_like(ids)
    mask[1, length - 2 :] = 0
    marks = torch.zeros_like(ids)
    if global_tokens:
        marks[0, 1], marks[1, [0, length // 2]] = 1, 1
    return {"input_ids": ids, "attention_mask": mask, "global_attention_mask": marks}


@pytest.mark.parametrize("global_tokens", [False, True])
@pytest.mark.parametrize("length", [5, 8, 21])
def test_the_attention_is_that_of_transformers(model: Any, length: int, global_tokens: bool) -> None:
    inputs = given(length, global_tokens)
    wanted = states(model, inputs)
    with windows_as_masks(model):
        made = states(model, inputs)
    real = inputs["attention_mask"].bool()
    assert made.shape == wanted.shape
    assert torch.allclose(made[real], wanted[real], atol=1e-4)
    assert torch.equal(states(model, inputs), wanted)  # nothing is left of the trace


def test_a_window_that_is_too_narrow_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = given(21, True)
    wanted = states(model, inputs)
    narrow = window_attention._attention

    def attention(self: Any, *given: Any, **named: Any) -> Any:
        monkeypatch.setattr(self, "one_sided_attn_window_size", 1)
        return narrow(self, *given, **named)

    monkeypatch.setattr(window_attention, "_attention", attention)
    with windows_as_masks(model):
        made = states(model, inputs)
    assert not torch.allclose(made[0], wanted[0], atol=1e-2)
