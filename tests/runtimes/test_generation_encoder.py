"""Tokens of encoder-decoders compared with transformers' `generate`. Files that do not fit are refused in one
sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tiny_models
import torch
from helpers import cli
from onnx import TensorProto, helper
from small_decoders import exported_model, small_checkpoint
from tiny_models import checkpoint, oracle

from posexport.errors import RequestError
from posexport.runtimes.generation_encoder import arrays_of_prompts, encode

pytest.importorskip("transformers")

COUNT = 20
TEXTS = ((5, 17, 3, 44, 21, 8, 30), (11, 2), (50, 9, 33, 27))
WIDTH = max(map(len, TEXTS))


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both files."""
    folder = tmp_path_factory.mktemp("bart")
    exported_model(checkpoint("bart"), folder / "model.onnx", "--form", "native")
    return folder


def tokens_of(result: Any) -> list[list[int]]:
    assert result.exit_code == 0, result.output
    return [row["tokens"] for row in json.loads(result.stdout)["rows"]]


def ids(texts: Any = TEXTS) -> list[str]:
    return [option for text in texts for option in ("--prompt-ids", ",".join(map(str, text)))]


def expected(
    name: str, inputs: dict[str, torch.Tensor], begin: list[int], rows: int, forced: bool = True
) -> list[list[int]]:
    """The most likely tokens of transformers, with one pass over all tokens for each. If `forced`, the last token is
    the forced one."""
    model, made = oracle(checkpoint(name)), torch.tensor([begin] * rows)
    with torch.no_grad():
        for _ in range(COUNT):
            logits = model(**inputs, decoder_input_ids=made).logits[:, -1]
            made = torch.cat((made, logits.argmax(-1, keepdim=True)), 1)
    last = model.generation_config.forced_eos_token_id
    if forced and last is not None:
        made[:, -1] = last
    return np.asarray(made[:, len(begin) :]).tolist()


def text_inputs(texts: Any = TEXTS) -> dict[str, torch.Tensor]:
    padded = [[*text] + [0] * (WIDTH - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (WIDTH - len(text)) for text in texts]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def start_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["decoder_start_token_id"])


SMALL = ("--max-new-tokens", str(COUNT), "--ignore-eos", "--json")


@pytest.mark.slow
def test_tokens_are_those_of_transformers(bart: Path) -> None:
    """The batch has rows of different lengths."""
    found = tokens_of(cli("generate", bart / "decoder_model.onnx", *ids(), *SMALL))
    assert found == expected("bart", text_inputs(), [start_of(bart)], len(TEXTS))
    assert len({token for row in found for token in row}) > 2
    assert len({tuple(row) for row in found}) == len(TEXTS)


@pytest.mark.slow
def test_a_row_alone_has_the_same_tokens(bart: Path) -> None:
    alone = [tokens_of(cli("generate", bart / "decoder_model.onnx", *ids([text]), *SMALL))[0] for text in TEXTS]
    assert alone == tokens_of(cli("generate", bart / "decoder_model.onnx", *ids(), *SMALL))


@pytest.mark.slow
def test_decoder_input_ids_and_a_forced_first_token(bart: Path, tmp_path: Path) -> None:
    begin = [start_of(bart), 7, 9]
    named = ("--decoder-input-ids", ",".join(map(str, begin)))
    found = tokens_of(cli("generate", bart / "decoder_model.onnx", *ids(), *SMALL, *named))
    assert found == expected("bart", text_inputs(), begin, len(TEXTS))
    folder = tmp_path / "forced"
    shutil.copytree(bart, folder)
    settings = {"decoder_start_token_id": begin[0], "forced_bos_token_id": begin[1]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    found = tokens_of(cli("generate", folder / "decoder_model.onnx", *ids(), *SMALL))
    assert found == expected("bart", text_inputs(), begin[:2], len(TEXTS), forced=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "whisper", "mbart"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    exported_model(checkpoint(name), tmp_path / "model.onnx")
    folder, rows, options = tmp_path, len(TEXTS), ids()
    inputs = text_inputs()
    if name == "whisper":
        config = json.loads((folder / "config.json").read_text())
        shape = (2, config["num_mel_bins"], 2 * config["max_source_positions"])
        features = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.savez(tmp_path / "sound.npz", input_features=features)
        options, rows = ["--inputs", str(tmp_path / "sound.npz")], 2
        inputs = {"input_features": torch.from_numpy(features)}
    found = tokens_of(cli("generate", folder / "decoder_model.onnx", *options, *SMALL))
    assert found == expected(name, inputs, [start_of(folder)], rows)


@pytest.mark.slow
def test_people_see_tokens_and_speed(bart: Path) -> None:
    result = cli("generate", bart / "decoder_model.onnx", *ids(TEXTS[:1]), "--max-new-tokens", "3", "--ignore-eos")
    assert result.exit_code == 0
    assert "3 tokens" in result.stdout
    assert "tokens/s" in result.stdout


def alone(folder: Path) -> None:
    (folder / "encoder_model.onnx").unlink()


def no_start(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            config = json.loads((folder / name).read_text())
            config |= {"decoder_start_token_id": None, "bos_token_id": None}
            (folder / name).write_text(json.dumps(config))


def nothing(folder: Path) -> None:
    pass


ROWS = np.ones((2, 5), np.int64)

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no encoder": (alone, ids(), "takes what an encoder gives, and there is none beside it"),
    "no start": (no_start, ids(), "give --decoder-input-ids"),
    "no prompt": (nothing, [], "no prompt given"),
    "two kinds": (nothing, [*ids(), "--inputs", "x.npz"], "several kinds of prompt given"),
    "no file": (nothing, ["--inputs", "nothing.npz"], "nothing.npz' can't be read"),
    "no ids": (nothing, [*ids(), "--decoder-input-ids", "a"], "--decoder-input-ids is 'a'"),
    "no such id": (nothing, [*ids(), "--decoder-input-ids", "100000"], "the token 100000 is none of the model's"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(name: str, bart: Path, tmp_path: Path) -> None:
    change, options, said = REFUSED[name]
    folder = tmp_path / "model"
    shutil.copytree(bart, folder)
    change(folder)
    result = cli("generate", folder / "decoder_model.onnx", *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert [line[:7] for line in result.stderr.splitlines() if "still running" not in line] == ["Error: "]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other names": ({"x": ROWS}, "its encoder takes 'input_ids', 'attention_mask', and 'x' was given"),
    "other rows": ({"input_ids": ROWS, "attention_mask": ROWS[:1]}, "not as many"),
    "no rows": ({"input_ids": ROWS[:0], "attention_mask": ROWS[:0]}, "have no rows"),
    "no array": ({"input_ids": np.int64(3), "attention_mask": ROWS}, "have no rows"),
    "other ranks": ({"input_ids": ROWS[..., None], "attention_mask": ROWS}, "'input_ids' has shape [2, 5, 1]"),
    "floats": ({"input_ids": ROWS + 0.5, "attention_mask": ROWS}, "'input_ids' is float64"),
    "no such token": ({"input_ids": ROWS * 90, "attention_mask": ROWS}, "the token 90 is none of the model's"),
    "no token": ({"input_ids": -ROWS, "attention_mask": ROWS}, "the token -1 is none of the model's"),
    "a shorter mask": ({"input_ids": ROWS, "attention_mask": ROWS[:, :3]}, "'attention_mask' has 3 of "),
    "another mask": ({"input_ids": ROWS, "attention_mask": ROWS * 7}, "'attention_mask' must be 1 at tokens"),
    "an empty row": ({"input_ids": ROWS, "attention_mask": ROWS * [[1], [0]]}, "with one token in each row at least"),
    "no text": ({"input_ids": ROWS, "attention_mask": np.full((2, 5), "a")}, "'attention_mask' is <U1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_of_the_encoder(name: str, bart: Path) -> None:
    inputs, said = WRONG[name]
    encoder, decoder = (tiny_models.session(bart / f"{part}_model.onnx") for part in ("encoder", "decoder"))
    with pytest.raises(RequestError) as error:
        encode(encoder, decoder, inputs, vocabulary=90)
    assert said in str(error.value)


@pytest.mark.slow
def test_a_file_that_is_no_encoder_of_this_decoder(bart: Path) -> None:
    decoder = tiny_models.session(bart / "decoder_model.onnx")
    inputs = {name: np.ones(shape, np.int64) for name, shape in {"input_ids": (1, 3)}.items()}
    with pytest.raises(RequestError, match="its encoder takes"):
        encode(decoder, decoder, inputs)


def test_rows_of_different_lengths_need_a_mask() -> None:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["input_ids"], ["last_hidden_state"], to=TensorProto.FLOAT)],
        "encoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["b", "s"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    encoder = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert {*arrays_of_prompts(encoder, [[1, 2], [3, 4]])} == {"input_ids"}
    with pytest.raises(RequestError, match="as many tokens"):
        arrays_of_prompts(encoder, [[1, 2], [3]])


@pytest.mark.slow
def test_inputs_are_for_encoders_alone(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "Llama")
    (tmp_path / "model").mkdir()
    path = exported_model(tmp_path / "Llama", tmp_path / "model" / "model.onnx")
    np.savez(tmp_path / "inputs.npz", input_ids=ROWS)
    result = cli("generate", path, "--inputs", tmp_path / "inputs.npz")
    assert (result.exit_code, "it has no encoder, which --inputs is for" in result.stderr) == (2, True)
    result = cli("generate", path, "--prompt-ids", "1,2", "--decoder-input-ids", "1")
    assert (result.exit_code, "it has no encoder, which --decoder-input-ids is for" in result.stderr) == (2, True)
