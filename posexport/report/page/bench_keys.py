"""What timings must share before they are compared: block, machine and settings; and what sets them apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from posexport.machine import SAME
from posexport.report.page.blocks import fact, listed

_LONG = 32
_NAMED = 4
"""Facts that a label names at most."""


def facts(head: dict[str, Any]) -> dict[str, Any]:
    """Everything that a time depends on beside the artifact's form, dtype and opset, by name."""
    spec, machine = head.get("spec") or {}, head.get("machine") or {}
    found = {"encoding": head["encoding"], **_flat("", {key: value for key, value in spec.items() if key != "dtype"})}
    for name in SAME:
        found |= _flat(f"machine.{name}", machine.get(name))
    return {**found, "machine.threads": head.get("threads"), "cuda_graph": bool(head.get("cuda_graph"))}


def key(head: dict[str, Any]) -> str:
    """A text that is the same for what may be compared."""
    return json.dumps(facts(head), sort_keys=True)


def labels(heads: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What each block is called, by its key: its size, and whatever sets it apart from the others of that name."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for head in heads:
        groups.setdefault(_block(head), {}).setdefault(key(head), facts(head))
    found = {}
    for name, own in groups.items():
        every = dict.fromkeys(path for each in own.values() for path in each)
        differ = [path for path in every if len({json.dumps(each.get(path)) for each in own.values()}) > 1]
        for one, each in own.items():
            said = [_said(path, each.get(path)) for path in differ]
            found[one] = ", ".join([name, *([listed(said, _NAMED)] if said else [])])
    return found


def _flat(path: str, value: Any) -> dict[str, Any]:
    """Facts inside objects under dotted names; one that isn't known is left out."""
    if isinstance(value, dict):
        return {
            name: each
            for key, inner in value.items()
            for name, each in _flat(f"{path}.{key}" if path else key, inner).items()
        }
    return {} if value is None else {path: value}


def _said(path: str, value: Any) -> str:
    name, text = path.rpartition(".")[2].replace("_", " "), fact(value)
    short = text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"
    if path == "machine.cpu":
        return f"on {short or 'an unknown CPU'}"
    return f"{name} {short or 'unknown' if path.startswith('machine.') else short or 'none'}"


def _block(head: dict[str, Any]) -> str:
    spec = head.get("spec") or {}
    size = spec.get("hidden_size")
    layers = spec.get("layers") or 1
    told = [head["encoding"], *([f"hidden {size}"] if size else []), *([f"{layers} layers"] if layers != 1 else [])]
    return ", ".join(str(each) for each in told)
