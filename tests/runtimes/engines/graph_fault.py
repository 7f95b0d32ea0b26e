"""ONNX Runtime with a fault: it runs another graph than the file's, or spoils its outputs.

Option `how`: "operator": a Sin is run as a Cos. "whole": outputs are off unless inner values are requested. "dtype":
outputs are in half precision. "shape": outputs lack their last row. "second": inputs of more than two rows end in an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from posexport.runtimes import ort

USUAL_OUTPUTS = 6


class Spoilt:
    """A runner whose outputs are spoilt."""

    def __init__(self, runner: ort.OrtRunner, how: str) -> None:
        self._runner, self._how = runner, how

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        outputs = self._runner.run(inputs)
        first = next(iter(outputs))
        if self._how == "whole" and len(outputs) <= USUAL_OUTPUTS:
            outputs[first] = outputs[first] * np.float32(1.001)
        if self._how == "dtype":
            outputs[first] = outputs[first].astype(np.float16)
        if self._how == "shape":
            outputs[first] = outputs[first][:-1]
        if self._how == "second" and len(next(iter(inputs.values()))) > 2:
            raise RuntimeError("it takes two rows at most")
        return outputs

    def describe(self) -> dict[str, str]:
        return self._runner.describe()


def load(path: Path, options: Mapping[str, Any]) -> Any:
    """A runner with the fault."""
    how, options = options["how"], {key: value for key, value in options.items() if key != "how"}
    if how == "operator":
        model = onnx.load(path)
        next(node for node in model.graph.node if node.op_type == "Sin").op_type = "Cos"
        path = path.with_name(f"{path.stem} changed.onnx")
        onnx.save(model, path)
    return Spoilt(ort.load(path, options), how)
