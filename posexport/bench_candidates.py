"""What can be timed, by name: every runtime that runs kernels, and torch.compile on each device. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport.bench_shapes import Subject
from posexport.errors import RequestError, unknown
from posexport.runtimes import RUNTIMES, Runtime

_TAKES = {"torch_eager": ("threads",), "ort": ("threads", "cuda_graph"), "trt": ("cuda_graph",), "onnx_reference": ()}
"""Which of the options of a benchmark an engine has, by its home; one that isn't here runs nothing to be timed."""


@attrs.frozen(kw_only=True)
class Candidate:
    """What is timed: a row of RUNTIMES with extra options. `against` names the candidate that its ratio is taken to."""

    name: str
    runtime: Runtime
    against: str
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def missing(self, subject: Subject) -> str | None:
        """Why it can't time the subject here, or None."""
        if subject.plan_runtime not in (None, self.runtime.name) and self.runtime.package != "torch":
            return f"a plan of {subject.plan_runtime} runs on nothing else"
        return self.runtime.missing()

    def takes(self, option: str) -> bool:
        """Whether `threads` or `cuda_graph` has an effect on it."""
        return option in _TAKES[self.runtime.home] and (option != "cuda_graph" or self.runtime.needs_gpu)

    def path(self, subject: Subject) -> Path:
        """The file that it opens: torch rebuilds its block from the ONNX file, also for a plan."""
        return subject.onnx if self.runtime.package == "torch" else subject.path


def _candidates() -> dict[str, Candidate]:
    found = {}
    for row in (row for row in RUNTIMES.values() if row.home in _TAKES):
        against = "torch-cuda" if row.needs_gpu else "torch"
        found[row.name] = Candidate(name=row.name, runtime=row, against=against)
        if row.package == "torch":
            name = row.name.replace("torch", "torch-compile", 1)
            found[name] = Candidate(name=name, runtime=row, against=against, options={"compiled": True})
    return found


CANDIDATES = _candidates()
"""Everything that can be timed, by name, in the order of reports: the runtimes, and torch.compile on each device."""

DEFAULT = tuple(name for name in CANDIDATES if name != "onnx-reference")
"""Timed where no runtime is named; onnx's evaluator is there to be right, not to be fast."""


def choose(names: Iterable[str]) -> list[Candidate]:
    """The candidates of those names (default: DEFAULT) and the torch peers that they are held against."""
    wanted = set(names) or set(DEFAULT)
    for name in wanted:
        if name in RUNTIMES and name not in CANDIDATES:
            raise RequestError(f"runtime {name!r} runs no kernels to be timed: allowed: {', '.join(CANDIDATES)}.")
        if name not in CANDIDATES:
            raise unknown("runtime", name, CANDIDATES)
    for name in tuple(wanted):
        against = CANDIDATES[name].against
        wanted |= {against, against.replace("torch", "torch-compile", 1)}
    return [candidate for name, candidate in CANDIDATES.items() if name in wanted]
