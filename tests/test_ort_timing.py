"""How ONNX Runtime is timed on a stream: without a wait of the host's inside the events. The stream is a stand-in."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from helpers import small_spec

from posexport.artifact import write_onnx
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort

KEY = "disable_synchronize_execution_providers"


class Noting:
    """A session that keeps the options of its bound runs."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.options: list[onnxruntime.RunOptions | None] = []

    def run_with_iobinding(self, binding: Any, options: onnxruntime.RunOptions | None = None) -> None:
        self.options.append(options)
        self._session.run_with_iobinding(binding, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize("stream", [None, "a stream"])
def test_only_runs_between_events_leave_the_wait_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    spec = small_spec("none")
    path = tmp_path / "block.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    session = Noting(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]))
    monkeypatch.setattr(ort, "_by_events", lambda call, on, held: lambda: call() or 1.0)
    once = ort.OrtRunner(session, "CPU", stream=stream).prepare({"hidden_states": np.zeros((1, 3, 32), np.float32)})
    session.options.clear()
    assert once() > 0
    (options,) = session.options
    if stream is None:
        assert options is None  # onnxruntime waits by itself
    else:
        assert options is not None
        assert options.get_run_config_entry(KEY) == "1"


def test_onnxruntime_knows_that_option() -> None:
    """It takes any name without a word; the name is at least in its library."""
    (library,) = Path(onnxruntime.__file__).parent.joinpath("capi").glob("onnxruntime_pybind11_state*")
    assert KEY.encode() in library.read_bytes()
