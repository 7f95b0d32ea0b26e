"""The schema of a benchmark's result: every candidate at every shape, the gate, and a project's limits.

The classes define the JSON files (`posexport.jsondata`). Times are in seconds and memory in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from posexport.bench import statistics
from posexport.bench.shapes import Sizes
from posexport.errors import RequestError, shown
from posexport.files import check_writable, real_path
from posexport.jsondata import DataError, omitted, read_json, structure, unstructure

KIND, VERSION = "bench", 1
TIMED: Final = "timed"
FAILED: Final = "failed"
NOT_RUN: Final = "not run"
FINE: Final = "fine"
SLOWER: Final = "slower"
INCONCLUSIVE: Final = "inconclusive"
OUT_OF_DATE: Final = "out of date"

State = Literal["timed", "failed", "not run"]
Judgement = Literal["fine", "slower", "inconclusive", "not run"]

METHOD = "method"
"""The key under which the engine of a lower bound says how it was run."""

HIGH_MACHINE_LOAD = 0.2
"""The share of the CPU that other work may take. Above it, times are not reliable."""


def _check_ratios(_: object, field: attrs.Attribute[Any], value: Mapping[str, tuple[float, ...]]) -> None:
    for name, ratios in value.items():
        if not all(0 < ratio < math.inf for ratio in ratios):
            raise ValueError(f"{field.name} of {name} holds a ratio that is not above 0")


@attrs.frozen(kw_only=True)
class Timing:
    """One candidate at one shape. `state` is timed, failed or not run, with a `reason` for the last two.

    `ratios` are this candidate's time over that of each reference (`lower_bound`, `torch`, `torch-compile`,
    `torch-onnx`, `ort-optimizer`, `against`) on the same device. `processes` are the medians of that ratio in each
    process. `note` says which options had no effect on it.
    """

    runtime: str
    state: State
    reason: str = ""
    note: str = ""
    seconds: statistics.Summary | None = None
    ratios: Mapping[str, statistics.Ratio] = attrs.field(factory=dict)
    processes: Mapping[str, tuple[float, ...]] = attrs.field(factory=dict, validator=_check_ratios)
    tokens_per_second: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    load_seconds: float | None = None
    build_seconds: float | None = None
    warmup_seconds: float | None = None
    engine: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.state == TIMED and self.seconds is None:
            raise ValueError(f"({self.runtime}) is timed without seconds")


@attrs.frozen(kw_only=True)
class Shape:
    """One shape: its scenario, if any, its sizes, and the number of rounds that there was time for.

    Graphs of other tools may have no tokens (`seq`), and `others` of their own, such as the height of pictures.
    """

    scenario: str | None
    also: tuple[str, ...] = omitted(())  # further scenarios of the same sizes
    batch: int
    seq: int | None = omitted(None)
    past_seq: int | None = omitted(None)
    max_seq: int | None = omitted(None)
    encoder_seq: int | None = omitted(None)
    others: Mapping[str, int] = omitted(factory=dict)
    rounds: int
    results: tuple[Timing, ...]

    @property
    def sizes(self) -> Sizes:
        """Its sizes, by dimension."""
        known = {field.name: getattr(self, field.name) for field in attrs.fields(Sizes)}
        return Sizes(**known | {"others": tuple(self.others.items())})

    @property
    def scenarios(self) -> tuple[str, ...]:
        """All scenarios that have these sizes."""
        return () if self.scenario is None else (self.scenario, *self.also)

    @property
    def title(self) -> str:
        """Its scenario, or its sizes if it has none."""
        return self.scenario or str(self.sizes)

    def timing(self, runtime: str) -> Timing | None:
        """The result of one candidate."""
        return next((timing for timing in self.results if timing.runtime == runtime), None)


@attrs.frozen(kw_only=True)
class LeftOut:
    """A point of a sweep that the artifact can't take."""

    scenario: str
    reason: str


@attrs.frozen(kw_only=True)
class Change:
    """One runtime at one shape. `change` is new time over old time (1.05 is 5 % slower), with its interval.

    Both times were divided by that of `reference`. `reason` says why the change is not known. `more` is whether more
    processes could tell it.
    """

    runtime: str
    shape: str
    state: Judgement
    reference: str = ""
    before: float | None = None
    now: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    more: bool = False


@attrs.frozen(kw_only=True)
class Gate:
    """Every change, and the `limit`: the largest change that is not a regression (0.05 is 5 %).

    `notes` say what makes the comparison less certain.
    """

    limit: float
    confidence: float
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def exit_code(self, strict: bool) -> int:
        """1 if something got slower. With `strict`, also if a change is inconclusive or was not run."""
        bad = (SLOWER, INCONCLUSIVE, NOT_RUN) if strict else (SLOWER,)
        return int(any(change.state in bad for change in self.changes))

    @property
    def settled(self) -> bool:
        """Whether the result is as clear as more processes could make it."""
        return not any(change.state == INCONCLUSIVE and change.more for change in self.changes)


@attrs.frozen(kw_only=True)
class LimitResult:
    """One limit of a project on one runtime: its state, and the ratio to the reference with its interval."""

    runtime: str
    scenario: str
    reference: str
    limit: float
    state: Judgement
    reason: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    there: bool = False  # true if its runtime is available but was not measured

    def __attrs_post_init__(self) -> None:
        if self.state == SLOWER and self.ratio is None:
            raise ValueError(f"on {self.runtime} is broken without a ratio")


@attrs.frozen(kw_only=True)
class Benchmark:
    """The result: every candidate at every shape, and what it was measured with.

    For graphs of other tools, `encoding` is None, `spec` is empty, and `no_torch` says why torch is not known. If
    posexport rewrote the graph, `form` and `origin` (the sha256 of the original file) are known.
    """

    kind: Literal["bench"] = "bench"
    version: Literal[1] = 1
    file: str
    sha256: str
    encoding: str | None
    form: str | None
    opset: int
    dtype: str
    spec: Mapping[str, Any]
    origin: str | None = omitted(None)
    no_torch: str = omitted("")
    rounds: int
    burst: int
    """The least number of timed runs in a turn."""
    processes: int
    """The number of processes of each candidate, one after the other."""
    seed: int
    machine_load: float
    """The CPU share of other work during the rounds. Above `HIGH_MACHINE_LOAD`, times are not reliable."""
    machine: Mapping[str, Any]
    threads: int | None
    cuda_graph: bool = False
    """Whether runs were captured as CUDA graphs, where a runtime can."""
    manifest_warnings: tuple[str, ...] = omitted(())
    """Why a manifest is not of the file that was timed, where it isn't."""
    left_out: tuple[LeftOut, ...] = ()
    shapes: tuple[Shape, ...]
    limits: tuple[LimitResult, ...] = omitted(())
    """The limits of a project that it was judged by."""
    gate: Gate | None = omitted(None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = unstructure(self)
        return data

    @property
    def busy(self) -> bool:
        """Whether other work made the times unreliable."""
        return self.machine_load > HIGH_MACHINE_LOAD

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Every result at every shape."""
        return tuple(timing for shape in self.shapes for timing in shape.results)

    def bound_methods(self) -> dict[tuple[str, str], str]:
        """The method of each lower bound, by its name and the sizes as text."""
        return {
            (timing.runtime, str(shape.sizes)): timing.engine[METHOD]
            for shape in self.shapes
            for timing in shape.results
            if METHOD in timing.engine
        }


FileState = Literal["timed", "not run", "out of date"]


@attrs.frozen(kw_only=True)
class FileResult:
    """One file of a project: its result, or why there is none."""

    file: str
    artifact: str
    state: FileState
    reason: str = ""
    limits: tuple[LimitResult, ...] = ()
    result: Benchmark | None = None


@attrs.frozen(kw_only=True)
class ProjectBenchmark:
    """What `posexport bench --json` prints for a project."""

    kind: Literal["bench-project"] = "bench-project"
    version: Literal[1] = 1
    project: str
    exit_code: int
    reason: str = omitted("")
    """Why the exit code is not 0, where the rows alone don't say it."""
    files: tuple[FileResult, ...]


_ARTIFACT = (".onnx", ".plan", ".data")


def check_place(path: Path, baseline: Path | None = None) -> None:
    """Check `path` before minutes of timing.

    RequestError if it can't be written, or if it is a file of an artifact or the `baseline`.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(f"--save is {str(path)!r}: give the name of a file in a folder that is there.")
    real = real_path(path)
    of = real.with_suffix("") if real.suffix == ".json" else real  # the file whose manifest it would be
    if real.suffix in _ARTIFACT or (of.suffix in _ARTIFACT and of.is_file()):
        raise RequestError(f"--save is {str(path)!r}, a file of an artifact: give the result a name of its own.")
    if baseline is not None and real == real_path(baseline):
        raise RequestError(f"--save and --baseline are both {str(path)!r}: save the new result under another name.")
    check_writable(path)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the fields in which two specs, as plain data, differ."""
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))


def read_benchmark(path: Path) -> Benchmark:
    """The result saved at `path`. RequestError if it is not a result, or has another version."""
    named, save = repr(str(path)), "give a file that `posexport bench --save` wrote."
    try:
        data = read_json(path)
    except (OSError, DataError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"can't read {named} ({cause}): {save}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise RequestError(f"{named} is no result of a benchmark: {save}")
    if data.get("version") != VERSION:
        raise RequestError(
            f"{named} has version {shown(data.get('version'))}, this posexport reads {VERSION}: save it anew."
        )
    try:
        return structure(data, Benchmark)
    except DataError as error:
        raise RequestError(f"{named} is a damaged result of a benchmark ({error}): save it anew.") from None
