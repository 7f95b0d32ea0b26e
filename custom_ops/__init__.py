"""posexport's own operators, which torch blocks call wherever positions matter, and how each is written in ONNX.

Names load on first use: every operator's file imports torch and onnx, and the table of encodings, which uses the
operators, must stay cheap to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posexport.custom_ops.angles import (
        exact_sinusoids,
        grid_sinusoids,
        keep_prefix,
        length_frequencies,
        ntk_frequencies,
        pair_features,
        position_powers,
        position_temperature,
        sinusoids,
    )
    from posexport.custom_ops.attention import attend
    from posexport.custom_ops.bias import alibi_bias, cosine_bias, fire_bias, grid_bias, kerple_bias, relative_bias
    from posexport.custom_ops.cache import attend_cached, attend_shared, key_positions
    from posexport.custom_ops.content import cached_keys, contextual_score, disentangled_score
    from posexport.custom_ops.norm import head_norm
    from posexport.custom_ops.offsets import offset_score, offset_values
    from posexport.custom_ops.relative import add_head_bias, relative_score, relative_table_score
    from posexport.custom_ops.rotary import angles_by_heads, rotate, rotate_features
    from posexport.custom_ops.windows import cosine_heads, window_bias, window_table

_FILES = {
    "angles": "sinusoids exact_sinusoids length_frequencies ntk_frequencies grid_sinusoids position_powers "
    "position_temperature keep_prefix pair_features",
    "rotary": "angles_by_heads rotate rotate_features",
    "bias": "alibi_bias grid_bias relative_bias kerple_bias cosine_bias fire_bias",
    "windows": "window_table window_bias cosine_heads",
    "relative": "add_head_bias relative_score relative_table_score",
    "offsets": "offset_score offset_values",
    "content": "disentangled_score contextual_score cached_keys",
    "norm": "head_norm",
    "cache": "key_positions attend_cached attend_shared",
    "attention": "attend",
}
"""The operators of each file, separated by spaces."""

_HOMES = {name: file for file, names in _FILES.items() for name in names.split()}

# fmt: off
__all__ = [
    "add_head_bias", "alibi_bias", "angles_by_heads", "attend", "attend_cached", "attend_shared", "cached_keys",
    "contextual_score", "cosine_bias", "cosine_heads", "disentangled_score", "exact_sinusoids", "fire_bias",
    "grid_bias", "grid_sinusoids", "head_norm", "keep_prefix", "kerple_bias", "key_positions", "length_frequencies",
    "ntk_frequencies", "offset_score", "offset_values", "pair_features", "position_powers", "position_temperature",
    "relative_bias", "relative_score", "relative_table_score", "rotate", "rotate_features", "sinusoids",
    "window_bias", "window_table",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def operators() -> list[Any]:
    """Every operator, in a fixed order."""
    return [__getattr__(name) for name in _HOMES]
