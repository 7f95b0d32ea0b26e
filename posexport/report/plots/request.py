"""The request of a plot: which encodings, with which parameters, drawn into which file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.export.block_options import spec_of
from posexport.export.layer_pattern import parameters_of
from posexport.files import check_writable, staged
from posexport.progress import Progress
from posexport.runtimes import Runtime
from posexport.spec.fields import integer
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.report.plots.panels import Panel

FIELDS = (
    "hidden_size",
    "num_heads",
    "head_dim",
    "scale",
    "causal",
    "window",
    "attention_chunk_size",
    "angles",
    "prefix_tokens",
)
"""The fields of a spec that a plot shows."""

_LONGEST = 45  # letters of a parameter that a plot shows


@attrs.frozen(kw_only=True)
class PlotOptions:
    """The numeric options, validated."""

    seq: int | None = integer(None, "tokens that are drawn", at_least=2, at_most=1024)
    seed: int = integer(0, "seed of the weights", at_least=0)


@attrs.frozen
class PlotRow:
    """One encoding of a plot: its spec, and the parameters as text beside its name."""

    spec: Spec
    parameters: str


def read_row(text: str, parameters: Sequence[str], block: Mapping[str, Any]) -> PlotRow:
    """The row that NAME, or NAME:key=value:key=value, describes. `parameters` and options of the `block` apply too."""
    name, *pairs = text.split(":")
    if not name or not all("=" in pair for pair in pairs):
        raise RequestError(f"{text!r} is no encoding: write NAME, or NAME:key=value:key=value.")
    texts = (*pairs, *parameters)
    values: dict[str, Any] = dict(parameters_of(texts))
    fields = {key: values.pop(key) for key in FIELDS if key in values}
    shown = " ".join(pair if len(pair) <= _LONGEST else f"{pair[:_LONGEST]}…" for pair in texts)
    return PlotRow(spec_of({**block, **fields, "encoding": name}, values), shown)


def check_output(path: Path) -> None:
    """RequestError if no picture can be written there."""
    from posexport.report.drawing import FORMATS

    if path.suffix not in FORMATS:
        raise RequestError(f"output {str(path)!r} must end in {' or '.join(FORMATS)}: name it like plot.png.")
    if not path.parent.is_dir():
        raise RequestError(f"output folder {str(path.parent)!r} is not there: make it first, or give another.")
    check_writable(path)


def draw_plot(
    rows: Sequence[PlotRow],
    kind: str | None,
    path: Path,
    options: PlotOptions,
    runtimes: Mapping[str, Runtime],
    progress: Progress,
) -> list[list[Panel]]:
    """Draw the rows into a file and return their panels. RequestError for a wrong kind or path, before measuring."""
    check_output(path)
    from posexport.report.plots.kinds import panels
    from posexport.report.plots.picture import draw
    from posexport.verify.probe import ProbeTarget

    progress("probing the encodings")
    given: dict[str, Any] = {"runtimes": runtimes, "advance": lambda text: progress(f"measuring {text}")}
    given |= attrs.asdict(options)
    drawn = panels([ProbeTarget(spec=row.spec, given=row.parameters, **given) for row in rows], kind)
    progress("drawing")
    picture = draw(drawn, path.suffix)
    with staged() as files:
        files.write(path, lambda file: file.write(picture))
    return drawn
