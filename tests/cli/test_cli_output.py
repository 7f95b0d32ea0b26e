"""Commands whose output can't be written, and commands with names that are nearly right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from helpers import cli, refused

from posexport.cli.console import runs, show_table

POSEXPORT = [sys.executable, "-m", "posexport"]


def test_a_closed_pipe_is_no_verdict() -> None:
    shell = f"set -o pipefail; {sys.executable} -m posexport list --json | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141), "0 where all fitted into the pipe before it was closed"
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stdout_that_is_not_unicode_gets_a_table(encoding: str) -> None:
    command = [sys.executable, "-c", "from posexport.cli import main; main()", "list"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=True)
    assert (done.stderr, "------" in done.stdout.decode(encoding)) == (b"", True)


def test_a_full_stdout_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*POSEXPORT, "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_a_command_that_is_nearly_right() -> None:
    refused(cli("compiel", "x"), "unknown command 'compiel': did you mean 'compile'?")


def test_a_parameter_given_twice(tmp_path: Path) -> None:
    out = tmp_path / "a.onnx"
    refused(cli("export", "--encoding", "rope", "--set", "theta=1", "--set", "theta=2", "-o", out), "given twice")
    assert not out.exists()


def test_a_checkpoint_of_other_names_is_told_what_to_rename(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkvo"]
    save_file({name: torch.zeros(64, 64) for name in names}, tmp_path / "hf.safetensors")
    sizes = ("--hidden-size", "64", "--num-heads", "4", "--weights", tmp_path / "hf.safetensors")
    refused(
        cli("export", "--encoding", "rope", *sizes, "-o", tmp_path / "a.onnx"),
        "lack 'q_proj.weight'",
        "rename 'model.layers.0.self_attn.q_proj.weight' to it",
    )


def test_a_table_is_aligned_and_folded(capsys: pytest.CaptureFixture[str]) -> None:
    words = "word " * 40
    show_table("Title", ("name", "size", "note"), [("a\nbc", "1", words), ("", "100", "x" * 200)], right=("size",))
    title, empty, header, rule, *rows = capsys.readouterr().out.splitlines()
    assert (title, empty) == ("Title", "")
    assert header == " name   size   note"
    assert rule == " " + "─" * 178, "180 columns, one of them empty on each side"
    assert rows[0].startswith(" a         1   word word")
    assert rows[1].startswith(" bc            word")
    assert " ".join(row[15:] for row in rows[:2]).split() == words.split()
    assert rows[2] == " " * 9 + "100   " + "x" * 164
    assert rows[3:] == [" " * 15 + "x" * 36, ""]


def test_a_wide_table_may_have_a_column_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("Title", ("", "tensor"), [("input", "x" * 300)])
    assert capsys.readouterr().out.count("x") == 300


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_numbers_are_never_folded_and_empty_columns_go_first(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    names = ("artifact", "runtime", "state", "error", "torch error", "limit", "note")
    row = ("artifacts/encoder-decomposed.onnx", "ort-cpu", "passed", "2.89e-05", "2.07e-05", "1.74e-04", "")
    show_table("Parity", names, [row], right=names[3:6])
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert {"2.89e-05", "2.07e-05", "1.74e-04", "ort-cpu", "passed"} <= set(" ".join(lines).split())
    assert ("note" in " ".join(lines)) == (columns == 100)
    assert columns < 70 or max(map(len, lines)) < columns


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["key.0", "key.1", "key.2"], ["key.0 ... key.2"]),
        (
            [f"{kind}.{layer}" for layer in range(3) for kind in ("key", "value")],
            ["key.0 ... key.2", "value.0 ... value.2"],
        ),
        (["past.0.key", "past.1.key", "past.2.key"], ["past.0.key ... past.2.key"]),
        (
            ["past.0.key", "past.0.value", "past.1.key", "past.1.value"],
            ["past.0.key, past.1.key", "past.0.value, past.1.value"],
        ),
        (
            [f"past.{layer}.{kind}" for layer in range(4) for kind in ("key", "value")],
            ["past.0.key, past.1.key ... past.3.key", "past.0.value, past.1.value ... past.3.value"],
        ),
        (["key.0", "key.2"], ["key.0", "key.2"]),
    ],
)
def test_a_run_of_layers_names_what_there_is(names: list[str], expected: list[str]) -> None:
    """Both ends of a range are names, and the range contains the names between them."""
    assert runs([(name, "fp32") for name in names]) == [(name, "fp32") for name in expected]
    for row, _ in runs([(name, "fp32") for name in names]):
        assert set(row.replace(" ... ", ", ").split(", ")) <= set(names)
