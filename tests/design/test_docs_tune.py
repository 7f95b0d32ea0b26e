"""docs/guide/tune.md: its commands run in order in one folder, and its Python runs behind them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers import cli

from posexport.runtimes import RUNTIMES

BLOCKS = re.findall(
    r"```(\w+)\n(.*?)```", (Path(__file__).parents[2] / "docs/guide/tune.md").read_text(), flags=re.DOTALL
)


@pytest.mark.slow
def test_the_commands_and_the_snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [kind for kind, _ in BLOCKS] == ["bash", "bash", "python"]
    for kind, text in BLOCKS:
        if kind == "python":
            names: dict[str, object] = {}
            exec(compile(text, "docs/guide/tune.md", "exec"), names)
            assert getattr(names["output"], "shape", None) == (1, 32, 64)
            continue
        for line in text.splitlines():
            if "tensorrt-rtx" in line and RUNTIMES["tensorrt-import"].missing() is not None:
                continue
            words = shlex.split(line)
            assert words[0] == "posexport"
            result = cli(*words[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"
