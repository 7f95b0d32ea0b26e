"""The schema of a tuning's result: every candidate with its outcome, the winner, and the cost.

The classes define the JSON files (`posexport.jsondata`). Times are in seconds and memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from posexport.bench import statistics
from posexport.bench.result import HIGH_MACHINE_LOAD
from posexport.bench.tune.space import Options, Program
from posexport.jsondata import omitted, unstructure

WON: Final = "won"
RACED: Final = "raced"
DROPPED: Final = "dropped"
FAILED: Final = "failed"
REFUSED: Final = "refused"
NOT_RUN: Final = "not run"
SAME_GRAPH: Final = "same-graph"
SLOWER_HALF: Final = "slower-half"

State = Literal["won", "raced", "dropped", "failed", "refused", "not run"]

ReasonCode = Literal[
    "",
    "same-graph",  # its file or graph is that of another candidate, and only that one was timed
    "slower",  # its interval lies above the time of another
    "slower-half",  # its median was in the slower half of those that remained, whatever its interval says
    "behind",  # it remained to the end, and is behind the fastest in the median
    "equal",  # it is as fast as the winner, which is simpler
    "fastest",  # it won: nothing else is as fast
    "simplest",  # it won: others are as fast, and it is the simplest of them
    "larger",  # it takes more memory, or space, than another, if that is the objective
    "by-kernels",  # plans were ranked by what the builder chose, without a GPU
    "unsupported",  # the form, the scenario or the runtime can't take it
    "not-verified",  # its outputs differ from the float64 reference, or could not be compared
    "error",  # an engine failed, as the reason says
]
"""Why a candidate is in its state."""


@attrs.define(kw_only=True)
class Row:
    """One candidate, a program with options of the runtime, and its outcome.

    `reason_code` is for code, `reason` for people. `ratio` is to the winner, in the rounds of both. `memory` is the
    most that it took. `size` is that of the ONNX file with its data, or for TensorRT of the plan (None if none was
    built). `verified` is the runtime that it was verified on. Only the winner has `settings` (as a deployment sets
    them), `file` and `sha256`.
    """

    name: str
    form: str
    dtype: str
    opset: int
    target: str
    options: Mapping[str, Any]
    positions: str = omitted("data")
    state: State = NOT_RUN
    reason: str = ""
    reason_code: ReasonCode = omitted("")
    rounds: int = 0
    seconds: statistics.Summary | None = omitted(None)
    ratio: statistics.Ratio | None = omitted(None)
    kernels: Mapping[str, Any] | None = omitted(None)
    memory: int | None = omitted(None)
    size: int | None = omitted(None)
    verified: str | None = omitted(None)
    settings: Mapping[str, Any] | None = omitted(None)
    file: str | None = omitted(None)
    sha256: str | None = omitted(None)

    @classmethod
    def of(cls, program: Program, options: Options) -> Row:
        """The row of a candidate about which nothing is known yet."""
        name = " ".join((str(program), *(f"{option}={str(value).lower()}" for option, value in options.items())))
        return cls(name=name, **attrs.asdict(program), options=options)

    @property
    def program(self) -> Program:
        """The program that it runs."""
        return Program(form=self.form, dtype=self.dtype, opset=self.opset, target=self.target, positions=self.positions)

    @property
    def plainness(self) -> tuple[int, ...]:
        """The sort key for simplicity. Smaller is simpler: fewer options first, then the program's."""
        return (len(self.options), *self.program.plainness)

    def decide(self, state: State, code: ReasonCode, reason: str) -> None:
        """Note the outcome and the reason."""
        self.state, self.reason_code, self.reason = state, code, reason


@attrs.frozen(kw_only=True)
class Cost:
    """The cost of a tuning.

    `timed_runs` counts its runs, also those known from an interrupted one. `everything_runs` is the number of runs if
    every distinct candidate had full rounds. `known_before` counts the facts that came from the cache.
    """

    seconds: float
    timed_runs: int
    everything_runs: int
    known_before: int


@attrs.frozen(kw_only=True)
class Result:
    """A whole tuning. `method` says how candidates were compared. `winner` is None if nothing verified."""

    kind: Literal["tune"] = "tune"
    version: Literal[1] = 1
    encoding: str
    target: str
    scenario: str
    objective: str
    method: str
    winner: Row | None
    candidates: tuple[Row, ...]
    cost: Cost
    machine_load: float
    machine: Mapping[str, Any]

    @property
    def busy(self) -> bool:
        """Whether other work made the times unreliable."""
        return self.machine_load > HIGH_MACHINE_LOAD

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and the manifest."""
        data: dict[str, Any] = unstructure(self)
        return data
