"""What `posexport plot` draws, as panels of numbers: KINDS of pictures, each with the specs that it suits.

The numbers come from an encoding's hooks (posexport.verify.probe) and from its angles (posexport.verify.angles); no
formula of an encoding stands here. `picture` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import attrs
import numpy as np

from posexport.errors import RequestError, RuntimeMissingError, unknown
from posexport.models.axes import AXES
from posexport.models.scaling import SCALINGS, parameters
from posexport.report.plots.panels import Absent, Chart, Image, Line, Mark, Panel
from posexport.spec.spec import ANGLES, Spec
from posexport.verify import angles
from posexport.verify.cases import FAR
from posexport.verify.probe import Probe, ProbeTarget, cells, check_size, decay, seen, wavelengths

HEADS = 4
"""Heads that are drawn, evenly spaced from the first to the last."""

MOST_ROWS = 50
"""Encodings in one picture."""


def chosen_heads(count: int) -> list[int]:
    """At most HEADS numbers of heads, from the first to the last."""
    return [round(index) for index in np.linspace(0, count - 1, min(count, HEADS))]


def _titles(target: ProbeTarget, shows: str, weighed: bool = True) -> dict[str, Any]:
    """Title and note of a panel; with a word on weights where they are random ones, and in what is shown."""
    random = " (random weights)" if weighed and target.encoding.weights(target.spec) else ""
    return {"title": target.encoding.name, "note": "\n".join(filter(None, (target.given, shows + random)))}


def _table(target: ProbeTarget) -> list[Panel]:
    axes, embeds, side = target.encoding.axes, target.encoding.hook == "embed", target.side(128, 12, 6)
    probe = Probe(target, cells(side, axes))
    return [
        Image(
            **_titles(target, "added to the input" if embeds else "a query of ones, rotated"),
            x="feature of the input" if embeds else "feature of a head",
            y="position" if axes == 1 else f"cell of a {'×'.join([str(side)] * axes)} grid, x fastest",
            value="value",
            rows=probe.embedding() if embeds else probe.rotated()[0][:, 0],
        )
    ]


def _bias(target: ProbeTarget) -> list[Panel]:
    axes, side, heads = target.encoding.axes, target.side(64, 15), target.spec.num_heads
    place: dict[str, Any] = {"x": "key", "y": "query"}
    rows = slice(None)
    if axes > 1:  # from the query in the middle of the grid
        middle = side // 2
        rows = slice(middle * side + middle, middle * side + middle + 1)
        place = {"x": "key's column − query's", "y": "key's row − query's", "first": (-middle, -middle)}
    values = Probe(target, cells(side, axes)).logits(rows)[1]
    what = "added to the logits" + (" of ones" if target.encoding.hook == "score" else "")
    return [
        Image(
            **_titles(target, f"{what}, head {head + 1} of {heads}"),
            **place,
            value="logit",
            rows=values[head].reshape(-1, side),
        )
        for head in chosen_heads(heads)
    ]


def _mask(target: ProbeTarget) -> list[Panel]:
    spec = target.spec
    limits = {"causal": spec.causal, f"window {spec.window}": spec.window}
    limits[f"chunks of {spec.attention_chunk_size}"] = spec.attention_chunk_size
    text = ", ".join(name for name, value in limits.items() if value) or "every query sees every key"
    return [
        Image(
            **_titles(target, f"mask: {text}", weighed=False),
            x="key (token)",
            y="query (token)",
            value="",
            rows=seen(spec, target.seq or 64).double(),
            names=("hidden", "seen"),
        )
    ]


def _decay(target: ProbeTarget) -> list[Panel]:
    axes = target.encoding.axes
    distances, values = decay(target)
    heads, alike = len(values), np.allclose(values, values[:1], atol=1e-4, equal_nan=True)
    if axes >= 2:
        named = {f"along {name}": line for name, line in zip(AXES, values[0], strict=False)}
    elif alike:
        named = {"mean of heads" if target.encoding.hook == "embed" else "every head": values[0, 0]}
    else:
        named = {f"head {head + 1}": values[head, 0] for head in chosen_heads(heads)}
    which = f", head 1 of {heads}" if axes >= 2 and not alike else ""
    return [
        Chart(
            **_titles(target, f"what distance does to a key's logit{which}"),
            x=f"distance: query − key ({'tokens' if axes < 2 else 'cells'})",
            y="logit − logit at distance 0",
            lines=tuple(Line(label=label, x=distances, y=line) for label, line in named.items()),
            together=axes >= 2,
        )
    ]


def _gain(target: ProbeTarget) -> list[Panel]:
    limit = target.encoding.position_limit()
    places = np.array(angles.spaced(FAR - 1)) if limit is None else np.linspace(0, limit - 1, 65, dtype=np.int64)
    rotated = zip(("query", "key"), Probe(target, places).rotated(), strict=True)
    lengths = {name: values[:, 0].norm(dim=-1) / target.spec.head_dim**0.5 for name, values in rotated}
    return [
        Chart(
            **_titles(target, "what a query and a key are multiplied by", weighed=False),
            x="position",
            y="factor",
            lines=tuple(Line(label=name, x=places, y=factors) for name, factors in lengths.items()),
            scales=(1.0 if limit is None else "linear", "linear"),
        )
    ]


def _wavelength(target: ProbeTarget) -> list[Panel]:
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
            lines.append(Line(label=label, x=turning, y=values[turning]))
    return [
        Chart(
            **_titles(target, "positions for one turn of each pair", weighed=False),
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


def _error(target: ProbeTarget) -> list[Panel]:
    """Errors of parity's angles and of exact ones (of exact ones alone where the spec says so) on every runtime.

    Raises RuntimeMissingError where none of them could be measured.
    """
    specs = [target.spec]
    if target.spec.angles == ANGLES[0]:
        with suppress(RequestError):  # frequencies that depend on the length have no exact angles
            specs.append(attrs.evolve(target.spec, angles="exact"))
    places = angles.spaced(angles.POSITIONS[-1])
    results = list(angles.measure(specs, target.runtimes, tuple(places), target.advance))
    measured = [result for result in results if result.errors]
    absent = {result.runtime: result for result in results if result.reason is not None}
    if not measured:
        why = "; ".join(f"{name}: {result.reason}" for name, result in absent.items())
        raise RuntimeMissingError(f"no error could be measured ({why}): name a runtime that is here.")
    runtimes = list(dict.fromkeys(result.runtime for result in measured))
    lines = tuple(
        Line(
            label=f"{result.spec.angles}, {result.runtime}",
            x=places,
            y=result.errors,
            look=(runtimes.index(result.runtime), ANGLES.index(result.spec.angles)),
            angles=result.spec.angles,
        )
        for result in measured
    )
    return [
        Chart(
            **_titles(target, "largest error of cosine and sine, fp32, against float64", weighed=False),
            x="position",
            y="absolute error",
            lines=lines,
            scales=(1.0, 1e-8),
            together=True,
            marks=(Mark(label="2.5e-7: what exact promises", at=angles.EXACT, end="right"),),
            absent=tuple(
                Absent(name=name, reason=str(result.reason), failed=result.failed) for name, result in absent.items()
            ),
        )
    ]


KINDS: dict[str, Callable[[ProbeTarget], list[Panel]]] = {
    "table": _table,
    "bias": _bias,
    "mask": _mask,
    "decay": _decay,
    "gain": _gain,
    "wavelength": _wavelength,
    "error": _error,
}
"""How each of `posexport.report.plots.panels.WHAT` is made, the look of an encoding being the first that suits it."""

_UNSIZED = ("gain", "wavelength", "error")
"""Kinds in which the number of tokens can't be chosen."""


def _refusal(what: str, spec: Spec) -> str | None:
    """Why a spec has no picture of a kind, as a clause behind the encoding's name, or None."""
    encoding = spec.encoding
    match what:
        case "table" if encoding.hook not in ("embed", "rotate"):
            return "which adds nothing to the input and rotates nothing"
        case "bias" if encoding.hook not in ("bias", "score"):
            return "which adds nothing to the logits"
        case "gain" if encoding.name not in ("temperature", "xpos"):
            return "which multiplies queries and keys by no factor of their position"
        case "wavelength" if not encoding.angular:
            return "which has no angles linear in the position"
        case "wavelength" | "error":
            return angles.why_none(spec)
    return None


def panels(targets: list[ProbeTarget], what: str | None) -> list[list[Panel]]:
    """Rows of panels: of the kind `what`, or for each encoding a row of what it looks like and its decay.

    Raises RequestError for a kind that isn't known or that an encoding has none of, before anything is made.
    """
    if len(targets) > MOST_ROWS:
        raise RequestError(f"{len(targets)} encodings were given: at most {MOST_ROWS} are drawn together.")
    if what is None:
        return [[KINDS[_look(target)](target)[0], *_decay(target)] for target in targets]
    if what not in KINDS:
        raise unknown("kind of picture", what, KINDS)
    for target in targets:
        _check(target, what)
    rows = [KINDS[what](target) for target in targets]
    return rows if max(map(len, rows)) > 1 else _wrapped([row[0] for row in rows])


def _look(target: ProbeTarget) -> str:
    """The kind that shows at a glance what an encoding is."""
    if target.encoding.name == "temperature":  # its table would show nothing within the first 8191 positions
        return "gain"
    return _kinds_of(target.spec)[0]


def _kinds_of(spec: Spec) -> list[str]:
    return [what for what in KINDS if _refusal(what, spec) is None]


def _check(target: ProbeTarget, what: str) -> None:
    """RequestError where an encoding has no picture of that kind, or `seq` no meaning in it."""
    why = _refusal(what, target.spec)
    if why is not None:
        allowed = ", ".join(_kinds_of(target.spec))
        raise RequestError(f"what is {what!r} with {target.encoding.name}, {why}: give one of {allowed}.")
    if what in _UNSIZED:
        check_size(2 * len(angles.spaced(FAR)) * max(target.spec.hidden_size, target.spec.head_dim))
        if target.seq is not None:
            raise RequestError(f"seq is {target.seq} with what {what!r}, which shows no number of tokens: drop it.")


def _wrapped(row: list[Panel], width: int = 3) -> list[list[Panel]]:
    """A row as rows of at most `width`, as even as can be."""
    width = math.ceil(len(row) / math.ceil(len(row) / width))
    return [row[start : start + width] for start in range(0, len(row), width)]
