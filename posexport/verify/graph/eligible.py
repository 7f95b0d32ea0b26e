"""Which runtimes can take any ONNX file, with what options, and whether a refusal says something about the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posexport.errors import Reason
from posexport.runtimes import INTERPRETER, REFERENCE, TENSORRT, TORCH, Runtime
from posexport.verify.eligibility import OPTIONS, UNSUPPORTED, WORK
from posexport.verify.graph.cases import GraphCase
from posexport.verify.graph.subject import GraphSubject


def unsupported_reason(subject: GraphSubject, row: Runtime) -> Reason | None:
    """Why a runtime can't take a file on any machine, or None."""
    text = row.unsupported_dtypes.get(subject.dtype)
    if row.module == TORCH:
        text = "torch rebuilds blocks from the spec that posexport's own files have, and this file has none"
    elif row.module == REFERENCE and subject.foreign_domains:
        text = f"onnx's evaluator has no operators of {', '.join(subject.foreign_domains)}"
    elif row.module == REFERENCE and subject.dtype in ("fp16", "bf16") and subject.has_attention:
        text = "onnx's evaluator sums Attention's softmax in half precision, so its error says nothing"
    return None if text is None else Reason(UNSUPPORTED, text)


def is_excused(subject: GraphSubject, row: Runtime) -> bool:
    """Whether a failure of a runtime says nothing about the file.

    This holds for onnx's evaluator, which lacks much, and for TensorRT if the file has operators of another engine.
    """
    return row.module == REFERENCE or (row.module in (TENSORRT, INTERPRETER) and bool(subject.foreign_domains))


def affordable(subject: GraphSubject, cases: Sequence[GraphCase], row: Runtime) -> list[int]:
    """The numbers of the cases that a runtime is fast enough for: about a multiply-add for each weight and token."""
    if row.name not in WORK:
        return list(range(len(cases)))
    return [index for index, case in enumerate(cases) if subject.weight_count * _tokens(case) <= WORK[row.name]]


def _tokens(case: GraphCase) -> int:
    """About how often each weight is used: for each token, or for each patch of 8 by 8 pixels."""
    sizes = case.sizes
    pixels = sizes.get("height", 1) * sizes.get("width", 1)
    return int(sizes.get("batch", 1) * max(sizes.get("seq", 1), sizes.get("encoder", 1), pixels // 64, 1))


def run_options(cases: Sequence[GraphCase], row: Runtime) -> Mapping[str, Any]:
    """The options of a run: a plan that is built for the run covers the shapes of all cases."""
    if row.module != TENSORRT:
        return OPTIONS.get(row.module, {})
    requests = []
    for name in cases[0].arrays if cases else ():
        shapes = np.array([case.arrays[name].shape for case in cases])
        if shapes.size and (shapes.min(0) != shapes.max(0)).any():
            texts = ["x".join(map(str, shape)) for shape in (shapes.min(0), shapes.max(0), shapes.max(0))]
            requests.append(f"{name}={','.join(texts)}")
    return {"profile": requests}
