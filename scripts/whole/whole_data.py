"""The contents of docs/results/models.json: the schema, the list of cells, and how results are added."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from results import read_results, record, rounded, write_results
from whole_rows import ROWS

from posexport.jsondata import omitted, structure, unstructure
from posexport.machine import versions

FORMS, DTYPES = ("native", "contrib", "decomposed"), ("fp32", "fp16")
CACHES = {"concat": "grown", "shared": "shared"}
"""Kinds of caches of a decoder, as options and in words."""

DECODERS = ("decoder", "bare", "causal")


@attrs.frozen(kw_only=True)
class Cell:
    """An architecture in a form, dtype and kind of cache ("" for a model without caches). `of_limit` is the largest
    error divided by its limit. `in_form` is the number of attentions in the form, and `kept` contains the reasons for
    the others."""

    architecture: str
    form: str
    dtype: str
    caches: str = omitted("")
    state: Literal["", "equal", "different", "not verified", "refused", "crashed", "ended"] = ""
    reason: str = omitted("")
    of_limit: float | None = omitted(None)
    attentions: int = omitted(0)
    in_form: int = omitted(0)
    kept: tuple[str, ...] = omitted(())
    tokens: int = omitted(0)
    seconds: float = omitted(0.0)

    @property
    def column(self) -> str:
        """The form, the dtype and the caches."""
        return "/".join(filter(None, (self.form, self.dtype, self.caches)))

    @property
    def key(self) -> str:
        """A unique key of the cell."""
        return f"{self.architecture}/{self.column}"


@attrs.frozen(kw_only=True)
class Results:
    """All cells that were run, and the machine and the versions."""

    machine: Mapping[str, Any] = attrs.field(factory=dict)
    cells: tuple[Cell, ...] = ()


def cells(names: Iterable[str]) -> Iterator[Cell]:
    """All cells of these architectures, without results. The most important columns come first."""
    names = tuple(names)
    for dtype, form, caches in itertools.product(DTYPES, FORMS, CACHES):
        for name in names:
            decodes = ROWS[name].kind in DECODERS
            if decodes or caches == "concat":
                yield Cell(architecture=name, form=form, dtype=dtype, caches=caches if decodes else "")


def read() -> Results:
    """The committed results."""
    return structure(read_results("models"), Results)


def publish(made: Sequence[Cell]) -> None:
    """Add results, which replace older ones of the same cells, and write the page of all cells."""
    from whole_page import figures

    old, now = read(), record()
    now["versions"] |= versions(["transformers"])
    new = {one.key: structure(rounded(unstructure(one)), Cell) for one in made}
    kept = {one.key: one for one in old.cells} | new
    order = {one.key: at for at, one in enumerate(cells(ROWS))}
    ordered = sorted((one for key, one in kept.items() if key in order), key=lambda one: order[one.key])
    results = Results(machine=now if made else old.machine, cells=tuple(ordered))
    write_results("models", unstructure(results), figures(results))
