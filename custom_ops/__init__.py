"""posexport's own operators. Torch modules call them wherever positions matter. Each has a body in ONNX.

    from posexport import custom_ops

    out = custom_ops.attend(q, k, v, bias=bias, num_heads=8, causal=True)

`help(custom_ops.attend)` shows an operator's arguments with their shapes. S is the number of queries, T of keys, P of
pairs of features.

Names load on first use, because every operator's file imports torch and onnx. The table of encodings uses the operators
and must stay cheap to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posexport.custom_ops.angles import (
        exact_sinusoids,
        grid_sinusoids,
        keep_prefix,
        pair_features,
        position_powers,
        sinusoids,
    )
    from posexport.custom_ops.attention import attend, attend_cached, attend_shared
    from posexport.custom_ops.bias import alibi_bias, cosine_bias, grid_bias, kerple_bias, relative_bias
    from posexport.custom_ops.cache import cached_keys, key_positions
    from posexport.custom_ops.contextual import contextual_score
    from posexport.custom_ops.difference_disentangled import difference_disentangled_score
    from posexport.custom_ops.difference_relative import difference_relative_score
    from posexport.custom_ops.difference_scores import difference_score
    from posexport.custom_ops.difference_values import difference_values
    from posexport.custom_ops.differences import difference_bias
    from posexport.custom_ops.disentangled import disentangled_score
    from posexport.custom_ops.fire import fire_bias
    from posexport.custom_ops.frequencies import length_frequencies, ntk_frequencies, position_temperature
    from posexport.custom_ops.linear_attention import linear_attention
    from posexport.custom_ops.norm import head_norm
    from posexport.custom_ops.relative import add_head_bias, relative_score, relative_table_score
    from posexport.custom_ops.rotary import angles_by_heads, rotate, rotate_features
    from posexport.custom_ops.scores import offset_score, offset_values
    from posexport.custom_ops.windows import cosine_heads, window_bias, window_order_bias, window_table

# fmt: off
__all__ = [
    "add_head_bias", "alibi_bias", "angles_by_heads", "attend", "attend_cached", "attend_shared", "cached_keys",
    "contextual_score", "cosine_bias", "cosine_heads", "difference_bias", "difference_disentangled_score",
    "difference_relative_score", "difference_score", "difference_values", "disentangled_score", "exact_sinusoids",
    "fire_bias", "grid_bias", "grid_sinusoids", "head_norm", "keep_prefix", "kerple_bias", "key_positions",
    "length_frequencies", "linear_attention", "ntk_frequencies", "offset_score", "offset_values", "pair_features",
    "position_powers", "position_temperature", "relative_bias", "relative_score", "relative_table_score", "rotate",
    "rotate_features", "sinusoids", "window_bias", "window_order_bias", "window_table",
]
# fmt: on


# fmt: off
_FILES = (
    "angles", "attention", "attention_by_head", "attention_by_queries", "bias", "cache", "contextual",
    "difference_disentangled", "difference_relative", "difference_scores", "difference_values", "differences",
    "disentangled", "fire", "frequencies", "linear_attention", "norm", "relative", "rotary", "scores", "windows",
)
# fmt: on
"""The files that define operators and their bodies."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update({operator.name: operator for operator in operators()})
    return globals()[name]


def operators() -> list[Any]:
    """Return every operator, in the order of `__all__`."""
    files = [vars(import_module(f"{__name__}.{file}")) for file in _FILES]
    return [next(file[name] for file in files if name in file) for name in __all__]
