"""What the operators of a form can't carry, in one sentence each. Imports nothing, so that tables can ask."""

from __future__ import annotations

_NATIVE = (("native", "portable"), ("native", "tensorrt"))
_CONTRIB = (("contrib", "portable"), ("contrib", "tensorrt"))
REFUSALS = (
    (_NATIVE, "softcap", "TensorRT's Attention takes no softcap: give --target ort, or --form decomposed"),
    (
        _CONTRIB,
        "softcap",
        "MultiHeadAttention takes no softcap: give --target ort, whose GroupQueryAttention does, or --form decomposed",
    ),
    (
        (("contrib", "ort"),),
        "softcap with a grown cache",
        "GroupQueryAttention, which takes softcap, takes chunks over a grown cache for batch 1 only: "
        "give --kv-cache shared, or --form decomposed",
    ),
    (
        _CONTRIB,
        "shared caches",
        "shared caches are GroupQueryAttention's, which TensorRT lacks: give --target ort, or --form native",
    ),
)
"""(form, target) pairs, what they can't carry, and the sentence."""


def carries(form: str, target: str, *, cache: str | None, softcap: bool) -> str | None:
    """Why attention of this kind has no operator in `form` for `target`, without a full stop; None where it has one."""
    asked = {
        "softcap": softcap,
        "shared caches": cache == "shared",
        "softcap with a grown cache": softcap and cache == "concat",
    }
    for at, what, why in REFUSALS:
        if (form, target) in at and asked[what]:
            return why
    return None
