"""Rules for every command: an option is given once, errors name it as it was written, and cheap errors come first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import click
import onnx
import pytest
from helpers import cli, refused

from posexport.cli import COMMANDS, main

pytestmark = pytest.mark.few_inputs


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_of_one_value_is_given_once(name: str) -> None:
    command = main.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    for option in (each for each in command.params if isinstance(each, click.Option)):
        first, last = option.opts[0], (*option.opts, *option.secondary_opts)[-1]
        words = (first, last) if option.is_flag else (first, "x", last, "y")
        result = cli(name, *words, "--help")
        if option.multiple or (option.is_flag and not option.secondary_opts):
            assert result.exit_code == 0, first
        else:
            refused(result, first, "was given 2 times: give it once.")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("verify x.onnx --time-limit never", "--time-limit is 'never': it must be a number"),
        ("sweep --job matrix --time-limit 0", "--time-limit is '0'"),
        ("package x.onnx --triton --max-batch-size -1", "--max-batch-size is '-1': it must be a whole number from 0"),
        ("bench x.onnx --rounds 1.5", "--rounds is '1.5'"),
        ("tune --encoding rope --max-seq 0", "--max-seq is '0'"),
        ("plot rope --seq 1", "--seq is '1'"),
        ("positions --grid 2x2 --prefix-tokens x", "--prefix-tokens is 'x'"),
        ("export --encoding rope --norm-eps 0", "--norm-eps is '0'"),
        ("export --config c.toml --num-heads 0", "--num-heads is '0'"),
        ("export --config c.toml", "hidden_size is 'wide'"),
    ],
)
def test_an_error_names_the_option_as_it_is_written(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text("encoding = 'rope'\n" + ("" if "num-heads" in command else "hidden-size = 'wide'\n"))
    result = cli(*command.split())
    refused(result, said)
    assert said.startswith("--") or f"--{said}" not in result.stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("bench", "x.onnx", "--against", "y.onnx", "--max-regression", ""), "--max-regression"),
        (("plot", "rope", "-o", ""), "--output"),
        (("matrix", "--output="), "--output"),
        (("verify", "x.onnx", "--runtime", "torch", "--runtime", ""), "--runtime"),
    ],
)
def test_an_empty_text_as_of_an_unset_variable_is_refused(words: tuple[str, ...], option: str) -> None:
    refused(cli(*words), f"{option} was given an empty text: give it a value, or leave it out.")


BEYOND = {
    "package a.onnx b.onnx --triton": "posexport package takes one FILE, and 'b.onnx' was given beside it",
    "compile a.onnx b.onnx c.onnx": "posexport compile takes one FILE, and 'b.onnx', 'c.onnx' was given beside it",
    "bench a.onnx b.onnx": "posexport bench takes one FILE",
    "inspect a.onnx b.onnx": "posexport inspect takes one FILE",
    "export rope": "posexport export takes options only, but 'rope' was given",
    "tune --encoding rope --runtime ort-cpu": "posexport tune has no option --runtime: use --for instead.",
    "bench a.onnx --for ort-cpu": "posexport bench has no option --for: use --runtime instead.",
    "matrix --workers 2": "posexport matrix has no option --workers: use --jobs instead.",
    "export --runtime ort-cpu": "No such option '--runtime'.",
}


@pytest.mark.parametrize("command", BEYOND)
def test_what_a_command_does_not_take_is_told_with_what_it_takes(command: str) -> None:
    refused(cli(*command.split()), BEYOND[command])


def test_help_is_given_beside_arguments_that_are_too_many() -> None:
    assert cli("package", "a.onnx", "b.onnx", "--help").exit_code == 0


@pytest.mark.parametrize("becomes", ["another error", "nothing"])
def test_ctrl_c_ends_a_command_as_an_interruption_whatever_becomes_of_it(
    becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if becomes == "another error":
                raise AttributeError("module 'torch._dynamo' has no attribute 'exc'") from None

    monkeypatch.setattr("posexport.cli.console.show_json", interrupted)
    result = cli("list", "--json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Error: interrupted: no file is half-written; files written before are kept.\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


CHEAP = {
    "bench gone.onnx": "'gone.onnx' is not there",
    "bench gone.plan": "'gone.plan' is not there",
    "bench here.onnx --against gone.onnx": "'gone.onnx' is not there",
    "bench here.onnx --scenario prefil:8": "did you mean 'prefill'",
    "bench here.onnx --scenario prefill:x": "has the size 'x'",
    "bench here.onnx --shape batch=x": "batch is 'x'",
    "bench here.onnx --shape batch=1,batch=2": "gives batch twice: give it once",
    "bench here.onnx --runtime ort-cup": "did you mean 'ort-cpu'",
    "bench here.onnx --baseline empty.json": "can't read 'empty.json' (it is not JSON)",
    "bench here.onnx --save /dev/null": "output '/dev/null' is a device or a pipe",
    "bench here.onnx --save /proc/x.json": "output '/proc/x.json' can't be written",
    "export --encoding rope -o /proc/x.onnx": "output '/proc/x.onnx' can't be written",
    "tune --encoding rope -o /proc/x.onnx": "output '/proc/x.onnx' can't be written",
    "tune --encoding rope --save /proc/x.json": "output '/proc/x.json' can't be written",
    "verify here.onnx --junit /proc/x.xml": "output '/proc/x.xml' can't be written",
    "compile here.onnx -o /proc/x.plan": "output '/proc/x.plan' can't be written",
    "plot rope -o /proc/x.png": "output '/proc/x.png' can't be written",
    "matrix -o /proc": "output '/proc/matrix.json' can't be written",
    "bench here.onnx --threads 0": "--threads is '0'",
    "package gone.onnx --triton": "'gone.onnx' is not there",
    "package here.onnx --triton --instances 0": "--instances is '0'",
    "package here.onnx --triton --name ../up": "'../up' can't be used",
    "package here.onnx --triton -o no/folder": "'no' is not there",
    "tune --encoding rope --weights gone.safetensors": "weights 'gone.safetensors' can't be read",
    "tune --encoding rope --scenario prefil:8": "did you mean 'prefill'",
    "tune --encoding rope --seed x": "--seed is 'x'",
    "compile gone.onnx": "'gone.onnx' is not there",
    "export --config /dev/zero": "config '/dev/zero' can't be read (it is a device, not a regular file)",
    "export --config latin.toml": "config 'latin.toml' is not TOML, whose text is UTF-8",
}


def test_what_is_wrong_at_a_glance_is_told_before_torch_loads(tmp_path: Path) -> None:
    """One process runs all of them. Each gives exit code 2 and one sentence, and at the end torch is not loaded."""
    graph = onnx.helper.make_graph([], "nothing", [], [])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), tmp_path / "here.onnx")
    (tmp_path / "empty.json").touch()
    (tmp_path / "latin.toml").write_bytes("encoding = 'größe'".encode("latin-1"))
    code = (
        "import sys\nfrom posexport.cli import main\nfor line in sys.argv[1:]:\n    try:\n        main(line.split())\n"
        "    except SystemExit as done:\n        assert done.code == 2, (line, done.code)\n"
        "assert 'torch' not in sys.modules and 'onnx' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *CHEAP], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    for line, (command, sentence) in zip(said, CHEAP.items(), strict=True):
        assert sentence in line, command
