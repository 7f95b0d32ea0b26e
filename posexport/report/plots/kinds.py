"""What `posexport plot` draws, as panels of numbers: KINDS of pictures.

The numbers come from posexport.verify.probe, so this module has no formula of an encoding. `picture` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from posexport.errors import RequestError, check_known
from posexport.models.axes import AXES
from posexport.report.plots.panels import Absent, Chart, Image, Line, Mark, Panel
from posexport.spec.arrays import Array
from posexport.spec.spec import ANGLES
from posexport.verify import probe
from posexport.verify.angles import EXACT
from posexport.verify.probe import Probe, ProbeTarget

MOST_ROWS = 50
"""The most encodings in one picture."""


def chosen_heads(count: int) -> list[int]:
    """At most four indices of heads, evenly spaced from the first to the last."""
    return [round(index) for index in np.linspace(0, count - 1, min(count, 4))]


def _titles(target: ProbeTarget, shows: str, weighed: bool) -> dict[str, Any]:
    """Title and note of a panel. The note says so if what is shown depends on random weights."""
    random = " (random weights)" if weighed and target.encoding.weights(target.spec) else ""
    return {"title": target.encoding.name, "note": "\n".join(filter(None, (target.given, shows + random)))}


def _image(target: ProbeTarget, shows: str, value: str, rows: Array | Tensor, **fields: Any) -> Image:
    return Image(**_titles(target, shows, weighed=bool(value)), value=value, rows=rows, **fields)


def _chart(target: ProbeTarget, shows: str, weighed: bool = False, **fields: Any) -> list[Panel]:
    return [Chart(**_titles(target, shows, weighed), **fields)]


def _lines(named: Mapping[str, tuple[Array, Array]]) -> tuple[Line, ...]:
    return tuple(Line(label=label, x=x, y=y) for label, (x, y) in named.items())


def _table(target: ProbeTarget) -> list[Panel]:
    axes, side = target.encoding.axes, target.side(128, 12, 6)
    asked = Probe(target, probe.cells(side, axes))
    y = "position" if axes == 1 else f"cell of a {'×'.join([str(side)] * axes)} grid, x fastest"
    if target.encoding.hook == "embed":
        return [_image(target, "added to the input", "value", asked.embedding(), x="feature of the input", y=y)]
    return [_image(target, "a query of ones, rotated", "value", asked.rotated()[0][:, 0], x="feature of a head", y=y)]


def _bias(target: ProbeTarget) -> list[Panel]:
    axes, side, heads = target.encoding.axes, target.side(64, 15), target.spec.num_heads
    place: dict[str, Any] = {"x": "key", "y": "query"}
    rows = slice(None)
    if axes > 1:  # from the query in the middle of the grid
        middle = side // 2
        rows = slice(middle * side + middle, middle * side + middle + 1)
        place = {"x": "key's column − query's", "y": "key's row − query's", "first": (-middle, -middle)}
    values = Probe(target, probe.cells(side, axes)).logits(rows)[1].reshape(heads, -1, side)
    what = "added to the logits" + (" of ones" if target.encoding.hook == "score" else "")
    return [
        _image(target, f"{what}, head {head + 1} of {heads}", "logit", values[head], **place)
        for head in chosen_heads(heads)
    ]


def _mask(target: ProbeTarget) -> list[Panel]:
    spec = target.spec
    limits = {"causal": spec.causal, f"window {spec.window}": spec.window}
    limits[f"chunks of {spec.attention_chunk_size}"] = spec.attention_chunk_size
    text = ", ".join(name for name, value in limits.items() if value) or "every query sees every key"
    mask, place = probe.seen(spec, target.seq or 64).double(), {"x": "key (token)", "y": "query (token)"}
    return [_image(target, f"mask: {text}", "", mask, **place, names=("hidden", "seen"))]


def _decay(target: ProbeTarget) -> list[Panel]:
    axes = target.encoding.axes
    distances, values = probe.decay(target)
    heads, alike = len(values), np.allclose(values, values[:1], atol=1e-4, equal_nan=True)
    if axes >= 2:
        named = {f"along {name}": line for name, line in zip(AXES, values[0], strict=False)}
    elif alike:
        named = {"mean of heads" if target.encoding.hook == "embed" else "every head": values[0, 0]}
    else:
        named = {f"head {head + 1}": values[head, 0] for head in chosen_heads(heads)}
    which = f", head 1 of {heads}" if axes >= 2 and not alike else ""
    return _chart(
        target,
        f"what distance does to a key's logit{which}",
        weighed=True,
        x=f"distance: query − key ({'tokens' if axes < 2 else 'cells'})",
        y="logit − logit at distance 0",
        lines=_lines({name: (distances, line) for name, line in named.items()}),
        together=axes >= 2,
    )


def _gain(target: ProbeTarget) -> list[Panel]:
    places, factors = probe.gain(target)
    lines = _lines({name: (places, values) for name, values in factors.items()})
    scales = ("linear" if target.encoding.position_limit() else 1.0, "linear")
    shows = "what a query and a key are multiplied by"
    return _chart(target, shows, x="position", y="factor", lines=lines, scales=scales)


def _wavelength(target: ProbeTarget) -> list[Panel]:
    """Wavelengths of every pair, beside those before scaling. RequestError for frequencies above a radian."""
    trained = getattr(target.encoding, "original_max_position_embeddings", None)
    return _chart(
        target,
        "positions for one turn of each pair",
        x="pair of features",
        y="wavelength (positions)",
        lines=_lines(probe.wavelengths(target.spec)),
        scales=("linear", "log"),
        marks=() if trained is None else (Mark(label=f"trained length {trained}", at=trained, end="left"),),
        dots=True,
        rising=target.encoding.axes < 2,
        together=getattr(target.encoding, "scaling", None) is not None,
    )


def _error(target: ProbeTarget) -> list[Panel]:
    """Errors of parity's and of exact angles on every runtime, or only of exact angles if the spec has these."""
    places, measured, absent = probe.angle_errors(target)
    runtimes = list(dict.fromkeys(result.runtime for result in measured))
    lines = []
    for result in measured:
        kind, look = result.spec.angles, (runtimes.index(result.runtime), ANGLES.index(result.spec.angles))
        lines.append(Line(label=f"{kind}, {result.runtime}", x=places, y=result.errors, look=look, angles=kind))
    return _chart(
        target,
        "largest error of cosine and sine, fp32, against float64",
        x="position",
        y="absolute error",
        lines=tuple(lines),
        scales=(1.0, 1e-8),
        together=True,
        marks=(Mark(label="2.5e-7: what exact promises", at=EXACT, end="right"),),
        absent=tuple(Absent(name=name, reason=str(row.reason), failed=row.failed) for name, row in absent.items()),
    )


KINDS: dict[str, Callable[[ProbeTarget], list[Panel]]] = {
    "table": _table,
    "bias": _bias,
    "mask": _mask,
    "decay": _decay,
    "gain": _gain,
    "wavelength": _wavelength,
    "error": _error,
}
"""How each of `posexport.report.plots.panels.WHAT` is made. The look of an encoding is the first that suits it."""


def panels(targets: list[ProbeTarget], what: str | None) -> list[list[Panel]]:
    """Rows of panels: of the kind `what`, or for each encoding a row with its look and its decay.

    Raises RequestError before anything is made, if the kind is not known or an encoding has no such picture.
    """
    if len(targets) > MOST_ROWS:
        raise RequestError(f"{len(targets)} encodings were given: at most {MOST_ROWS} are drawn together.")
    if what is None:
        return [[KINDS[probe.look_of(target.spec)](target)[0], *_decay(target)] for target in targets]
    check_known("kind of picture", what, KINDS)
    for target in targets:
        probe.check(target, what)
    rows = [KINDS[what](target) for target in targets]
    return rows if max(map(len, rows)) > 1 else _wrapped([row[0] for row in rows])


def _wrapped(row: list[Panel], width: int = 3) -> list[list[Panel]]:
    """A row as rows of at most `width` panels, as even as possible."""
    width = math.ceil(len(row) / math.ceil(len(row) / width))
    return [row[start : start + width] for start in range(0, len(row), width)]
