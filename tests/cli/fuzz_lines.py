"""Command lines drawn from click's own parameters: a line that works, with some options replaced, left out, repeated or
added. New values may be valid or wild."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from posexport.cli import COMMANDS, main
from posexport.models import ENCODINGS
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import FORMS, TARGETS

SIZES = ("--hidden-size", "8", "--num-heads", "2")
ROPE = ("--encoding", "rope", *SIZES)
WORKING: dict[str, tuple[str, ...]] = {
    "list": (),
    "inspect": ("here.onnx",),
    "export": (*ROPE, "-o", "new.onnx"),
    "rewrite": ("here.onnx", "-o", "new.onnx", "--form", "native"),
    "build": ("--project", "posexport.toml"),
    "compile": ("here.onnx", "-o", "new.plan"),
    "verify": ("here.onnx", "--runtime", "ort-cpu"),
    "generate": ("here.onnx", "--prompt-ids", "1,2"),
    "matrix": ("--encoding", "rope", "--form", "native", "--dtype", "fp32", "--no-picture", "-o", "m"),
    "positions": ("--grid", "2x3", "-o", "p.npz"),
    "bench": ("here.onnx", "--runtime", "ort-cpu", "--shape", "seq=4", "--rounds", "1"),
    "tune": (*ROPE, "--for", "ort-cpu", "--scenario", "prefill:4", "-o", "t.onnx"),
    "plot": ("rope", "-o", "p.png", "--seq", "8"),
    "package": ("here.onnx", "--triton", "-o", "repository"),
    "sweep": ("--job", "verify artifact=here.onnx runtime=ort-cpu", "-o", "s"),
    "report": ("here.json", "-o", "r.html"),
}
"""For each command, a line that works as far as it needs no engine. Engines do not run in these tests."""

WILD = (
    *("", " ", "-", "--", "=", ",", ":", "a=b", "=1", "seq=", "0", "-0", "-1", "1", "2", "1.5", "1e3", "007", "+1"),
    *(
        "4294967296",
        "9" * 400,
        "1e308",
        "1e400",
        "1e-400",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "0x10",
        "1_000",
        "true",
        "none",
    ),
    *("\u0661\u0662", "\u00bd", "\u2028", "\u00e9", "\U0001f600", "\u202e", "e\u0301", "\ufeff", "\ufffe"),
    *(
        "\ud800",
        "\udcff",
        "a\0b",
        "\0",
        "\x1b[31m",
        "\x7f",
        "a\rb",
        "a\nb",
        "\t",
        "{}",
        "{0}",
        "%s",
        "%(a)s",
        "[",
        "$(id)",
    ),
    *("x" * 300, "y" * 6000, "\u00e4" * 200, "a/" * 3000, "../" * 50 + "x", "~", "~/x", "*", "?", "'", '"', "\\"),
    *(
        "/dev/null",
        "/dev/full",
        "/dev/stdout",
        "/proc/self/mem",
        "/proc/x",
        "/",
        ".",
        "..",
        "folder",
        "folder/",
        "link",
    ),
    *("here.onnx", "here.json", "here.onnx.json", "missing.onnx", "missing/x.onnx", "broken.onnx", "broken.json"),
    *(
        "empty",
        "empty.onnx",
        "empty.json",
        "broken.npz",
        "broken.safetensors",
        "posexport.toml",
        "broken.toml",
        "nul.toml",
    ),
    *("\udcff.onnx", "new.plan", "new.json", "new.npz", "here.onnx/x.onnx", "loop", "loop/x.onnx"),
    *("2x3", "0x0", "99999x99999", "1x1x1", "batch=1,seq=1", "batch=0", "seq=99999999999", "seq=1:2:3", "prefill:4"),
    *(
        "prefill",
        "decode:0",
        "batch:9999999999999",
        "theta=nan",
        "theta=1e4",
        "layout=half",
        "rotary_dim=-2",
        "5%",
        "-5%",
    ),
    *(
        "8.9",
        "8.9,8.9",
        "512M",
        "0M",
        "verify",
        "verify artifact=",
        "bench artifact=here.onnx cpus=0",
        "tune x",
        "auto",
    ),
    *("localhost:1", "[::1]:1", "host:99999", "rope,alibi", "rope:theta=1:theta=2", "none,none", ":", "rope:"),
)
"""Odd values that every option must handle. Some are names of files that `fill` makes, others of files that do not
exist."""

NAMES = (*ENCODINGS, *FORMS, *TARGETS, *RUNTIMES, "fp32", "fp16", "bf16", "prefill", "decode", "angles", "transformer")
"""Values that are valid for some option."""


def fill(folder: Path, artifact: Callable[[Path], object], results: bytes) -> None:
    """Make the files that lines name. `artifact` writes a small ONNX file. `results` are the data for a report."""
    artifact(folder / "here.onnx")
    (folder / "here.json").write_bytes(results)
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("here.onnx")
    (folder / "loop").symlink_to("loop")
    for name in ("empty", "empty.onnx", "empty.json"):
        (folder / name).touch()
    (folder / "broken.onnx").write_bytes((folder / "here.onnx").read_bytes()[:500])
    (folder / "broken.json").write_text('{"kind": "bench", "version": 1, "timings": [{}]}')
    (folder / "broken.npz").write_bytes(b"PK\x03\x04" + b"\0" * 50)
    (folder / "broken.safetensors").write_bytes(b"\xff" * 40)
    artifact_of = '[[artifact]]\nname = "one"\nencoding = "rope"\nhidden-size = 8\nnum-heads = 2\n'
    (folder / "posexport.toml").write_text(artifact_of)
    (folder / "broken.toml").write_text("a = [")
    (folder / "nul.toml").write_text(f'folder = "a\\u0000b"\n{artifact_of}')


def lines(count: int, seed: int) -> Iterator[list[str]]:
    """Command lines, the same ones for the same seed. The commands take turns."""
    draw = random.Random(seed)
    names = list(COMMANDS)
    for number in range(count):
        name = names[number % len(names)]
        yield [name, *_arguments(name, draw)]


def _arguments(name: str, draw: random.Random) -> list[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    takes_argument = len(options) < len(command.params)
    words = list(WORKING[name]) if draw.random() < 0.8 else []
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        option = draw.choice(options)
        flag = draw.choice((*option.opts, *option.secondary_opts))
        value = draw.choice(WILD if draw.random() < 0.7 else NAMES)
        places = [at for at, word in enumerate(words) if word in option.opts]
        match draw.randrange(10):
            case 0 if takes_argument:
                words.insert(0, value)
            case 1 if words:
                words[draw.randrange(len(words))] = value
            case 2 if words:
                del words[draw.randrange(len(words))]
            case _ if option.is_flag:
                words.append(flag)
            case _ if places and not option.multiple and draw.random() < 0.9 and places[0] + 1 < len(words):
                words[places[0] + 1] = value
            case 3:
                words.append(f"{flag}={value}")
            case _:
                words += [flag, value]
    return words
