"""Decoders with bidirectional attention over the prompt are refused, by transformers' masks and configurations."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, refused
from small_decoders import TRAINED, VOCABULARY, exported_model, save_randomised, small_checkpoint

from posexport.errors import RequestError
from posexport.models.whole_both_ways import check_causal

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": TRAINED, "vocab_size": VOCABULARY}
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 8, "model_type": "siglip_vision_model"}
SAID = "reads its prompt in both directions, which a decoder of steps can't do"


def paligemma() -> Any:
    text = {**TEXT, **IDS, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=IMAGES, image_token_index=VOCABULARY - 1, projection_dim=32
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def gemma3_of_images() -> Any:
    images = {**IMAGES, "image_size": 16}
    config = transformers.Gemma3Config(
        text_config={**TEXT, **IDS}, vision_config=images, image_token_id=VOCABULARY - 1, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def decoder(kind: str, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{kind}Config")(**{**TEXT, **IDS, **changes})
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


READERS: dict[str, Callable[[], Any]] = {
    "types of tokens": paligemma,
    "a prefix": decoder("HrmText"),
    "a prefix that transformers leaves out": decoder("Mpt", d_model=32, n_heads=4, n_layers=2, prefix_lm=True),
    "not causal": decoder("Qwen2", is_causal=False),
    "in windows too": decoder("Gemma3Text", use_bidirectional_attention=True),
}
CAUSAL: dict[str, Callable[[], Any]] = {
    "llama": decoder("Llama"),
    "windows": decoder("Mistral", sliding_window=2),
    "kinds of layers": decoder("Gemma3Text", sliding_window=2),
    "a prefix that is off": decoder("HrmText", prefix_lm=False),
    "alibi": decoder("Bloom", n_layer=2, n_head=4),
    "states": decoder("Mamba"),
    "images": gemma3_of_images,
}


@pytest.mark.parametrize("name", READERS)
def test_readers_in_both_directions(name: str) -> None:
    model = READERS[name]()
    with pytest.raises(RequestError, match=f"{type(model).__name__} {SAID}"):
        check_causal(model)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_decoders_whose_tokens_see_those_before_them(name: str, kernel: str) -> None:
    model = CAUSAL[name]()
    if kernel == "eager" or model._supports_sdpa:
        model.set_attn_implementation(kernel)
    check_causal(model)


def test_transformers_says_nothing_of_types_of_tokens_that_no_user_gave() -> None:
    said = list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.models.hrm_text.modeling_hrm_text")
    transformers.utils.logging.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        check_causal(CAUSAL["a prefix that is off"]())
    finally:
        logger.removeHandler(handler)
    assert not said


def test_masks_of_numbers_show_it_too() -> None:
    model = paligemma()
    model.set_attn_implementation("eager")
    with pytest.raises(RequestError, match=SAID):
        check_causal(model)


def test_without_caches_too(tmp_path: Path) -> None:
    """Such a file would compute the model's forward, but generate other tokens than transformers."""
    torch.manual_seed(0)
    model = decoder("Qwen2", is_causal=False)()
    save_randomised(model, tmp_path / "qwen2")
    ids = torch.tensor([[5, 17, 3, 44, 21]])
    given = {"input_ids": ids, "max_new_tokens": 24, "do_sample": False}
    with_cache, without = (model.generate(**given, use_cache=one).tolist() for one in (True, False))
    assert with_cache != without
    command = ("export", "--from", tmp_path / "qwen2", "--model", "-o", tmp_path / "model.onnx", "--kv-cache", "none")
    refused(
        cli(*command),
        "Qwen2ForCausalLM reads its prompt in both directions, and a file without caches isn't told where the prompt "
        "ends: for its states without a head, put Qwen2Model into 'architectures'",
    )


@pytest.mark.slow
def test_neither_exported_nor_verified(tmp_path: Path) -> None:
    """Without token types, transformers itself treats such a model as causal, so verify would pass its file.

    The part below its head also reads images and would be refused too.
    """
    save_randomised(paligemma(), tmp_path / "paligemma")
    command = ("export", "--from", tmp_path / "paligemma", "--model", "-o", tmp_path / "model.onnx")
    refused(cli(*command), f"{SAID}: give a checkpoint of a decoder whose tokens see only those before them.")
    assert not (tmp_path / "model.onnx").exists()
    small_checkpoint(tmp_path / "llama")
    file = exported_model(tmp_path / "llama", tmp_path / "model.onnx")
    refused(cli("verify", file, "--from", tmp_path / "paligemma", "--runtime", "ort-cpu"), SAID)


@pytest.mark.slow
def test_its_states_are_exported_as_the_sentence_says(tmp_path: Path) -> None:
    model = decoder("Qwen2", is_causal=False)()
    save_randomised(model, tmp_path / "qwen2")
    command = ("export", "--from", tmp_path / "qwen2", "--model", "-o", tmp_path / "model.onnx")
    refused(cli(*command), SAID, "put Qwen2Model into 'architectures' of its config.json")
    path = tmp_path / "qwen2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen2Model"]}))
    assert cli(*command).exit_code == 0
    import onnxruntime

    ids = torch.tensor([[5, 17, 3, 44, 21]])
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    given = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
    (states,) = session.run(["last_hidden_state"], given)
    wanted = model.model(input_ids=ids).last_hidden_state
    assert abs(states - wanted.numpy()).max() < 1e-4
    other = model.model(input_ids=torch.tensor([[5, 17, 3, 44, 22]])).last_hidden_state
    assert not torch.allclose(wanted[:, 0], other[:, 0])  # The first token sees the last one.
