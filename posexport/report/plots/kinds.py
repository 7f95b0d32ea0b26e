"""What `posexport plot` draws, as panels of numbers: KINDS of pictures, each with the specs that it suits.

The numbers come from an encoding's hooks (`probe`) and from its angles (`angles`); no formula of an encoding stands
here. `picture` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from posexport.errors import RequestError, unknown
from posexport.models.axes import AXES
from posexport.report.plots.angles import error_panels, wavelength_panels
from posexport.report.plots.panels import Chart, Image, Panel, line_of, rows_of
from posexport.report.plots.probe import Probe, ProbeTarget, cells, check_size, seen
from posexport.spec.spec import Spec
from posexport.verify import angles
from posexport.verify.cases import FAR

HEADS = 4
"""Heads that are drawn, evenly spaced from the first to the last."""

MOST_ROWS = 50
"""Encodings in one picture."""


def chosen_heads(count: int) -> list[int]:
    """At most HEADS numbers of heads, from the first to the last."""
    return [round(index) for index in np.linspace(0, count - 1, min(count, HEADS))]


def _table(target: ProbeTarget) -> list[Panel]:
    axes, embeds = target.encoding.axes, target.encoding.hook == "embed"
    side = target.side(128, 12, 6)
    probe = Probe(target, cells(side, axes))
    return [
        Image(
            **target.titles("added to the input" if embeds else "a query of ones, rotated"),
            x="feature of the input" if embeds else "feature of a head",
            y="position" if axes == 1 else f"cell of a {'×'.join([str(side)] * axes)} grid, x fastest",
            value="value",
            rows=rows_of(probe.embedding() if embeds else probe.rotated()[0][:, 0]),
        )
    ]


def _bias(target: ProbeTarget) -> list[Panel]:
    axes, side = target.encoding.axes, target.side(64, 15)
    probe, heads = Probe(target, cells(side, axes)), target.spec.num_heads
    query = side // 2
    place = query * side + query
    rows = slice(None) if axes < 2 else slice(place, place + 1)
    values = _hidden(probe.logits(rows)[1], seen(target.spec, probe.tokens, rows))
    what = "added to the logits" + (" of ones" if target.encoding.hook == "score" else "")

    def image(head: int, **fields: Any) -> Image:
        return Image(**target.titles(f"{what}, head {head + 1} of {heads}"), value="logit", **fields)

    if axes < 2:
        return [image(head, x="key", y="query", rows=rows_of(values[head])) for head in chosen_heads(heads)]
    around = {"x": "key's column − query's", "y": "key's row − query's", "first": (-query, -query)}
    return [image(head, **around, rows=rows_of(values[head].reshape(side, side))) for head in chosen_heads(heads)]


def _hidden(values: Tensor, visible: Tensor) -> Tensor:
    """Values, NaN where a key isn't seen."""
    return values.masked_fill(~visible, math.nan)


def _mask(target: ProbeTarget) -> list[Panel]:
    spec = target.spec
    limits = {"causal": spec.causal, f"window {spec.window}": spec.window}
    limits[f"chunks of {spec.attention_chunk_size}"] = spec.attention_chunk_size
    text = ", ".join(name for name, value in limits.items() if value) or "every query sees every key"
    return [
        Image(
            **target.titles(f"mask: {text}", weighed=False),
            x="key (token)",
            y="query (token)",
            value="",
            rows=rows_of(seen(spec, target.seq or 64).double()),
            names=("hidden", "seen"),
        )
    ]


def _decay(target: ProbeTarget) -> list[Panel]:
    axes, side = target.encoding.axes, target.side(512, 25, 13)
    probe = Probe(target, cells(side, axes))
    at = side - 1 if axes < 2 and target.spec.causal else side // 2
    steps = side ** np.arange(max(axes, 1))  # how far apart neighbours along each axis stand
    query = int(at * steps.sum())
    rows = slice(query, query + 1)
    logits = _hidden(probe.logits(rows)[0], seen(target.spec, probe.tokens, rows))[:, 0]
    lower = logits - logits[:, query : query + 1]
    heads, distances = len(lower), (at - np.arange(side)).tolist()
    alike = torch.allclose(lower, lower[:1], atol=1e-4, equal_nan=True)
    which = "" if alike or axes < 2 else f", head 1 of {heads}"
    if axes >= 2:
        along = {name: query + (np.arange(side) - at) * step for name, step in zip(AXES, steps, strict=False)}
        lines = [line_of(f"along {name}", distances, lower[0, keys]) for name, keys in along.items()]
    elif alike:
        lines = [line_of("mean of heads" if target.encoding.hook == "embed" else "every head", distances, lower[0])]
    else:
        lines = [line_of(f"head {head + 1}", distances, lower[head]) for head in chosen_heads(heads)]
    unit = "tokens" if axes < 2 else "cells"
    return [
        Chart(
            **target.titles(f"what distance does to a key's logit{which}"),
            x=f"distance: query − key ({unit})",
            y="logit − logit at distance 0",
            lines=tuple(lines),
            together=axes >= 2,
        )
    ]


def _gain(target: ProbeTarget) -> list[Panel]:
    limit = target.encoding.position_limit()
    places = angles.spaced(FAR - 1) if limit is None else np.linspace(0, limit - 1, 65, dtype=np.int64).tolist()
    query, key = (t[:, 0].norm(dim=-1) / target.spec.head_dim**0.5 for t in Probe(target, np.array(places)).rotated())
    return [
        Chart(
            **target.titles("what a query and a key are multiplied by", weighed=False),
            x="position",
            y="factor",
            lines=(line_of("query", places, query), line_of("key", places, key)),
            scales=(1.0 if limit is None else "linear", "linear"),
        )
    ]


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of picture.

    `refuses` gives the reason why a spec has none, as a clause behind the encoding's name; `sized` tells whether the
    number of tokens in it can be chosen.
    """

    panels: Callable[[ProbeTarget], list[Panel]]
    refuses: Callable[[Spec], str | None] = lambda _: None
    sized: bool = True


def _no_table(spec: Spec) -> str | None:
    hook = spec.encoding.hook
    return None if hook in ("embed", "rotate") else "which adds nothing to the input and rotates nothing"


def _no_bias(spec: Spec) -> str | None:
    hook = spec.encoding.hook
    return None if hook in ("bias", "score") else "which adds nothing to the logits"


def _no_gain(spec: Spec) -> str | None:
    grows = spec.encoding.name in ("temperature", "xpos")
    return None if grows else "which multiplies queries and keys by no factor of their position"


def _no_wavelength(spec: Spec) -> str | None:
    return angles.why_none(spec) if spec.encoding.angular else "which has no angles linear in the position"


KINDS = {
    "table": Kind(panels=_table, refuses=_no_table),
    "bias": Kind(panels=_bias, refuses=_no_bias),
    "mask": Kind(panels=_mask),
    "decay": Kind(panels=_decay),
    "gain": Kind(panels=_gain, refuses=_no_gain, sized=False),
    "wavelength": Kind(panels=wavelength_panels, refuses=_no_wavelength, sized=False),
    "error": Kind(panels=error_panels, refuses=angles.why_none, sized=False),
}
"""How each of `posexport.report.plots.panels.WHAT` is made, the look of an encoding being the first that suits it."""


def _look(target: ProbeTarget) -> str:
    """The kind that shows at a glance what an encoding is."""
    if target.encoding.name == "temperature":  # its table would show nothing within the first 8191 positions
        return "gain"
    return next(name for name, kind in KINDS.items() if kind.refuses(target.spec) is None)


def panels(targets: list[ProbeTarget], what: str | None) -> list[list[Panel]]:
    """Rows of panels: of the kind `what`, or for each encoding a row of what it looks like and its decay.

    Raises RequestError for a kind that isn't known or that an encoding has none of, before anything is made.
    """
    if len(targets) > MOST_ROWS:
        raise RequestError(f"{len(targets)} encodings were given: at most {MOST_ROWS} are drawn together.")
    if what is not None:
        if what not in KINDS:
            raise unknown("kind of picture", what, KINDS)
        for target in targets:
            check(target, what)
        made = [KINDS[what].panels(target) for target in targets]
        return made if max(map(len, made)) > 1 else _wrapped([row[0] for row in made])
    rows = []
    for target in targets:
        first = KINDS[_look(target)].panels(target)[0]
        rows.append([first, *KINDS["decay"].panels(target)])
    return rows


def check(target: ProbeTarget, what: str) -> None:
    """RequestError where an encoding has no picture of that kind, or `seq` no meaning in it."""
    why = KINDS[what].refuses(target.spec)
    if why is not None:
        allowed = [name for name, kind in KINDS.items() if kind.refuses(target.spec) is None]
        raise RequestError(f"what is {what!r} with {target.encoding.name}, {why}: give one of {', '.join(allowed)}.")
    if not KINDS[what].sized:
        check_size(2 * len(angles.spaced(FAR)) * max(target.spec.hidden_size, target.spec.head_dim))
    if target.seq is not None and not KINDS[what].sized:
        raise RequestError(f"seq is {target.seq} with what {what!r}, which shows no number of tokens: drop it.")


def _wrapped(row: list[Panel], width: int = 3) -> list[list[Panel]]:
    """A row as rows of at most `width`, as even as can be."""
    count = math.ceil(len(row) / width)
    width = math.ceil(len(row) / count)
    return [row[start : start + width] for start in range(0, len(row), width)]
