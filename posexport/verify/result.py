"""The results of verification as data: comparisons, verdicts and the report. This module imports no engine.

A reason has a text for people (`reason`) and a code for programs (`reason_code`). The codes are defined beside the code
that gives them: here, in eligibility, and in posexport.processes for those that end a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from posexport.artifact.authenticity import AS_ORIGINAL, NO_MANIFEST, TRUSTED
from posexport.artifact.manifest import manifest_path
from posexport.artifact.paths import check_artifact, find_artifacts
from posexport.errors import Reason, RequestError
from posexport.jsondata import omitted, unstructure
from posexport.runtimes import WITHOUT_GRAPHS, Runtime
from posexport.spec.fields import flag, integer, parsed, positive
from posexport.verify.reach import Shown, read_reach

if TYPE_CHECKING:
    from posexport.artifact.original import Original

PARITY = "parity"
"""The check of a verdict that compares outputs with the float64 reference. Other checks are named by properties."""

GENERATION = "generation"
"""The check of a verdict that compares the tokens that a decoder makes with those of the float64 reference."""

PROJECT = "project"
"""The runtime of a verdict on a project's own check, such as a file's size, which involves no runtime."""

VERSION = 1
"""The version of the JSON of a report."""

INCONCLUSIVE_STATE: Final = "inconclusive"
"""What tables write for a verdict that passed on inputs that did not reach all of a block's own numbers."""

PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_RUN: Final = "not run"

State = Literal["passed", "failed", "not run"]

CONTRACT, REFERENCE_FAILED, NOTHING_COMPARED = "contract", "reference-failed", "nothing-compared"
INPUTS_REFUSED = "inputs-refused"
OTHER_TOKENS, NO_LOOP, NO_ENCODER = "other-tokens", "no-loop", "no-encoder"
MISSING_OUTPUT, UNKNOWN_OUTPUT, WRONG_SHAPE, WRONG_DTYPE = "missing-output", "unknown-output", "shape", "dtype"
NOT_FINITE, OVER_LIMIT, INCONCLUSIVE, PROPERTY = "not-finite", "over-limit", "inconclusive", "property"
"""Codes of failed comparisons and verdicts."""

SHOWS_NOTHING = (INCONCLUSIVE, NOTHING_COMPARED)
"""Codes of verdicts that are not run although the runtime ran: its outputs on the inputs show nothing."""

ONLY_AS_A_WHOLE = "each of its values is right: the runtime is only wrong when it runs the whole graph"
"""The place of a fault that shows in no node alone."""


def _reason_fields(reason: Reason | None) -> dict[str, Any]:
    """The fields `reason` and `reason_code` of a comparison or verdict."""
    return {} if reason is None else {"reason": reason.text, "reason_code": reason.code}


@attrs.frozen(kw_only=True)
class Tolerance:
    """`multiple` of torch's error; `floor` and `ceiling` as parts of the root mean square of the float64 reference."""

    multiple: float
    floor: float
    ceiling: float

    def uncapped(self, torch_error: float, rms: float) -> float:
        """The limit for a torch error and a root mean square of the reference, without the ceiling."""
        return self.multiple * torch_error + self.floor * rms

    def limit(self, torch_error: float, rms: float) -> float:
        """The largest error that passes."""
        return min(self.uncapped(torch_error, rms), self.ceiling * rms)


EXACT = {"fp16": 2.0, "bf16": 2.0}
"""The multiple of torch's error by dtype that a runtime may have if it computes in float64 and rounds only outputs,
angles, and whole numbers that are cast.

Measured with 66 variants of all encodings: in half precision its error is at most that of torch, which rounds each
step. In fp32 it may be larger, since angles are rounded too.
"""


@attrs.frozen(kw_only=True)
class Comparison:
    """One output on one case. Numbers are None if they could not be computed.

    `far_out` says that the case has positions beyond the usual range (posexport.verify.cases.USUAL_POSITIONS). `got`
    and `reference` are the values at `index`, where the error is largest.
    """

    case: str
    far_out: bool = False
    output: str
    state: State
    reason: str | None = None
    reason_code: str | None = None
    max_error: float | None = None
    rms_error: float | None = None
    torch_error: float | None = None
    limit: float | None = None
    reference_rms: float | None = None
    index: tuple[int, ...] | None = None
    got: float | None = None
    reference: float | None = None

    @classmethod
    def of(cls, case: str, output: str, reason: Reason | None, **fields: Any) -> Comparison:
        """A comparison that failed for `reason`, or that passed if there is none."""
        state: State = PASSED if reason is None else FAILED
        return cls(case=case, output=output, state=state, **_reason_fields(reason), **fields)

    def texts(self) -> tuple[str, str, str, str]:
        """The case, the error, the torch error and the limit for people."""
        numbers = (self.max_error, self.torch_error, self.limit)
        error, torch_error, limit = ("-" if number is None else f"{number:.2e}" for number in numbers)
        return self.case, error, torch_error, limit

    @property
    def severity(self) -> float:
        """The error as a part of its limit; infinite if no error could be computed."""
        if self.max_error is None or self.limit is None:
            return float("inf") if self.state == FAILED else 0.0
        return self.max_error / self.limit if self.limit else (float("inf") if self.max_error else 0.0)


@attrs.frozen(kw_only=True)
class Verdict:
    """What is known about one artifact on one runtime: passed, failed, or not run with its reason.

    `sha256` is that of the artifact's file. `worst` is the comparison that failed most or came nearest to its limit,
    `worst_usual` the same among cases within the usual range of positions. `cases` is the number of compared sets of
    inputs. `where` is the place where the graph departs, as far as it was found, and `departure` the first node that
    differs from a fresh export, in one clause. `reach` says how far the inputs went, and `not_shown` which of the
    block's own numbers, such as a window, they did not reach: a verdict that passed is then inconclusive. `weights`
    says what is known about the file's weights, `signature` who signed it, each with a code
    (docs/reference/artifact.md). `reference` says whose float64 values are the truth, if it is not the torch block of
    the file's spec.

    A check that compares no outputs, such as that of a file's size, states its value as `measured` and the largest that
    passes as `limit_text`, both with their unit.
    """

    artifact: str
    sha256: str | None = None
    weights: Reason | None = None
    signature: Reason | None = None
    runtime: str
    state: State
    reason: str | None = None
    reason_code: str | None = None
    worst: Comparison | None = None
    worst_usual: Comparison | None = None
    tolerance: Tolerance | None = None
    cases: int = 0
    reach: Shown | None = None
    not_shown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    where: str | None = None
    departure: str | None = None
    describe: Mapping[str, str] = attrs.field(factory=dict)
    reference: str | None = omitted(None)
    check: str = PARITY
    measured: str | None = None
    limit_text: str | None = None

    @classmethod
    def of(cls, artifact: str, runtime: str, state: State, reason: Reason | None = None, **fields: Any) -> Verdict:
        """A verdict with the text and the code of a reason."""
        return cls(artifact=artifact, runtime=runtime, state=state, **_reason_fields(reason), **fields)

    @property
    def label(self) -> str:
        """The runtime, and the check unless it is parity."""
        return self.runtime if self.check == PARITY else f"{self.runtime}: {self.check}"

    @property
    def inconclusive(self) -> bool:
        """Whether it passed on inputs that did not reach all of the block's own numbers."""
        return self.state == PASSED and bool(self.not_shown)

    @property
    def shows_nothing(self) -> bool:
        """Whether the runtime ran, but its outputs show nothing about the file: such a verdict is not run."""
        return self.state == NOT_RUN and self.reason_code in SHOWS_NOTHING

    @property
    def measurement(self) -> str:
        """The value of a check that compares no outputs, and its limit; empty for other checks."""
        return f"{self.measured}, limit {self.limit_text}" if self.measured else ""

    @property
    def note(self) -> str:
        """The reason or the measurement, where the graph departs, and the notes."""
        parts = (self.reason or self.measurement, self.where, *self.not_shown, *self.notes, *self._authenticity())
        return "; ".join(filter(None, parts))

    def _authenticity(self) -> tuple[str, ...]:
        """What a reader must know about the weights and the signature of the file that ran: only what is unusual."""
        unusual = {NO_MANIFEST: "weights: ", AS_ORIGINAL: "weights: ", TRUSTED: ""}
        known = [reason for reason in (self.weights, self.signature) if reason is not None and self.state != NOT_RUN]
        return tuple(unusual[reason.code] + reason.text for reason in known if reason.code in unusual)


@attrs.frozen
class Unreadable:
    """An artifact that could not be read, with the reason."""

    artifact: str
    error: str


@attrs.frozen(kw_only=True)
class Report:
    """All verdicts, in the order of artifacts and runtimes."""

    verdicts: tuple[Verdict, ...]
    unreadable: tuple[Unreadable, ...]
    seed: int
    strict: bool = False

    def exit_code(self, required: Sequence[str] = ()) -> int:
        """The exit code of the command.

        2 if an artifact can't be read; 1 if a verdict failed or, with `strict`, is inconclusive or shows nothing; 3 if
        parity was not checked on a required runtime, or passed on none; else 0. A runtime that doesn't run graphs
        counts only if it is required, or if no other was asked for.
        """
        if self.unreadable:
            return 2
        if any(map(self.fails, self.verdicts)):
            return 1
        for name in required:
            parity = [row.state for row in self.verdicts if row.runtime == name and row.check == PARITY]
            if not parity or NOT_RUN in parity:
                return 3
        rows = [row for row in self.verdicts if row.check == PARITY]
        counted = [row for row in rows if row.runtime not in WITHOUT_GRAPHS or row.runtime in required]
        return 0 if any(row.state == PASSED for row in counted or rows) else 3

    def fails(self, verdict: Verdict) -> bool:
        """Whether a verdict failed or, with `strict`, is inconclusive or shows nothing."""
        return verdict.state == FAILED or (self.strict and (verdict.inconclusive or verdict.shows_nothing))

    @property
    def inconclusive(self) -> int:
        """How many verdicts passed on inputs that did not reach all of a block's own numbers."""
        return sum(verdict.inconclusive for verdict in self.verdicts)

    def counts(self) -> dict[str, int]:
        """How many verdicts are in each state."""
        return {state: sum(row.state == state for row in self.verdicts) for state in (PASSED, FAILED, NOT_RUN)}

    def to_dict(self, required: Sequence[str] = ()) -> dict[str, Any]:
        """The report as plain data; errors are absolute, in the unit of the output."""
        return {
            "kind": "verify",
            "version": VERSION,
            "exit_code": self.exit_code(required),
            "seed": self.seed,
            "strict": self.strict,
            "counts": self.counts(),
            "inconclusive": self.inconclusive,
            "verdicts": unstructure(self.verdicts),
            "unreadable": unstructure(self.unreadable),
        }


def unreadable_report(paths: Sequence[Path], seed: int) -> Report | None:
    """The report if none of the artifacts in `paths` can be read; None if one may be readable.

    Raises RequestError if `paths` has no artifacts. Imports no engine.
    """
    unreadable = []
    for path in find_artifacts(paths):
        if manifest_path(path).is_file():  # the manifest says whether the file was changed
            return None
        try:
            check_artifact(path)
        except RequestError as error:
            unreadable.append(Unreadable(str(path), str(error)))
        else:
            return None
    return Report(verdicts=(), unreadable=tuple(unreadable), seed=seed)


@attrs.frozen(kw_only=True)
class VerifyOptions:
    """The options of a run, validated."""

    seed: int = integer(0, "seed of the inputs", at_least=0)
    time_limit: float = positive(300.0, "seconds that one runtime may take for one artifact")
    properties: bool = flag(False, "try the encoding's properties too")
    reach: Mapping[str, int] = parsed(
        "keys and rows that inputs reach",
        "sizes such as seq=4096,batch=8, at most seq=1048576 and batch=4096",
        read_reach,
        default="",
    )
    cases: int = integer(0, "sets of inputs that are drawn beyond the usual ones", at_least=0, at_most=1000)
    strict: bool = flag(False, "an inconclusive verdict is no pass")


@attrs.frozen(kw_only=True)
class VerifyOverrides:
    """Settings of one artifact: its runtimes (None: all), numbers that replace those of its Tolerance, and what it must
    be an export of."""

    runtimes: tuple[str, ...] | None = None
    tolerance: Mapping[str, float] = attrs.field(factory=dict)
    original: Original | None = None

    def notes(self) -> tuple[str, ...]:
        """What a reader of a verdict must know about these settings."""
        numbers = ", ".join(f"{name} {value:g}" for name, value in self.tolerance.items())
        return (f"the project's own tolerance: {numbers}",) if numbers else ()

    def on(self, row: Runtime, dtype: str, tolerance: Tolerance) -> Tolerance:
        """The tolerance of a dtype on a runtime: a smaller multiple if it is exact, and the numbers of these
        settings."""
        multiple = min(tolerance.multiple, EXACT.get(dtype, tolerance.multiple)) if row.exact else tolerance.multiple
        return attrs.evolve(tolerance, **{"multiple": multiple, **self.tolerance})

    def among(self, runtimes: Mapping[str, Runtime]) -> Mapping[str, Runtime]:
        """The `runtimes` that the artifact is verified on."""
        return {name: row for name, row in runtimes.items() if self.runtimes is None or name in self.runtimes}


@attrs.frozen(kw_only=True)
class AngleRow:
    """The errors of one encoding's angles on one runtime, one for each position."""

    encoding: str
    angles: str
    dtype: str
    runtime: str
    errors: tuple[float, ...]


@attrs.frozen(kw_only=True)
class AngleErrors:
    """The measured errors of angles, as `scripts/angle_errors` writes them; `refused` and `not_run` contain reasons."""

    positions: tuple[int, ...]
    rows: tuple[AngleRow, ...]
    refused: Mapping[str, str] = attrs.field(factory=dict)
    not_run: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for row in self.rows:
            if len(row.errors) != len(self.positions):
                raise ValueError(f"has a row of {row.encoding} without one error for each position")
