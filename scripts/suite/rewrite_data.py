"""The contents of docs/results/rewrite.json: the schema, and how a part of it is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from results import read_results, record, rounded, write_results
from tools import ONNXSIM

from posexport.jsondata import omitted, structure, unstructure
from posexport.machine import versions


@attrs.frozen(kw_only=True)
class Kept:
    """An attention that posexport left as it was, and the reason."""

    name: str
    code: str
    text: str


@attrs.frozen(kw_only=True)
class ToolScore:
    """One tool on one file. `attentions` and `rotations` count operators in the result. `recognised` is the number of
    attentions that posexport wrote in the form or found in it. `error` is the largest difference from the original,
    relative to the largest value. It is None if an output is not finite or has another shape."""

    verdict: Literal["exact", "wrong", "broken", "unknown", "failed", "not run"]
    attentions: int = omitted(0)
    rotations: int = omitted(0)
    nodes: int = omitted(0)
    error: float | None = omitted(None)
    seconds: float = omitted(0.0)
    problem: str = omitted("")
    recognised: int | None = omitted(None)
    kept: tuple[Kept, ...] = omitted(())


@attrs.frozen(kw_only=True)
class File:
    """One file of the suite with its scores by tool. `sites` is the number of its attentions."""

    name: str
    kind: str
    exporter: str
    encoding: str
    rope: str
    sites: int
    scores: Mapping[str, ToolScore]


@attrs.frozen(kw_only=True)
class NearMiss:
    """One near miss: the file it was made from, its fault, and the verdict. `rewritten` counts attentions."""

    of: str
    fault: str
    seed: int
    form: str
    verdict: Literal["left alone", "rewritten, the same", "corrected", "broken", "crashed"]
    rewritten: int = 0
    error: float | None = omitted(None)
    kept: tuple[str, ...] = omitted(())
    problem: str = omitted("")


@attrs.frozen(kw_only=True)
class Ratio:
    """The median of the ratios of rounds, with its interval."""

    median: float
    low: float
    high: float
    confidence: float


@attrs.frozen(kw_only=True)
class Time:
    """One file in one scenario: milliseconds, and the ratio of its time to the original's."""

    scenario: str
    file: str
    error: float
    ms: float
    ratio: Ratio
    rounds: int


@attrs.frozen(kw_only=True)
class Speed:
    """A decoder timed before and after rewriting."""

    layers: int
    hidden: int
    parameters: int
    threads: int
    machine_load: float
    cells: tuple[Time, ...]


@attrs.frozen(kw_only=True)
class Plan:
    """What TensorRT chose for one file. `problem` is set if the plan was not built."""

    kernels: int | None = None
    fused: int | None = None
    problem: str = omitted("")


@attrs.frozen(kw_only=True)
class Plans:
    """The plans of one file of the suite in fp16, by form."""

    file: str
    sites: int
    files: Mapping[str, Plan]


@attrs.frozen(kw_only=True)
class Results:
    """All parts. A part that was not measured is None or empty. `machines` has the machine and the versions of each
    part."""

    machines: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    suite: tuple[File, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    speed: Speed | None = None
    tensorrt: tuple[Plans, ...] = ()


def read() -> Results:
    """The committed results."""
    return structure(read_results("rewrite"), Results)


def publish(**parts: Any) -> None:
    """Replace parts, given as plain data by name, in the results and on their page."""
    from page import figures

    old, now = read(), record()
    now["versions"] |= {**versions(["transformers"]), "onnxsim": ONNXSIM}
    machines = {**old.machines, **dict.fromkeys(parts, now)}
    fields = {field.name: getattr(old, field.name) for field in attrs.fields(Results)}
    results = structure(unstructure({**fields, "machines": machines}) | rounded(parts), Results)
    write_results("rewrite", unstructure(results), figures(results))
