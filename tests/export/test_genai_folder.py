"""Decoders as folders for onnxruntime-genai: it loads them and generates the same tokens as transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from helpers import cli, refused, tree
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

pytestmark = pytest.mark.few_inputs

CONSTRAINTS = Path(__file__).parents[2] / "scripts" / "constraints.txt"

PROMPTS = [[5, 6, 7, 8, 9], [41, 3, 77, 12, 60]]

CLIENT = """
import json, sys
import numpy, onnxruntime_genai
model = onnxruntime_genai.Model(sys.argv[1])
prompts, count = json.loads(sys.argv[2]), int(sys.argv[3])
parameters = onnxruntime_genai.GeneratorParams(model)
parameters.set_search_options(max_length=len(prompts[0]) + count, batch_size=len(prompts), do_sample=False)
generator = onnxruntime_genai.Generator(model, parameters)
generator.append_tokens(numpy.array(prompts, numpy.int32))
while not generator.is_done():
    generator.generate_next_token()
print(json.dumps([generator.get_sequence(row).tolist() for row in range(len(prompts))]))
"""


@pytest.fixture(scope="module")
def genai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with onnxruntime-genai that uses the installed ONNX Runtime; its own would replace that."""
    folder = tmp_path_factory.mktemp("genai")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    made = subprocess.run(
        [*command, "--constraint", str(CONSTRAINTS), "onnxruntime-genai"], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"not run: onnxruntime-genai can't be installed ({made.stderr.strip()[-200:]})")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and grouped heads."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,  # torch multiplies queries and keys by the root of the scale, which float32 cannot represent
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported Llama with growing caches."""
    return exported(checkpoint, tmp_path_factory.mktemp("decoder"))


def exported(checkpoint: Path, folder: Path, *options: str) -> Path:
    path = folder / "llama.onnx"
    made = cli("export", "--from", checkpoint, "--model", "-o", path, *options)
    assert made.exit_code == 0, made.output
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return path


def packaged(path: Path, folder: Path, *options: str) -> Any:
    result = cli("package", path, "--genai", "-o", folder, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def generated(genai: Path, folder: Path, count: int = 32) -> Any:
    made = subprocess.run(
        [sys.executable, "-c", CLIENT, str(folder), json.dumps(PROMPTS), str(count)],
        env=os.environ | {"PYTHONPATH": str(genai)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


def of_transformers(checkpoint: Path, count: int = 32, model_class: Any = LlamaForCausalLM) -> Any:
    """Greedy tokens of transformers; finished rows are filled with the end token, as in onnxruntime-genai."""
    model = model_class.from_pretrained(checkpoint).eval()
    rows = model.generate(torch.tensor(PROMPTS), max_new_tokens=count, do_sample=False, pad_token_id=2)
    return rows.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--form", "contrib", "--target", "ort", "--kv-cache", "shared")])
def test_it_generates_what_transformers_does(
    options: tuple[str, ...], genai: Path, checkpoint: Path, decoder: Path, tmp_path: Path
) -> None:
    path = exported(checkpoint, tmp_path, *options) if options else decoder
    said = packaged(path, tmp_path / "packaged")
    assert said["buffers"] == ("shared" if options else "grown")
    expected = of_transformers(checkpoint)
    assert generated(genai, tmp_path / "packaged") == expected
    assert len({*expected[0][5:]}) > 4  # A repeated token would hide errors.


SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
HYBRIDS: dict[str, tuple[Any, Any]] = {
    "convolutions": (Lfm2ForCausalLM, Lfm2Config(**SMALL, num_hidden_layers=2, layer_types=["conv", "full_attention"])),
    "states": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **SMALL,
            head_dim=16,
            layers_block_type=["linear_attention", "mlp", "full_attention"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HYBRIDS)
def test_it_hands_on_states_of_linear_attention(kind: str, genai: Path, tmp_path: Path) -> None:
    model_class, config = HYBRIDS[kind]
    torch.manual_seed(4)
    checkpoint = tmp_path / "checkpoint"
    model_class(config).save_pretrained(checkpoint)
    packaged(exported(checkpoint, tmp_path), tmp_path / "packaged")
    expected = of_transformers(checkpoint, 16, model_class)
    assert generated(genai, tmp_path / "packaged", 16) == expected
    assert len({*expected[0][5:]}) > 4


@pytest.mark.slow
def test_a_faulty_model_generates_other_tokens(genai: Path, checkpoint: Path, decoder: Path, tmp_path: Path) -> None:
    model = onnx.load(decoder)
    norm = next(each for each in model.graph.initializer if each.name.endswith("layers.1.input_layernorm.weight"))
    norm.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(norm), norm.name))
    onnx.save(model, tmp_path / "faulty.onnx")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    packaged(tmp_path / "faulty.onnx", tmp_path / "packaged")
    assert generated(genai, tmp_path / "packaged") != of_transformers(checkpoint)


def test_the_folder_holds_the_model_and_what_lies_beside_it(decoder: Path, tmp_path: Path) -> None:
    tokenizer = decoder.with_name("tokenizer.json")
    tokenizer.write_text("{}")
    folder = tmp_path / "packaged"
    said = packaged(decoder, folder)
    tokenizer.unlink()
    files = tree(folder)
    assert {*files} == {"genai_config.json", "model.onnx", "model.onnx.json", "tokenizer.json"}
    assert files["model.onnx"] == decoder.read_bytes()
    assert said["tokenizer"] == ["tokenizer.json"]
    config = json.loads(files["genai_config.json"])
    assert config["search"]["max_length"] == config["model"]["context_length"] == 256
    part = config["model"]["decoder"]
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size", "hidden_size")
    assert [part[name] for name in counts] == [2, 4, 2, 24, 64]
    assert [config["model"][name] for name in ("vocab_size", "bos_token_id", "eos_token_id")] == [100, 1, 2]
    assert cli("verify", folder / "model.onnx", "--runtime", "ort-cpu", "--reach", "seq=64").exit_code == 0


def test_people_see_what_was_written(decoder: Path, tmp_path: Path) -> None:
    result = cli("package", decoder, "--genai", "-o", tmp_path / "packaged")
    assert result.exit_code == 0, result.output
    for said in ("2", "grown", "256 tokens", "none lies beside the model", "onnxruntime_genai.Model("):
        assert said in result.output


def test_a_folder_is_replaced_only_when_asked(decoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packaged"
    packaged(decoder, folder)
    before = tree(folder)
    refused(cli("package", decoder, "--genai", "-o", folder), "is there", "--force")
    assert tree(folder) == before
    (folder / "old").touch()
    packaged(decoder, folder, "--force")
    assert tree(folder) == before
    (tmp_path / "file").touch()
    refused(cli("package", decoder, "--genai", "--force", "-o", tmp_path / "file"), "is there", "another --output")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--genai", "--triton"], "give --triton or --genai, one of them"),
        ([], "give --triton or --genai, what to package for"),
        (["--genai", "--instances", "2"], "--instances belongs to --triton"),
        (["--genai", "--max-batch-size", "2"], "--max-batch-size belongs to --triton"),
    ],
)
def test_options_of_the_other_kind_are_refused(options: list[str], said: str, decoder: Path) -> None:
    refused(cli("package", decoder, *options), said)


def renamed(model: onnx.ModelProto, old: str, new: str) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name == old:
            value.name = new
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("attention_mask", "mask", "has the input 'mask'"),
        ("logits", "scores", "lacks 'logits'"),
        ("present.1.key", "present_1_key", "lacks 'present.1.key'"),
        ("past_key_values.1.value", "past_1", "has the input 'past_1'"),
    ],
)
def test_what_is_no_decoder_is_refused(old: str, new: str, said: str, decoder: Path, tmp_path: Path) -> None:
    model = onnx.load(decoder)
    renamed(model, old, new)
    onnx.save(model, tmp_path / "other.onnx")
    (tmp_path / "config.json").write_bytes(decoder.with_name("config.json").read_bytes())
    refused(cli("package", tmp_path / "other.onnx", "--genai", "-o", tmp_path / "packaged"), said)
    assert not (tmp_path / "packaged").exists()


@pytest.mark.parametrize("name", ["genai_config.json", "tokenizer.json", "model.onnx.json.sig"])
def test_weights_under_the_name_of_another_file_are_refused(name: str, decoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    onnx.save(onnx.load(decoder), path, save_as_external_data=True, location=name)
    (tmp_path / "config.json").write_bytes(decoder.with_name("config.json").read_bytes())
    refused(cli("package", path, "--genai", "-o", tmp_path / "packaged"), f"keeps weights in '{name}'")
    assert not (tmp_path / "packaged").exists()


@pytest.mark.slow
def test_a_model_without_caches_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = exported(checkpoint, tmp_path, "--kv-cache", "none")
    refused(cli("package", path, "--genai"), "has no caches", "made with --kv-cache concat or shared")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "is not there"),
        ({"eos_token_id": None}, "has no eos_token_id"),
        ({"hidden_size": "64"}, "has none of hidden_size, n_embd"),
        ({"num_attention_heads": -4}, "has none of num_attention_heads"),
        *(
            ({name: value}, "is 100, and the model has 100 tokens: correct it in config.json")
            for name, value in (("pad_token_id", 100), ("bos_token_id", 100), ("eos_token_id", [2, 100]))
        ),
    ],
)
def test_a_config_that_says_too_little_or_wrong_is_refused(
    change: dict[str, Any] | None, said: str, decoder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(decoder.read_bytes())
    if change is not None:
        config = json.loads(decoder.with_name("config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    refused(cli("package", path, "--genai", "-o", tmp_path / "packaged"), said)
    assert not (tmp_path / "packaged").exists()
