"""Outputs of two files in ONNX Runtime on the suite's reference inputs, compared at tokens that are not padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnxruntime

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

LIMITS = {"float32": 1e-3, "float16": 1e-2}
"""How much outputs may differ, relative to their largest value. Rounding errors are a hundred times smaller."""

LEAST = 1e-3
"""The least reference value for relative differences. Probabilities that are all 0 have only rounding errors."""

KINDS = ("out64/", "ort/")
"""Prefixes of outputs in the files of references, the best first."""


@attrs.frozen(kw_only=True)
class Reference:
    """Inputs by the file's names, and outputs in order. The outputs are torch's, or ONNX Runtime's for a file without a
    module."""

    label: str
    feeds: Arrays
    outputs: tuple[Array, ...]


def references(folder: Path, record: Mapping[str, Any]) -> Iterator[Reference]:
    """The references of a file of the suite."""
    names = record.get("feeds") or {name: name for name in record["inputs"]}
    for reference in record["references"]:
        data = np.load(folder / reference)
        kind = next(kind for kind in KINDS if any(key.startswith(kind) for key in data))
        yield Reference(
            label=Path(reference).stem.rpartition("-")[2],
            feeds={mine: data[f"in/{theirs}"] for mine, theirs in names.items()},
            outputs=tuple(data[key] for key in data if key.startswith(kind)),
        )


def session_of(path: Path, *, optimised: bool = True) -> onnxruntime.InferenceSession:
    """A session on one thread of the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def outputs_of(session: onnxruntime.InferenceSession, feeds: Arrays) -> dict[str, Array]:
    """The outputs by name."""
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def difference(expected: Arrays, actual: Arrays, feeds: Arrays) -> float:
    """The largest difference of an output, relative to its largest value. It is infinite if names, shapes or finiteness
    differ."""
    if not set(expected) <= set(actual):
        return math.inf
    return max((_gap(expected[name], actual[name], feeds) for name in expected), default=0.0)


def _gap(expected: Array, actual: Array, feeds: Arrays) -> float:
    if expected.shape != actual.shape:
        return math.inf
    seen = attending(expected, feeds)
    want, have = (values.astype(np.float64)[seen] for values in (expected, actual))
    finite = np.isfinite(want)
    if (finite != np.isfinite(have)).any():
        return math.inf
    if not finite.any():
        return 0.0
    return float(np.abs(want - have)[finite].max() / max(np.abs(want[finite]).max(), LEAST))


def attending(values: Array, feeds: Arrays) -> Array:
    """Which of these values belong to tokens that are not padding. A query that sees no key may yield any value.

    Values are [batch, tokens, ...], or [batch, heads, tokens, size] for a cache.
    """
    mask, axis = feeds.get("attention_mask"), 2 if values.ndim == 4 else 1
    if mask is None or "decoder_input_ids" in feeds or values.ndim < 2 or values.shape[axis] > mask.shape[1]:
        return np.ones(values.shape, bool)
    tokens = mask[:, mask.shape[1] - values.shape[axis] :].astype(bool)
    shape = [len(tokens), *[1] * (axis - 1), -1, *[1] * (values.ndim - axis - 1)]
    return np.broadcast_to(tokens.reshape(shape), values.shape)
