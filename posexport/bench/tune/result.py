"""What a tuning found, as data: every candidate with what became of it and why, the winner, and what it all cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.bench import statistics
from posexport.bench.tune.space import Candidate

KIND, VERSION = "tune", 1
WON, RACED, DROPPED, FAILED, REFUSED, NOT_RUN = "won", "raced", "dropped", "failed", "refused", "not run"

TWIN = "timed once"
"""How the reason of a candidate ends whose graph is another one's."""


@attrs.define(kw_only=True)
class Row:
    """One candidate. `ratio` is to the winner, in the rounds that both took part in; `memory` in bytes, at most; `size`
    in bytes, of the ONNX file with its data, or for TensorRT of the plan, None where that was not built for it."""

    candidate: Candidate
    state: str = NOT_RUN
    reason: str = ""
    rounds: int = 0
    seconds: statistics.Summary | None = None
    ratio: statistics.Ratio | None = None
    kernels: Mapping[str, Any] | None = None
    memory: int | None = None
    size: int | None = None
    verified: str | None = None
    """The runtime that it was verified on."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what isn't known is left out."""
        program = self.candidate.program
        found = {
            "name": str(self.candidate),
            **attrs.asdict(program),
            "options": dict(self.candidate.options),
            "state": self.state,
            "reason": self.reason,
            "rounds": self.rounds,
        }
        for name in ("seconds", "ratio"):
            value = getattr(self, name)
            if value is not None:
                found[name] = attrs.asdict(value)
        more = {"kernels": self.kernels, "memory": self.memory, "size": self.size, "verified": self.verified}
        return found | {name: value for name, value in more.items() if value is not None}


@attrs.frozen(kw_only=True)
class Result:
    """A whole tuning. `method` says how candidates were compared; `winner` is None where nothing verified.

    `everything` counts the runs that every distinct candidate at full rounds would have taken; `runs` those of the
    races, also where they were known from an interrupted tuning; `known` the facts that came from the cache.
    """

    encoding: str
    target: str
    scenario: str
    objective: str
    method: str
    winner: Mapping[str, Any] | None
    candidates: tuple[Row, ...]
    seconds: float
    runs: int
    everything: int
    known: int
    machine_load: float
    machine: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For --json, --save and the manifest."""
        return {
            "kind": KIND,
            "version": VERSION,
            "encoding": self.encoding,
            "target": self.target,
            "scenario": self.scenario,
            "objective": self.objective,
            "method": self.method,
            "winner": None if self.winner is None else dict(self.winner),
            "candidates": [row.to_dict() for row in self.candidates],
            "cost": {
                "seconds": round(self.seconds, 3),
                "timed_runs": self.runs,
                "everything_runs": self.everything,
                "known_before": self.known,
            },
            "machine_load": round(self.machine_load, 3),
            "machine": dict(self.machine),
        }
