"""The shapes of result files, as far as a report reads them, and a check that says where a file departs from its own.

A shape is a type, a table of allowed texts, `[shape]` for a list, `Each(shape)` for an object with any keys, or a dict
of keys; a key that ends in "?" may be missing or null. Keys that aren't named here are not read.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class Each:
    """An object whose values all have one shape."""

    shape: Any


class Positive:
    """A number above zero."""


STATES = ("passed", "failed", "not run")
TIMED = ("timed", "failed", "not run")
CELLS = ("passed", "failed", "refused", "not run")
CHANGED = ("fine", "slower", "inconclusive", "not run")
TRIED = ("won", "raced", "dropped", "failed", "refused", "not run")

_SECONDS = {"median": Positive, "p10": Positive, "p90": Positive, "p99?": Positive, "count?": int}
_RATIO = {"median": Positive, "low": Positive, "high": Positive, "confidence?": float}

_LIMITS = [
    {
        "runtime": str, "scenario": str, "reference": str, "limit": float, "state": CHANGED, "reason?": str,
        "ratio?": Positive, "low?": Positive, "high?": Positive, "there?": bool,
    }
]  # fmt: skip

SHAPES: dict[str, Any] = {
    "sweep": {
        "jobs": [
            {
                "id": str, "kind": str, "label?": str, "state?": str, "reason?": str, "result?": str,
                "files?": [{"name": str, "sha256": str}],
            }
        ],
        "refused?": [Each(str)], "notes?": [str],
    },
    "verify": {
        "seed?": int,
        "verdicts": [
            {
                "artifact": str, "sha256?": str, "runtime": str, "state": STATES, "reason?": str, "where?": str,
                "check?": str, "cases?": int, "notes?": [str], "describe?": Each(str),
                "worst?": {
                    "case?": str, "output?": str, "max_error?": float, "torch_error?": float, "limit?": float,
                },
            }
        ],
        "unreadable?": [{"artifact": str, "error": str}],
    },
    "bench": {
        "file": str, "encoding": str, "form": str, "dtype": str, "opset": int, "rounds?": int, "burst?": int,
        "seed?": int, "machine_load?": float, "threads?": int, "cuda_graph?": bool, "machine?": Each(object),
        "spec?": Each(object), "sha256?": str,
        "gate?": {
            "limit": float, "notes?": [str],
            "changes": [
                {
                    "runtime": str, "shape": str, "state": CHANGED, "reference?": str, "reason?": str, "before?": float,
                    "now?": float, "change?": float, "low?": float, "high?": float,
                }
            ],
        },
        "left_out?": [{"scenario": str, "reason": str}], "limits?": _LIMITS,
        "shapes": [
            {
                "scenario?": str, "also?": [str], "batch": int, "seq": int, "past_seq?": int, "max_seq?": int,
                "encoder_seq?": int,
                "results": [
                    {
                        "runtime": str, "state": TIMED, "reason?": str, "note?": str, "seconds?": _SECONDS,
                        "ratios?": Each(_RATIO), "tokens_per_second?": float, "memory?": float, "gpu_memory?": float,
                        "load_seconds?": float, "build_seconds?": float, "warmup_seconds?": float,
                        "engine?": Each(object),
                    }
                ],
            }
        ],
    },
    "tune": {
        "encoding": str, "target": str, "scenario?": str, "objective": str, "method?": str, "machine_load?": float,
        "winner?": {"file?": str, "sha256?": str, "verified?": str, "seconds?": _SECONDS},
        "candidates": [
            {
                "name": str, "form?": str, "dtype?": str, "opset?": int, "target?": str, "options?": Each(object),
                "state": TRIED,
                "reason?": str, "rounds?": int, "seconds?": _SECONDS, "ratio?": _RATIO, "kernels?": object,
                "memory?": float, "size?": float, "verified?": str,
            }
        ],
        "cost?": Each(object), "machine?": Each(object),
    },
    "matrix": {
        "target": str, "made_by": Each(str), "sizes?": Each(object), "modes?": Each({"summary?": str}),
        "cells": [
            {
                "encoding": str, "form": str, "dtype": str, "mode": str, "column": str, "state": CELLS, "reason?": str,
                "error?": float, "eager?": float, "ratio?": float, "cases?": int, "kernels?": int, "fused?": bool,
                "version?": str,
            }
        ],
    },
    "angles": {
        "positions": [int], "sizes?": Each(object), "engines?": Each(str), "refused?": Each(str), "not_run?": Each(str),
        "rows": [{"encoding": str, "angles": str, "dtype": str, "runtime": str, "errors": [float]}],
    },
    "plot": {"file?": str, "rows": [[{"kind": str, "title": str}]]},
}  # fmt: skip
SHAPES["bench-project"] = {
    "files": [{"file": str, "state?": str, "reason?": str, "limits?": _LIMITS, "result?": SHAPES["bench"]}],
}
"""What each kind of result file holds."""

LARGEST = 10**300
"""Numbers beyond it are no measurement, and no float."""

CHART = {
    "title": str, "note": str, "x": str, "y": str, "lines": [{"label": str, "x": [float], "y": list}],
    "scales": list, "marks": [{"label": str, "at": float}], "absent": [{"name": str, "reason": str, "failed": bool}],
}  # fmt: skip
"""A panel of a plot that is a chart."""

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


def complaint(value: Any, shape: Any, place: str = "") -> str | None:
    """Where and how `value` departs from its shape, as a clause, or None."""
    if isinstance(shape, Each):
        return _object(value, dict.fromkeys(value, shape.shape) if isinstance(value, dict) else {}, place)
    if isinstance(shape, dict):
        return _object(value, shape, place)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place or 'it'} is no list"
        found = (complaint(each, shape[0], f"{place}[{at}]") for at, each in enumerate(value))
        return next((text for text in found if text), None)
    if isinstance(shape, tuple):
        return None if value in shape else f"{place} is {_shown(value)}, not one of {', '.join(shape)}"
    return None if _is(value, shape) else f"{place} is {_shown(value)}, not {_WORDS.get(shape, 'a number above 0')}"


def _object(value: Any, shape: dict[str, Any], place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place or 'it'} is no object"
    for name, inner in shape.items():
        key = name.removesuffix("?")
        at = f"{place}.{key}" if place else key
        if value.get(key) is None and name.endswith("?"):
            continue
        if key not in value:
            return f"{at} is missing"
        found = complaint(value[key], inner, at)
        if found:
            return found
    return None


def _is(value: Any, kind: Any) -> bool:
    if kind in (float, Positive):
        sound = type(value) in (int, float) and abs(value) < LARGEST
        return sound and (kind is float or value > 0)
    if kind is int:
        return type(value) is int and abs(value) < LARGEST
    return kind is object or type(value) is kind


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
