"""Operators without a kernel: onnx's reference implementation runs them, and knows the bodies of its functions.

It gets float64, but some of its operators compute in float32 internally.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

from posexport.artifact.onnx_limits import RANDOM
from posexport.errors import RequestError
from posexport.graphs.kernels import dtypes
from posexport.graphs.kernels.registry import Call, Value

_ADVICE = {
    "com.microsoft.nchwc": "it is made for one kind of CPU, so let ONNX Runtime save the file again with "
    "ORT_ENABLE_EXTENDED in place of ORT_ENABLE_ALL"
}
"""What to do about operators of a domain."""


class UnknownOperatorError(RequestError):
    """An operator that has neither a kernel here nor a reference implementation in onnx."""


def evaluate(call: Call, domain: str, attributes: Sequence[ir.Attr], inputs: Sequence[Value], place: str) -> Value:
    """Run the operator as a graph of one node. Raises UnknownOperatorError if onnx doesn't know it."""
    if not domain and call.op_type in RANDOM:
        raise UnknownOperatorError(f"{place} draws random numbers, and can't be evaluated: remove it.")
    if not onnx.defs.has(call.op_type, domain):
        advice = _ADVICE.get(domain, "remove the node, or give its function")
        raise UnknownOperatorError(f"{place} has an operator that can't be evaluated: {advice}.")
    names = ["" if value is None else f"input{at}" for at, value in enumerate(inputs)]
    outputs = [f"output{at}" if wanted else "" for at, wanted in enumerate(call.wanted)]
    node = onnx.helper.make_node(call.op_type, names, outputs, domain=domain)
    node.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in attributes)
    graph = onnx.helper.make_graph(
        [node],
        "one_node",
        [onnx.ValueInfoProto(name=name) for name in names if name],
        [onnx.ValueInfoProto(name=name) for name in outputs if name],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(domain, call.version)])
    try:
        evaluator = ReferenceEvaluator(model)
    except (NotImplementedError, RuntimeError, ValueError, KeyError, TypeError):
        raise UnknownOperatorError(
            f"{place} has an operator that can't be evaluated in opset {call.version}."
        ) from None
    feeds = {name: _to_numpy(value) for name, value in zip(names, inputs, strict=True) if name}
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        found = iter(evaluator.run(None, feeds))
    return tuple(_from_numpy(next(found), call.wide) if wanted else None for wanted in call.wanted)


def _to_numpy(value: Value) -> Value:
    if isinstance(value, list):
        return [_to_numpy(item) for item in value]
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.contiguous().numpy()


def _from_numpy(value: Value, wide: bool) -> Value:
    if isinstance(value, list):
        return [_from_numpy(item, wide) for item in value]
    if value is None:
        return None
    array = np.asarray(value)
    if array.dtype == ml_dtypes.bfloat16:
        return dtypes.widened(torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16), wide)
    return dtypes.widened(torch.from_numpy(np.array(array)), wide)
