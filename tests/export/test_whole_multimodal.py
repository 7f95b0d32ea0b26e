"""The text decoder of a vision-language model is exported: its file, its verification and its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import cli
from small_decoders import PROMPTS, TRAINED, VOCABULARY, greedy, save_randomised

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": TRAINED, "vocab_size": VOCABULARY}
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of Llava, whose vision tower has as many layers as its decoder; and transformers' model."""
    images = {**SIZES, "image_size": 16, "patch_size": 8, "projection_dim": 32, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(
        text_config={**TEXT, **IDS, "model_type": "llama"}, vision_config=images, image_token_index=VOCABULARY - 1
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    folder = tmp_path_factory.mktemp("llava")
    save_randomised(model, folder)
    return folder, model


@pytest.fixture(scope="module")
def path(checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "model.onnx"
    result = cli("export", "--from", checkpoint[0], "--model", "--form", "native", "-o", made)
    assert result.exit_code == 0, result.output
    said = "LlavaForConditionalGeneration has parts for vision, which are left out: the file takes tokens alone."
    assert said in " ".join(result.stderr.split())
    return made


@pytest.mark.slow
def test_the_file_is_a_decoder_without_the_tower_for_images(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    assert [value.name for value in model.graph.input][:3] == ["input_ids", "attention_mask", "position_ids"]
    assert not [tensor.name for tensor in model.graph.initializer if "vision" in tensor.name]
    operators = [node.op_type for node in model.graph.node]
    assert (operators.count("Attention"), operators.count("Conv")) == (2, 0)


@pytest.mark.slow
def test_it_is_the_checkpoint_and_makes_its_tokens(checkpoint: tuple[Path, Any], path: Path) -> None:
    folder, model = checkpoint
    result = cli("verify", path, "--from", folder, "--runtime", "ort-cpu", "--json")
    assert result.exit_code == 0, result.output
    verdicts = json.loads(result.stdout)["verdicts"]
    assert [(one["check"], one["state"]) for one in verdicts] == [("parity", "passed"), ("generation", "passed")]
    given = [option for prompt in PROMPTS for option in ("--prompt-ids", ",".join(map(str, prompt)))]
    result = cli("generate", path, *given, "--max-new-tokens", "24", "--ignore-eos", "--json")
    assert [row["tokens"] for row in json.loads(result.stdout)["rows"]] == greedy(model)


@pytest.mark.slow
def test_json_says_what_is_left_out(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    result = cli("export", "--from", checkpoint[0], "--model", "-o", tmp_path / "model.onnx", "--json")
    assert json.loads(result.stdout)["left_out"] == ["vision"]
