"""Graphs of one node, evaluated in float64 and run by ONNX Runtime on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import TensorProto, helper

from posexport.graphs.evaluate import Evaluator

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
RANDOM = np.random.default_rng(5)


def normal(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def one_node(
    operator: str,
    inputs: list[Array | None],
    outputs: int | str = 1,
    *,
    domain: str = "",
    opset: int = 20,
    dtypes: dict[int, int] | None = None,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of one node, and its inputs.

    `outputs` is the number of outputs, or a string with a letter for each and `-` for each output without a name.
    `dtypes` are the ONNX element types of outputs that are not float32.
    """
    names = ["" if value is None else f"in{at}" for at, value in enumerate(inputs)]
    results = "abcdefgh"[:outputs] if isinstance(outputs, int) else outputs
    results_named = ["" if letter == "-" else f"out_{letter}" for letter in results]
    node = helper.make_node(operator, names, results_named, domain=domain, **attributes)
    feeds = {name: value for name, value in zip(names, inputs, strict=True) if value is not None}
    typed = {name: (dtypes or {}).get(at, TensorProto.FLOAT) for at, name in enumerate(results_named) if name}
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in typed.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def evaluated(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """The outputs in float64."""
    given = {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
    return [value.numpy() for value in Evaluator(ir.from_proto(model)).run(given).values()]


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """The outputs of ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


def assert_same(got: list[Array], expected: list[Array], rtol: float = 2e-6, atol: float = 2e-6) -> None:
    """Asserts that shapes are equal and that values agree within the rounding of fp32."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert (a.dtype == np.float64) == (b.dtype.kind == "f")
        np.testing.assert_allclose(a, b.astype(a.dtype), rtol=rtol, atol=atol)


def compare(operator: str, inputs: list[Array | None], outputs: int | str = 1, **options: Any) -> list[Array]:
    """Evaluates and runs one node, compares all outputs, and returns those of the evaluator."""
    model, feeds = one_node(operator, inputs, outputs, **options)
    got = evaluated(model, feeds)
    assert_same(got, run(model, feeds))
    return got
