"""What verification found, as data: comparisons, verdicts and the report. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs

from posexport.runtimes import Runtime

PARITY = "parity"
"""The check of a verdict that holds outputs against the truth; others are names of properties."""


PROJECT = "project"
"""The runtime of a verdict on a project's own check, such as a file's size: no runtime is involved."""

PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_RUN: Final = "not run"

State = Literal["passed", "failed", "not run"]


@attrs.frozen(kw_only=True)
class Tolerance:
    """`multiple` of eager's error; `floor` and `ceiling` as parts of the root mean square of the truth."""

    multiple: float
    floor: float
    ceiling: float

    def beside(self, torch_error: float, rms: float) -> float:
        """What is allowed beside eager's own error and the root mean square of the truth, whatever the ceiling is."""
        return self.multiple * torch_error + self.floor * rms


@attrs.frozen(kw_only=True)
class Comparison:
    """One output on one case. Numbers are None where something kept them from being taken."""

    case: str
    output: str
    state: State
    reason: str | None = None
    max_error: float | None = None
    rms_error: float | None = None
    torch_error: float | None = None
    limit: float | None = None
    reference_rms: float | None = None
    index: tuple[int, ...] | None = None
    got: float | None = None
    truth: float | None = None

    @property
    def severity(self) -> float:
        """How bad it is: the error as a part of what is allowed, infinite where no error could be taken."""
        if self.max_error is None or self.limit is None:
            return float("inf") if self.state == FAILED else 0.0
        return self.max_error / self.limit if self.limit else (float("inf") if self.max_error else 0.0)


@attrs.frozen(kw_only=True)
class Verdict:
    """What is known of one artifact on one runtime: passed, failed, or not run with its reason.

    `sha256` is that of the artifact's file, `worst` the comparison that failed most or came nearest to it, `cases` how
    many sets of inputs were compared, `where` what was found about the place where the graph departs; `departure` is
    the first node that a fresh export has otherwise, in one clause. A check that is no
    comparison of outputs, such as a file's size, states its value as `measured` and the largest that passes as
    `limit_text`, both with their unit.
    """

    artifact: str
    sha256: str | None = None
    runtime: str
    state: State
    reason: str | None = None
    worst: Comparison | None = None
    tolerance: Tolerance | None = None
    cases: int = 0
    notes: tuple[str, ...] = ()
    where: str | None = None
    departure: str | None = None
    describe: Mapping[str, str] = attrs.field(factory=dict)
    check: str = PARITY
    measured: str | None = None
    limit_text: str | None = None

    @property
    def label(self) -> str:
        """The runtime, and the check where it is another than parity."""
        return self.runtime if self.check == PARITY else f"{self.runtime}: {self.check}"


@attrs.frozen
class Unreadable:
    """An artifact that could not be read, with the reason."""

    artifact: str
    error: str


@attrs.frozen(kw_only=True)
class Report:
    """All verdicts, in the order of artifacts and runtimes, the artifacts that could not be read, with why, and those
    whose manifest is not of them (`manifest_warnings`), with what is wrong."""

    verdicts: tuple[Verdict, ...]
    unreadable: tuple[Unreadable, ...]
    manifest_warnings: tuple[tuple[str, str], ...] = ()
    seed: int

    def exit_code(self, required: Sequence[str] = ()) -> int:
        """2 where an artifact can't be read, else 1 where a verdict failed, else 3 where what was required, or
        everything, was not run, else 0."""
        if self.unreadable:
            return 2
        states = {verdict.state for verdict in self.verdicts}
        if FAILED in states:
            return 1
        for name in required:
            of_it = [each.state for each in self.verdicts if each.runtime == name and each.check == PARITY]
            if not of_it or NOT_RUN in of_it:
                return 3
        return 0 if states - {NOT_RUN} else 3


@attrs.frozen(kw_only=True)
class VerifyOverrides:
    """What is asked of one artifact alone: the runtimes that it is checked on (None: all), and numbers of Tolerance
    that stand in place of posexport's own."""

    runtimes: tuple[str, ...] | None = None
    tolerance: Mapping[str, float] = attrs.field(factory=dict)

    def among(self, runtimes: Mapping[str, Runtime]) -> Mapping[str, Runtime]:
        """Those of `runtimes` that are asked for."""
        return {name: row for name, row in runtimes.items() if self.runtimes is None or name in self.runtimes}


_ANY = VerifyOverrides()
