"""For each runtime, whether an attention becomes one kernel, and if not, why and what to do.

Measured with ONNX Runtime 1.31 on the CPU and TensorRT for RTX 1.7 (docs/reference/attentions.md). `compile` shows what
a builder really chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import Reason
from posexport.runtimes import RUNTIMES

if TYPE_CHECKING:
    from posexport.graphs.expand import Expanded

DECOMPOSED, DTYPE, HEAD_SIZE, OPERATOR, SCORES, NOT_MEASURED = (
    "decomposed",
    "dtype",
    "head-dim",
    "operator",
    "scores",
    "not-measured",
)
"""Codes of the reasons."""

HEAD_DIMS = range(16, 257)
"""The head sizes that TensorRT's fused kernels take, measured with TensorRT for RTX 1.7 in fp16 and bf16."""

HALVES = ("fp16", "bf16")

_WHOLE = {
    "Attention",
    "com.microsoft.Attention",
    "com.microsoft.MultiHeadAttention",
    "com.microsoft.GroupQueryAttention",
}
"""Operators that compute a whole attention."""


_WINDOWS = {"left_window_size", "right_window_size"}
_NOT_TAKEN = {
    "Attention": ({4, 5, 6}, "caches, numbers of keys, windows, a precision or a negative scale"),
    "MultiHeadAttention": ({3, 4, 6, 7, 8, 9}, "caches, biases of projections, padding or a negative scale"),
}
"""The inputs of operators that TensorRT refuses or does not read, and what it does not take in words."""


def ort_takes(operator: Expanded) -> bool:
    """Whether ONNX Runtime takes an operator for attention. Its Attention has no windows and no negative scale."""
    attributes = operator.node.attributes
    if operator.node.domain == "com.microsoft":
        return True
    return not _WINDOWS & set(attributes) and attributes.get_float("scale", 1.0) >= 0


def tensorrt_takes(operator: Expanded) -> bool:
    """Whether TensorRT takes an Attention or MultiHeadAttention: one output, no cache inside, and no input or attribute
    that TensorRT refuses or does not read. Softcaps are not judged here.
    """
    attributes, (inputs, _) = operator.node.attributes, _NOT_TAKEN.get(operator.node.op_type, (set[int](), ""))
    given = any(value is not None for at, value in enumerate(operator.inputs) if at in inputs)
    unread = {*_WINDOWS, "softmax_precision"} & set(attributes)
    alone = sum(bool(name) for name in operator.outputs) == 1
    return alone and not given and not unread and attributes.get_float("scale", 1.0) >= 0


@attrs.frozen(kw_only=True)
class Carried:
    """What decides whether an attention is one kernel: its operator, the dtype of its products, its head sizes, softcap
    and sinks.

    `ort_takes` and `tensorrt_takes` are False for an operator with inputs, attributes or outputs that they don't take.
    """

    operator: str
    dtype: str
    head_dim: int
    value_dim: int
    softcap: bool
    sinks: bool
    ort_takes: bool = True
    tensorrt_takes: bool = True


def kernels_of(carried: Carried) -> dict[str, dict[str, Any]]:
    """By runtime: `one_kernel`, which is True, False, or None if it isn't known, and the reason unless it is True."""
    found: dict[str, dict[str, Any]] = {}
    for name, judge in _JUDGES.items():
        reason = judge(carried)
        known = reason is None or reason.code != NOT_MEASURED
        data = None if reason is None else {"code": reason.code, "text": reason.text}
        found[name] = {"one_kernel": reason is None if known else None, "reason": data}
    return found


def _ort_cpu(carried: Carried) -> Reason | None:
    if carried.operator not in _WHOLE:
        return Reason(
            DECOMPOSED,
            "ONNX Runtime fuses no decomposed attention on the CPU: give it an operator with 'posexport rewrite "
            "--form native' or '--form contrib'",
        )
    if not carried.ort_takes:
        return Reason(
            OPERATOR,
            "ONNX Runtime has no Attention with windows or a negative scale: write it anew with 'posexport rewrite "
            "--target ort'",
        )
    if carried.dtype == "bf16":
        return Reason(DTYPE, "ONNX Runtime has no bf16 kernels on the CPU: use fp32 or fp16")
    return None


def _ort_cuda(carried: Carried) -> Reason | None:
    if carried.operator not in _WHOLE:
        return Reason(
            NOT_MEASURED,
            "not measured on a GPU; expect kernels of their own for each MatMul and for the Softmax, with the scores "
            "in memory between them, since ONNX Runtime joined none when it loaded such files on the CPU: give it an "
            "operator with 'posexport rewrite --form contrib', and time both with 'posexport bench --runtime ort-cuda'",
        )
    return Reason(
        NOT_MEASURED,
        "ONNX Runtime runs it as one operator; which kernels its CUDA provider takes for that was not measured: time "
        "it with 'posexport bench --runtime ort-cuda'",
    )


def _tensorrt(carried: Carried) -> Reason | None:
    if carried.operator in ("com.microsoft.Attention", "com.microsoft.GroupQueryAttention"):
        return Reason(
            OPERATOR,
            f"TensorRT has no {carried.operator}: write it anew with 'posexport rewrite --form decomposed' or '--form "
            "native'",
        )
    if carried.operator in _WHOLE and not carried.tensorrt_takes:
        operator = carried.operator.rpartition(".")[2]
        return Reason(
            OPERATOR,
            f"TensorRT takes {operator} with one output, and without {_NOT_TAKEN[operator][1]}: write it anew with "
            "'posexport rewrite --target tensorrt'",
        )
    if carried.head_dim not in HEAD_DIMS:
        return Reason(
            HEAD_SIZE,
            f"the head size is {carried.head_dim}, and fused attention kernels take {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}: "
            "no other form helps",
        )
    if carried.softcap or carried.sinks:
        what = "capped scores" if carried.softcap else "attention sinks"
        return Reason(SCORES, f"the builder does not fuse {what} with attention: no other form helps")
    if carried.value_dim != carried.head_dim:
        return Reason(
            HEAD_SIZE,
            f"values are {carried.value_dim} wide and keys {carried.head_dim}, which the builder does not fuse: no "
            "other form helps",
        )
    if carried.dtype == "fp32":  # checked last: the reasons above would still hold in another dtype
        return Reason(DTYPE, "fp32 has no fused attention kernel: use fp16 or bf16")
    if carried.dtype not in HALVES:
        return Reason(NOT_MEASURED, f"attention in {carried.dtype} was not measured: build it with 'posexport compile'")
    return None


_JUDGES: Mapping[str, Callable[[Carried], Reason | None]] = {
    name: judge
    for name, judge in {
        "ort-cpu": _ort_cpu,
        "ort-cuda": _ort_cuda,
        "tensorrt": _tensorrt,
        "tensorrt-rtx": _tensorrt,
    }.items()
    if name in RUNTIMES
}
