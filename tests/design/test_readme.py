"""Every command of the README runs, in order, in one folder; its Python too."""

import re
import shlex
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from posexport.cli import main
from posexport.models import ENCODINGS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.strip()]
ELSEWHERE = {
    "./scripts/demo": "test_demo.py",
    "./scripts/test": "what runs this",
    "pip install .": "test_packaging.py",
}


def test_commands_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path / "checkpoint")
    for kind, text in BLOCKS:
        if kind == "toml":
            name = re.match(r"# (\S+)\n", text).group(1)
            (tmp_path / name).write_text(text)
    ran = 0
    for line in COMMANDS:
        if line in ELSEWHERE:
            continue
        words = shlex.split(line)
        assert words[0] == "posexport", line
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        ran += 1
    assert ran == len(COMMANDS) - len(ELSEWHERE)
    assert (tmp_path / "llama.onnx.json").exists()
    assert (tmp_path / "vit.plan.json").exists()


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_python(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "alibi.onnx").exists()


def test_every_script_named_is_there():
    for name in set(re.findall(r"\./scripts/(\w+)", README)):
        assert (ROOT / "scripts" / name).stat().st_mode & 0o111, name


def test_the_table_of_encodings_is_complete():
    table = README.split("## Encodings")[1].split("## Forms")[0]
    rows = re.findall(r"^\| `([a-z][\w-]*)` \|[^|]*\|([^|]*)\|", table, flags=re.MULTILINE)
    import attrs

    assert [name for name, _ in rows] == list(ENCODINGS)
    for name, parameters in rows:
        for field in attrs.fields(ENCODINGS[name]):
            assert f"`{field.name}`" in parameters, (name, field.name)
