"""Doge sees only some keys of a text that is longer than its window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posexport.errors import RequestError
from posexport.models.whole_kept_keys import check_keys

transformers: Any = pytest.importorskip("transformers")


@pytest.fixture
def doge() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.DogeForCausalLM(transformers.DogeConfig(**sizes, vocab_size=16, keep_window_size=8)).eval()


def test_equal_tokens_have_equal_numbers(doge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of the refusal: which of them torch takes is not defined."""
    numbers = []
    attention = doge.model.layers[0].self_attn
    method = attention.prepare_dynamic_mask

    def spied(**given: Any) -> Any:
        numbers.append(given["dt_states"])
        return method(**given)

    monkeypatch.setattr(attention, "prepare_dynamic_mask", spied)
    torch.nn.init.normal_(attention.A)
    with torch.no_grad():
        doge(input_ids=torch.tensor([[3, 5, 3, 7, 5, 3]]))
    (made,) = numbers
    assert torch.equal(made[..., [0, 0, 1]], made[..., [2, 5, 4]])
    assert not torch.equal(made[..., 0], made[..., 1])


@pytest.mark.parametrize("length", [9, None])
def test_a_text_that_is_longer_than_the_window_is_refused(doge: Any, length: int | None) -> None:
    """A file with caches chose keys of each text, or of none, as in the trace; the refusal named a loop over chunks."""
    with pytest.raises(
        RequestError, match=r"DogeForCausalLM keeps the 8 keys with the largest numbers \(keep_window_s"
    ):
        check_keys(doge, length)


def test_other_texts_are_not(doge: Any) -> None:
    check_keys(doge, 8)
    check_keys(torch.nn.Linear(2, 2), None)
