"""Engines that misbehave, for the tests of workers. The option `how` selects the behaviour."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Echo:
    """Returns its inputs."""

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return dict(inputs)

    def describe(self) -> dict[str, str]:
        return {"engine": "echo", "process": str(os.getpid())}


class Zeros(Echo):
    """Returns zeros of the right shape."""

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"output": np.zeros_like(inputs["hidden_states"])}


class Limits(Echo):
    """Returns the memory limit of its process (-1: none) and its oom_score_adj."""

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        score = int(Path("/proc/self/oom_score_adj").read_text())
        return {"limit": np.array(limit if limit != resource.RLIM_INFINITY else -1), "score": np.array(score)}


def load(path: Path, options: Mapping[str, Any]) -> Echo:
    how = options.get("how")
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "sleep":
        time.sleep(60)
    elif how == "exit":
        os.write(2, b"out of luck\n")
        os._exit(7)
    elif how == "raise":
        raise ValueError("no such\nkernel")
    elif how == "noise":
        print("text on stdout", flush=True)  # noqa: T201
        os.write(1, b'{"id": 1, "ok": false}\n')
    elif how == "limits":
        return Limits()
    return Zeros() if how == "zeros" else Echo()
