"""Frequencies over several axes as the parameters of rope2d, rope3d and mrope (posexport.models.axes).

Axes are x (column), y (row), t (time). One axis rotates each pair: `frequencies` [axes, P] is zero for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from posexport.graphs.attention.pairings import Pairs
from posexport.graphs.fits.progressions import EXACT, USUAL_THETA, Parameters, agree, progression, shortest
from posexport.graphs.fits.rope import static_parameters

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]

AXES = "xyt"

THETA_2D = 100.0
"""The usual theta of two axes."""


def axes_parameters(frequencies: Array, amplitude: float, slack: float, pairs: Pairs) -> Parameters | None:
    """The encoding, with its name and layout; None if none of the three has these frequencies."""
    owners = _owners(frequencies, slack)
    if owners is None:
        return None
    merged = frequencies.sum(0)
    if len(frequencies) == 3 and len(pairs.runs) == 1 and (found := _mrope(merged, owners, amplitude, slack)):
        layout = "interleaved" if pairs.interleaved else "half"
        return {"name": "mrope", "layout": layout, **found}
    if abs(amplitude - 1.0) > max(EXACT, slack):
        return None
    order = "".join(dict.fromkeys(owners))
    runs = {axis: merged[[owner == axis for owner in owners]] for axis in order}
    if "".join(owner for axis in order for owner in [axis] * len(runs[axis])) != owners:
        return None  # axes alternate
    layout = "interleaved" if pairs.interleaved else "half" if len(pairs.runs) > 1 else "half-head"
    if layout == "half" and list(pairs.runs) != [len(runs[axis]) for axis in order]:
        return None
    found = _rope2d(order, runs, slack) if len(frequencies) == 2 else _rope3d(order, runs, slack)
    if found is None:
        return None
    return {"name": "rope2d" if len(frequencies) == 2 else "rope3d", "layout": layout, **found}


def _owners(frequencies: Array, slack: float) -> str | None:
    """The axis of each pair; None if several axes rotate a pair, or none does."""
    turns = np.abs(frequencies) > max(slack, 1e-12)
    if (turns.sum(0) != 1).any():
        return None
    return "".join(AXES[int(at)] for at in turns.argmax(0))


def _rope2d(order: str, runs: dict[str, Array], slack: float) -> Parameters | None:
    """rope2d: each axis has half of the pairs. The second axis may have its own theta, or frequencies in between."""
    if len(order) != 2 or len(runs[order[0]]) != len(runs[order[1]]):
        return None
    half = len(runs[order[0]])
    if half == 1:
        whole = all(agree(values, np.ones(1), slack) for values in runs.values())
        return {"theta": THETA_2D, "order": order} if whole else None
    first, second = (progression(runs[axis], 2 * half, slack) for axis in order)
    if first is None or second is None or first[1] > 1.0:
        return None
    found: Parameters = {"theta": first[0], "order": order}
    if first[1] < 1.0:
        found["factor"] = shortest(1 / first[1], EXACT)
    if agree(runs[order[0]] * first[0] ** (-1 / (2 * half)), runs[order[1]], slack):
        return {**found, "spacing": "alternate"}
    if abs(second[1] - first[1]) > EXACT * first[1]:
        return None
    thetas = dict(zip(order, (first[0], second[0]), strict=True))
    found["theta"] = thetas["x"]
    return found if thetas["x"] == thetas["y"] else {**found, "theta_y": thetas["y"]}


def _rope3d(order: str, runs: dict[str, Array], slack: float) -> Parameters | None:
    if len(order) != 3:
        return None
    thetas: dict[str, float] = {}
    for axis, values in runs.items():
        fitted = progression(values, 2 * len(values), slack) if len(values) > 1 else None
        if len(values) == 1 and agree(values, np.ones(1), slack):
            continue  # any theta
        if fitted is None or fitted[1] != 1.0:
            return None
        thetas[axis] = fitted[0]
    theta = thetas.get("x", next(iter(thetas.values()), USUAL_THETA))
    others = {f"theta_{axis}": value for axis, value in sorted(thetas.items()) if axis != "x" and value != theta}
    split = [2 * len(runs[axis]) for axis in order]
    third = 2 * (sum(split) // 6)
    usual = split == [sum(split) - 2 * third, third, third]
    return {"theta": theta, **others, "order": order, **({} if usual else {"split": split})}


def _mrope(merged: Array, owners: str, amplitude: float, slack: float) -> Parameters | None:
    """RoPE's frequencies, with pairs that are divided among time, rows and columns."""
    sections = [owners.count(axis) for axis in "tyx"]
    if not all(sections) or (found := static_parameters(merged, amplitude, slack)) is None:
        return None
    if owners == "".join(axis * count for axis, count in zip("tyx", sections, strict=True)):
        part = 3 * len(owners) // 8
        usual = sections == [len(owners) - 2 * part, part, part]
        return found if usual else {**found, "mrope_section": sections}
    alternating = ["t"] * len(owners)
    alternating[1 : 3 * sections[1] : 3] = ["y"] * len(alternating[1 : 3 * sections[1] : 3])
    alternating[2 : 3 * sections[2] : 3] = ["x"] * len(alternating[2 : 3 * sections[2] : 3])
    return {**found, "mrope_section": sections, "mrope_interleaved": True} if owners == "".join(alternating) else None
