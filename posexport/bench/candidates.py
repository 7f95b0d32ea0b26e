"""What can be timed, by name: every runtime that runs kernels, and for each device the references of ratios.

A reference has a role, the name of ratios to it on either device: `lower_bound` (only the matrix products), `torch`
(eager), `torch-compile`, `torch-onnx` (torch's own export, run by ONNX Runtime), `ort-optimizer` (that file after ONNX
Runtime's transformers optimizer) and `against` (an earlier artifact). Imports no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError, check_known
from posexport.runtimes import ORT, REFERENCE, RUNTIMES, TENSORRT, TORCH, Runtime
from posexport.runtimes.module_reference import MODULE, module_parts

if TYPE_CHECKING:
    from posexport.bench.timed_file import TimedFile

_TAKES = {
    TORCH: ("threads",),
    MODULE.module: ("threads",),
    ORT: ("threads", "cuda_graph"),
    TENSORRT: ("cuda_graph",),
    REFERENCE: (),
}
"""The benchmark options that each engine supports, by its module. Other modules run nothing that can be timed."""

ALWAYS = LOWER_BOUND, EAGER, COMPILED = "lower_bound", "torch", "torch-compile"
"""References that are timed without being named: the lower bound, and the block in torch, eager and compiled."""

ALTERNATIVES = EXPORTED, OPTIMIZED = "torch-onnx", "ort-optimizer"
"""References that are files of their own, made before ONNX Runtime runs them; timed with `--peers`, or where named."""

ROLES = (*ALWAYS, *ALTERNATIVES)

OF_TORCH = (EAGER, COMPILED, *ALTERNATIVES)
"""References that torch's block of a spec is needed for."""

PREVIOUS_ARTIFACT = "against"
"""The role of an earlier artifact that is timed in the same rounds."""


@attrs.frozen(kw_only=True)
class Candidate:
    """What is timed: a row of RUNTIMES with extra options. `role` is set for a reference."""

    name: str
    runtime: Runtime
    role: str = ""
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def references(self) -> dict[str, str]:
        """The candidates that its ratios compare it with, by role."""
        names = {role: f"{role}{'-cuda' if self.runtime.needs_gpu else ''}" for role in ROLES}
        return names if self.role == PREVIOUS_ARTIFACT else {**names, PREVIOUS_ARTIFACT: previous(self).name}

    def missing(self, artifact: TimedFile) -> str | None:
        """Why it can't time the artifact here, or None."""
        required = artifact.required_runtime
        if self.role in OF_TORCH and self.runtime != MODULE and artifact.no_torch:
            return artifact.no_torch
        if required not in (None, self.runtime.name) and self.role in ("", PREVIOUS_ARTIFACT):
            return f"a plan of {required} runs on nothing else"
        reason = self.runtime.missing()
        return None if reason is None else reason.text

    def takes(self, option: str) -> bool:
        """Whether `threads` or `cuda_graph` has an effect on it."""
        return option in _TAKES[self.runtime.module] and (option != "cuda_graph" or self.runtime.needs_gpu)


def _candidates() -> dict[str, Candidate]:
    candidates = {}
    for suffix, ort in (("", "ort-cpu"), ("-cuda", "ort-cuda")):
        for role in ROLES:
            row = RUNTIMES[ort if role in ALTERNATIVES else f"torch{suffix}"]
            options = {"compiled": True} if role == COMPILED else {}
            name = f"{role}{suffix}"
            candidates[name] = Candidate(name=name, runtime=row, role=role, options=options)
    rows = [row for row in RUNTIMES.values() if row.module in _TAKES and row.name not in candidates]
    return candidates | {row.name: Candidate(name=row.name, runtime=row) for row in rows}


CANDIDATES = _candidates()
"""Everything that can be timed, by name, in the order of reports: references on the CPU, on the GPU, then runtimes."""

DEFAULT = tuple(
    name for name, candidate in CANDIDATES.items() if name != "onnx-reference" and candidate.role not in ALTERNATIVES
)
"""Timed if no runtime is named. onnx's evaluator is left out, because it is made to be right, not fast."""


def choose(names: Iterable[str], alternatives: bool = False, required: Iterable[str] = ()) -> list[Candidate]:
    """The candidates with these names (default: DEFAULT), the `required` ones, and the references of their ratios.

    `alternatives` adds torch's own export and ONNX Runtime's optimizer. RequestError for other names.
    """
    chosen = (set(names) or set(DEFAULT)) | set(required)
    for name in chosen:
        if name in RUNTIMES and name not in CANDIDATES:
            raise RequestError(f"runtime {name!r} runs no kernels to be timed: allowed: {', '.join(CANDIDATES)}.")
        check_known("runtime", name, CANDIDATES)
    for name in tuple(chosen):
        chosen |= {CANDIDATES[name].references[role] for role in (*ALWAYS, *(ALTERNATIVES if alternatives else ()))}
    return [candidate for name, candidate in CANDIDATES.items() if name in chosen]


def torch_of(module: str) -> Candidate:
    """The user's torch module FILE.py:NAME in place of torch eager. RequestError if there is no such file."""
    path, name = module_parts(module)
    options = {"module": f"{path.absolute()}:{name}", "wide": False}
    return attrs.evolve(CANDIDATES[EAGER], runtime=MODULE, options=options)


def is_reference(name: str) -> bool:
    """Whether a candidate doesn't run the artifact: torch, an alternative, or an earlier artifact."""
    return name not in CANDIDATES or bool(CANDIDATES[name].role)


def previous(candidate: Candidate) -> Candidate:
    """The same runtime as a candidate for an earlier artifact that is timed in the same rounds."""
    return attrs.evolve(candidate, name=f"{PREVIOUS_ARTIFACT}:{candidate.name}", role=PREVIOUS_ARTIFACT)
