"""`posexport generate`: its output, text and ids, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from helpers import cli
from small_decoders import NATIVE, PROMPTS, TRAINED, VOCABULARY, exported_model, greedy, small_checkpoint

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

IDS = tuple(word for prompt in PROMPTS for word in ("--prompt-ids", ",".join(map(str, prompt))))


def word_tokenizer(path: Path) -> None:
    """A tokenizer with the words w0, w1, ... w59."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder with the file of a model, its configuration and a tokenizer, and the tokens of transformers."""
    folder = tmp_path_factory.mktemp("model")
    model = small_checkpoint(folder / "checkpoint")
    (folder / "out").mkdir()
    exported_model(folder / "checkpoint", folder / "out" / "model.onnx", *NATIVE)
    word_tokenizer(folder / "out" / "tokenizer.json")
    return folder / "out", greedy(model)


@pytest.fixture(autouse=True)
def _folder(made: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made[0])


def test_json_has_tokens_and_times(made: tuple[Path, list[list[int]]]) -> None:
    result = cli("generate", "model.onnx", *IDS, "--max-new-tokens", "24", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert [row["tokens"] for row in data["rows"]] == made[1]
    assert [tuple(row["prompt"]) for row in data["rows"]] == list(PROMPTS)
    assert "text" not in data["rows"][0]
    assert len(data["step_seconds"]) == 23
    assert data["tokens_per_second"] > 0
    assert (data["kind"], data["file"], data["runtime"], data["cache"]) == (
        "generate",
        "model.onnx",
        "ort-cpu",
        "grown",
    )


def test_several_rows_are_numbered(made: tuple[Path, list[list[int]]]) -> None:
    result = cli("generate", "model.onnx", *IDS, "--max-new-tokens", "24")
    first, second, third, *facts = result.stdout.splitlines()
    assert [first, second, third] == [f"{number}: {','.join(map(str, row))}" for number, row in enumerate(made[1], 1)]
    assert facts[0] == "72 tokens"
    assert "tokens/s" in facts[2]


def test_text_in_and_out(made: tuple[Path, list[list[int]]]) -> None:
    result = cli("generate", "model.onnx", "--prompt", "w5 w17 w3 w44 w21 w8 w30", "--max-new-tokens", "24", "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert row["prompt"] == list(PROMPTS[0])
    assert row["tokens"] == made[1][0]
    assert row["text"] == " ".join(f"w{token}" for token in row["tokens"])
    shown = cli("generate", "model.onnx", "--prompt", "w5 w17 w3 w44 w21 w8 w30", "--max-new-tokens", "24")
    assert shown.stdout.splitlines()[0] == row["text"]


def test_tokens_come_one_by_one(made: tuple[Path, list[list[int]]]) -> None:
    """The first tokens are printed while the process still generates others."""
    command = [sys.executable, "-m", "posexport", "generate", "model.onnx", "--prompt-ids", "5,17", "--max-new-tokens"]
    process = subprocess.Popen([*command, "20000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        first = process.stdout.read(8)
        assert first.count(b",") >= 2
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_tokens_that_end_a_text_end_it(made: tuple[Path, list[list[int]]]) -> None:
    stop = made[1][0][4]
    whole = made[1][0][: made[1][0].index(stop) + 1]
    file = Path("generation_config.json")
    before = file.read_bytes()
    file.write_text(json.dumps({"eos_token_id": [stop]}))
    try:
        arguments = ("generate", "model.onnx", *IDS[:2], "--max-new-tokens", "24", "--json")
        (row,) = json.loads(cli(*arguments).stdout)["rows"]
        assert row["tokens"] == whole
        (row,) = json.loads(cli(*arguments, "--ignore-eos").stdout)["rows"]
        assert row["tokens"] == made[1][0]
    finally:
        file.write_bytes(before)


def test_a_seed_draws_the_same_again() -> None:
    def draw(seed: str) -> list[int]:
        options = ("--temperature", "1.5", "--top-k", "20", "--top-p", "0.9", "--seed", seed, "--json")
        (row,) = json.loads(cli("generate", "model.onnx", "--prompt-ids", "5,17", *options).stdout)["rows"]
        return list(row["tokens"])

    assert draw("1") == draw("1") != draw("2")


def test_a_prompt_behind_the_trained_length_is_a_warning() -> None:
    ids = ",".join(["7"] * (TRAINED + 1))
    result = cli("generate", "model.onnx", "--prompt-ids", ids, "--max-new-tokens", "2")
    assert result.exit_code == 0
    assert result.stderr == (
        f"Warning: prompt and new tokens have {TRAINED + 2} positions, and the model was trained for {TRAINED}.\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--top-k", "5"], "--top-k changes nothing at --temperature 0"),
        (["--top-p", "0.9", "--seed", "1"], "--top-p and --seed change nothing at --temperature 0"),
        (["--top-k", "5", "--temperature", "0.5"], ""),
    ],
)
def test_what_needs_a_temperature_says_so(options: list[str], said: str) -> None:
    result = cli("generate", "model.onnx", "--prompt-ids", "1", "--max-new-tokens", "2", *options)
    assert result.exit_code == 0
    assert said in result.stderr if said else not result.stderr


REFUSED: dict[str, tuple[list[str], str]] = {
    "no prompt": (["model.onnx"], "no prompt given: give one of --prompt TEXT and --prompt-ids 1,2,3"),
    "both prompts": (["model.onnx", "--prompt", "w1", "--prompt-ids", "1"], "several kinds of prompt given"),
    "words for ids": (["model.onnx", "--prompt-ids", "1,two"], "--prompt-ids is '1,two': give whole numbers from 0"),
    "below 0": (["model.onnx", "--prompt-ids", "1,-2"], "--prompt-ids is '1,-2': give whole numbers from 0"),
    "no ids": (["model.onnx", "--prompt-ids", " , "], "--prompt-ids is ' , ': give whole numbers"),
    "empty text": (["model.onnx", "--prompt", ""], "--prompt was given an empty text"),
    "no UTF-8": (["model.onnx", "--prompt", "w1 \udcff"], "--prompt is 'w1 \\udcff', which is not UTF-8"),
    "no words": (["model.onnx", "--prompt", " "], "a prompt has no tokens: give at least one"),
    "out of range": (["model.onnx", "--prompt-ids", "60"], "the token 60 is none of the model's: give ids from 0 to 5"),
    "no file": (["nothing.onnx", "--prompt-ids", "1"], "'nothing.onnx' is not there"),
    "no ONNX file": (["config.json", "--prompt-ids", "1"], "'config.json' does not end in .onnx: give the ONNX file"),
    "damaged": (["damaged.onnx", "--prompt-ids", "1"], "'damaged.onnx' is not an ONNX file, or it is cut short"),
    "no decoder": (["block.onnx", "--prompt-ids", "1"], "the file has the input 'hidden_states'"),
    "no tokenizer": (["alone/model.onnx", "--prompt", "w1"], "'alone' holds no tokenizer (tokenizer.json)"),
    "a bad tokenizer": (["bad/model.onnx", "--prompt", "w1"], "the tokenizer in 'bad' can't be read"),
    "no such runtime": (["model.onnx", "--prompt-ids", "1", "--runtime", "ort-cpux"], "did you mean 'ort-cpu'"),
    "a runtime that is none here": (
        ["model.onnx", "--prompt-ids", "1", "--runtime", "ort-gpu"],
        "allowed: ort-cpu, ort-cuda.",
    ),
    "another runtime": (["model.onnx", "--prompt-ids", "1", "--runtime", "torch"], "tokens are made by ort-cpu and"),
    "no tokens": (["model.onnx", "--prompt-ids", "1", "--max-new-tokens", "0"], "--max-new-tokens is '0'"),
    "a bad temperature": (["model.onnx", "--prompt-ids", "1", "--temperature", "nan"], "--temperature is 'nan'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(name: str) -> None:
    arguments, said = REFUSED[name]
    if name == "damaged":
        Path("damaged.onnx").write_bytes(Path("model.onnx").read_bytes()[:-100])
    if name == "no decoder":
        assert cli("export", "--encoding", "rope", "--hidden-size", "32", "--num-heads", "4", "-o", "block.onnx")
    for folder in ("alone", "bad"):
        if arguments[0].startswith(f"{folder}/"):
            Path(folder).mkdir(exist_ok=True)
            onnx.save(onnx.load("model.onnx"), arguments[0])
    if name == "a bad tokenizer":
        Path("bad/tokenizer.json").write_text("{}")
    result = cli("generate", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert [line[:7] for line in result.stderr.splitlines() if "still running" not in line] == ["Error: "]
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the runtime is there")
def test_a_runtime_that_is_not_there() -> None:
    result = cli("generate", "model.onnx", "--prompt-ids", "1", "--runtime", "ort-cuda")
    assert result.exit_code == 3
    assert [line[:7] for line in result.stderr.splitlines() if "still running" not in line] == ["Error: "]
