"""Further inputs of whole models: keys of an indexer that selects tokens, and videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from tiny_models import ROWS, build

from posexport.errors import RequestError
from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.graphs.cases import cases_of
from posexport.graphs.roles import Role
from posexport.models.pretrained import Pretrained
from posexport.models.whole import cached_layers, decoder_of, without_keys_of_others
from posexport.models.whole_encoder import encoder_of
from posexport.models.whole_inputs import possible_inputs

TOKENS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose queries see four tokens; an indexer with its own keys selects them."""
    row = ROWS["deepseek_v32"]
    return build(attrs.evolve(row, options={**row.options, "num_hidden_layers": 2}))


@torch.no_grad()
def test_an_indexer_keeps_its_keys(model: Any) -> None:
    decoder, signature = decoder_of(model, torch.float32)
    assert signature.inputs["past_key_values.1.indexer.key"] == ("batch", 1, "past", 16)
    assert cached_layers(["past_key_values.1.indexer.key"]) == [1]
    before: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, shape in signature.inputs.items():
        if name.startswith("past_key_values."):
            _, layer, kind = name.split(".", 2)
            before[int(layer)][kind] = torch.zeros(1, int(shape[1]), 0, int(shape[3]))
    first = decoder(TOKENS[:, :8], torch.ones(1, 8, dtype=torch.int64), past_key_values=before)
    second = decoder(
        TOKENS[:, 8:], torch.ones(1, 12, dtype=torch.int64), torch.arange(8, 12)[None], past_key_values=first["present"]
    )
    wanted = model(TOKENS, use_cache=False).logits
    assert torch.allclose(torch.cat([first["logits"], second["logits"]], 1), wanted, atol=1e-4)


def caches_of(names: Any) -> set[str]:
    return {name.partition(".")[2] for name in names if name.startswith(("past_key_values.", "present."))}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama", {"0.key", "0.value"}),
        (
            "qwen3_next",
            {"1.key", "1.value", *(f"{at}.{kind}_state" for at in (0, 2) for kind in ("conv", "recurrent"))},
        ),
    ],
)
def test_keys_of_layers_that_are_not_traced_are_not_traced_either(name: str, kept: set[str]) -> None:
    """The states of all layers stay, because transformers asks the last one whether there are past tokens."""
    _, whole = decoder_of(build(ROWS[name]), torch.float32)
    traced = without_keys_of_others(whole, (0, 1) if name == "qwen3_next" else (0,))
    assert caches_of(traced.inputs) == caches_of(traced.outputs) == kept < caches_of(whole.inputs)
    past = traced.example["past_key_values"]
    assert {f"{layer}.{kind}" for layer, held in enumerate(past) for kind in held} == kept
    assert [{*held} for held in traced.shapes["past_key_values"]] == [{*held} for held in past]


def test_parts_of_a_configuration_without_a_module_are_not_left_out() -> None:
    """The export of MPT must not warn that its "attn" is left out."""
    model = build(attrs.evolve(ROWS["mpt"], options={**ROWS["mpt"].options, "n_layers": 1}))
    assert Pretrained(folder=Path(), files=(), model=model, weights={}).left_out == ()
    assert type(model.config.attn_config).__name__ == "MptAttentionConfig"


@torch.no_grad()
def test_a_file_without_caches_needs_none_that_can_be_handed_on() -> None:
    """xLSTM must not be refused if --kv-cache none is given."""
    model: Any = build(ROWS["xlstm"])
    with pytest.raises(RequestError, match="give --kv-cache none"):
        decoder_of(model, torch.float32)
    decoder, signature = decoder_of(model, torch.float32, with_caches=False)
    assert not caches_of(signature.inputs)
    made = decoder(TOKENS, torch.ones_like(TOKENS))
    assert {*made} == {"logits"} and torch.equal(made["logits"], model(TOKENS, use_cache=False).logits)


def test_a_model_that_pools_tokens_is_traced_with_more() -> None:
    """CANINE needs more tokens than other models for an example."""
    _, signature = encoder_of(build(ROWS["canine"]), torch.float32)
    assert signature.example["input_ids"].shape == signature.example["attention_mask"].shape == (2, 24)
    _, signature = encoder_of(build(ROWS["bert"]), torch.float32)
    assert signature.example["input_ids"].shape == (2, 3)


@torch.no_grad()
def test_states_alone_are_handed_on() -> None:
    """Mamba-2 has another name for its cache."""
    model: Any = build(ROWS["mamba2"])
    decoder, signature = decoder_of(model, torch.float32)
    before: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
    for name, shape in signature.inputs.items():
        if name.startswith("past_key_values."):
            _, layer, kind = name.split(".", 2)
            before[int(layer)][kind] = torch.zeros(1, *map(int, shape[1:]))
    assert {*before[3]} == {"conv_state", "recurrent_state"}
    first = decoder(TOKENS[:, :8], torch.ones(1, 8, dtype=torch.int64), past_key_values=before)
    second = decoder(TOKENS[:, 8:], torch.ones(1, 12, dtype=torch.int64), past_key_values=first["present"])
    wanted = model(TOKENS, use_cache=False).logits
    assert torch.allclose(torch.cat([first["logits"], second["logits"]], 1), wanted, atol=1e-4)


def test_an_indexer_that_keeps_positions_too_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicIndexedLayer

    update = DynamicIndexedLayer.update_indexer

    def updated(self: Any, keys: Any) -> Any:
        self.indexer_position_ids = TOKENS[None]
        return update(self, keys)

    monkeypatch.setattr(DynamicIndexedLayer, "update_indexer", updated)
    with pytest.raises(RequestError, match="remembers something that can't be handed on by name"):
        decoder_of(model, torch.float32)


@torch.no_grad()
def test_a_video_has_the_frames_and_the_channels_of_its_configuration() -> None:
    row = ROWS["vjepa2"]
    model: Any = build(attrs.evolve(row, options={**row.options, "in_chans": 4, "num_hidden_layers": 1}))
    encoder, signature = encoder_of(model, torch.float32)
    assert signature.inputs == {"pixel_values_videos": ("batch", 4, 4, 32, 32)}
    video = torch.randn(1, 4, 4, 32, 32)
    wanted = model(video, skip_predictor=True).last_hidden_state
    assert torch.equal(encoder(pixel_values_videos=video)["last_hidden_state"], wanted)


def test_cached_keys_of_an_indexer_are_never_alike() -> None:
    """TopK may select any of several equal scores, so a correct file could give other results."""
    names = ("past_key_values.0.key", "past_key_values.0.indexer.key")
    shapes: dict[str, Any] = dict.fromkeys(names, ("batch", 1, "past", 16)) | {"input_ids": ("batch", "sequence")}
    axes: dict[int, Any] = {4: (BATCH, 1, PAST, 16), 2: (BATCH, SEQ)}
    kinds: dict[int, Any] = {
        4: {"kind": "past", "dtype": "fp32"},
        2: {"kind": "token_ids", "dtype": "int64", "rows": 100},
    }
    roles = {
        name: Role(name=name, shape=shape, stated=shape, axes=axes[len(shape)], **kinds[len(shape)])
        for name, shape in shapes.items()
    }
    (case,) = (one for one in cases_of(roles, 0) if one.kinds.values == "zeros" and one.arrays[names[0]].shape[2])
    are_zero = [(case.arrays[name] == 0).all(-1).any() for name in names]
    assert are_zero == [True, False]


PART = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**PART, "vocab_size": 40, "max_position_embeddings": 20}
PICTURES = {**PART, "image_size": 8, "patch_size": 4}


def two_towers(**more: Any) -> Any:
    config = transformers.CLIPConfig(
        text_config={**TEXT, "eos_token_id": 2}, vision_config=PICTURES, projection_dim=8, **more
    )
    torch.manual_seed(0)
    return transformers.CLIPModel(config).eval()


@torch.no_grad()
def test_each_text_is_compared_with_each_image() -> None:
    model = two_towers()
    encoder, signature = encoder_of(model, torch.float32)
    texts, images = ("text_batch", "sequence"), ("image_batch", 3, 8, 8)
    assert signature.inputs == {"input_ids": texts, "attention_mask": texts, "pixel_values": images}
    assert signature.example["input_ids"].shape[0] != signature.example["pixel_values"].shape[0]
    assert [*signature.outputs] == ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]
    ids = torch.arange(3, 18).reshape(3, 5)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 8, 8)}
    made, wanted = encoder(**given), model(**given)
    assert made["logits_per_image"].shape == (2, 3)
    assert all(torch.equal(made[name], wanted[name]) for name in made)


@torch.no_grad()
def test_a_text_and_its_image_have_the_same_rows() -> None:
    wide = {"hidden_size": 64, "num_hidden_layers": 2}  # a head has 64 features
    towers = {"text_config": {**TEXT, **wide}, "vision_config": {**PICTURES, **wide}}
    model = transformers.BridgeTowerModel(transformers.BridgeTowerConfig(**PART | wide, **towers)).eval()
    _, signature = encoder_of(model, torch.float32)
    assert signature.inputs["pixel_values"] == ("batch", 3, 8, 8) and signature.inputs["input_ids"][0] == "batch"


def test_the_part_of_two_towers_that_a_head_reads_is_enough() -> None:
    """CLIPForImageClassification was said to read text and images together."""
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=PICTURES, num_labels=3)
    _, signature = encoder_of(transformers.CLIPForImageClassification(config).eval(), torch.float32)
    assert [*signature.inputs] == ["pixel_values"]


def test_a_captioner_is_no_pair_of_towers() -> None:
    sizes = {"text_config": {**TEXT, "encoder_hidden_size": 16}, "vision_config": PICTURES}
    model = transformers.BlipForConditionalGeneration(transformers.BlipConfig(**sizes)).eval()
    with pytest.raises(RequestError, match="BlipForConditionalGeneration reads text and vision together: give"):
        encoder_of(model, torch.float32)


def test_what_is_wrong_with_two_towers_is_said() -> None:
    model = two_towers()
    model.visual_projection = torch.nn.Linear(16, 4, bias=False)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        encoder_of(model, torch.float32)


def test_series_of_channels_are_an_input_and_others_are_refused() -> None:
    sizes = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 1, "d_model": 8}
    config = transformers.PatchTSTConfig(**sizes, num_attention_heads=2, ffn_dim=8, num_input_channels=3)
    _, signature = encoder_of(transformers.PatchTSTForPrediction(config).eval(), torch.float32)
    assert signature.inputs == {"past_values": ("batch", 16, 3)} and "prediction_outputs" in signature.outputs
    other = transformers.TimeSeriesTransformerConfig(prediction_length=2, context_length=4, num_time_features=1)
    with pytest.raises(RequestError, match="models of time_series_transformer read past_values with other inputs"):
        encoder_of(transformers.TimeSeriesTransformerForPrediction(other).eval(), torch.float32)


def test_the_frames_of_a_spectrogram_follow_from_the_preprocessor(tmp_path: Path) -> None:
    """CLAP makes an image of a sound of a fixed length."""
    sizes = {"spec_size": 32, "num_mel_bins": 8, "patch_embeds_hidden_size": 8, "depths": [1, 1], "hidden_size": 16}
    config = transformers.ClapAudioConfig(**sizes, num_attention_heads=[2, 2], window_size=2, num_hidden_layers=2)
    model = transformers.ClapAudioModel(config).eval()
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps({"nb_max_samples": 1000, "hop_length": 10}))
    _, signature = encoder_of(model, torch.float32, folder=tmp_path)
    assert signature.inputs == {"input_features": ("batch", 1, 101, 8)}
    settings.write_text(json.dumps({"nb_max_samples": 1000, "hop_length": 0}))
    with pytest.raises(RequestError, match=r"put nb_max_samples and hop_length into preprocessor_config\.json"):
        encoder_of(model, torch.float32, folder=tmp_path)
    model.config.enable_fusion = True
    settings.write_text(json.dumps({"nb_max_samples": 1000, "hop_length": 10}))
    with pytest.raises(RequestError, match="has enable_fusion and reads is_longer besides a spectrogram"):
        encoder_of(model, torch.float32, folder=tmp_path)


@torch.no_grad()
def test_a_token_of_a_table_has_several_kinds() -> None:
    """TAPAS reads the row and the column of each token; its file had no input for them."""
    sizes = {"type_vocab_sizes": [3, 5, 5], "max_position_embeddings": 20}
    model = transformers.TapasModel(transformers.TapasConfig(**TEXT | sizes)).eval()
    encoder, signature = encoder_of(model, torch.float32)
    assert signature.inputs["token_type_ids"] == ("batch", "sequence", 3)
    ids = torch.arange(3, 9)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.ones(1, 6, 3).long()}
    assert torch.equal(encoder(**given)["last_hidden_state"], model(**given).last_hidden_state)


def test_an_image_has_the_channels_of_the_backbone() -> None:
    """VitMatte reads a fourth channel, which its backbone's configuration states."""
    backbone = {"model_type": "vitdet", **PICTURES, "hidden_size": 16, "num_channels": 4, "pretrain_image_size": 8}
    config = transformers.VitMatteConfig(
        backbone_config={**backbone, "mlp_ratio": 1, "out_features": ["stage1"]},
        hidden_size=16,
        convstream_hidden_sizes=[4, 4, 4],
        fusion_hidden_sizes=[8, 8, 4, 4],
    )
    assert list(possible_inputs(transformers.VitMatteForImageMatting(config))) == [{"pixel_values": ("batch", 4, 8, 8)}]


def test_an_input_that_transformers_asks_for_is_named() -> None:
    """LXMERT's refusal gave a line of transformers and advised to look at config.json."""
    sizes = {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 4}
    model = transformers.LxmertModel(transformers.LxmertConfig(**TEXT | sizes)).eval()
    with pytest.raises(RequestError, match="LxmertModel needs visual_feats too, which a file has no input for"):
        encoder_of(model, torch.float32)


@torch.no_grad()
def test_features_of_sound_may_come_before_its_frames() -> None:
    """The encoder of GLM-ASR was said to be one that transformers can't run."""
    sizes = {**PART, "num_key_value_heads": 2, "num_mel_bins": 8, "max_position_embeddings": 64}
    encoder, signature = encoder_of(
        transformers.GlmAsrEncoder(transformers.GlmAsrEncoderConfig(**sizes)), torch.float32
    )
    assert signature.inputs == {"input_features": ("batch", 8, "frames")}
    assert encoder(input_features=torch.randn(1, 8, 20))["last_hidden_state"].shape[-1] == 16
