"""Reasons to skip a runtime: unsupported, too slow, or out of memory; and options of the other runtimes' runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posexport.errors import Reason
from posexport.runtimes import INTERPRETER, ORT, TENSORRT, TORCH, Runtime
from posexport.spec.forms import ORT_ALONE

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.onnx_artifact import Artifact
    from posexport.spec.spec import Spec

UNSUPPORTED = "unsupported"
"""The code of a runtime that can't take the file, on any machine."""

OTHER_BUILDER = "other-builder"
"""The code of a plan that another runtime built."""

SLOW = "slow"
OUT_OF_MEMORY = "out-of-memory"

_WEIGHTS_DTYPE = "fp64"  # an engine needs 4 to 8 bytes for each weight: as many as this dtype has
_MIXED = ("relative", "shaw", "deberta", "cope")  # encodings whose scores need a third product

OPTIONS: Mapping[str, Mapping[str, Any]] = {TORCH: {"streamed": True}, ORT: {"spinning": False}}
"""Options of runs by module: torch loads one layer at a time, and ONNX Runtime doesn't spin on cores that others
need."""

WORK = {"onnx-reference": 4e9}
"""The most multiply-adds of a case for a slow runtime: about ten seconds."""


def unsupported_reason(artifact: Artifact, row: Runtime) -> Reason | None:
    """Why a runtime can't take an artifact on any machine, or None."""
    dtype, form = artifact.spec.dtype, artifact.form
    text = row.unsupported_dtypes.get(dtype)
    if row.name == "onnx-reference" and form == "contrib":
        text = "onnx's evaluator has no com.microsoft operators"
    elif row.name == "onnx-reference" and form == "native" and dtype != "fp32":
        text = "onnx's evaluator sums Attention's softmax in half precision, so its error says nothing"
    elif row.module in (TENSORRT, INTERPRETER) and artifact.target == "ort":
        text = ORT_ALONE
    return None if text is None else Reason(UNSUPPORTED, text)


def weight_bytes(artifact: LoadedArtifact, row: Runtime) -> int:
    """About how many bytes of memory a runtime needs for an artifact's weights; 0 for torch, which streams them."""
    from posexport.models.weights import bytes_of

    return 0 if row.module == TORCH or row.needs_gpu else bytes_of(artifact.spec, _WEIGHTS_DTYPE)


def memory_shortfall(needed: int, promised: int = 0) -> Reason | None:
    """Why `needed` bytes are not free here, or None. `promised` bytes are those that runs under way may still take."""
    from posexport.machine import available, size_text

    free = available() - promised
    if needed <= free or not needed:
        return None
    text = f"it would need about {size_text(needed)} of memory for weights, and {size_text(free)} are free"
    return Reason(OUT_OF_MEMORY, text)


def slow_reason(row: Runtime) -> Reason:
    """Why a slow runtime gets none of the cases."""
    return Reason(SLOW, f"it is slow, so it only runs inputs of at most {WORK[row.name]:.0e} multiply-adds")


def is_affordable(spec: Spec, sizes: Mapping[str, int], row: Runtime) -> bool:
    """Whether a runtime is fast enough for a run of these sizes."""
    return row.name not in WORK or work(spec, sizes) <= WORK[row.name]


def work(spec: Spec, sizes: Mapping[str, int]) -> float:
    """About the multiply-adds of one run: projections, and two products of attention (three for mixed scores)."""
    from posexport.models.weights import weight_shapes

    tables = ("embed_tokens.weight", "encoding.weight")
    weights = sum(math.prod(shape) for name, shape in weight_shapes(spec).items() if name not in tables)
    width = spec.num_heads * (3 * spec.hidden_size if spec.encoding.name in _MIXED else 2 * spec.head_dim)
    batch, seq = sizes["batch"], sizes["seq"]
    keys = sizes.get("encoder_seq") or sizes.get("max_seq") or seq + sizes.get("past_seq", 0)
    tokens = max(seq, sizes.get("encoder_seq", 0))
    return float(batch * (tokens * weights + seq * keys * width * spec.layers))
