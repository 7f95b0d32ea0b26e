"""Which cells of the support matrix must be measured, and which are known from an earlier run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from itertools import product

import attrs

from posexport.errors import RequestError, check_known
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt.api import BUILDERS, can_build
from posexport.verify.matrix.table import AXES, BUILD, REFUSED, Cell, Entry, Key, Matrix, public_version
from posexport.verify.result import FAILED, NOT_RUN


@attrs.frozen(kw_only=True)
class Column:
    """What judges in one column on this machine: its `version`, or why it is `missing`."""

    version: str | None = None
    missing: str | None = None
    builder: str | None = None


def columns_here() -> dict[str, Column]:
    """Every column, as it is on this machine."""
    distributions = metadata.packages_distributions()

    def version(*packages: str | None) -> str | None:
        here = next((name for name in packages if name and find_spec(name)), "")
        return public_version(metadata.version(distributions[here][0])) if here in distributions else None

    columns = {}
    for name, row in RUNTIMES.items():
        missing = row.missing()
        columns[name] = Column(missing=missing.text) if missing else Column(version=version(row.package, row.instead))
    reasons = {name: can_build(name) for name in BUILDERS}
    able = [name for name, why in reasons.items() if why is None]
    if able:
        columns[BUILD] = Column(version=f"{able[0]} {version(BUILDERS[able[0]].package)}", builder=able[0])
    else:
        columns[BUILD] = Column(missing="; ".join(f"{name}: {why}" for name, why in reasons.items()))
    return columns


@attrs.frozen(kw_only=True)
class Selection:
    """The cells that a run is for: names of each axis, or all of them if none are given."""

    encoding: Sequence[str] = ()
    form: Sequence[str] = ()
    dtype: Sequence[str] = ()
    mode: Sequence[str] = ()
    runtime: Sequence[str] = ()

    def __attrs_post_init__(self) -> None:
        for kind in ("encoding", "form", "dtype", "mode", "runtime"):
            given, names = getattr(self, kind), AXES["column" if kind == "runtime" else kind]
            for name in given:
                check_known(kind, name, names)
            object.__setattr__(self, kind, tuple(name for name in names if not given or name in given))

    def entries(self) -> list[Entry]:
        """The entries in order."""
        return [
            Entry(encoding=encoding, form=form, dtype=dtype, mode=mode)
            for mode, encoding, form, dtype in product(self.mode, self.encoding, self.form, self.dtype)
        ]

    def cells(self) -> list[Key]:
        """The cells in order."""
        return [(entry, column) for entry in self.entries() for column in self.runtime]


Todo = dict[Entry, list[str]]
"""The columns in which entries must be measured."""


def settle(old: Matrix | None, selection: Selection, here: Mapping[str, Column], target: str) -> tuple[Matrix, Todo]:
    """A matrix with the cells that need no measurement, and what is still to do.

    Cells need no measurement if `old` has them, or if they can't be measured. Cells of `old` outside the selection stay
    if they are current. Cells that failed are measured again, and so are cells that could not run for a reason that may
    be gone. If a runtime is missing here, a verdict from elsewhere stays, since "not run" would say less. RequestError
    if cells would be lost that aren't asked for.
    """
    matrix, todo, asked = Matrix(target=target), Todo(), dict.fromkeys(selection.cells())
    kept = {} if old is None else old.cells
    if old is not None and not matrix.same_makers(old):
        lost = sum(key not in asked for key in kept)
        if lost:
            made = ", ".join(f"{name} {version}" for name, version in old.made_by.items())
            raise RequestError(
                f"the folder holds {lost} cells that aren't asked for, for the target {old.target} by {made}: "
                "give another folder, or --no-resume to drop them."
            )
        kept = {}
    hashes = {entry: spec_hash(entry) for entry in dict.fromkeys(entry for entry, _ in [*kept, *asked])}

    def stands(cell: Cell) -> bool:
        if cell.state == REFUSED:
            return cell.entry.refusal(target) == cell.reason
        judged_by = here[cell.column].version
        as_before = cell.state == NOT_RUN if cell.version is None else judged_by in (None, cell.version)
        return as_before and cell.spec == hashes[cell.entry]

    current = {key: cell for key, cell in kept.items() if stands(cell)}
    matrix.put(cell for key, cell in current.items() if key not in asked)
    matrix.put_cpus(old.cpus if old is not None and current else ())
    for entry, column in asked:
        cell, missing = current.get((entry, column)), here[column].missing
        refusal = entry.refusal(target)
        if refusal is not None:
            matrix.put([Cell(entry=entry, column=column, state=REFUSED, reason=refusal)])
        elif cell is not None and cell.version is not None and (cell.state != FAILED or missing is not None):
            matrix.put([cell])
        elif missing is not None:
            matrix.put([Cell(entry=entry, column=column, state=NOT_RUN, reason=missing, spec=hashes[entry])])
        else:
            todo.setdefault(entry, []).append(column)
    return matrix, todo


def spec_hash(entry: Entry) -> str | None:
    """A hash of the block of an entry; None if there is no such block."""
    try:
        return hashlib.sha256(entry.spec().to_json().encode()).hexdigest()[:12]
    except RequestError:
        return None
