"""Engines with wrong answers, for the tests of workers. `options` selects the answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Wrong:
    """Returns what its function makes of the inputs."""

    def __init__(self, run: Callable[[dict[str, Any]], Any], describe: Any) -> None:
        self.run, self._describe = run, describe

    def describe(self) -> Any:
        return self._describe


def _cut_answer(inputs: dict[str, Any]) -> Any:
    """End the process in the middle of writing an answer, as a crash in another thread would."""
    for descriptor in range(3, 64):
        try:
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("pipe:"):
                os.write(descriptor, b'{"id": 1, "ok": tr')
        except OSError:
            continue
    os._exit(3)


def _grandchild(inputs: dict[str, Any]) -> Any:
    """Start a child that keeps the pipe of answers open for a while, then be killed."""
    if os.fork() == 0:
        import time

        time.sleep(40)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _shout(inputs: dict[str, Any]) -> Any:
    """Write megabytes to stdout and stderr, with junk and partial lines among them."""
    for line in (b"x" * 1000 + b"\n",) * 3000:
        os.write(1, line)
        os.write(2, line)
    os.write(1, b"\xff\xfe no end of line")
    sys.stdout.write(json.dumps({"id": 1, "ok": True}) + "\n")
    return inputs


RUN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "none": lambda inputs: None,
    "list": lambda inputs: list(inputs.values()),
    "no-array": lambda inputs: {"output": [1.0, 2.0]},
    "number-name": lambda inputs: {1: np.ones(3)},
    "objects": lambda inputs: {"output": np.array([print, None], dtype=object)},
    "text": lambda inputs: {"output": np.full(inputs["hidden_states"].shape, "a")},
    "shape": lambda inputs: {"output": inputs["hidden_states"][..., :1]},
    "nan": lambda inputs: {"output": np.full_like(inputs["hidden_states"], np.nan)},
    "nothing": lambda inputs: {},
    "two": lambda inputs: {"output": inputs["hidden_states"], "more": inputs["hidden_states"]},
    "wide": lambda inputs: {"output": inputs["hidden_states"].astype(np.float64)},
    "echo": dict,
    "raise": lambda inputs: {}["no such key"],
    "memory": lambda inputs: np.empty(1 << 55),
    "exit": lambda inputs: os._exit(3),
    "system-exit": lambda inputs: sys.exit("gave up"),
    "abort": lambda inputs: os.abort(),
    "thread": lambda inputs: [t := threading.Thread(target=os._exit, args=(5,)), t.start(), threading.Event().wait()],
    "recursion": lambda inputs: RUN["recursion"](inputs),
    "cut-answer": _cut_answer,
    "grandchild": _grandchild,
    "shout": _shout,
}


def load(path: Path, options: Mapping[str, Any]) -> Wrong:
    return Wrong(RUN[options["how"]], {"engine": object() if options.get("bad_describe") else "wrong"})
