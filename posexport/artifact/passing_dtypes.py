"""Dtypes in which a file only rounds: ALiBi of Falcon, in a file of fp32, is rounded to bfloat16.

Where neither inputs, outputs nor matrices of a file have a dtype of fewer digits than all of these, a conversion to it
is part of what the model computes. Elsewhere it is how the file stores what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

_HALF = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def passing_dtypes(values: Iterable[int], weights: Iterable[tuple[int, Sequence[int]]]) -> frozenset[int]:
    """The half-precision element types that neither `values`, the types of inputs and outputs, nor matrices have;
    `weights` are the types and shapes of all weights."""
    matrices = {kind for kind, shape in weights if sum(size > 1 for size in shape) > 1}
    return frozenset(_HALF - matrices - {*values})


def passing_dtypes_of(model: onnx.ModelProto) -> frozenset[int]:
    """Those of a file."""
    graph = model.graph
    values = (value.type.tensor_type.elem_type for value in (*graph.input, *graph.output))
    return passing_dtypes(values, ((tensor.data_type, tensor.dims) for tensor in graph.initializer))
