"""Pictures of angles: the wavelength of each pair of features, and how far cosines and sines are off by position."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, cast

import attrs
import numpy as np
import torch

from posexport.errors import RequestError, RuntimeMissingError
from posexport.models.axes import AXES
from posexport.models.scaling import SCALINGS, parameters
from posexport.report.plots.panels import Absent, Chart, Line, Mark, Panel, line_of
from posexport.report.plots.probe import Array, ProbeTarget
from posexport.spec.spec import ANGLES, Spec
from posexport.verify import angles


def wavelengths(spec: Spec, length: int = 2) -> dict[str, Array]:
    """2 pi over the angle of one step along each axis, for every pair; infinite where it doesn't turn by that axis.

    The angle is that of the encoding's own cosine and sine, in float64, at a sequence's length.
    """
    axes = spec.encoding.axes
    module = angles.Angles(spec, torch.float64)
    lengths = {}
    for axis in range(axes):
        places = torch.zeros(1, 2, axes, dtype=torch.int64)
        places[0, 0, axis], places[0, 1] = 1, length - 1
        cos, sin = (t[0, 0].numpy() for t in module(places if axes > 1 else places[..., 0]))
        with np.errstate(divide="ignore"):
            lengths[AXES[axis] if axes > 1 else ""] = 2 * math.pi / np.arctan2(sin, cos)
    return lengths


def wavelength_panels(target: ProbeTarget) -> list[Panel]:
    """Wavelengths of every pair, beside those before scaling; RequestError for frequencies above a radian."""
    spec, rope = target.spec, cast(Any, target.encoding)
    if rope.theta < 1.0:
        raise RequestError(
            f"theta is {rope.theta:g}: wavelengths of less than two positions can't be told apart, so give a theta of "
            "1 or more."
        )
    scaling, trained = getattr(rope, "scaling", None), getattr(rope, "original_max_position_embeddings", None)
    cases: dict[str, tuple[Spec, int]] = {"": (spec, 2)}
    if scaling is not None:
        plain = attrs.evolve(rope, **dict.fromkeys(("scaling", *parameters())))
        cases = {"before scaling": (attrs.evolve(spec, encoding=plain), 2), f"{scaling}": (spec, 2)}
        if SCALINGS[scaling].by_length:
            longer = round(trained * rope.factor)
            cases[f"{scaling}, up to {trained} tokens"] = cases.pop(scaling)
            cases[f"{scaling}, {longer} tokens"] = (spec, longer)
    lines = []
    for name, (case, length) in cases.items():
        for axis, values in wavelengths(case, length).items():
            turning = np.flatnonzero(np.isfinite(values))
            label = ", ".join(part for part in (axis and f"by {axis}", name) if part)
            lines.append(line_of(label, turning.tolist(), values[turning]))
    return [
        Chart(
            **target.titles("positions for one turn of each pair", weighed=False),
            x="pair of features",
            y="wavelength (positions)",
            lines=tuple(lines),
            scales=("linear", "log"),
            marks=() if trained is None else (Mark(label=f"trained length {trained}", at=trained, end="left"),),
            dots=True,
            rising=spec.encoding.axes < 2,
            together=scaling is not None,
        )
    ]


def error_panels(target: ProbeTarget) -> list[Panel]:
    """Errors of parity's angles and of exact ones (of exact ones alone where the spec says so) on every runtime.

    Raises RuntimeMissingError where none of them could be measured.
    """
    specs = [target.spec]
    if target.spec.angles == ANGLES[0]:
        with suppress(RequestError):  # frequencies that depend on the length have no exact angles
            specs.append(attrs.evolve(target.spec, angles="exact"))
    places = angles.spaced(angles.POSITIONS[-1])
    measured = list(angles.measure(specs, target.runtimes, tuple(places), target.advance))
    runtimes = list(dict.fromkeys(result.runtime for result in measured if result.errors))
    lines = [
        Line(
            label=f"{result.spec.angles}, {result.runtime}",
            x=tuple(places),
            y=result.errors,
            look=(runtimes.index(result.runtime), ANGLES.index(result.spec.angles)),
            angles=result.spec.angles,
        )
        for result in measured
        if result.errors
    ]
    absent = {result.runtime: result for result in measured if result.reason is not None}
    if not lines:
        why = "; ".join(f"{name}: {result.reason}" for name, result in absent.items())
        raise RuntimeMissingError(f"no error could be measured ({why}): name a runtime that is here.")
    return [
        Chart(
            **target.titles("largest error of cosine and sine, fp32, against float64", weighed=False),
            x="position",
            y="absolute error",
            lines=tuple(lines),
            scales=(1.0, 1e-8),
            together=True,
            marks=(Mark(label="2.5e-7: what exact promises", at=angles.EXACT, end="right"),),
            absent=tuple(
                Absent(name=name, reason=str(result.reason), failed=result.failed) for name, result in absent.items()
            ),
        )
    ]
