"""ONNX Runtime on a machine with memory for few tokens: memory runs out, or the kernel kills the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posexport.runtimes import ort
from posexport.runtimes.base import Arrays


class Short:
    """Runs inputs of up to `room` bytes in total. On larger inputs it raises MemoryError, or is killed (`killed`)."""

    def __init__(self, runner: ort.OrtRunner, room: int, killed: bool) -> None:
        self._runner, self._room, self._killed = runner, room, killed

    def run(self, inputs: Arrays) -> Arrays:
        if sum(array.nbytes for array in inputs.values()) > self._room:
            if self._killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no room")
        return self._runner.run(inputs)

    def describe(self) -> dict[str, str]:
        return self._runner.describe()


def load(path: Path, options: Mapping[str, Any]) -> Short:
    return Short(ort.load(path, {}), options["room"], options["killed"])
