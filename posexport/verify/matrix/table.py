"""The matrix: what works where, as data. Every encoding, form, dtype and mode is an entry; on a runtime, it is a cell.

A cell is passed or failed as `posexport.verify` judges it. It is refused if the form can't express the block for the
target. It is not run if a runtime is missing or can't take such a file. Both have a reason. In addition to the runtimes
there is one more column, `build`: the plan that TensorRT builds from the file, its kernels, and whether attention is
one of them. Of the machine, only the CPU is recorded, no times are recorded, and errors have two digits. So measuring
again gives the same file, except for a digit of an error. This module imports no engine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import attrs

from posexport import __version__
from posexport.errors import RequestError, shown
from posexport.export import support
from posexport.files import staged
from posexport.jsondata import DataError, clean, read_json, structure
from posexport.machine import machine
from posexport.models import ENCODINGS, read_spec
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.spec import DTYPES, Spec
from posexport.verify.result import FAILED, NOT_RUN, PASSED

REFUSED: Final = "refused"
STATES = (PASSED, FAILED, REFUSED, NOT_RUN)
State = Literal["passed", "failed", "refused", "not run"]
SIZES = {"hidden_size": 256, "num_heads": 4}
"""The sizes of every block: four heads with 64 features each."""

BUILD = "build"
COLUMNS = (*RUNTIMES, BUILD)
_MAKERS = ("torch", "onnx", "onnxscript", "onnx-ir")  # what a file's bytes depend on, in addition to posexport


@attrs.frozen(kw_only=True)
class Mode:
    """One way of using a block: fields of its spec, in addition to sizes, encoding and dtype."""

    summary: str
    fields: Mapping[str, Any]

    def fields_for(self, encoding: str) -> dict[str, Any]:
        """`fields`, with causality: without a cache, positions on several axes, as those of images, have no order."""
        return {**self.fields, "causal": "kv_cache" in self.fields or ENCODINGS[encoding].axes < 2}


MODES = {
    "prefill": Mode(summary="a whole sequence at once, without a cache", fields={}),
    "decode": Mode(summary="prefill, chunks and single tokens, over caches that grow", fields={"kv_cache": "concat"}),
    "decode-shared": Mode(
        summary="prefill, chunks and single tokens, written into shared buffers", fields={"kv_cache": "shared"}
    ),
    "padding": Mode(summary="rows padded left, right and wholly, masks with holes", fields={"padding_mask": True}),
    "prefill-consecutive": Mode(
        summary="a whole sequence at once, its positions consecutive by promise", fields={"positions": "consecutive"}
    ),
    "decode-consecutive": Mode(
        summary="prefill, chunks and single tokens, over caches that grow, positions consecutive by promise",
        fields={"kv_cache": "concat", "positions": "consecutive"},
    ),
}
"""All ways of use, by name."""

AXES = {"mode": [*MODES], "encoding": [*ENCODINGS], "form": [*FORMS], "dtype": [*DTYPES], "column": [*COLUMNS]}
"""The axes that cells are sorted by, the outermost first, with the names along each axis."""


@attrs.frozen(kw_only=True)
class Entry:
    """One file to export and measure."""

    encoding: str
    form: str
    dtype: str
    mode: str

    @property
    def name(self) -> str:
        """A name for its file."""
        return f"{self.encoding}-{self.form}-{self.dtype}-{self.mode}"

    def spec(self) -> Spec:
        """Its block; raises RequestError if the encoding and the mode contradict each other."""
        fields = MODES[self.mode].fields_for(self.encoding)
        return read_spec({"encoding": {"name": self.encoding}, "dtype": self.dtype, **SIZES, **fields})

    def refusal(self, target: str) -> str | None:
        """Why it can't be exported for `target`, without a full stop, or None."""
        try:
            reason = support.unsupported_reason(self.spec(), self.form, target)
            return None if reason is None else reason.text
        except RequestError as error:
            return str(error).rstrip(".")


_NOT_NEGATIVE = attrs.validators.optional(attrs.validators.ge(0))


@attrs.frozen(kw_only=True)
class Cell:
    """An entry in one column: a state, and a reason unless the state is "passed".

    `error` is the largest error of the comparison that came nearest to its limit, `eager` the torch error there, and
    `ratio` their quotient. `kernels` and `fused` are those of a plan. `spec` is a hash of the block and `version` that
    of the runtime that judged: a cell is kept as long as both are the same. Without a version, the cell has no lasting
    verdict.
    """

    entry: Entry
    column: str
    state: State
    reason: str | None = None
    error: float | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    eager: float | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    ratio: float | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    cases: int | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    kernels: int | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    fused: bool | None = None
    spec: str | None = None
    version: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without unknown fields."""
        values = {key: value for key, value in attrs.asdict(self).items() if key != "entry" and value is not None}
        return {**attrs.asdict(self.entry), **values}


Key = tuple[Entry, str]


@attrs.define(kw_only=True)
class Matrix:
    """Cells by entry and column, all made for one target by the same versions of posexport and its exporters."""

    target: str = "portable"
    made_by: Mapping[str, str] = attrs.field(factory=lambda: makers())
    cpus: list[Mapping[str, Any]] = attrs.field(factory=list)  # those measured on, as `cpu_facts` gives them
    cells: dict[Key, Cell] = attrs.field(factory=dict)

    def put(self, cells: Iterable[Cell]) -> None:
        """Add cells, or replace them."""
        self.cells.update({(cell.entry, cell.column): cell for cell in cells})

    def put_cpus(self, cpus: Iterable[Mapping[str, Any]]) -> None:
        """Add CPUs that cells were measured on."""
        self.cpus += [cpu for cpu in cpus if cpu not in self.cpus]

    def ordered(self) -> list[Cell]:
        """The cells in the order of the tables of modes, encodings, forms, dtypes and columns."""

        def place(cell: Cell) -> list[int]:
            row = cell.to_dict()
            return [names.index(row[axis]) for axis, names in AXES.items()]

        return sorted(self.cells.values(), key=place)

    def header(self) -> dict[str, Any]:
        """What holds for all cells."""
        return {
            "made_by": dict(self.made_by),
            "cpus": [dict(cpu) for cpu in self.cpus],
            "target": self.target,
            "sizes": SIZES,
            "modes": {name: {"summary": mode.summary, **mode.fields} for name, mode in MODES.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `read` takes it."""
        return {**self.header(), "cells": [cell.to_dict() for cell in self.ordered()]}

    def to_bytes(self) -> bytes:
        """`to_dict` as JSON with a line per cell: so a change of one cell changes one line."""
        head = json.dumps(self.header(), indent=2).removesuffix("\n}")
        cells = ",\n".join(f"    {json.dumps(cell.to_dict(), ensure_ascii=False)}" for cell in self.ordered())
        return f'{head},\n  "cells": [\n{cells}\n  ]\n}}\n'.encode()

    def write(self, path: Path) -> None:
        """Write it as a whole or not at all; RequestError if the folder can't be written."""
        with staged() as files:
            files.write(path, lambda file: file.write(self.to_bytes()))

    def same_makers(self, other: Matrix) -> bool:
        """Whether cells of `other` may be put in this matrix: their files were made with the same versions, for the
        same target."""
        return (self.target, dict(self.made_by)) == (other.target, dict(other.made_by))


def counts(cells: Iterable[Cell]) -> dict[str, int]:
    """How many cells are in each state."""
    number: Counter[str] = Counter(cell.state for cell in cells)
    return {state: number[state] for state in STATES}


def judged(cells: Iterable[Cell]) -> list[str]:
    """The columns that judged anything, in order."""
    columns = {cell.column for cell in cells if cell.state in (PASSED, FAILED)}
    return [name for name in COLUMNS if name in columns]


def idle(cells: Sequence[Cell]) -> dict[str, str]:
    """The columns in which nothing ran, with the reasons."""
    ran, reasons = judged(cells), dict[str, dict[str, None]]()
    for cell in cells:
        if cell.column not in ran and cell.state == NOT_RUN:
            reasons.setdefault(cell.column, {})[cell.reason or ""] = None
    return {name: "; ".join(reasons[name]) for name in COLUMNS if name in reasons}


def summary(cells: Iterable[Cell]) -> str:
    """How many cells are in each state, in words."""
    return ", ".join(f"{number} {state}" for state, number in counts(cells).items())


TOTALS = ("runtime", *STATES, "worst to torch error", "fused")
"""The columns of `totals`."""


def totals(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """A row of text per column of the matrix in which anything ran, with the columns `TOTALS`."""
    table = []
    for name in judged(cells):
        column = [cell for cell in cells if cell.column == name]
        worst = max((cell.ratio for cell in column if cell.ratio is not None), default=None)
        fused = [cell.fused for cell in column if cell.fused is not None]
        numbers = ("-" if worst is None else f"{worst:g}x", f"{sum(fused)} of {len(fused)}" if fused else "-")
        table.append((name, *map(str, counts(column).values()), *numbers))
    return table


def read(path: Path, advice: str = "give another folder, or --no-resume to write it anew") -> Matrix:
    """The matrix in a file, without cells of unknown names.

    Characters that posexport's own texts never have are replaced. RequestError if the file has no matrix; the message
    ends with `advice`.
    """
    try:
        return matrix_from(clean(read_json(path)))
    except OSError as error:
        raise RequestError(f"{str(path)!r} can't be read ({error.strerror}): {advice}.") from None
    except DataError as error:
        raise RequestError(f"{str(path)!r} is no matrix of posexport ({error}): {advice}.") from None


class _Cpu(TypedDict, total=False):
    cpu: str | None
    vendor: str | None
    cores: int | None
    instruction_sets: list[str] | None
    architecture: str | None


def _known_target(instance: object, field: attrs.Attribute[str], value: str) -> None:
    """A target's name, which becomes part of a file's name."""
    if value not in TARGETS:
        raise ValueError(f"has the target {shown(value, 40)}, not one of {', '.join(TARGETS)}")


@attrs.frozen(kw_only=True)
class _File:
    target: str = attrs.field(validator=_known_target)
    made_by: Mapping[str, str]
    cpus: list[_Cpu] = attrs.field(factory=list)
    cells: tuple[Cell, ...]


def matrix_from(data: Any) -> Matrix:
    """The matrix from the plain data of `to_dict`, without cells of unknown names; DataError for anything else."""
    rows = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError("it has no list of cells")
    known = [{**row, "entry": row} for row in rows if all(_is_known(row, axis) for axis in AXES)]
    file = structure({**data, "cells": known}, _File)
    matrix = Matrix(target=file.target, made_by=file.made_by, cpus=data.get("cpus", []))  # lists stay lists
    matrix.put(file.cells)
    return matrix


def _is_known(row: Mapping[str, Any], axis: str) -> bool:
    """Whether a name belongs to its axis. The class refuses names that are missing or not text, so they pass here."""
    return not isinstance(row.get(axis), str) or row[axis] in AXES[axis]


def cpu_facts() -> dict[str, Any]:
    """The CPU of this machine: model, vendor, cores, instruction sets and architecture; None if not known."""
    facts = machine()
    return {name: facts[name] for name in ("cpu", "vendor", "cores", "instruction_sets", "architecture")}


def makers() -> dict[str, str]:
    """The versions of posexport and of the packages that it exports with."""
    return {"posexport": __version__, **{name: public_version(metadata.version(name)) for name in _MAKERS}}


def public_version(version: str) -> str:
    return version.partition("+")[0]  # torch adds the CUDA of its wheel after it
