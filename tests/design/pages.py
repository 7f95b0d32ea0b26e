"""The pages of the documentation, and one way to run what they show: commands, TOML files and Python, in page order.

A fence begins with its language. `bash` contains commands. `python` contains a program that runs in the folder of the
page. A `toml` or `python` block whose first line is a name (`# name.toml`, `# name.py`) is a file. Anything else is
only shown. The word `slow` after the language leaves the block to the slow sweep. Equal exports on several pages run
once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import tokenizers
import transformers
from helpers import cli

from posexport.runtimes import RUNTIMES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "matrix")

COVERED = {
    "./scripts/demo": "test_demo.py runs it",
    "./scripts/test": "it runs this test",
    "./scripts/check": "scripts/test runs it",
    "./scripts/benchmark": "minutes on a quiet machine; its parts have tests of their own",
    "./scripts/whole_models": "hours; test_whole_results.py tests its parts",
    "./scripts/gpu_acceptance": "test_scripts_gpu.py runs it",
    "./scripts/mutation": "an hour; test_mutation.py tests its parts, test_mutation_slow.py runs a part of it",
    "./scripts/angle_errors": "test_angle_errors.py runs it",
    "pip install": "test_packaging.py installs the wheel",
    "pip download": "needs a network",
    "pre-commit install": "needs a network",
}
"""The beginnings of commands that pages show and these tests do not run, and the reasons."""

MAY_EXIT = {
    r"bench .*--(baseline|against)": (1, r"(?m)^\d+ of \d+ got slower\.$"),  # noise may look like a change
    r"tensorrt_run\.py": (3, "not run: no GPU"),
}
"""Commands that may exit with another code than 0: a pattern of the command, the code, and a pattern of the output."""

QUICK = {
    "bench.md": {"bench": ["--processes", "2", "--seconds", "5"]},
    "ci.md": {"bench": ["--rounds", "2", "--processes", "2", "--seconds", "5"]},
}
"""Options that are added to the commands of a page, so that a test takes seconds instead of minutes. Two processes
leave out torch.compile, which takes seconds to start."""

_FENCE = re.compile(r"^```(\w+)( slow)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """One fenced block of a page."""

    language: str
    slow: bool
    text: str

    @property
    def runs(self) -> bool:
        """Whether a reader can run it."""
        return self.language in ("bash", "python") and self.file is None

    @property
    def file(self) -> str | None:
        """The name of the file in the block; None if the block is not a file."""
        named = re.match(r"# ([\w-]+\.(?:toml|py))\n", self.text)
        return (
            named[1]
            if named and named[1].endswith({"toml": ".toml", "python": ".py"}.get(self.language, " "))
            else None
        )

    def commands(self) -> list[str]:
        """The commands of a bash block, one per line."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "bash" else []
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(match[1], bool(match[2]), match[3]) for match in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def covered(line: str) -> bool:
    """Whether another test runs this command."""
    return any(line.startswith(start) for start in COVERED)


def posexport_commands() -> Iterator[tuple[str, list[str]]]:
    """Every posexport command of every page: the page's name, and the words after `posexport`."""
    for page in PAGES:
        for block in blocks(page):
            for line in block.commands():
                words = shlex.split(line)
                if words[0] == "posexport":
                    yield page.name, words[1 : words.index(">")] if ">" in words else words[1:]
            if block.language == "console":  # commands of a cluster, after a prompt or an image
                for line in re.findall(r"(?:\$|--) +posexport (.*)", block.text):
                    yield page.name, shlex.split(line)


def run(page: Path, folder: Path, slow: bool) -> int:
    """Run the blocks of a page in `folder`, which is the working folder. Returns the number of commands and programs
    that ran.

    Slow blocks run only if `slow` is true. AssertionError names the command that failed.
    """
    _prepare(folder)
    ran = 0
    for block in blocks(page):
        if block.slow and not slow:
            continue
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), {"__name__": "__main__"})
            ran += 1
        for line in block.commands():
            if not covered(line) and not _impossible(line):
                run_command(line, folder, QUICK.get(page.name, {}))
                ran += 1
    return ran


def _prepare(folder: Path) -> None:
    _write_checkpoint(folder / "checkpoint")
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    shutil.copy(ROOT / "docs" / "examples" / "posexport.toml", folder)


def _write_checkpoint(folder: Path) -> None:
    """A checkpoint of a small Llama with random weights, and a tokenizer of words."""
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = ("<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "and", "slept")
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def _impossible(line: str) -> bool:
    """Whether a command needs something that is not installed: a TensorRT, openssl, or ONNX Runtime's headers for
    C++."""
    needs_rtx = "tensorrt" in line or line.startswith(("posexport compile", "posexport build"))
    if needs_rtx and RUNTIMES["tensorrt-import"].missing() is not None:
        return True
    if shutil.which("openssl") is None and ("key.p" in line or "signed.onnx" in line):
        return True
    return line.startswith(("cmake", "./build")) and not ("ORT_INCLUDE" in os.environ and shutil.which("cmake"))


def run_command(line: str, folder: Path, quick: dict[str, list[str]]) -> None:
    """Run one command in `folder`. Raises AssertionError if its exit code is neither 0 nor allowed by MAY_EXIT."""
    words, target = shlex.split(os.path.expandvars(line)), None
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    if words[0] == "posexport":
        words += quick.get(words[1], [])
        if (
            words[1] == "export"
            and "-o" in words
            and not {"--from", "--config", "--weights", "--sign", "--module", ">"} & set(words)
        ):
            _export(words, folder)
            return
        result = cli(*words[1:])
        code, output, stdout = result.exit_code, result.output, result.stdout
    else:
        program = sys.executable if words[0] == "python" else words[0]
        done = subprocess.run([program, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
        code, output, stdout = done.returncode, done.stdout + done.stderr, done.stdout
    excused = (
        code == other and re.search(pattern, line) and re.search(text, output)
        for pattern, (other, text) in MAY_EXIT.items()
    )
    assert code == 0 or any(excused), f"{line}\n{output}"
    if target is not None:
        (folder / target).write_text(stdout, encoding="utf-8")


_EXPORTED: dict[tuple[str, ...], dict[str, bytes]] = {}
"""For the options of an export: the files that it wrote, by the end of their names (`""`, `".json"`)."""


def _export(words: list[str], folder: Path) -> None:
    at = words.index("-o")
    path, key = folder / words[at + 1], (*words[:at], *words[at + 2 :])
    path.parent.mkdir(parents=True, exist_ok=True)
    if key not in _EXPORTED:
        result = cli(*words[1:])
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
        _EXPORTED[key] = {file.name[len(path.name) :]: file.read_bytes() for file in path.parent.glob(f"{path.name}*")}
    for end, data in _EXPORTED[key].items():
        path.with_name(path.name + end).write_bytes(data)
