"""The test vectors of single operators that onnx provides, and a comparison of the evaluator with them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from posexport.errors import PosexportError
from posexport.graphs.evaluate import Evaluator

FLOATS = {np.dtype(name): getattr(torch, str(name)) for name in ("float16", "float32", "float64")}
FLOATS |= {
    np.dtype(getattr(ml_dtypes, name)): getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
}

LIMITS = {torch.float64: (1e-5, 1e-6), torch.float32: (1e-5, 2e-6), torch.float16: (2e-3, 1e-3)}
"""Relative and absolute limits: most expected outputs of onnx are computed in float32."""
COARSE = (1.6e-2, 8e-3)
"""The limits of bfloat16 and narrower types: two units in the last place."""


@functools.cache
def cases() -> dict[str, Any]:
    """Every vector by name."""
    with warnings.catch_warnings(action="ignore"):
        return {case.name: case for case in collect_testcases()}


def as_torch(value: Any, wide: bool) -> Any:
    """A vector's value as a tensor, in float64 if `wide`. Raises TypeError if torch has no such type."""
    if isinstance(value, onnx.SequenceProto):
        value = numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        value = numpy_helper.to_optional(value)
    if value is None or isinstance(value, (list, tuple)):
        return None if value is None else [as_torch(item, wide) for item in value]
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
    if array.dtype in FLOATS:
        exact = torch.from_numpy(array.astype(np.float64))
        return exact if wide else exact.to(FLOATS[array.dtype])
    if "float4" in array.dtype.name:
        if not wide:
            raise TypeError("torch has no float4")
        return torch.from_numpy(array.astype(np.float64))
    if "int4" in array.dtype.name or "int2" in array.dtype.name:
        array = array.astype(np.uint8 if array.dtype.name.startswith("u") else np.int8)
    tensor = torch.from_numpy(np.array(array))
    return tensor.to(torch.complex128) if wide and tensor.is_complex() else tensor


def limits(value: Any) -> tuple[float, float]:
    """The relative and absolute limit of a result, by the type of the vector's output."""
    if isinstance(value, onnx.TensorProto):
        value = numpy_helper.to_array(value)
    dtype = FLOATS.get(np.asarray(value).dtype) if isinstance(value, (np.ndarray, np.generic)) else None
    return LIMITS.get(dtype, COARSE) if dtype is not None else LIMITS[torch.float32]


def difference(got: Any, expected: Any, within: tuple[float, float]) -> str:
    """What differs between two values, or an empty string."""
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return "another number of tensors"
        return "; ".join(filter(None, (difference(a, b, within) for a, b in zip(got, expected, strict=True))))
    if expected is None or got is None:
        return "" if got is expected else "a value is missing"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)} for {expected.dtype}{list(expected.shape)}"
    a, b = (
        x if x.is_complex() else x.float().double() if x.element_size() < 4 else x.double() for x in (got, expected)
    )
    close = torch.isclose(a, b, rtol=within[0], atol=within[1], equal_nan=True)
    return "" if bool(close.all()) else f"{int((~close).sum())} of {close.numel()} values differ"


def outcome(case: Any, wide: bool, within: tuple[float, float] | None = None) -> str:
    """What is wrong with the evaluator's results for one vector, or an empty string.

    `within` are limits to use instead of `limits`.
    """
    model = ir.from_proto(case.model)
    try:
        for inputs, outputs in case.data_sets:
            names = [str(value.name) for value in model.graph.inputs]
            feeds = {name: as_torch(value, wide) for name, value in zip(names, inputs, strict=True)}
            results: Sequence[Any] = list(Evaluator(model, wide=wide).run(feeds).values())
            if len(results) != len(outputs):
                return "another number of outputs"
            for got, value in zip(results, outputs, strict=True):
                wrong = difference(got, as_torch(value, wide), within or limits(value))
                if wrong:
                    return wrong
    except (PosexportError, TypeError) as error:
        return str(error)
    return ""
