"""Decoders that keep images in their caches are refused with caches, and exported without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, refused
from small_decoders import TRAINED, VOCABULARY, save_randomised, small_checkpoint

from posexport.errors import RequestError
from posexport.models.whole import decoder_of
from posexport.models.whole_masks import check_mask

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def captioner() -> Any:
    config = transformers.GitConfig(
        **SIZES, vocab_size=VOCABULARY, max_position_embeddings=TRAINED, vision_config={**SIZES, "image_size": 32}
    )
    return transformers.GitForCausalLM(config)


def test_a_captioner_is_refused_with_caches() -> None:
    with pytest.raises(RequestError, match="GitForCausalLM expects an image before the tokens in its caches"):
        decoder_of(captioner(), torch.float32)
    decoder_of(captioner(), torch.float32, with_caches=False)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bloom", "Bamba"])
def test_the_masks_of_other_decoders_are_those_of_their_tokens(kind: str, tmp_path: Path) -> None:
    decoder_of(small_checkpoint(tmp_path / kind, kind), torch.float32)


def test_nothing_behind_the_mask_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not run the layers, so it is fast however large the model is."""
    model, cache = small_checkpoint(tmp_path / "llama"), transformers.DynamicCache()
    model(input_ids=torch.ones(1, 3, dtype=torch.int64), past_key_values=cache)
    made = list[object]()
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda *_, **__: made.append(0))
    check_mask(model, 3, past_key_values=cache)
    assert not made and cache.get_seq_length() == 3


@pytest.mark.slow
def test_a_captioner_without_caches_is_the_model_of_transformers(tmp_path: Path) -> None:
    save_randomised(captioner(), tmp_path / "git")
    command = ("export", "--from", tmp_path / "git", "--model", "-o", tmp_path / "model.onnx")
    refused(cli(*command), "expects an image before the tokens in its caches", "give --kv-cache none")
    assert cli(*command, "--kv-cache", "none").exit_code == 0
    assert cli("verify", tmp_path / "model.onnx", "--from", tmp_path / "git", "--runtime", "ort-cpu").exit_code == 0
