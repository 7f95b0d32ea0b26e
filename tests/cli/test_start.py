"""Ctrl-C while the command line loads: the process ends as other programs do, without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("posexport")

AT_IMPORT = """
import importlib.abc, os, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["posexport", "list"]
if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from posexport.{entry} import main
main()
"""


def _run(module: str, entry: str = "__main__", ignored: bool = False) -> subprocess.CompletedProcess[str]:
    code = AT_IMPORT.format(module=module, entry=entry, ignored=ignored)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["posexport.cli", "click", "posexport.errors", "posexport.temporary"])
def test_an_interrupt_while_the_command_line_loads_gives_no_traceback(module: str) -> None:
    ended = _run(module)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_planted_fault() -> None:
    """Without the small module that starts the command, the interrupt gives a traceback."""
    assert "Traceback" in _run("click", entry="cli").stderr


def test_an_ignored_interrupt_stays_so() -> None:
    ended = _run("click", ignored=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "rope" in ended.stdout


def test_the_script_is_that_module() -> None:
    assert "posexport.__main__ import main" in SCRIPT.read_text(encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "posexport", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
