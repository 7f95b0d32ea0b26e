"""What the operators of a form can't carry, in one sentence each. Imports nothing, so that tables can ask."""

from __future__ import annotations

_NATIVE = (("native", "portable"), ("native", "tensorrt"))
_CONTRIB = (("contrib", "portable"), ("contrib", "tensorrt"))
GROUPED_WIDTH = 8
"""GroupQueryAttention takes heads of a multiple of it."""

_ORT = (("contrib", "ort"),)
_ODD = "a head_dim that is no multiple of 8"

REFUSALS = (
    (_NATIVE, "softcap", "TensorRT's Attention takes no softcap: give --target ort, or --form decomposed"),
    (
        (*_CONTRIB, *_ORT),
        f"softcap or shared caches, and {_ODD}",
        "GroupQueryAttention, which alone takes them, takes heads of a multiple of 8 features: "
        "give --form decomposed, or native with --target ort",
    ),
    (
        (*_CONTRIB, *_ORT),
        "softcap with a grown cache",
        "GroupQueryAttention, which alone takes softcap, takes chunks over a grown cache for batch 1 only: "
        "give --form decomposed, or native with --target ort",
    ),
    (
        (*_CONTRIB, *_ORT),
        "softcap with an encoder's keys",
        "GroupQueryAttention, which alone takes softcap, takes as many keys as queries: "
        "give --form decomposed, or native with --target ort",
    ),
    (
        _CONTRIB,
        "softcap",
        "MultiHeadAttention takes no softcap: give --target ort, whose GroupQueryAttention does, or --form decomposed",
    ),
    (
        _CONTRIB,
        "shared caches",
        "shared caches are GroupQueryAttention's, which TensorRT lacks: give --target ort, or --form native",
    ),
)
"""(form, target) pairs, what they can't carry, and the sentence; the first that fits is told."""


def unsupported(form: str, target: str, *, cache: str | None, softcap: bool, head_dim: int, square: bool) -> str | None:
    """Why attention of this kind has no operator in `form` for `target`, without a full stop; None where it has one.

    `square`: there are as many keys as queries, which plays no part where there is a cache.
    """
    asked = {
        "softcap": softcap,
        "shared caches": cache == "shared",
        "softcap with a grown cache": softcap and cache == "concat",
        "softcap with an encoder's keys": softcap and cache is None and not square,
        f"softcap or shared caches, and {_ODD}": (softcap or cache == "shared") and head_dim % GROUPED_WIDTH > 0,
    }
    for at, what, why in REFUSALS:
        if (form, target) in at and asked[what]:
            return why
    return None
