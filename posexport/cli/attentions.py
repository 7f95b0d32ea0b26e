"""Attention that was recognised in a graph, in words: `4 heads over 2, size 16, causal, grown cache, rope half ...`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST = 4  # numbers of a list that are shown


def recognised(one: Mapping[str, Any]) -> str:
    """What is known of an attention, from its record (posexport.graphs.attention.describe)."""
    return ", ".join(_parts(one)) or "not known"


def encoding_text(encoding: Mapping[str, Any]) -> str:
    """An encoding with its parameters: `rope half theta=500000 llama3 factor=8`."""
    words = [str(encoding["name"])]
    for name, value in encoding.items():
        if isinstance(value, str) and name not in ("name", "reason"):
            words.append(value)
        elif isinstance(value, list) and 0 < len(value) <= _LONGEST:
            words.append(f"{name}={','.join(map(_number, value))}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            words.append(f"{name}={_number(value)}")
    return " ".join(words)


def _parts(one: Mapping[str, Any]) -> Iterator[str]:
    heads, shared = one["num_heads"], one["num_kv_heads"]
    if heads is None:
        return
    yield f"{heads} head{'s' * (heads != 1)}" + (f" over {shared}" if shared != heads else "")
    yield f"size {one['head_dim']}"
    mask, cache, encoding = one["mask"] or {}, one["cache"] or {}, one["encoding"]
    sizes = [f"{name} {mask[name]}" for name in ("window", "chunk") if mask.get(name) is not None]
    if sizes or mask.get("kind") not in (None, "none"):
        yield " ".join(sizes) or ("unknown mask" if mask["kind"] == "other" else str(mask["kind"]))
    if mask.get("padding"):
        yield "padding"
    if cache:
        yield f"{cache['kind']} cache"
    if encoding is not None and encoding["name"] != "none":
        yield encoding_text(encoding)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
