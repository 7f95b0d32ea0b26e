"""`posexport verify --from` with whole models: logits and greedy tokens compared with transformers in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from helpers import cli
from safetensors.torch import load_file, save_file
from small_decoders import NATIVE, TRAINED, exported_model, save_randomised, small_checkpoint
from tiny_models import checkpoint

pytestmark = pytest.mark.few_inputs

pytest.importorskip("transformers")

HERE = ("--runtime", "ort-cpu")

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "grown": ("Llama", NATIVE),
    "buffers": ("Llama", (*NATIVE, "--kv-cache", "shared")),
    "fp16": ("Llama", (*NATIVE, "--dtype", "fp16")),
    "no caches": ("Llama", ("--kv-cache", "none")),
    "learned": ("GPT2", ()),
    "no positions": ("Bloom", ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints by the names of their models. Files are exported into it when they are needed."""
    here = tmp_path_factory.mktemp("models")
    for kind in ("Llama", "GPT2", "Bloom"):
        small_checkpoint(here / kind, kind)
    return here


def file_of(folder: Path, name: str) -> Path:
    """The file of a row of FILES."""
    kind, options = FILES[name]
    path = folder / name.replace(" ", "_") / "model.onnx"
    if not path.exists():
        path.parent.mkdir()
        exported_model(folder / kind, path, *options)
    return path


def verdicts(path: Path, checkpoint: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the verdicts by check."""
    result = cli("verify", path, "--from", checkpoint, *HERE, *options, "--json")
    found = json.loads(result.stdout)["verdicts"]
    return result.exit_code, {verdict["check"]: verdict for verdict in found}


SLOW = ("buffers", "no caches", "no positions", "fp16", "learned")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FILES])
def test_a_model_is_its_checkpoint(name: str, folder: Path) -> None:
    code, found = verdicts(file_of(folder, name), folder / FILES[name][0])
    parity = found["parity"]
    assert (code, parity["state"], parity["reason"]) == (0, "passed", None)
    assert parity["cases"] > 10
    assert parity["reach"]["batch"] > 2
    assert parity["reach"]["position"] in (None, TRAINED - 1)
    assert 0 < parity["worst"]["torch_error"] < (0.1 if name == "fp16" else 1e-4)
    assert found["generation"]["state"] == "passed"
    equal, _, total = found["generation"]["measured"].split()[:3]
    assert int(total) == 3 * 64
    assert int(equal) > (170 if name == "fp16" else 190)


def test_the_cases_are_prompts_steps_and_chunks_with_padding(folder: Path) -> None:
    from posexport.verify.graph.cases import drawn_cases
    from posexport.verify.graph.subject import read_file, read_subject
    from posexport.verify.graph.trained import trained

    roles = read_subject(read_file(file_of(folder, "grown"))).roles()
    cases = drawn_cases(trained(folder / "Llama").roles(roles), 0)
    sizes = {(case.sizes["seq"] == 1, case.sizes["past"] > 0) for case in cases}
    assert sizes == {(False, False), (True, False), (False, True), (True, True)}
    masks = [case.arrays["attention_mask"] for case in cases]
    assert any((mask[:, 0] == 0).any() and (mask[:, -1] == 1).all() for mask in masks if len(mask) > 1)
    assert max(int(case.arrays["position_ids"].max()) for case in cases) == TRAINED - 1


def changed(path: Path, to: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    model = onnx.load(path)
    change(model)
    onnx.save(model, to)
    return to


def swaps_caches(model: onnx.ModelProto) -> None:
    """The second layer reads the cache of the first."""
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = name.replace("past_key_values.1.", "past_key_values.0.")


def scales_logits(model: onnx.ModelProto) -> None:
    """Logits are a tenth too large, which does not change tokens."""
    (node,) = (node for node in model.graph.node if "logits" in node.output)
    node.output[0] = "small"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1.1).reshape(()), "factor"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["small", "factor"], ["logits"]))


PLANTED = {
    "swapped caches": (swaps_caches, "failed", "; the first layer that differs is 'model.layers.1'"),
    "larger logits": (
        scales_logits,
        "passed",
        "; all layers of 'model.layers' agree, so the difference comes after them",
    ),
}
"""By name: a change, the state of the tokens after it, and the end of the clause that says where the file departs."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_fail(name: str, folder: Path, tmp_path: Path) -> None:
    change, tokens, where = PLANTED[name]
    code, found = verdicts(changed(file_of(folder, "grown"), tmp_path / "wrong.onnx", change), folder / "Llama")
    assert code == 1
    assert found["parity"]["state"] == "failed"
    assert found["parity"]["where"].startswith("the file and the module are different functions in float64")
    assert found["parity"]["where"].endswith(where)
    assert found["generation"]["state"] == tokens
    if tokens == "failed":
        assert found["generation"]["reason_code"] == "other-tokens"
        assert "of row" in found["generation"]["reason"]


LAYERS = {
    "fp16": ("model.layers.1.mlp.down_proj.weight", "; the first layer that differs is 'model.layers.1'"),
    "no caches": ("model.layers.0.self_attn.q_proj.weight", "; the first layer that differs is 'model.layers.0'"),
    "buffers": ("lm_head.weight", "; all layers of 'model.layers' agree, so the difference comes after them"),
    "learned": ("transformer.h.1.mlp.c_fc.weight", "; the first layer that differs is 'transformer.h.1'"),
}
"""By the name of a file: a weight that is changed in the checkpoint, and the clause that says where the file
departs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_of_another_weight_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    weight, where = LAYERS[name]
    shutil.copytree(folder / FILES[name][0], tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    save_file({**weights, weight: -weights[weight]}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    _, found = verdicts(file_of(folder, name), tmp_path / "other")
    assert found["parity"]["where"].endswith(where)


@pytest.mark.slow
def test_equal_logits_are_stated(tmp_path: Path) -> None:
    """Two tokens have the same row of the head, so both are right. The note says where."""
    small_checkpoint(tmp_path / "twins")
    weights = load_file(tmp_path / "twins" / "model.safetensors")
    head = weights["lm_head.weight"]
    head[30:] = head[:30]
    save_file({**weights, "lm_head.weight": head}, tmp_path / "twins" / "model.safetensors", {"format": "pt"})
    path = exported_model(tmp_path / "twins", tmp_path / "twins.onnx", *NATIVE)
    _, found = verdicts(path, tmp_path / "twins")
    generation = found["generation"]
    assert generation["state"] == "passed"
    assert generation["limit_text"].startswith("0, as many as")
    assert "row 1, token 1: 0.00e+00, row 1, token 2: 0.00e+00, row 1, token 3: 0.00e+00 and 189 more" in str(
        generation["notes"]
    )


def test_another_checkpoint_of_the_same_sizes_fails(folder: Path, tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "other", seed=1)
    code, found = verdicts(file_of(folder, "grown"), tmp_path / "other")
    assert (code, found["parity"]["state"], found["generation"]["state"]) == (1, "failed", "failed")


@pytest.mark.slow
@pytest.mark.slow
def test_logits_that_overflow_in_transformers_too_show_nothing(tmp_path: Path) -> None:
    """The file can't make tokens in fp16, but neither can transformers: another dtype is what helps."""
    import transformers

    small_checkpoint(tmp_path / "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        usual = model(torch.arange(16)[None]).logits.std()
        weight = model.lm_head.weight * (4e4 / usual)
        model.lm_head.weight = torch.nn.Parameter(weight)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "loud")
    file = exported_model(tmp_path / "loud", tmp_path / "model.onnx", *NATIVE, "--dtype", "fp16")
    code, found = verdicts(file, tmp_path / "loud")
    assert (code, found["generation"]["state"], found["generation"]["reason_code"]) == (0, "not run", "inconclusive")
    assert found["generation"]["reason"] == (
        "inconclusive: the logits are NaN or infinity, and so are those of transformers in fp16: export it with "
        "--dtype fp32"
    )
    assert verdicts(file, tmp_path / "loud", "--strict")[0] == 1


def test_reports_have_the_tokens(folder: Path, tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    result = cli("verify", file_of(folder, "grown"), "--from", folder / "Llama", *HERE, "--junit", junit)
    assert result.exit_code == 0
    assert "ort-cpu: generation" in result.stdout
    assert 'name="ort-cpu: generation"' in junit.read_text()
    assert "192 of 192 tokens are those of float64" in junit.read_text()


def other_config(folder: Path) -> Path:
    return folder.parent / "GPT2"


def other_sizes(folder: Path) -> Path:
    small_checkpoint(folder, num_key_value_heads=4)
    return folder


def missing_shard(folder: Path) -> Path:
    shutil.copytree(folder.parent / "Llama", folder)
    tensors = load_file(folder / "model.safetensors")
    names = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def no_folder(folder: Path) -> Path:
    return folder / "nothing"


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another architecture": (other_config, "give the checkpoint that the file was exported from"),
    "other sizes": (other_sizes, "'past_key_values.0.key' of the file is ['batch', 2, 'past', 8], and ['batch', 4,"),
    "a missing shard": (missing_shard, "model-00002-of-00002.safetensors"),
    "no folder": (no_folder, "nothing' is no folder: give that of a checkpoint"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(name: str, folder: Path) -> None:
    make, said = REFUSED[name]
    checkpoint = make(folder / name.replace(" ", "_"))
    result = cli("verify", file_of(folder, "grown"), "--from", checkpoint, *HERE)
    assert result.exit_code == 2
    assert said in result.stderr
    assert [line[:7] for line in result.stderr.splitlines() if "still running" not in line] == ["Error: "]
    assert "Traceback" not in result.stderr


def test_a_layer_of_a_whole_model_is_refused(folder: Path) -> None:
    result = cli("verify", file_of(folder, "grown"), "--from", folder / "Llama", "--layer", "1", *HERE)
    assert (result.exit_code, "is a whole model, which has no --layer" in result.stderr) == (2, True)


def test_a_file_of_another_origin_needs_a_spec(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(file_of(folder, "grown"))
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    result = cli("verify", tmp_path / "foreign.onnx", "--from", folder / "Llama", *HERE)
    assert (result.exit_code, "--weights or --from needs one" in result.stderr) == (2, True)


def test_constants_keep_their_dtype_in_half_precision(folder: Path) -> None:
    """Frequencies in float16 would make torch's error, and so the limit, a hundred times larger."""
    from posexport.runtimes import torch_module

    path = file_of(folder, "grown")
    module = torch_module._load(str(folder / "Llama"), path)
    half = torch_module._copied(module, torch.float16, None)
    kinds = {name: buffer.dtype for name, buffer in half.module.named_buffers()}
    assert {dtype for name, dtype in kinds.items() if "inv_freq" in name} == {torch.float32}
    assert {parameter.dtype for parameter in half.module.parameters()} == {torch.float16}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "bert_masked", "t5"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    """Windows, mixtures of experts, an encoder, and the two files of an encoder-decoder."""
    exported_model(checkpoint(name), tmp_path / "model.onnx", *NATIVE)
    result = cli("verify", tmp_path, "--from", checkpoint(name), *HERE, "--json")
    assert result.exit_code == 0, result.stdout
    found = json.loads(result.stdout)["verdicts"]
    checks = {"bert_masked": 1, "t5": 3}.get(name, 2)  # decoders have tokens too; an encoder-decoder has two files
    assert [verdict["state"] for verdict in found] == ["passed"] * checks


@pytest.mark.slow
def test_float64_may_put_a_distance_in_another_bucket(tmp_path: Path) -> None:
    """In T5's usual buckets, a distance of 16 tokens is at an edge, and a file's float64 puts it in another bucket than
    its float32, which counts. Buckets of another distance are another model's."""
    import transformers

    for name, distance in (("sound", 128), ("wrong", 124)):
        config = transformers.T5Config(
            **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "vocab_size": 90},
            relative_attention_max_distance=distance,
        )
        save_randomised(transformers.T5EncoderModel(config), tmp_path / name)
        exported_model(tmp_path / name, tmp_path / f"{name}.onnx")
        (tmp_path / f"{name}.onnx.json").unlink()
    for name, state in (("sound", "passed"), ("wrong", "failed")):
        code, found = verdicts(tmp_path / f"{name}.onnx", tmp_path / "sound", "--strict")
        assert (code, found["parity"]["state"], found["parity"]["not_shown"]) == (int(state == "failed"), state, [])
