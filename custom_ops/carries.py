"""What the operators of a form can't carry, in one sentence each. Imports nothing, so that tables can ask."""

from __future__ import annotations


def carries(form: str, target: str, *, cache: str | None, softcap: bool, causal: bool, window: bool) -> str | None:
    """Why attention of this kind has no operator in `form` for `target`, without a full stop; None where it has one."""
    for at, kinds, why in _REFUSALS:
        asked = {"softcap": softcap, "shared": cache == "shared", "grown and capped": softcap and cache == "concat"}
        if (form, target) in at and any(asked[kind] for kind in kinds):
            return why
    return None


_NATIVE = (("native", "portable"), ("native", "tensorrt"))
_CONTRIB = (("contrib", "portable"), ("contrib", "tensorrt"))
_REFUSALS = (
    (_NATIVE, ("softcap",), "TensorRT's Attention takes no softcap: give --target ort, or --form decomposed"),
    (
        _CONTRIB,
        ("softcap",),
        "MultiHeadAttention takes no softcap: give --target ort, whose GroupQueryAttention does, or --form decomposed",
    ),
    (
        (("contrib", "ort"),),
        ("grown and capped",),
        "GroupQueryAttention, which takes softcap, takes chunks over a grown cache for batch 1 only: "
        "give --kv-cache shared, or --form decomposed",
    ),
    (
        _CONTRIB,
        ("shared",),
        "shared caches are GroupQueryAttention's, which TensorRT lacks: give --target ort, or --form native",
    ),
)
"""(form, target) pairs, what they can't carry, and the sentence."""
