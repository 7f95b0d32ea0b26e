"""Start-up of commands, compared with a bare interpreter that imports the libraries that they need anyway."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from results import Row, compared, counted
from timing import block_spec, write_block

from posexport import temporary
from posexport.bench import rounds, statistics
from posexport.runtimes.base import timed

CLICK, ONNX = "import click", "import onnx, click"
COMMANDS = {"--help": (CLICK, 3.0), "list": (CLICK, 3.0), "inspect block.onnx": (ONNX, 4.0)}
"""Commands, each with the code that it is compared with and the largest ratio."""

MISSING, MISSING_SECONDS = ("verify missing.onnx", "inspect missing.onnx"), 0.5
"""Commands that get a missing file, and the most seconds until they report it."""

_MAIN = "from posexport.cli import main; main()"


def measure(quick: bool) -> list[Row]:
    """Ratios of wall time, and the seconds until a missing file is reported."""
    with temporary.folder() as folder:
        write_block(block_spec("rope", 256, 4), Path(folder, "block.onnx"))
        calls = {name: partial(_run, folder, _MAIN, name) for name in COMMANDS}
        calls |= {name: partial(_run, folder, _MAIN, name, 2) for name in MISSING}
        calls |= {code: partial(_run, folder, code) for code in (CLICK, ONNX)}
        for call in calls.values():
            call()
        series = rounds.interleave({name: timed(call) for name, call in calls.items()}, 5 if quick else 31)
    seconds = {name: statistics.quantile(series[name], 0.5) for name in MISSING}
    rows = [counted(f"posexport {name}", seconds[name], MISSING_SECONDS, "s") for name in MISSING]
    for name, (code, target) in COMMANDS.items():
        rows.append(compared(f"posexport {name}, against '{code}'", series[name], series[code], target))
    return rows


def _run(folder: Path, program: str, words: str = "", code: int = 0) -> None:
    """Run a program in a new interpreter. Raises RuntimeError if it ends with another exit code."""
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode != code:
        raise RuntimeError(f"posexport {words} exited {done.returncode}: {done.stderr.strip()}")
