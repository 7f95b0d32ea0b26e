"""Encoders and encoder-decoders of transformers as whole files, against transformers' models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import Array, checkpoint, error, oracle, session

from posexport.artifact import write_onnx
from posexport.errors import RequestError
from posexport.export.whole_model import ExportedModel, HowToExport, export_whole
from posexport.models.pretrained import open_pretrained
from posexport.models.whole import decoder_of
from posexport.models.whole_encoder import encoder_of
from posexport.models.whole_translator import CrossEncoder, translator_of

BOUND = 2e-5


def exported(name: str, **how: Any) -> list[ExportedModel]:
    return export_whole(open_pretrained(checkpoint(name)), HowToExport(**how))


def drawn(run: Any, sizes: dict[str, int], seed: int = 0) -> dict[str, Array]:
    """Inputs of a session by name. Rows of tokens have padding on the right, as usual for encoders."""
    random, given = np.random.default_rng(seed), {}
    for value in run.get_inputs():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in value.shape]
        given[value.name] = random.standard_normal(shape).astype(np.float32)
        if value.name == "input_ids":
            given[value.name] = random.integers(3, 100, shape)
        elif value.name.endswith("attention_mask"):
            given[value.name] = np.ones(shape, np.int64)
            given[value.name][0, -2:] = 0
        elif value.name == "token_type_ids":
            given[value.name] = random.integers(0, 2, shape)
    return given


def results(run: Any, given: dict[str, Array]) -> dict[str, Array]:
    return dict(zip((value.name for value in run.get_outputs()), run.run(None, given), strict=True))


ENCODERS: dict[str, tuple[str, list[str], list[str]]] = {
    "bert_masked": ("native", ["input_ids", "attention_mask", "token_type_ids"], ["logits"]),
    "vit_classifier": ("native", ["pixel_values"], ["logits"]),
    "bert": ("native", ["input_ids", "attention_mask", "token_type_ids"], ["last_hidden_state", "pooler_output"]),
    "modernbert": ("native", ["input_ids", "attention_mask"], ["last_hidden_state"]),
    "levit": ("native", ["pixel_values"], ["last_hidden_state", "pooler_output"]),
    "yolos": ("native", ["pixel_values"], ["logits", "last_hidden_state", "pred_boxes"]),
    "swin2sr": ("native", ["pixel_values"], ["reconstruction"]),
    "hubert": ("native", ["input_values"], ["last_hidden_state"]),
    "wav2vec2_ctc": ("native", ["input_values"], ["logits"]),
}


QUICK = ("vit_classifier", "bert_masked")
"""Cases of the default run; the others take as long and run by `scripts/test slow`."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in ENCODERS])
def test_an_encoder_is_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    form, inputs, outputs = ENCODERS[name]
    (model,) = exported(name, form=form)
    assert [value.name for value in model.model.graph.inputs] == inputs
    assert [value.name for value in model.model.graph.outputs] == outputs
    assert (len(model.attentions), model.left()) == (4, [])
    write_onnx(model.model, tmp_path / "model.onnx")
    run = session(tmp_path / "model.onnx")
    for rows, length in ((2, 9), (1, 5)):
        given = drawn(run, {"batch": rows, "sequence": length, "samples": 900 + 7 * length})
        made = results(run, given)
        wanted = oracle(checkpoint(name))(**{name: torch.from_numpy(value) for name, value in given.items()})
        for output in outputs:
            real = given.get("attention_mask") if made[output].ndim == 3 else None
            assert error(made[output], wanted[output].numpy(), real) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", pytest.param("whisper", marks=pytest.mark.slow)])
def test_an_encoder_decoder_is_two_files(name: str, tmp_path: Path) -> None:
    """The encoder's output goes to the decoder's cross-attention. Tokens come in three chunks after the caches."""
    runs = {}
    for model in exported(name, form="native"):
        assert model.attentions and not model.left()
        write_onnx(model.model, tmp_path / f"{model.part}.onnx")
        runs[model.part] = session(tmp_path / f"{model.part}.onnx")
    given = drawn(runs["encoder"], {"batch": 2, "encoder_sequence": 9})
    read = results(runs["encoder"], given)
    ids = np.random.default_rng(1).integers(3, 100, (2, 8))
    tensors = {name: torch.from_numpy(value) for name, value in given.items()}
    wanted = oracle(checkpoint(name))(**tensors, decoder_input_ids=torch.from_numpy(ids))
    real = given.get("attention_mask")
    assert error(read["last_hidden_state"], wanted.encoder_last_hidden_state.numpy(), real) < BOUND
    caches: dict[str, Array] = {}
    for value in runs["decoder"].get_inputs():
        if ".encoder." in value.name:
            caches[value.name] = read[value.name.replace("past_key_values", "present")]
        elif ".decoder." in value.name:
            caches[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32)
    mask = {"encoder_attention_mask": real} if real is not None else {}
    start = 0
    for chunk in (5, 1, 2):
        new = ids[:, start : start + chunk]
        made = results(runs["decoder"], {"input_ids": new, **mask, **caches})
        assert error(made["logits"], wanted.logits[:, start : start + chunk].numpy()) < BOUND
        caches |= {name.replace("present", "past_key_values"): made[name] for name in made if name != "logits"}
        start += chunk


def test_options_without_a_meaning_are_refused() -> None:
    for name in ("bert", "bart"):
        with pytest.raises(RequestError, match="kv_cache was given"):
            exported(name, kv_cache="shared")


@pytest.mark.slow
def test_attention_beside_the_layers_is_listed_with_that_of_all_layers() -> None:
    """The model has a head that pools by attention."""
    (model,) = exported("siglip", form="native")
    layers = [one["layer"] for one in model.attentions if one["name"].startswith("layers.")]
    assert layers == [0, 1, 2, 3] and len(model.attentions) == 5


def test_rows_that_are_looped_over_are_refused() -> None:
    """Image sizes are a list with an entry for each row, so the trace fixes the number of rows."""
    with pytest.raises(RequestError, match=r"PixtralVisionModel is not exported .* fixes the size 'batch' of"):
        exported("pixtral_vision")


@pytest.mark.slow
def test_hidden_states_of_all_layers_that_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read outside of the layers, so no layer can be a copy of another."""
    import transformers
    from transformers.modeling_outputs import ImageClassifierOutput

    def summed(self: Any, pixel_values: torch.Tensor, **_: Any) -> Any:
        states = self.vit(pixel_values=pixel_values, output_hidden_states=True).hidden_states
        return ImageClassifierOutput(logits=self.classifier(torch.stack(states).sum(0)[:, 0]))

    monkeypatch.setattr(transformers.ViTForImageClassification, "forward", summed)
    (model,) = exported("vit_classifier")
    write_onnx(model.model, tmp_path / "model.onnx")
    run = session(tmp_path / "model.onnx")
    given = drawn(run, {"batch": 3})
    wanted = oracle(checkpoint("vit_classifier"))(**{name: torch.from_numpy(value) for name, value in given.items()})
    assert error(results(run, given)["logits"], wanted.logits.numpy()) < BOUND


HEADLESS = {"base": "LlamaModel", "sequences": "LlamaForSequenceClassification", "tokens": "GPT2ForTokenClassification"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one == "tokens")) for one in HEADLESS])
def test_a_decoder_without_its_head_has_no_caches(name: str, tmp_path: Path) -> None:
    """Embedders and classifiers: config.json asks for caches, but nothing reads them."""
    import transformers

    kind: Any = getattr(transformers, HEADLESS[name])
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 100, "max_position_embeddings": 64, "intermediate_size": 48, "pad_token_id": 0}
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes)).eval()
    assert model.config.use_cache
    model.save_pretrained(tmp_path / "checkpoint")
    (made,) = export_whole(open_pretrained(tmp_path / "checkpoint"), HowToExport(form="native"))
    assert not any("past" in str(value.name) for value in made.model.graph.inputs)
    assert len(made.attentions) == 3
    write_onnx(made.model, tmp_path / "model.onnx")
    ids = np.random.default_rng(0).integers(3, 100, (2, 7))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with torch.no_grad():
        wanted = model(**{name: torch.from_numpy(array) for name, array in given.items()})
    found = results(session(tmp_path / "model.onnx"), given)
    for output, array in found.items():
        assert error(array, wanted[output].numpy()) < BOUND


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
SMALL_BOTH = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
SMALL_BOTH |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
SMALL_TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForSequenceClassification": ({**SMALL, "hidden_size": 8}, "no pad_token_id: add it"),
    "GPT2ForSequenceClassification": ({"n_embd": 8, "n_layer": 1, "n_head": 2}, "no pad_token_id: add it"),
    "Siglip2VisionModel": (
        {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "needs pixel_attention_mask and spatial_shapes too, which a file has no input for",
    ),
    **dict.fromkeys(
        ("Siglip2Model", "Siglip2ForImageClassification"),
        (
            {"vision_config": {**SMALL_TOWER, "patch_size": 2, "num_patches": 4}}
            | {"text_config": {**SMALL_TOWER, "vocab_size": 16, "max_position_embeddings": 8, "projection_size": 8}},
            "needs spatial_shapes too, which a file has no input for",
        ),
    ),
    "DecisionTransformerModel": (
        {"hidden_size": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},
        "reads states: only models of input_ids",
    ),
    "PerceiverModel": (
        {"num_latents": 4, "d_latents": 8, "d_model": 8, "num_self_attends_per_block": 1}
        | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2},
        "reads inputs: only models of input_ids",
    ),
    "T5Model": (T5, "reads decoder_input_ids, which a file has no input for"),
    "MusicgenForConditionalGeneration": (
        {
            "text_encoder": {"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
            "audio_encoder": {"model_type": "encodec", "num_filters": 2, "hidden_size": 8, "codebook_size": 4},
            "decoder": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8},
        },
        "reads decoder_input_ids, which a file has no input for",
    ),
    "ClapAudioModel": (
        {"spec_size": 32, "patch_embeds_hidden_size": 8, "depths": [1], "num_attention_heads": [2], "hidden_size": 8},
        "doesn't say how many frames a spectrogram has",
    ),
    "Gemma4VisionModel": (
        {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
        | {"num_key_value_heads": 2},
        "needs pixel_position_ids too, which a file has no input for",
    ),
    "BertForMultipleChoice": ({**SMALL, "hidden_size": 8}, "chooses between several texts"),
    "BartForSequenceClassification": ({**SMALL_BOTH, "vocab_size": 16}, "looks for the last </s> of each text"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_refused_say_why(name: str) -> None:
    import transformers

    options, said = HEADS[name]
    kind: Any = getattr(transformers, name)
    with pytest.raises(RequestError, match=rf"({name}|configuration of \w+) .*{said}"):
        encoder_of(kind(kind.config_class(**options)).eval(), torch.float32)


def test_logits_of_three_alphabets_are_three_outputs(tmp_path: Path) -> None:
    """A tuple of logits gets the names that loaders expect."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": [8, 16]}
    sizes |= {"num_character_labels": 5, "num_bpe_labels": 6, "num_wordpiece_labels": 7, "max_token_length": 3}
    model = transformers.MgpstrForSceneTextRecognition(transformers.MgpstrConfig(**sizes, patch_size=4)).eval()
    module, signature = encoder_of(model, torch.float32)
    assert [*signature.outputs] == ["char_logits", "bpe_logits", "wp_logits"]
    pixels = torch.randn(2, 3, 8, 16)
    made = module(pixel_values=pixels)
    for output, wanted in zip(made.values(), model(pixel_values=pixels).logits, strict=True):
        assert torch.equal(output, wanted)


def test_codes_of_sound_are_not_the_tokens_of_a_decoder() -> None:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8, "vocab_size": 16}
    model = transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**sizes)).eval()
    with pytest.raises(RequestError, match="MusicgenForCausalLM reads 4 codes of sound for each token"):
        decoder_of(model, torch.float32)


def test_codes_of_sound_are_not_the_tokens_of_a_translator() -> None:
    import transformers

    part = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    decoder = {**part, "num_key_value_heads": 2, "cross_num_attention_heads": 2, "cross_num_key_value_heads": 2}
    decoder |= {"cross_head_dim": 4, "cross_hidden_size": 8, "vocab_size": 16, "num_channels": 3}
    encoder = {**part, "num_key_value_heads": 2}
    config = transformers.DiaConfig(encoder_config=encoder, decoder_config=decoder, delay_pattern=[0, 1, 2])
    with pytest.raises(RequestError, match="DiaForConditionalGeneration reads 3 codes of sound for each token"):
        translator_of(transformers.DiaForConditionalGeneration(config).eval(), torch.float32)


def test_a_place_on_a_page_is_no_input_of_an_encoder_beside_a_decoder() -> None:
    import transformers

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = transformers.UdopForConditionalGeneration(transformers.UdopConfig(**sizes)).eval()
    with pytest.raises(RequestError, match="UdopForConditionalGeneration reads bbox besides its text"):
        translator_of(model, torch.float32)


def test_states_of_an_encoder_that_are_a_picture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of PP-FormulaNet's encoder had other dimensions than it said, and its export crashed."""
    import transformers

    model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)).eval()
    encode = CrossEncoder.forward

    @functools.wraps(encode)
    def picture(self: Any, *given: Any, **named: Any) -> Any:
        made = encode(self, *given, **named)
        return {**made, "last_hidden_state": made["last_hidden_state"][..., None]}

    monkeypatch.setattr(CrossEncoder, "forward", picture)
    said = r"the encoder of T5ForConditionalGeneration gives states \[2, 3, 8, 1\], and only states \[batch, tokens"
    with pytest.raises(RequestError, match=said):
        translator_of(model, torch.float32)


def test_a_complaint_of_transformers_is_not_taken_for_one_about_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def complaining(self: Any, **_: Any) -> Any:
        raise ValueError("You have to specify pixel_values")

    model = transformers.BertModel(transformers.BertConfig(**SMALL, hidden_size=8, pad_token_id=None)).eval()
    monkeypatch.setattr(type(model.embeddings), "forward", complaining)
    with pytest.raises(ValueError, match="You have to specify pixel_values"):
        encoder_of(model, torch.float32)


@pytest.mark.parametrize(("causal", "kind"), [(True, "decoder"), (False, "encoder")])
def test_one_class_for_next_words_and_for_hidden_words(causal: bool, kind: str, tmp_path: Path) -> None:
    """XLM's head is of one class; its setting `causal` says which words a word sees."""
    import transformers

    sizes = {"emb_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16, "max_position_embeddings": 16}
    transformers.XLMWithLMHeadModel(transformers.XLMConfig(**sizes, causal=causal)).save_pretrained(tmp_path)
    assert open_pretrained(tmp_path).kind == kind
