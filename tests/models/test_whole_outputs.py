"""The outputs that a file of a model without caches has, by what the model returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posexport.models.pretrained import open_pretrained
from posexport.models.whole_encoder import encoder_of
from posexport.models.whole_outputs import outputs_by_name

ONE = torch.ones(1)

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "usual ones come first": (
        {"pred_boxes": ONE, "pred_masks": ONE, "logits": ONE},
        ["logits", "pred_boxes", "pred_masks"],
    ),
    "others keep their order": ({"waveform": ONE, "spectrogram": ONE}, ["waveform", "spectrogram"]),
    "losses": ({"loss": ONE, "depth_loss": ONE, "logits": ONE}, ["logits"]),
    "states of parts": (
        {
            "last_hidden_state": ONE,
            "encoder_last_hidden_state": ONE,
            "image_hidden_states": ONE,
            "enc_topk_logits": ONE,
        },
        ["last_hidden_state"],
    ),
    "states that are features of several sizes": ({"fpn_hidden_states": (ONE,)}, ["fpn_hidden_states_0"]),
    "masks": ({"audio_values": ONE, "padding_mask": ONE, "mask": ONE}, ["audio_values"]),
    "nothing but states of parts": ({"encoder_last_hidden_state": ONE}, ["encoder_last_hidden_state"]),
    "tuples": ({"feature_maps": (ONE, ONE), "hidden_states": (ONE,)}, ["feature_maps_0", "feature_maps_1"]),
    "logits of three alphabets": ({"logits": (ONE, ONE, ONE)}, ["char_logits", "bpe_logits", "wp_logits"]),
    "nothing with a name": ({"past_key_values": None, "classes": ["a"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_outputs_of_a_file_are_what_the_model_returns_as_its_own(case: str) -> None:
    made, names = CASES[case]
    assert [*outputs_by_name(made)] == names


SMALL = {"image_size": 8, "patch_size": 4}
POOLERS: dict[str, tuple[Any, bool, list[str]]] = {
    "a pooler without weights": (
        transformers.SwinModel(transformers.SwinConfig(**SMALL, embed_dim=8, depths=[1], num_heads=[2], window_size=2)),
        False,
        ["last_hidden_state", "pooler_output"],
    ),
    "a pooler that the checkpoint lacks": (
        transformers.ViTModel(
            transformers.ViTConfig(
                **SMALL, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
            )
        ),
        True,
        ["last_hidden_state"],
    ),
}


@pytest.mark.parametrize("case", POOLERS)
def test_poolers_are_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    """Without the output of Swin's pooler, which has no weights, a file had one output less than the model."""
    model, without, names = POOLERS[case]
    model.save_pretrained(tmp_path)
    if without:
        file = tmp_path / "model.safetensors"
        save_file({key: one for key, one in load_file(file).items() if "pooler" not in key}, file, {"format": "pt"})
    _, signature = encoder_of(open_pretrained(tmp_path).model, torch.float32)
    assert [*signature.outputs] == names
