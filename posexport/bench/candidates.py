"""What can be timed, by name: every runtime that runs kernels, and on each device the references of their ratios.

A reference has a role, the name of ratios to it on either device: `lower_bound` (the bare matrix products), `torch`
(eager), `torch-compile`, `torch-onnx` (torch's own export, run by ONNX Runtime), `ort-optimizer` (that file through
ONNX Runtime's transformers optimizer) and `against` (an earlier artifact). Imports no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from posexport.bench.shapes import Subject
from posexport.errors import RequestError, unknown
from posexport.runtimes import ORT, REFERENCE, RUNTIMES, TENSORRT, TORCH, Runtime

_TAKES = {TORCH: ("threads",), ORT: ("threads", "cuda_graph"), TENSORRT: ("cuda_graph",), REFERENCE: ()}
"""Which of the options of a benchmark an engine has, by its module; one that isn't here runs nothing to be timed."""

ROLES = {
    "lower_bound": "torch",
    "torch": "torch",
    "torch-compile": "torch",
    "torch-onnx": "ort",
    "ort-optimizer": "ort",
}
"""The peers that are always held against, each with what runs it."""

ALWAYS = ("lower_bound", "torch", "torch-compile")
EXPORTED = ("torch-onnx", "ort-optimizer")
"""Peers that are files of their own, made before they are timed; timed with `--peers`, or where they are named."""

AGAINST = "against"


@attrs.frozen(kw_only=True)
class Candidate:
    """What is timed: a row of RUNTIMES with extra options. `role` is set for a peer; `peers` names, by role, the
    candidates that its ratios are taken to."""

    name: str
    runtime: Runtime
    role: str = ""
    peers: Mapping[str, str] = attrs.field(factory=dict)
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def missing(self, subject: Subject) -> str | None:
        """Why it can't time the subject here, or None."""
        if subject.plan_runtime not in (None, self.runtime.name) and self.role in ("", AGAINST):
            return f"a plan of {subject.plan_runtime} runs on nothing else"
        reason = self.runtime.missing()
        return None if reason is None else reason.text

    def takes(self, option: str) -> bool:
        """Whether `threads` or `cuda_graph` has an effect on it."""
        return option in _TAKES[self.runtime.module] and (option != "cuda_graph" or self.runtime.needs_gpu)

    @property
    def torch_side(self) -> bool:
        """Whether it needs the ONNX file, from which torch rebuilds its block, also for a plan."""
        return self.runtime.package == "torch"


def _candidates() -> dict[str, Candidate]:
    found = {}
    for suffix in ("", "-cuda"):
        peers = {role: f"{role}{suffix}" for role in ROLES}
        for role, package in ROLES.items():
            row = RUNTIMES["ort-cpu" if (package, suffix) == ("ort", "") else f"{package}{suffix}"]
            options = {"compiled": True} if role == "torch-compile" else {}
            found[peers[role]] = Candidate(name=peers[role], runtime=row, role=role, peers=peers, options=options)
    for row in (row for row in RUNTIMES.values() if row.module in _TAKES and row.name not in found):
        peers = {role: f"{role}{'-cuda' if row.needs_gpu else ''}" for role in ROLES}
        found[row.name] = Candidate(name=row.name, runtime=row, peers=peers)
    return found


CANDIDATES = _candidates()
"""Everything that can be timed, by name, in the order of reports: peers on the CPU, those on the GPU, the runtimes."""

DEFAULT = tuple(
    name for name, candidate in CANDIDATES.items() if name != "onnx-reference" and candidate.role not in EXPORTED
)
"""Timed where no runtime is named; onnx's evaluator is there to be right, not to be fast."""


def choose(names: Iterable[str], peers: bool = False, also: Iterable[str] = ()) -> list[Candidate]:
    """The candidates of those names (default: DEFAULT), those of `also`, and the peers that they are held against.

    `peers` adds torch's own export and ONNX Runtime's optimizer.
    """
    wanted = (set(names) or set(DEFAULT)) | set(also)
    for name in wanted:
        if name in RUNTIMES and name not in CANDIDATES:
            raise RequestError(f"runtime {name!r} runs no kernels to be timed: allowed: {', '.join(CANDIDATES)}.")
        if name not in CANDIDATES:
            raise unknown("runtime", name, CANDIDATES)
    for name in tuple(wanted):
        wanted |= {CANDIDATES[name].peers[role] for role in (*ALWAYS, *(EXPORTED if peers else ()))}
    return [candidate for name, candidate in CANDIDATES.items() if name in wanted]


def is_peer(name: str) -> bool:
    """Whether a candidate is what the artifact is measured by, and doesn't run it: torch, or an earlier artifact."""
    return name not in CANDIDATES or bool(CANDIDATES[name].role)


def earlier(candidate: Candidate) -> Candidate:
    """The same runtime, for an earlier artifact that is timed in the same rounds."""
    return attrs.evolve(candidate, name=f"{AGAINST}:{candidate.name}", role=AGAINST)
