"""The cells of all matrix jobs together: one matrix for each target, as `posexport matrix` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from posexport.verify.matrix.table import REFUSED, Cell, Entry, Matrix, read
from posexport.verify.result import FAILED, NOT_RUN

_RANK = {NOT_RUN: 0, FAILED: 2}  # all others: 1

Refused = tuple[Mapping[str, str], str]
"""A combination that a form refuses, and the reason."""


def merged(results: Iterable[Path], refused: Iterable[Refused]) -> tuple[dict[str, Matrix], int]:
    """Matrices by target from files of results, and how many files were left out because other versions of the
    exporters made them than made the first.

    Of two cells for the same entry and runtime, such as from machines with a GPU and without, one that failed wins,
    else one that ran.
    """
    matrices: dict[str, Matrix] = {}
    left_out = 0
    for path in results:
        part = read(path)
        whole = matrices.setdefault(part.target, Matrix(target=part.target, made_by=part.made_by))
        if not whole.same_makers(part):
            left_out += 1
            continue
        whole.put_cpus(part.cpus)
        whole.put(
            cell for key, cell in part.cells.items() if key not in whole.cells or _rank(cell) > _rank(whole.cells[key])
        )
    for values, reason in refused:
        matrix = matrices.get(values.get("target", "portable"))
        if matrix is not None:
            entry = Entry(**{key: values[key] for key in ("encoding", "form", "dtype", "mode")})
            columns = dict.fromkeys(column for _, column in matrix.cells)
            matrix.put(Cell(entry=entry, column=column, state=REFUSED, reason=reason) for column in columns)
    return matrices, left_out


def _rank(cell: Cell) -> int:
    return _RANK.get(cell.state, 1)


def file_name(target: str) -> str:
    """The name of a target's matrix in the folder of a sweep."""
    return "matrix.json" if target == "portable" else f"matrix-{target}.json"
