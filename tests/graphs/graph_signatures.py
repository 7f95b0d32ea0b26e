"""Graphs with the input names and shapes that exporters write, and almost no nodes."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from posexport.artifact.graph_file import GraphFile, read_graph

KINDS = {
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "text": TensorProto.STRING,
}

Signature = dict[str, tuple[list[int | str], str]]


def model_of(
    signature: Signature,
    outputs: Signature | None = None,
    nodes: list[onnx.NodeProto] | None = None,
    weights: dict[str, object] | None = None,
) -> onnx.ModelProto:
    """A model with these inputs, each read by an Identity, and optionally more nodes and weights."""
    inputs = [helper.make_tensor_value_info(name, KINDS[dtype], shape) for name, (shape, dtype) in signature.items()]
    made = [
        helper.make_tensor_value_info(name, KINDS[dtype], shape) for name, (shape, dtype) in (outputs or {}).items()
    ]
    identities = [helper.make_node("Identity", [name], [f"{name} read"]) for name in signature]
    if not made:
        name, (shape, dtype) = next(iter(signature.items()))
        made = [helper.make_tensor_value_info(f"{name} read", KINDS[dtype], shape)]
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]  # type: ignore[arg-type]
    graph = helper.make_graph([*identities, *(nodes or [])], "signature", inputs, made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def graph_of(folder: Path, *arguments: object, **named: object) -> GraphFile:
    """Like `model_of`, but written to a file and read back."""
    path = folder / "signature.onnx"
    path.write_bytes(model_of(*arguments, **named).SerializeToString())  # type: ignore[arg-type]
    return read_graph(path)
