"""What verify doesn't ask of a runtime: what it can't take by its nature, what it is too slow or has no memory for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from posexport.runtimes import NO_KERNELS, TORCH, Runtime
from posexport.spec.forms import ORT_ALONE

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.onnx_artifact import Artifact
    from posexport.spec.spec import Spec

_NOT_FOR: tuple[tuple[Callable[[Runtime, Artifact], bool], str], ...] = (
    (
        lambda row, artifact: (row.name, artifact.spec.dtype) == ("ort-cpu", "bf16"),
        NO_KERNELS["ort-cpu", "bf16"],
    ),
    (
        lambda row, artifact: row.name == "onnx-reference" and artifact.form == "contrib",
        "onnx's evaluator has no com.microsoft operators",
    ),
    (
        lambda row, artifact: (
            row.name == "onnx-reference" and artifact.form == "native" and artifact.spec.dtype != "fp32"
        ),
        "onnx's evaluator sums Attention's softmax in half precision, which is no measure",
    ),
    (
        lambda row, artifact: row.name.startswith("tensorrt") and artifact.target == "ort",
        ORT_ALONE,
    ),
)
"""What a runtime can't take by its nature, and the reason."""

_HELD = "fp64"
"""An engine holds 4 to 8 bytes for each weight: as many as one of this dtype has."""

_MIXED = ("relative", "shaw", "deberta", "cope")
"""Encodings whose scores take a product of their own."""

WORK = {"onnx-reference": 4e9}
"""Multiply-adds of one case that a slow runtime still gets: ten seconds or so."""


def unsupported_reason(subject: LoadedArtifact, row: Runtime) -> str | None:
    """Why a runtime can't take an artifact by its nature, or None."""
    return next((why for applies, why in _NOT_FOR if applies(row, subject.source)), None)


def is_permanent(reason: str | None) -> bool:
    """Whether a runtime did not run for what a file is, which no other machine or day changes."""
    return any(reason == why for _, why in _NOT_FOR)


def held(subject: LoadedArtifact, row: Runtime) -> int:
    """Bytes of memory that a runtime holds of an artifact's weights, about; torch streams them."""
    from posexport.models.weights import bytes_of

    return 0 if row.module == TORCH or row.needs_gpu else bytes_of(subject.spec, _HELD)


def memory_shortfall(needed: int, promised: int = 0) -> str | None:
    """Why an engine that is to hold so many bytes can't have them here, or None; `promised` are those that runs under
    way may still take."""
    from posexport.machine import available

    free = available() - promised
    if needed <= free or not needed:
        return None
    return f"it would hold about {needed / 1e9:.1f} GB of weights in memory, and {free / 1e9:.1f} GB are free"


def work(spec: Spec, sizes: Mapping[str, int]) -> float:
    """Multiply-adds of one run, about: projections, and two products of attention (three for mixed scores)."""
    from posexport.models.weights import weight_shapes

    tables = ("embed_tokens.weight", "encoding.weight")
    weights = sum(math.prod(shape) for name, shape in weight_shapes(spec).items() if name not in tables)
    width = spec.num_heads * (3 * spec.hidden_size if spec.encoding.name in _MIXED else 2 * spec.head_dim)
    batch, seq = sizes["batch"], sizes["seq"]
    keys = sizes.get("encoder_seq") or sizes.get("max_seq") or seq + sizes.get("past_seq", 0)
    tokens = max(seq, sizes.get("encoder_seq", 0))
    return float(batch * (tokens * weights + seq * keys * width * spec.layers))
