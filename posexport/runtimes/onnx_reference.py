"""onnx's ReferenceEvaluator: every operator in numpy as the standard defines it. It is slow: for small inputs only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.external_data_helper
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_matmul import numpy_matmul

from posexport.artifact import onnx_file
from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.errors import system_error
from posexport.runtimes.base import Arrays, check_onnx_file, timed


class GatherElements(OpRun):
    """onnx's own takes no negative axis and no axis longer than numpy's `choose` (64)."""

    def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
        return (np.take_along_axis(data, np.where(indices < 0, indices + data.shape[axis], indices), axis),)


class BatchNormalization(OpRun):
    """Before opset 14 (opsets 9 to 13), onnx's own mixes the statistics of the input into the given ones."""

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


class LayerNormalization(OpRun):
    """onnx's own computes squares of half precision in half precision, whatever `stash_type` says (from opset 17).

    They overflow at 65,504.
    """

    centred = True

    def _run(
        self,
        x: Any,
        scale: Any,
        bias: Any = None,
        axis: int = -1,
        epsilon: float = 1e-5,
        stash_type: int = onnx.TensorProto.FLOAT,
    ) -> tuple[Any, ...]:
        wide = x.astype(np.result_type(x.dtype, np.float32) if x.dtype.kind == "f" else np.float32)
        axes = tuple(range(axis % x.ndim, x.ndim))
        mean = wide.mean(axes, keepdims=True) if self.centred else 0
        inverse = 1 / np.sqrt(np.mean((wide - mean) ** 2, axes, keepdims=True) + np.asarray(epsilon, wide.dtype))
        made = ((wide - mean) * inverse).astype(x.dtype) * scale
        made = (made if bias is None else made + bias).astype(scale.dtype)
        return (made, mean, inverse)[: max(len(self.onnx_node.output), 1)]


class RMSNormalization(LayerNormalization):
    """Like LayerNormalization, without the mean (opset 23)."""

    centred = False


class MatMul(OpRun):
    """A float16 product that adds in float32 and rounds once.

    numpy's own does the same, but without a BLAS, and takes 50 times as long.
    """

    def _run(self, a: Any, b: Any) -> tuple[Any]:
        if a.dtype != np.float16:
            return (numpy_matmul(a, b),)
        return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(np.float16),)


_MENDED = [GatherElements, BatchNormalization, LayerNormalization, RMSNormalization, MatMul]
"""Operators that onnx's evaluator computes differently from the standard, or far too slowly."""


class _Evaluator(ReferenceEvaluator):
    """Also evaluates the functions of a model with the operators above.

    onnx makes an evaluator of this class for each function. Weights outside the graph's message are mapped from files
    in the `folder`.
    """

    def __init__(self, proto: Any, *arguments: Any, folder: Path | None = None, **options: Any) -> None:
        self._folder = folder
        super().__init__(proto, *arguments, **{"new_ops": _MENDED, **options})

    def retrieve_external_data(self, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        return ir.serde.deserialize_tensor(tensor, base_path=str(self._folder)).numpy()


class ReferenceRunner:
    """One model in the evaluator."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._evaluator = _Evaluator(model, folder=folder)
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
    """Open the `.onnx` file at `path`, its weights mapped from the disk; there are no options."""
    check_onnx_file("onnx-reference", path, options)
    model = read_with_weights_on_disk(path).model
    weights = len(model.graph.initializer)  # they come first; the other tensors belong to nodes
    with system_error(f"can't read the weights of {str(path)!r}", "restore the files beside it"):
        for tensor in itertools.islice(onnx_file.tensors_within(model), weights, None):
            if onnx.external_data_helper.uses_external_data(tensor):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
                tensor.data_location = onnx.TensorProto.DEFAULT
    return ReferenceRunner(model, path.parent)
