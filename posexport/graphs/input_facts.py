"""What roles of inputs tell: which tokens are padding, where new tokens go, what is added to scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posexport.graphs.axes import BATCH, ENCODER, SEQ, SLOTS
from posexport.graphs.roles import Role
from posexport.runtimes.tensors import NUMPY_DTYPES

COUNTING = {"lengths", "last_key"}
"""Roles of inputs that count the keys of a row, so that padding is on the right."""


def dtype_of(role: Role) -> np.dtype[Any]:
    """numpy's dtype of an input."""
    return NUMPY_DTYPES.get(role.dtype) or np.dtype(role.dtype)


def is_of_tokens(role: Role) -> bool:
    """Whether a mask has an axis of tokens and one of keys: it says for each query which keys it sees."""
    return _has_axes_of_scores(role) and role.axes[-2] != 1


def _has_axes_of_scores(role: Role) -> bool:
    """Whether a mask has the axes of scores. The length of the axis of tokens may be 1."""
    return len(role.axes) > 2 or (len(role.axes) == 2 and BATCH not in role.axes)


def takes_padding(role: Role) -> bool:
    """Whether an input says which keys of each row are padding. A mask with only tokens and keys is for all rows."""
    kinds = {"attention_mask", "padding_mask"} | COUNTING
    return role.kind in kinds and not (is_of_tokens(role) and role.axes[0] == SEQ) and ENCODER not in role.axes


def pads_encoder(roles: Mapping[str, Role]) -> bool:
    """Whether an input says which tokens of an encoder are padding."""
    return any(role.kind.endswith("_mask") and ENCODER in role.axes for role in roles.values())


def rows_begin_apart(roles: Mapping[str, Role]) -> bool:
    """Whether each row of a buffer has its own place for its new tokens."""
    kinds = {role.kind for role in roles.values()}
    slots = any(SLOTS in role.axes for role in roles.values())
    return (
        slots
        and "cache_position" not in kinds
        and any(role.kind in ("write_indices", "past_length") and BATCH in role.axes for role in roles.values())
    )


def takes_scores(role: Role) -> bool:
    """Whether an input is a mask that is added to scores and may contain any numbers."""
    is_mask = role.kind.endswith("attention_mask") and not role.truths
    return is_mask and _has_axes_of_scores(role) and dtype_of(role).kind == "f"
