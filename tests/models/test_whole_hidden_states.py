"""The hidden states before a model's head are found, however the head calls its decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from posexport.models.whole_hidden_states import last_hidden_states  # noqa: E402

SIZES = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
BART = {"vocab_size": 16, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
LLAMA4 = SIZES | {"head_dim": 4, "num_key_value_heads": 1, "intermediate_size_mlp": 8, "num_local_experts": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "the head calls its base model": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "the head calls the decoder inside it": ("OPTConfig", "OPTForCausalLM", SIZES | {"word_embed_proj_dim": 8}),
    "a decoder taken from an encoder-decoder": ("BartConfig", "BartForCausalLM", BART),
    "a body with another name than the class says": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "all layers in one module": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 16, "hidden_size": 8, "n_head": 2}),
}


@pytest.mark.parametrize(("config", "name", "options"), MODELS.values(), ids=MODELS)
def test_the_head_makes_the_logits_of_them(config: str, name: str, options: dict[str, Any]) -> None:
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad(), last_hidden_states(model) as hidden:
        logits = model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(model.get_output_embeddings()(hidden[-1]), logits)
    assert len(hidden) == 1


def test_a_head_with_the_name_of_a_decoder_is_not_taken_for_one() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=4, patch_size=2, encoder_stride=2)
    model = transformers.ViTForMaskedImageModeling(config).eval()
    with torch.no_grad(), last_hidden_states(model) as hidden:
        model(pixel_values=torch.zeros(2, 3, 4, 4))
    assert [tuple(states.shape) for states in hidden] == [(2, 5, 8)]
