"""onnx's ReferenceEvaluator: every operator in numpy as the standard words it. Slow, so it gets small inputs only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from posexport.artifact import onnx_file
from posexport.runtimes.base import Arrays, check_onnx_file, timed


class GatherElements(OpRun):
    """onnx's own takes no negative axis and no axis longer than numpy's `choose` (64)."""

    def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
        return (np.take_along_axis(data, np.where(indices < 0, indices + data.shape[axis], indices), axis),)


class BatchNormalization(OpRun):
    """onnx's own mixes, before opset 14, the statistics of the input into those that it is given (opsets 9 to 13)."""

    def _run(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        mean: Any,
        var: Any,
        epsilon: float = 1e-5,
        momentum: float | None = None,
        training_mode: int = 0,
        is_test: int = 0,
        spatial: int = 1,
    ) -> tuple[Any]:
        if training_mode or len(self.onnx_node.output) > 1:
            raise NotImplementedError("BatchNormalization in training")
        scale, bias, mean, var = (each.reshape(-1, *(1,) * (x.ndim - 2)) for each in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)


class _Evaluator(ReferenceEvaluator):
    """Hands the operators above on to the functions of a model too: it makes one of its own class for each."""

    def __init__(self, proto: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(proto, *arguments, **{"new_ops": [GatherElements, BatchNormalization], **options})


class ReferenceRunner:
    """One model in the evaluator."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._evaluator = _Evaluator(model)
        self._names = list(self._evaluator.output_names)

    @np.errstate(all="ignore")  # the comparison reports infinities, not numpy's warnings
    def run(self, inputs: Arrays) -> Arrays:
        values = self._evaluator.run(None, inputs)
        return {name: np.asarray(value) for name, value in zip(self._names, values, strict=True)}

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        return timed(lambda: self.run(inputs))

    def describe(self) -> dict[str, str]:
        return {"engine": "onnx reference", "version": onnx.__version__, "device": "CPU (numpy)"}


def load(path: Path, options: Mapping[str, Any]) -> ReferenceRunner:
    """Open the `.onnx` file at `path`, external data included; there are no options."""
    check_onnx_file("onnx-reference", path, options)
    return ReferenceRunner(onnx_file.load(path))
