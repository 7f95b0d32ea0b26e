"""Small handmade graphs and networks for the tests of TensorRT's import, run on ONNX Runtime or on an oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime

from posexport.runtimes.tensorrt import api, interpreter
from posexport.runtimes.tensors import NUMPY_DTYPES

Array = np.ndarray[Any, Any]


def graph(text: str, opset: int = 23) -> onnx.ModelProto:
    """A model from ONNX's text syntax: `(float[b,s] x) => (float[b,s] y) { y = Neg(x) }`."""
    head = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1, "posexport": 1]> made '
    return onnx.parser.parse_model(head + text)


def inputs_for(
    model: onnx.ModelProto, sizes: Mapping[str, int], given: Mapping[str, Any], seed: int = 0
) -> dict[str, Array]:
    """Inputs of a model by name: those in `given`, otherwise unit normal floats or random booleans."""
    random = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        if value.name in given:
            made = given[value.name]
            found[value.name] = np.asarray(made(shape) if callable(made) else made, dtype)
        elif dtype == np.bool_:
            found[value.name] = random.integers(0, 2, shape).astype(bool)
        else:
            found[value.name] = random.standard_normal(shape).astype(dtype)
    return found


def on_ort(model: onnx.ModelProto, inputs: dict[str, Array]) -> dict[str, Array]:
    """All outputs of ONNX Runtime's CPU provider, without optimisations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def imported(model: onnx.ModelProto, folder: Path) -> interpreter.ImportRunner:
    """TensorRT's import of a model."""
    path = folder / "made.onnx"
    onnx.save(model, path)
    return interpreter.load(path, {})


def kinds(runner: interpreter.ImportRunner) -> set[str]:
    """The kinds of layers in an import."""
    return {node.kind for node in runner._nodes}


class ByHand:
    """A network under construction. `trt` is TensorRT's module, `net` the network, and `inputs` its input tensors."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        _, self.trt = interpreter._engine()
        self.log = api.make_log(self.trt)
        self.builder = api.create(self.trt.Builder, self.log)
        self.net = api.make_network(self.trt, self.builder)
        self.held: list[Array] = []
        names = {"fp32": "float32", "fp16": "float16"}
        self.inputs = {}
        for name, array in inputs.items():
            key = next(key for key, dtype in NUMPY_DTYPES.items() if dtype == array.dtype)
            self.inputs[name] = self.net.add_input(name, getattr(self.trt, names.get(key, key)), array.shape)

    def keep(self, array: Any) -> Array:
        """Keep an array alive as long as the network, because the network doesn't copy its weights."""
        self.held.append(np.array(array, order="C"))
        return self.held[-1]

    def constant(self, array: Any) -> Any:
        """The tensor of a constant."""
        kept = self.keep(array)
        return self.net.add_constant(kept.shape, kept).get_output(0)


def network(build: Callable[[ByHand], Any], inputs: Mapping[str, Array]) -> interpreter.ImportRunner:
    """A network whose last layer (or attention) is what `build` returns. Its outputs are y0, y1, ..."""
    made = ByHand(inputs)
    layer = build(made)
    for index in range(layer.num_outputs):
        output = layer.get_output(index)
        output.name = f"y{index}"
        made.net.mark_output(output)
    return interpreter.ImportRunner(made.trt, made.net, made.builder, made.log, made.held)


def causal_truth(q: Array, k: Array, v: Array, offset: int) -> Array:
    """Unscaled attention in float64 in which query i sees keys up to i + offset."""
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(float), k.astype(float))
    seen = np.arange(k.shape[2])[None, :] <= np.arange(q.shape[2])[:, None] + offset
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: Array = (weights / weights.sum(-1, keepdims=True)) @ v.astype(float)
    return found
