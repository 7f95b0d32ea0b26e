"""posexport's own operators: what a torch block calls where positions matter, and how each is written in ONNX.

Names resolve on first use, because every operator's file imports torch and onnx, and the table of encodings (which
names operators) must stay cheap to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posexport.custom_ops.angles import pair_features, sinusoids
    from posexport.custom_ops.attention import attend
    from posexport.custom_ops.bias import alibi_bias, relative_bias
    from posexport.custom_ops.cache import attend_cached, attend_shared, key_positions
    from posexport.custom_ops.norm import head_norm
    from posexport.custom_ops.relative import add_head_bias, relative_score, relative_table_score
    from posexport.custom_ops.rotary import rotate

_HOMES = {
    "sinusoids": "angles",
    "pair_features": "angles",
    "rotate": "rotary",
    "alibi_bias": "bias",
    "relative_bias": "bias",
    "add_head_bias": "relative",
    "relative_score": "relative",
    "relative_table_score": "relative",
    "head_norm": "norm",
    "key_positions": "cache",
    "attend": "attention",
    "attend_cached": "cache",
    "attend_shared": "cache",
}

__all__ = [
    "add_head_bias",
    "alibi_bias",
    "attend",
    "attend_cached",
    "attend_shared",
    "head_norm",
    "key_positions",
    "pair_features",
    "relative_bias",
    "relative_score",
    "relative_table_score",
    "rotate",
    "sinusoids",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def operators() -> list[Any]:
    """Every operator, in a fixed order."""
    return [__getattr__(name) for name in _HOMES]
