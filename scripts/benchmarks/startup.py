"""Start-up: `posexport --help` and `posexport list` against a bare interpreter that imports click."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from rows import Row, compared, counted

from posexport.bench import rounds
from posexport.runtimes.base import timed

TARGET = 3.0
HEAVY = ("torch", "onnx", "onnxruntime")
_RUN = "from posexport.cli import main; main()"
_LOADED = f"""
import sys
from posexport.cli import main
try:
    main()
finally:
    print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)
"""


def measure(quick: bool) -> list[Row]:
    """Two ratios of wall time, and the number of heavy packages that either command imports."""
    commands = {"posexport --help": ["--help"], "posexport list": ["list"]}
    calls = {name: timed(_python(_RUN, *args)) for name, args in commands.items()}
    calls["import click"] = timed(_python("import click"))
    for call in calls.values():
        call()
    series = rounds.interleave(calls, 5 if quick else 31)
    rows = [
        compared(f"{name}, against a bare 'import click'", series[name], series["import click"], TARGET)
        for name in commands
    ]
    for name, args in commands.items():
        loaded = _python(_LOADED, *args)().stderr.split()
        what = f"{name}: how many of {', '.join(HEAVY)} it imports"
        rows.append(counted(what, len(loaded), 0, "packages", **({"imports": loaded} if loaded else {})))
    return rows


def _python(code: str, *args: str) -> Callable[[], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-c", code, *args]
    return lambda: subprocess.run(command, check=True, capture_output=True, text=True)
