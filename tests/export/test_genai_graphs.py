"""Small decoders from any tool as folders for onnxruntime-genai: their configuration, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import cli, refused, tree
from onnx import TensorProto
from small_graphs import decoder

from posexport.errors import RequestError
from posexport.export import genai_folder
from posexport.export.genai_folder import package_genai

CONFIG = {"hidden_size": 32, "num_attention_heads": 4, "eos_token_id": 2}


def saved(folder: Path, change: Callable[[onnx.ModelProto], None] = lambda model: None, **generation: Any) -> Path:
    """A changed decoder in a folder with the configuration of a checkpoint."""
    path, model = folder / "small.onnx", decoder()
    change(model)
    onnx.save(model, path)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return path


def packaged(path: Path) -> Any:
    """The configuration in the written folder."""
    folder = path.with_name("packaged")
    result = cli("package", path, "--genai", "-o", folder)
    assert result.exit_code == 0, result.output
    return json.loads((folder / "genai_config.json").read_text())


@pytest.mark.parametrize(
    ("past", "present", "shared"), [("", "", False), ("rows", "rows", True), (8, 8, True), ("past", "total", False)]
)
def test_caches_are_buffers_where_both_have_one_size_or_name(
    past: str | int, present: str | int, shared: bool, tmp_path: Path
) -> None:
    def change(model: onnx.ModelProto) -> None:
        for values, prefix, size in (
            (model.graph.input, "past_key_values.", past),
            (model.graph.output, "present.", present),
        ):
            for dims in (value.type.tensor_type.shape.dim for value in values if value.name.startswith(prefix)):
                dims[2].Clear()
                if isinstance(size, int):
                    dims[2].dim_value = size
                elif size:
                    dims[2].dim_param = size

    assert packaged(saved(tmp_path, change))["search"]["past_present_share_buffer"] is shared


def test_caches_and_logits_of_other_ranks_are_refused(tmp_path: Path) -> None:
    def cut(name: str, left: int) -> Callable[[onnx.ModelProto], None]:
        def change(model: onnx.ModelProto) -> None:
            for value in (*model.graph.input, *model.graph.output):
                if value.name == name:
                    del value.type.tensor_type.shape.dim[left:]

        return change

    for name in ("past_key_values.0.value", "present.0.key"):
        refused(cli("package", saved(tmp_path, cut(name, 3)), "--genai"), "of other than 4 dimensions")
    refused(cli("package", saved(tmp_path, cut("logits", 0)), "--genai"), "has logits without a fixed number of tokens")


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 10])
def test_numbers_of_layers_have_few_digits(number: str, tmp_path: Path) -> None:
    """Python refuses to convert so many digits to an int, and a list of so many layers would take all memory."""

    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            value.name = value.name.replace(".0.", f".{number}.")
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [name.replace(".0.", f".{number}.") for name in names]

    path = saved(tmp_path, change)
    refused(cli("package", path, "--genai"), "has no caches past_key_values.N.key")
    shown = cli("inspect", path, "--no-attention")
    assert shown.exit_code == 0, shown.output


def test_settings_that_choose_tokens_are_taken(tmp_path: Path) -> None:
    given = {"do_sample": True, "temperature": 1, "top_k": 50, "top_p": 0.9, "repetition_penalty": None}
    search = packaged(saved(tmp_path, **given))["search"]
    assert {name: search[name] for name in given if name in search} == {
        name: value for name, value in given.items() if value is not None
    }


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("temperature", float("nan"), "nan, not a finite number"),
        ("top_p", float("inf"), "inf, not a finite number"),
        ("temperature", "0.7", "'0.7', not a finite number"),
        ("temperature", True, "True, not a finite number"),
        ("top_k", 5.5, "5.5, not a whole number"),
        ("do_sample", 1, "1, not true or false"),
    ],
)
def test_settings_of_another_type_are_refused(name: str, value: Any, what: str, tmp_path: Path) -> None:
    path = saved(tmp_path, **{name: value})
    refused(cli("package", path, "--genai", "-o", tmp_path / "packaged"), f"has the {name} {what}: correct it")
    assert not (tmp_path / "packaged").exists()


@pytest.mark.parametrize("kind", ["--genai", "--triton"])
def test_weights_in_the_file_itself_would_be_lost(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = onnx.load(path)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "inv_freq")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "small.onnx"), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    said = refused(cli("package", path, kind, "-o", tmp_path / "packaged"), "keeps weights as external data in itself")
    assert "posexport rewrite" in said
    assert not (tmp_path / "packaged").exists()


def test_what_another_process_writes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, copy = tmp_path / "packaged", genai_folder.copy_file

    def copies(*arguments: Any) -> str:
        folder.mkdir()
        (folder / "other").write_text("theirs")
        return copy(*arguments)

    monkeypatch.setattr(genai_folder, "copy_file", copies)
    with pytest.raises(RequestError, match="is there: give another --output, or --force"):
        package_genai(saved(tmp_path), folder)
    assert tree(folder) == {"other": b"theirs"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "packaged", "small.onnx"]
