"""`posexport export --from CHECKPOINT --model`: the files next to the model, and refusals in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from helpers import cli, refused, tree
from tiny_models import ROWS, checkpoint

from posexport.artifact import read_manifest
from posexport.artifact.manifest import OnnxManifest
from posexport.errors import RequestError
from posexport.export import linear_attention, whole_model
from posexport.export.whole_model import ExportedModel, HowToExport, export_whole
from posexport.files import sha256_of
from posexport.models.pretrained import open_pretrained


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint(name), folder / name))


def export(folder: Path, output: Path, *options: str | Path) -> list[str | Path]:
    return ["export", "--from", folder, "--model", "-o", output, *options]


def test_the_checkpoints_files_and_all_attentions_are_beside_the_model(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    output = tmp_path / "out" / "model.onnx"
    output.parent.mkdir()
    result = cli(*export(folder, output, "--form", "native", "--require-all"))
    assert result.exit_code == 0, result.output
    assert set(tree(output.parent)) == {
        *("model.onnx", "model.onnx.json", "config.json", "generation_config.json", "tokenizer.json")
    }
    assert (output.parent / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    manifest = read_manifest(output)
    assert isinstance(manifest, OnnxManifest) and manifest.weights is not None
    assert manifest.weights.config_sha256 == sha256_of(folder / "config.json")
    assert manifest.weights.files == {"model.safetensors": sha256_of(folder / "model.safetensors")}
    assert "transformers" in manifest.tools
    assert [one["layer"] for one in manifest.attentions] == [0, 1]
    for one in manifest.attentions:
        assert (one["state"], one["num_heads"], one["encoding"]["name"]) == ("rewritten", 4, "rope")
        assert one["cases"] > 0 and one["error"] < 1e-9


def test_an_attention_that_is_left_fails_where_all_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = {"code": "softcap", "text": "it has a softcap"}
    left = {"name": "layers.0.softmax", "state": "kept", "reason": reason}
    model = ExportedModel(
        model=ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), architecture="X", attentions=(left,)
    )
    monkeypatch.setattr(whole_model, "export_whole", lambda *_: [model])
    result = cli(*export(checkpoint("llama"), tmp_path / "model.onnx", "--form", "native", "--require-all"))
    assert result.exit_code == 1
    assert "layers.0.softmax is not in the form native: it has a softcap" in result.stderr
    assert "is not written" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_another_model_s_files_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = cli(*export(checkpoint("llama"), tmp_path / "model.onnx"))
    refused(result, "config.json", "folder of its own")
    assert set(tree(tmp_path)) == {"config.json"}


def test_one_layer_says_that_there_is_a_whole_model(tmp_path: Path) -> None:
    result = cli("export", "--from", checkpoint("llama"), "-o", tmp_path / "layer.onnx")
    assert result.exit_code == 0
    assert "give --model for the whole model" in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hidden-size", "64"], "--hidden-size was given with --model"),
        (["--layer", "1"], "--layer was given with --model"),
        (["--set", "theta=1"], "--set was given with --model"),
        (["--encoding", "rope"], "--encoding was given with --model"),
        (["--seed", "1"], "--seed was given with --model"),
        (["--preset", "llama3-8b"], "--preset was given with --model"),
        (["--example", "x.npz"], "--example was given with --model"),
        (["--kv-cache", "paged"], "unknown kv_cache 'paged'"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--form", "nativ"], "did you mean 'native'"),
    ],
)
def test_options_that_the_checkpoint_decides(options: list[str], said: str, tmp_path: Path) -> None:
    refused(cli(*export(checkpoint("llama"), tmp_path / "model.onnx", *options)), said)
    assert not list(tmp_path.iterdir())


def test_options_that_need_a_whole_model() -> None:
    refused(
        cli("export", "--from", checkpoint("llama"), "--hidden-states"), "--hidden-states was given without --model"
    )
    refused(cli("export", "--encoding", "rope", "--require-all"), "--require-all was given without --model")
    refused(cli("export", "--model"), "--model was given without --from")


def test_outputs(tmp_path: Path) -> None:
    refused(cli(*export(checkpoint("llama"), tmp_path / "model")), "must end in .onnx")
    refused(cli(*export(checkpoint("llama"), tmp_path / "no" / "model.onnx")), "is not there")


def _edited(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _missing_shard(folder: Path) -> None:
    names = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes the header of the weights file; the data stays."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return rewrite


def _long_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def _pickled(folder: Path) -> None:
    """Weights that a loader would unpickle, which can run code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")


def _index(names: dict[str, str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return write


def _bare_index(folder: Path) -> None:
    _index({NORM: "model-00001-of-00001.safetensors"})(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"]}))


def _listed_layers(folder: Path) -> None:
    """The index lists as many layers as config.json says, but the files do not have them."""
    _edited(num_hidden_layers=10**5)(folder)
    _index({f"model.layers.{number}.x": "model-00001-of-00001.safetensors" for number in range(10**5)})(folder)


def _pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


NORM, TABLE = "model.norm.weight", "model.embed_tokens.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["holds no config.json"]),
    "config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["can't be read as JSON"]),
    "a truncated shard": (_truncated, ["model.safetensors"]),
    "a missing shard": (_missing_shard, ["model-00002-of-00002.safetensors"]),
    "an unknown architecture": (_edited(architectures=["NoSuchModel"]), ["'NoSuchModel'"]),
    "no architecture": (_edited(architectures=None), ["has no 'architectures': add the model's class"]),
    "code of the checkpoint": (
        _edited(architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"}),
        ["'Own'", "Code that a checkpoint brings with it is not run"],
    ),
    "other sizes": (_edited(intermediate_size=64), ["another shape for", "LlamaForCausalLM"]),
    "more layers": (_edited(num_hidden_layers=3), ["has no tensor for", "layers.2"]),
    "ten million layers": (_edited(num_hidden_layers=10**7), ["'num_hidden_layers' is 10000000", "up to 1048576"]),
    "layers of a part": (_edited(text_config={"depths": [2, 10**9]}), ["text_config: 'depths' is 1000000000"]),
    "too many layers": (_edited(num_hidden_layers=10**5), ["parts or more, and its files have 21 tensors"]),
    "too many heads": (_edited(num_attention_heads=10**12), ["'num_attention_heads' is 1000000000000"]),
    "a negative length": (_edited(max_position_embeddings=-1), ["'max_position_embeddings' is -1: it must be"]),
    "labels": (_edited(num_labels=10**9), ["'num_labels' is 1000000000"]),
    "too many tokens": (_edited(vocab_size=4 * 10**9), ["256,000,000,000 weights or more, and its files have"]),
    "a table of 13 GB": (_edited(vocab_size=10**8), ["6,400,000,000 weights or more"]),
    "too wide": (_edited(intermediate_size=10**15), ["weights or more"]),
    "wider than 64 bits can count": (_edited(hidden_size=2**62), ["can't make a LlamaForCausalLM"]),
    "a word for a number": (_edited(num_attention_heads="4"), ["num_attention_heads", "expected int, got str"]),
    "an unknown function": (_edited(hidden_act="foo"), ["(KeyError: 'foo', the hidden_act of config.json)."]),
    "unknown angles": (
        _edited(rope_parameters={"rope_type": "spiral", "rope_theta": 10.0}),
        ["(KeyError: 'spiral', the rope_parameters.rope_type of config.json)."],
    ),
    "a shape that is not that of its data": (
        _header(lambda header: header[TABLE].update(shape=[10**9, 32])),
        ["model.safetensors", "can't be read as .safetensors", "fetch the file again"],
    ),
    "data behind the end": (
        _header(lambda header: header[TABLE].update(data_offsets=[0, 2**40])),
        ["can't be read as .safetensors"],
    ),
    "data that is another's too": (
        _header(lambda header: header[NORM].update(data_offsets=header[TABLE]["data_offsets"])),
        ["can't be read as .safetensors"],
    ),
    "a dtype that is none": (_header(lambda header: header[NORM].update(dtype="X9")), ["can't be read as"]),
    "a header beyond the file": (_long_header, ["can't be read as .safetensors"]),
    "a pipe for weights": (_pipe, ["model.safetensors"]),
    "pickled weights": (_pickled, ["neither model.safetensors nor"]),
    "a shard in another folder": (_index({NORM: "../other.safetensors"}), ["is no index of shards"]),
    "an index without metadata": (_bare_index, ["has no table 'metadata'", "transformers needs"]),
    "an index that is no table": (_index([]), ["is no index of shards"]),  # type: ignore[arg-type]
    "an index of layers that are not there": (_listed_layers, ["parts or more, and its files have 21 tensors"]),
}


@pytest.mark.slow
def test_tensors_that_the_model_does_not_have_are_a_warning(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    _edited(num_hidden_layers=1)(folder)
    (tmp_path / "out").mkdir()
    result = cli(*export(folder, tmp_path / "out" / "model.onnx"))
    assert result.exit_code == 0, result.output
    assert f"9 tensors of {folder} are not in the model, such as 'model.layers.1." in result.stderr
    assert "see that its config.json is that of these weights" in result.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(case: str, tmp_path: Path) -> None:
    change, said = BROKEN[case]
    folder = copied("llama", tmp_path)
    change(folder)
    refused(cli(*export(folder, tmp_path / "model.onnx")), *said)
    assert not (tmp_path / "model.onnx").exists()
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.slow
def test_weights_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    """They would become infinite, and the model's logits NaN."""
    from safetensors.torch import load_file, save_file

    folder = copied("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights[NORM][3] = -7e4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        RequestError, match=f"'{NORM}' has the value -7e\\+04, and torch.float16 ends at 6.55e\\+04: give"
    ):
        export_whole(open_pretrained(folder), HowToExport(dtype=torch.float16))


def test_a_class_whose_packages_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has a class for it, which only says what is missing; the message was that it has none."""
    import transformers
    from transformers.utils import DummyObject

    folder = copied("llama", tmp_path)
    monkeypatch.setattr(transformers, "LlamaForCausalLM", DummyObject("Missing", (), {"_backends": ["torchaudio"]}))
    refused(cli(*export(folder, tmp_path / "model.onnx")), "transformers needs torchaudio, which is not installed")


def test_no_folder(tmp_path: Path) -> None:
    refused(cli(*export(tmp_path / "none", tmp_path / "model.onnx")), "is no folder")
    refused(cli(*export(tmp_path, tmp_path / "model.onnx")), "neither model.safetensors nor")


def test_memories_that_are_no_keys_and_values() -> None:
    with pytest.raises(RequestError, match="MambaForCausalLM forgets its state in transformers where several tokens"):
        export_whole(open_pretrained(checkpoint("mamba")), HowToExport())
    with pytest.raises(RequestError, match="RwkvForCausalLM has no attention with caches, or remembers something"):
        export_whole(open_pretrained(checkpoint("rwkv")), HowToExport())


@pytest.mark.slow
def test_experts_that_are_looked_for_by_values(tmp_path: Path) -> None:
    """DBRX loops over the experts that some token chose; its mask has one expert more than there are."""
    output = tmp_path / "model.onnx"
    result = cli(*export(checkpoint("dbrx"), output, "--kv-cache", "none"))
    assert result.exit_code == 0, result.output
    model: Any = open_pretrained(checkpoint("dbrx")).model
    ids = torch.tensor([[5], [9]])  # With few tokens, some experts do not get any.
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids)}
    made = ort.InferenceSession(output, providers=["CPUExecutionProvider"]).run(
        ["logits"], {name: value.numpy() for name, value in given.items()}
    )
    np.testing.assert_allclose(made[0], model(**given, use_cache=False).logits.numpy(), atol=1e-4)


def test_loops_over_tokens_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "_FUNCTIONS", {})
    with pytest.raises(RequestError, match=r"MambaForCausalLM as a whole \(its code fixes a size that is to vary"):
        export_whole(open_pretrained(checkpoint("mamba")), HowToExport(kv_cache="none"))


@pytest.mark.slow
def test_loops_over_chunks_are_a_sentence(tmp_path: Path) -> None:
    """A trace of a few tokens has one chunk and would be wrong for more tokens than one chunk."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    config = MiniMaxConfig(**{**ROWS["minimax"].options, "max_position_embeddings": 1024})
    MiniMaxForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        RequestError, match=r"takes at most 256 tokens, as a loop over chunks does, .* trained for 1024"
    ):
        export_whole(open_pretrained(tmp_path), HowToExport(kv_cache="none"))


def test_a_model_without_caches_says_how_it_is_exported() -> None:
    with pytest.raises(RequestError, match="OpenAIGPTLMHeadModel has no caches in transformers: give --kv-cache none"):
        export_whole(open_pretrained(checkpoint("openai_gpt_causal")), HowToExport())


def test_caches_that_transformers_leaves_out_are_refused(tmp_path: Path) -> None:
    """In BERT with a language-model head, tokens see later tokens, so steps cannot continue from a cache."""
    folder = copied("bert_decoder", tmp_path)
    _edited(is_decoder=False)(folder)
    refused(cli(*export(folder, tmp_path / "model.onnx")), "BertLMHeadModel has no caches in transformers")
