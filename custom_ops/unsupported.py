"""The attention calls for which a form has no operator, each with the reason. Imports no runtime."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from posexport.errors import Reason

GROUPED_WIDTH = 8
"""GroupQueryAttention takes only a head_dim that is a multiple of this number."""


def fits_grouped_batch(batch: int, seq: int, past: int) -> bool:
    """Whether GroupQueryAttention takes `seq` tokens in `batch` rows after `past` cached tokens.

    After cached tokens, it takes several tokens only for batch 1.
    """
    return batch == 1 or seq == 1 or past == 0


@attrs.frozen
class AttentionCall:
    """The features of an attention call. `square`: as many new keys as queries. It is ignored for shared caches."""

    cache: str | None
    softcap: bool
    head_dim: int
    square: bool


@attrs.frozen
class Refusal:
    """A feature that `form` lacks for `targets`: the calls that have it, the feature in words, and the reason."""

    form: str
    targets: tuple[str, ...]
    feature: str
    applies: Callable[[AttentionCall], bool]
    reason: Reason


_WITHOUT_GROUPED = "give --form decomposed, or native with --target ort"
_ALL, _NOT_ORT = ("portable", "tensorrt", "ort"), ("portable", "tensorrt")

REFUSALS = (
    Refusal(
        "native",
        _NOT_ORT,
        "softcap",
        lambda call: call.softcap,
        Reason("softcap", "TensorRT's Attention takes no softcap: give --target ort, or --form decomposed"),
    ),
    Refusal(
        "contrib",
        _ALL,
        f"softcap or shared caches, and a head_dim that is no multiple of {GROUPED_WIDTH}",
        lambda call: (call.softcap or call.cache == "shared") and call.head_dim % GROUPED_WIDTH > 0,
        Reason(
            "head-dim",
            "GroupQueryAttention, which alone takes softcap or shared caches, takes heads of a multiple of 8 features: "
            + _WITHOUT_GROUPED,
        ),
    ),
    Refusal(
        "contrib",
        _ALL,
        "softcap with an encoder's keys",
        lambda call: call.softcap and call.cache != "shared" and not call.square,
        Reason(
            "softcap-cross",
            "GroupQueryAttention, which alone takes softcap, takes as many keys as queries: " + _WITHOUT_GROUPED,
        ),
    ),
    Refusal(
        "contrib",
        _NOT_ORT,
        "softcap",
        lambda call: call.softcap,
        Reason(
            "softcap",
            "MultiHeadAttention takes no softcap: give --target ort, whose GroupQueryAttention does, "
            "or --form decomposed",
        ),
    ),
    Refusal(
        "contrib",
        _NOT_ORT,
        "shared caches",
        lambda call: call.cache == "shared",
        Reason(
            "shared-cache",
            "shared caches are GroupQueryAttention's, which TensorRT lacks: give --target ort, or --form native",
        ),
    ),
)
"""Every unsupported feature. The first row that applies gives the reason."""


def unsupported_reason(form: str, target: str, call: AttentionCall) -> Reason | None:
    """Return why attention of this kind has no operator in `form` for `target`, or None if it has one."""
    for row in REFUSALS:
        if form == row.form and target in row.targets and row.applies(call):
            return row.reason
    return None
