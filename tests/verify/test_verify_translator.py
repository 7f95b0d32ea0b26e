"""`posexport verify --from` with encoder-decoders: greedy tokens of both files against transformers in float64."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import cli
from onnx import numpy_helper
from small_decoders import exported_model
from tiny_models import checkpoint

pytestmark = pytest.mark.few_inputs

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both files."""
    folder = tmp_path_factory.mktemp("bart")
    exported_model(checkpoint("bart"), folder / "model.onnx", "--form", "native")
    return folder


def verdicts(path: Path, model: Path) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit code and the verdicts by file and check."""
    result = cli("verify", path, "--from", model, "--runtime", "ort-cpu", "--json")
    found = json.loads(result.stdout)["verdicts"]
    return result.exit_code, {(Path(one["artifact"]).name.split("_")[0], one["check"]): one for one in found}


@pytest.mark.parametrize("name", ["bart", *(pytest.param(one, marks=pytest.mark.slow) for one in ("t5", "whisper"))])
def test_both_files_make_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = checkpoint(name, encoder_layers=1, decoder_layers=1) if name == "bart" else checkpoint(name)
    exported_model(model, tmp_path / "model.onnx", "--form", "native" if name == "bart" else "decomposed")
    code, found = verdicts(tmp_path, model)
    assert (code, {*found}) == (0, {("encoder", "parity"), ("decoder", "parity"), ("decoder", "generation")})
    generation = found["decoder", "generation"]
    assert (generation["state"], generation["reason"]) == ("passed", None)
    equal, _, total = generation["measured"].split()[:3]
    assert int(total) > 3 * 20
    assert int(equal) > 0.95 * int(total)


@pytest.mark.slow
def test_a_wrong_encoder_beside_it_makes_other_tokens(bart: Path, tmp_path: Path) -> None:
    """Only the decoder is right."""
    folder = shutil.copytree(bart, tmp_path / "model")
    model = onnx.load(folder / "encoder_model.onnx")
    changed = 0
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2 and array.dtype == np.float32 and "encoder" in tensor.name:
            tensor.CopyFrom(numpy_helper.from_array(array[::-1].copy(), tensor.name))
            changed += 1
    assert changed
    onnx.save(model, folder / "encoder_model.onnx")
    (folder / "encoder_model.onnx.json").unlink()
    code, found = verdicts(folder / "decoder_model.onnx", checkpoint("bart"))
    assert (code, found["decoder", "parity"]["state"]) == (1, "passed")
    assert found["decoder", "generation"]["state"] == "failed"
    assert found["decoder", "generation"]["reason_code"] == "other-tokens"
    assert found["decoder", "generation"]["where"] == "the decoder alone is right: verify the encoder beside it"


def swaps_cross_caches(path: Path) -> None:
    """The second layer attends to the keys of the first."""
    model = onnx.load(path)
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = name.replace("past_key_values.1.encoder.key", "past_key_values.0.encoder.key")
    onnx.save(model, path)
    path.with_name(f"{path.name}.json").unlink()


@pytest.mark.slow
def test_a_wrong_decoder_fails(bart: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bart, tmp_path / "model")
    swaps_cross_caches(folder / "decoder_model.onnx")
    code, found = verdicts(folder / "decoder_model.onnx", checkpoint("bart"))
    assert (code, found["decoder", "parity"]["state"]) == (1, "failed")
    assert found["decoder", "generation"]["state"] == "failed"


@pytest.mark.slow
def test_without_the_encoder_tokens_are_not_run(bart: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bart, tmp_path / "model")
    (folder / "encoder_model.onnx").unlink()
    code, found = verdicts(folder / "decoder_model.onnx", checkpoint("bart"))
    generation = found["decoder", "generation"]
    assert (code, generation["state"], generation["reason_code"]) == (0, "not run", "no-encoder")
    assert "the file of its encoder is not beside it" in generation["reason"]
