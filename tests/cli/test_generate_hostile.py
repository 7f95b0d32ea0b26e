"""`posexport generate --prompt` with a hostile tokenizer that tries to run code, hang, crash or exhaust memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import cli
from onnx import TensorProto, helper

tokenizers = pytest.importorskip("tokenizers")

WORDS = 8
SOUND: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(WORDS)}, "unk_token": "w0"},
}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "w0"}
GROWS = {"type": "Replace", "pattern": {"String": "w"}, "content": "ww" * 32}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with only a decoder whose next token is always w3."""
    graph = helper.make_graph(
        [
            helper.make_node("Sub", ["input_ids", "input_ids"], ["zeros"]),
            helper.make_node("Add", ["zeros", "three"], ["next"]),
            helper.make_node("OneHot", ["next", "depth", "values"], ["logits"]),
        ],
        "decoder",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", WORDS])],
        [
            helper.make_tensor("three", TensorProto.INT64, [], [3]),
            helper.make_tensor("depth", TensorProto.INT64, [], [WORDS]),
            helper.make_tensor("values", TensorProto.FLOAT, [2], [0.0, 1.0]),
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "model.onnx"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(prompt: str = "w1 w2") -> Any:
    return cli("generate", "model.onnx", "--prompt", prompt, "--max-new-tokens", "2", "--json")


KEPT = {
    "padded": {"padding": {"strategy": {"Fixed": 12}, **PADDING}},
    "padded beyond all memory": {"padding": {"strategy": {"Fixed": 2**62}, **PADDING}},
    "padded to multiples of nothing": {"padding": {"strategy": "BatchLongest", **PADDING, "pad_to_multiple_of": 0}},
    "cut": {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", KEPT)
def test_a_prompt_is_encoded_as_it_is(case: str, folder: Path) -> None:
    """Settings in the file for padding and truncation are not applied."""
    (folder / "tokenizer.json").write_text(json.dumps({**SOUND, **KEPT[case]}))
    result = generate()
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row == {"prompt": [1, 2], "tokens": [3, 3], "text": "w3 w3"}


GROWN = "a text that grows to 10^18 letters"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown word": ({"model": {**SOUND["model"], "vocab": {"w1": 1}}}, "can't encode the prompt"),
    "a panic at encoding": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[Q]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "can't encode the prompt (its library fails at it)",
    ),
    "a panic at reading": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "can't be read (its library fails at it)",
    ),
    GROWN: (
        {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 10}},
        "can't encode the prompt (its library crashes, or needs more memory than it may take)",
    ),
    "a decoder that is none": ({"decoder": [[]]}, "can't be read ("),
}


COMMAND = [sys.executable, "-P", "-m", "posexport", "generate", "model.onnx", "--prompt", "w1 w2"]


@pytest.mark.slow
def test_a_text_that_grows_ends_at_the_limit_of_the_shell(folder: Path) -> None:
    """The limit makes the text end early. Without a limit it would fill all free memory, which takes longer."""
    (folder / "tokenizer.json").write_text(json.dumps({**SOUND, **REFUSED[GROWN][0]}))
    limited = ["bash", "-c", 'ulimit -d 1048576 && exec "$@"', "bash", *COMMAND]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "(it crashes or needs more memory than the limit of this shell (ulimit) allows)" in done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one == GROWN)) for one in REFUSED])
def test_a_tokenizer_that_fails_is_one_sentence(case: str, folder: Path) -> None:
    changes, said = REFUSED[case]
    (folder / "tokenizer.json").write_text(json.dumps({**SOUND, **changes}))
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if "still running" not in line]
    assert line.startswith(f"Error: the tokenizer in '.' {said}")
    assert "give --prompt-ids" in line


CODE = """
from pathlib import Path
Path("ran").touch()
class Own: pass
"""
MAPS: dict[str, Any] = {"as today": {"AutoTokenizer": ["evil.Own", None]}, "as in old versions": ["evil.Own", None]}


@pytest.mark.parametrize("case", MAPS)
def test_code_beside_a_model_is_not_run_and_nobody_is_asked(case: str, folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": MAPS[case]}))
    (folder / "vocab.json").write_text(json.dumps({"w0": 0}))
    (folder / "evil.py").write_text(CODE)
    environment = {**os.environ, "HF_HOME": str(folder / "home")}
    done = subprocess.run(COMMAND, input="y\n" * 9, capture_output=True, text=True, check=False, env=environment)
    assert not (folder / "ran").exists()
    assert not list(folder.glob("home/modules/**/*.py"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if "still running" not in line]
    assert "code that a model brings with it is not run: give --prompt-ids" in line


def test_a_map_that_only_transformers_can_read_runs_no_code_either(folder: Path) -> None:
    """posexport refuses JSON with a duplicate key. The library itself is told to run no code."""
    pytest.importorskip("transformers")
    text = json.dumps({"tokenizer_class": "Own", "auto_map": MAPS["as today"]})
    (folder / "tokenizer_config.json").write_text(f'{{"x": 1, "x": 2, {text[1:]}')
    (folder / "vocab.json").write_text(json.dumps({"w0": 0}))
    (folder / "evil.py").write_text(CODE)
    result = generate()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the tokenizer in '.' can't be read" in result.stderr
    assert not (folder / "ran").exists()


def test_a_pipe_among_its_files_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(SOUND))
    os.mkfifo(folder / "tokenizer_config.json")
    result = generate()
    assert result.exit_code == 2
    assert "the tokenizer in '.' can't be read (tokenizer_config.json is no regular file)" in result.stderr
