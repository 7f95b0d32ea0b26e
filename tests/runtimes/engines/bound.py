"""ONNX Runtime with a fault in its binding: outputs of bound runs are half of the right values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posexport.runtimes import ort


class Halved:
    """A session with the fault."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        self._session.run_with_iobinding(binding, options)
        for output in binding.get_outputs():
            output.update_inplace(output.numpy() / 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def load(path: Path, options: Mapping[str, Any]) -> ort.OrtRunner:
    """A runner of a session with the fault."""
    runner = ort.load(path, options)
    runner._session = Halved(runner._session)
    return runner
