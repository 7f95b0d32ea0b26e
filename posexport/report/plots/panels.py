"""The panels of a picture as data: numbers with titles, units and scales. It imports neither torch nor matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from posexport.errors import shown
from posexport.jsondata import structure

WHAT = {
    "table": "what is added to the input, or a query of ones as rotated",
    "bias": "what is added to the logits, for each query and key",
    "mask": "which keys a query sees",
    "decay": "how a key's logit changes with its distance",
    "gain": "what queries and keys are multiplied by",
    "wavelength": "positions for one turn of each pair, also before scaling",
    "error": "error of cosines and sines by position, on every runtime",
}
"""Every kind of picture, and what it shows."""


def _plain(panel: Image | Chart) -> dict[str, Any]:
    """The fields of a panel for JSON, with None for NaN."""
    return attrs.asdict(panel, value_serializer=lambda _, __, value: None if value != value else value)


def _numbers(values: Any) -> tuple[Any, ...]:
    """An array, a tensor or another sequence as a tuple, with tuples for rows."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return tuple(tuple(row) if isinstance(row, list) else row for row in values)


@attrs.frozen(kw_only=True)
class Image:
    """Numbers by row and column (also from an array or a tensor), NaN if a key is hidden. `value` names their scale.

    `first` are the numbers of the first column and the first row. `names` stand for 0 and 1 if there are no other
    values.
    """

    title: str
    note: str
    x: str
    y: str
    value: str
    rows: tuple[tuple[float, ...], ...] = attrs.field(repr=False, converter=_numbers)
    first: tuple[int, int] = (0, 0)
    names: tuple[str, str] | None = None

    @property
    def square(self) -> bool:
        """Whether it has as many rows as columns."""
        return len(self.rows) == len(self.rows[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "image", **_plain(self)}


@attrs.frozen(kw_only=True)
class Line:
    """One line of a chart, from sequences, arrays or tensors. y is NaN (null in JSON) if there is no value.

    `look` are the numbers of its colour and its dashes, by default those of its place among the lines. `angles` is the
    kind of angles (parity or exact) whose errors it shows.
    """

    label: str
    x: tuple[float, ...] = attrs.field(repr=False, converter=_numbers)
    y: tuple[float | None, ...] = attrs.field(repr=False, converter=_numbers)
    look: tuple[int, int] | None = None
    angles: str = ""

    def __attrs_post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"({self.label!r}) has not one number for each x")


@attrs.frozen(kw_only=True)
class Mark:
    """A horizontal line across a chart at a value of y, with its label at the left or the right end."""

    label: str
    at: float
    end: Literal["left", "right"]


@attrs.frozen(kw_only=True)
class Absent:
    """A runtime without a line, and why. `failed` if it was run."""

    name: str
    reason: str
    failed: bool


def _check_scales(_: object, field: attrs.Attribute[Any], scales: tuple[str | float, ...]) -> None:
    for scale in scales:
        if scale not in ("linear", "log") and (isinstance(scale, str) or not 1e-30 <= scale <= 1e30):
            raise ValueError(f"{field.name} has {shown(scale, 40)}, not linear, log or a number from 1e-30 to 1e30")


@attrs.frozen(kw_only=True)
class Chart:
    """Lines over one x axis.

    `scales` are those of x and y: linear, log, or a number up to which a logarithmic axis is linear. `dots` is for
    separate values, `rising` for lines that leave the upper left free, `together` for lines that may cover each other.
    """

    title: str
    note: str
    x: str
    y: str
    lines: tuple[Line, ...]
    scales: tuple[str | float, str | float] = attrs.field(default=("linear", "linear"), validator=_check_scales)
    marks: tuple[Mark, ...] = ()
    dots: bool = False
    rising: bool = False
    together: bool = False
    absent: tuple[Absent, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "chart", **_plain(self)}


Panel = Image | Chart


@attrs.frozen(kw_only=True)
class _File:
    file: str | None = None
    rows: tuple[tuple[Mapping[str, Any], ...], ...]


@attrs.frozen(kw_only=True)
class Plot:
    """The output of `posexport plot --json` as a report shows it: the charts, and the number of other panels."""

    file: str | None
    charts: tuple[Chart, ...]
    images: int


def plot_from(data: Any) -> Plot:
    """A plot from its JSON. DataError if it is damaged."""
    plot = structure(data, _File)
    panels = [panel for row in plot.rows for panel in row]
    charts = [panel for panel in panels if panel.get("kind") == "chart"]
    return Plot(file=plot.file, charts=structure(charts, tuple[Chart, ...]), images=len(panels) - len(charts))
