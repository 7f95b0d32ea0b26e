"""Attention that was recognised in a graph, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def recognised(one: Mapping[str, Any]) -> str:
    """What was recognised of an attention, from its record."""
    return str({key: one[key] for key in ("num_heads", "num_kv_heads", "head_dim", "encoding")})
