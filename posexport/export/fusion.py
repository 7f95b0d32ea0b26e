"""Why a plan's attention is not one fused kernel a layer, and what to change."""

from __future__ import annotations

from posexport.artifact.manifest import PlanKernels
from posexport.errors import Reason
from posexport.export.support import unsupported_reason
from posexport.spec.encoding import Encoding
from posexport.spec.spec import Spec

FP32, HEAD_DIM, SCORES, SPLIT, BUILDER = "fp32", "head-dim", "scores", "split", "builder"
"""Codes of the reasons."""

HEAD_DIMS = range(16, 257)
"""The widths of heads that TensorRT's fused kernels take, measured with TensorRT for RTX 1.7 in fp16 and bf16."""


def unfused_reason(spec: Spec, form: str, kernels: PlanKernels) -> Reason | None:
    """Why attention is not fused in the kernels of a plan; None where it is, or where that is not known."""
    if kernels.fused_attention is not False:
        return None
    if spec.dtype == "fp32":
        return Reason(FP32, "fp32 has no fused attention kernel: export with --dtype fp16 or bf16")
    if spec.head_dim not in HEAD_DIMS:
        return Reason(
            HEAD_DIM,
            f"head_dim is {spec.head_dim}, and fused attention kernels take {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}: choose "
            "another number of heads or --head-dim",
        )
    if (count := kernels.attention_kernels) and count > kernels.attention_layers:
        return Reason(
            SPLIT,
            f"the builder made {count} attention kernels of {kernels.attention_layers} layers: give narrower shapes "
            "with --profile",
        )
    encodings = [kind.encoding for kind in spec.distinct_layers()]
    scoring = [encoding.name for encoding in encodings if isinstance(encoding, Encoding) and encoding.hook == "score"]
    if scoring and form in ("decomposed", "function"):
        others = [name for name in ("native", "contrib") if unsupported_reason(spec, name, "tensorrt") is None]
        advice = f"export with --form {others[0]}" if others else "no other form can carry this block for TensorRT"
        return Reason(
            SCORES,
            f"{scoring[0]} computes scores from positions and content together, which the builder does not fuse with "
            f"attention in the form {form}: {advice}",
        )
    return Reason(BUILDER, "the builder chose several kernels for it: compare forms with 'posexport tune'")
