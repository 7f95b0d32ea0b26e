"""Recognised attention of a graph as text for people, from the records of docs/reference/attentions.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]

_LONG = 4
"""How many numbers of a list are shown."""

_MASKS = {
    "none": "sees all keys",
    "causal": "causal",
    "window": "causal, window {window}",
    "local": "window {window} to both sides",
    "chunk": "causal, chunks of {chunk}",
    "input": "as {inputs} says",
    "other": "of another kind",
}


def recognised(one: Data) -> str:
    """What is known of an attention, from its record: `4 heads over 2, size 16, causal, grown cache, rope half ...`."""
    if one["head_dim"] is None:
        return "not known"
    mask, cache = one["mask"] or {"kind": "none", "padding": []}, one["cache"]
    parts = [heads_text(one), "" if mask["kind"] == "none" else _kind(mask), "padding" if mask["padding"] else ""]
    parts += [] if cache is None else [f"{cache['kind']} cache"]
    parts += [] if one["encoding"] is None or one["encoding"]["name"] == "none" else [encoding_text(one["encoding"])]
    return ", ".join(filter(None, parts))


def heads_text(one: Data) -> str:
    """The heads, key heads and head size."""
    heads, key_heads, width = one["num_heads"], one["num_kv_heads"], one["head_dim"]
    over = "" if key_heads == heads else f" over {key_heads}"
    values = "" if one["value_dim"] in (None, width) else f", values {one['value_dim']}"
    count = "number of heads not known" if heads is None else f"{heads} head{'s' if heads != 1 else ''}"
    return f"{count}{over}, size {width}{values}"


def encoding_text(encoding: Data | None) -> str:
    """An encoding: `rope half theta=500000 llama3 factor=8`."""
    if encoding is None:
        return ""
    parts = [str(encoding["name"])]
    for key, value in encoding.items():
        if key in ("layout", "scaling", "kernel", "distance"):
            parts.append(str(value))
        elif key == "near":
            parts.append(f"near theta={_number(value['theta'])} (differs by {value['difference']:g})")
        elif key == "reason":
            parts.append(f"({value['text']})")
        elif key not in ("name", "of"):
            parts.append(f"{key}={_value(value)}")
    return " ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ",".join(_value(one) for one in value[:_LONG])
        return f"[{shown}{',...' if len(value) > _LONG else ''}]"
    return _number(value)


def _number(value: Any) -> str:
    """A number without trailing zeros. Other values stay as they are."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def mask_text(mask: Data | None) -> str:
    """Which keys are seen, and which inputs hide some."""
    if mask is None:
        return ""
    text = _kind(mask)
    return f"{text}, padding from {' and '.join(mask['padding'])}" if mask["padding"] else text


def _kind(mask: Data) -> str:
    return _MASKS[mask["kind"]].format(
        window=mask.get("window"), chunk=mask.get("chunk"), inputs=" and ".join(mask.get("inputs", ()))
    )


def cache_text(cache: Data | None) -> str:
    """The inputs of a cache, and whether it grows."""
    if cache is None:
        return ""
    names = cache["inputs"].values() if isinstance(cache["inputs"], Mapping) else cache["inputs"]
    return f"{cache['kind']}: {', '.join(names)}"


def more_text(one: Data) -> str:
    """The properties that only some attentions have."""
    return ", ".join(_more(one))


def _more(one: Data) -> Iterator[str]:
    width = one["head_dim"]
    if width and abs(one["scale"] - width**-0.5) > 1e-5 * one["scale"]:
        yield f"scale {one['scale']:.6g}"
    if one["softcap"]:
        yield f"softcap {one['softcap']:g}"
    if one["sinks"]:
        yield "sinks"
    if one["head_scales"]:
        yield "a scale for each head"
    if factors := one.get("weight_factors"):  # manifests of earlier versions lack it
        yield "weights times a number" if len(factors) == 1 else "weights times a number for each head"
    norms: dict[str, list[str]] = {}
    for side, norm in (one["qk_norm"] or {}).items():
        if norm is not None:
            norms.setdefault(norm["kind"], []).append(side)
    yield from (f"{kind} norm of {' and '.join(sides)}" for kind, sides in norms.items())
    if one["prefix_tokens"]:
        yield f"{one['prefix_tokens']} tokens without position"
    for key, what in (("bias", "bias"), ("query_factor", "queries times"), ("input_encoding", "input plus")):
        if one[key] is not None and one[key] != one["encoding"]:
            is_known = key != "query_factor" or one[key]["name"] != "unknown"
            yield f"{what} {encoding_text(one[key])}" if is_known else one[key]["reason"]["text"]
    if one["softmax_dtype"] != one["dtype"]:
        yield f"softmax in {one['softmax_dtype']}"


def alike(attentions: Sequence[Data]) -> list[list[Data]]:
    """Groups of consecutive attentions that differ only in where they are."""
    groups: list[list[Data]] = []
    for one in attentions:
        if groups and _same(groups[-1][0]) == _same(one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _same(one: Data) -> dict[str, Any]:
    kept = {key: value for key, value in one.items() if key not in ("name", "layer", "nodes", "cache")}
    return {**kept, "cache": (one["cache"] or {}).get("kind")}
