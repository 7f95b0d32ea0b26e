"""One session of a benchmark: a process for each candidate, rounds in alternation, and their results.

Memory placement and thread affinity bias a process for its whole life, so each session starts new processes. It opens a
process for every candidate, times every shape and closes the processes. Several sessions show how much of a ratio is
that bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import attrs

from posexport import temporary
from posexport.bench import statistics
from posexport.bench.candidates import (
    ALTERNATIVES,
    COMPILED,
    EXPORTED,
    LOWER_BOUND,
    OPTIMIZED,
    PREVIOUS_ARTIFACT,
    Candidate,
)
from posexport.bench.options import ROUNDS, BenchOptions
from posexport.bench.result import FAILED, METHOD, NOT_RUN, TIMED, Timing
from posexport.bench.rounds import PAUSE, TimingProcesses
from posexport.bench.shapes import Sizes
from posexport.bench.worker import LONG_RUN_SECONDS
from posexport.files import real_path
from posexport.processes import FAILED as RAISED
from posexport.processes import KILLED, LIMITED, MEMORY, REFUSED
from posexport.progress import Progress

if TYPE_CHECKING:
    from posexport.bench.timed_file import TimedFile

BURST, MIN_BURST_SECONDS = 3, 0.01
"""The least number of timed runs in a turn, and about how long they, and the untimed runs before, take in seconds."""

MAX_RUNS, MIN_ROUNDS = 1000, 3
"""The most timed runs in a turn, and the least number of rounds, however slow a candidate is."""


@attrs.define
class _Series:
    """One candidate at one shape, by process: the seconds of timed runs by round, and the answer to `shape`."""

    turns: list[list[list[float]]] = attrs.field(factory=list)
    ready: list[Mapping[str, Any]] = attrs.field(factory=list)

    def medians(self) -> list[list[float]]:
        """The median run of each turn, by process."""
        return [[statistics.quantile(turn, 0.5) for turn in turns] for turns in self.turns]


class BenchSession:
    """The candidates of one benchmark. Those that run have a process, the others have a reason.

    `options` has the rounds and seconds of one session. `previous` is an earlier artifact, for the candidates of that
    role. `previous_sizes` are its own sizes. By default they are those of the artifact, which fit if both name their
    dimensions in the same way. `methods` gives the method of a lower bound, by its name and the sizes. Otherwise, all
    processes use the method of the first process.
    """

    def __init__(
        self,
        artifact: TimedFile,
        candidates: Sequence[Candidate],
        sizes: Sequence[Sizes],
        options: BenchOptions,
        previous: TimedFile | None,
        progress: Progress,
        methods: Mapping[tuple[str, str], str] | None = None,
        previous_sizes: Sequence[Sizes] | None = None,
    ) -> None:
        self._methods = dict(methods or {})
        self._artifact, self._previous, self._options = artifact, previous, options
        self._candidates = {candidate.name: candidate for candidate in candidates}
        self._sizes, self._progress = list(sizes), progress
        self._previous_sizes = self._sizes if previous_sizes is None else list(previous_sizes)
        self._series = [{name: _Series() for name in self._candidates} for _ in self._sizes]
        self._out: dict[tuple[str, int | None], Timing] = {}  # at one shape, or (None) at all of them
        self._loaded: dict[str, list[Mapping[str, Any]]] = {name: [] for name in self._candidates}
        self._timer = TimingProcesses()
        self._notes: dict[str, str] = {}
        self._not_made: dict[str, Timing] = {}
        self._folder = temporary.folder()
        self.rounds = [0] * len(self._sizes)
        self.processes, self.machine_load = 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.__exit__()
        self._folder.remove()

    def open_processes(self, count: int = 1) -> None:
        """Time every candidate at every shape `count` more times, each time in new processes."""
        for _ in range(count):
            self.processes += 1
            again = f" (process {self.processes})" if self.processes > 1 else ""
            with self._timer:
                for candidate in self._candidates.values():
                    if not self._is_out(candidate.name):
                        self._progress(f"loading {candidate.name}{again}")
                        self._open(candidate)
                for index, sizes in enumerate(self._sizes):
                    self._measure(index, sizes, again)

    def timings(self, index: int) -> tuple[Timing, ...]:
        """Every candidate at one shape, in their order. Empty before the first process."""
        if not self.processes:
            return ()
        return tuple(
            self._timing(name, index)
            if self._is_complete(name, index)
            else self._out.get((name, None)) or self._out[name, index]
            for name in self._candidates
        )

    def _is_complete(self, name: str, index: int) -> bool:
        """Whether every process timed it at this shape. If it fails later, it stays timed at earlier shapes."""
        return len(self._series[index][name].turns) == self.processes

    def _is_out(self, name: str, index: int | None = None) -> bool:
        return (name, None) in self._out or (name, index) in self._out

    def _open(self, candidate: Candidate) -> None:
        name = candidate.name
        artifact, sizes = self._timed_by(candidate)
        if (missing := candidate.missing(artifact)) is not None:
            self._out[name, None] = Timing(runtime=name, state=NOT_RUN, reason=missing)
            return
        options = dict(candidate.options)
        if self._options.cuda_graph and candidate.takes("cuda_graph"):
            options["cuda_graph"] = True
        threads = self._options.threads if candidate.takes("threads") else None
        without_effect = ["--threads"] * (threads != self._options.threads)
        if self._options.cuda_graph and candidate.runtime.needs_gpu and "cuda_graph" not in options:
            without_effect.append("--cuda-graph")
        self._notes[name] = "; ".join(f"{option} has no effect on it" for option in without_effect)
        if candidate.role in ("", PREVIOUS_ARTIFACT):
            options |= artifact.engine_options(candidate.runtime, sizes)
        path = self._path(candidate, artifact)
        if path is None:
            return
        request = {"runtime": attrs.asdict(candidate.runtime), "role": candidate.role, "options": options}
        reply = self._ask(name, None, "open", path=str(real_path(path)), threads=threads, **request)
        if reply is not None:
            self._loaded[name].append(reply)

    def _timed_by(self, candidate: Candidate) -> tuple[TimedFile, list[Sizes]]:
        """The file that a candidate times, and its sizes."""
        if self._previous is not None and candidate.role == PREVIOUS_ARTIFACT:
            return self._previous, self._previous_sizes
        return self._artifact, self._sizes

    def _path(self, candidate: Candidate, artifact: TimedFile) -> Path | None:
        """The file that it opens; None where it can't be made, with the reason noted."""
        request = artifact.work_request(self._sizes) if candidate.role == LOWER_BOUND else None
        if request is not None:
            return self._made(LOWER_BOUND, candidate.name, source=str(real_path(artifact.path)), **request)
        if candidate.runtime.package == "torch":  # it rebuilds the block from the ONNX file, also for a plan
            return artifact.source
        if candidate.role not in ALTERNATIVES:
            return artifact.path
        made = self._made(EXPORTED, candidate.name, source=str(real_path(self._artifact.source)))
        if made is None or candidate.role == EXPORTED:
            return made
        return self._made(OPTIMIZED, candidate.name, source=str(made), spec=self._artifact.spec)

    def _made(self, role: str, name: str, **fields: Any) -> Path | None:
        """The file of an alternative, or of a graph's work, made once, by a process of its own."""
        path = self._folder.path / f"{role}.{'json' if role == LOWER_BOUND else 'onnx'}"
        if role in self._not_made:
            self._out[name, None] = attrs.evolve(self._not_made[role], runtime=name)
        elif not path.exists():
            self._progress("counting products" if role == LOWER_BOUND else f"exporting {role}")
            if self._ask(name, None, "make", role=role, path=str(path), **fields) is None:
                self._not_made[role] = self._out[name, None]
            else:
                self._timer.close(name)
        return None if role in self._not_made else path

    def _measure(self, index: int, sizes: Sizes, again: str) -> None:
        ready: dict[str, Mapping[str, Any]] = {}
        settings = {"seed": self._options.seed, "warmup": self._options.warmup}
        transient = 0  # bytes that an earlier candidate allocates in every run
        for name, candidate in self._candidates.items():
            if self._is_out(name, index):
                continue
            if name not in self._timer:  # it ran out of memory at another shape
                self._open(candidate)
            if name not in self._timer:
                continue
            self._progress(f"warming up {name} at {sizes}{again}")
            method = self._methods.get((name, str(sizes)))
            file, sizes_of_file = self._timed_by(candidate)
            request = file.request(sizes_of_file[index]) | settings
            reply = self._ask(name, index, "shape", **request, keep_free=transient, method=method)
            if reply is not None:
                ready[name] = reply
                if METHOD in reply["describe"]:
                    self._methods[name, str(sizes)] = reply["describe"][METHOD]
                transient = max(transient, reply["memory"] - reply["resident"])
        if not ready:
            return
        seconds = {name: answer["run_seconds"] for name, answer in ready.items()}
        one_round = sum(PAUSE + _turn_seconds(run) for run in seconds.values())
        rounds = min(self._options.rounds or ROUNDS, max(MIN_ROUNDS, int(self._options.seconds / one_round)))
        step = partial(self._progress, f"timing {sizes}{again}")
        step()
        bursts, seed = {name: _burst(run) for name, run in seconds.items()}, self._options.seed + self.processes - 1
        turns, load = self._timer.interleave(bursts, rounds, seed, step, wake=MIN_BURST_SECONDS)
        self.machine_load = max(self.machine_load, load)
        self.rounds[index] += rounds
        for name, series in turns.items():
            if name in self._timer:
                self._series[index][name].turns.append(series)
                self._series[index][name].ready.append(ready[name])
            else:
                self._leave_out(name, index)

    def _ask(self, name: str, index: int | None, do: str, **fields: Any) -> Mapping[str, Any] | None:
        """A process's answer. None if it failed, with the reason noted."""
        reply = self._timer.ask(name, do, **fields)
        if reply is None:
            self._leave_out(name, index)
        return reply

    def _leave_out(self, name: str, index: int | None) -> None:
        """Note why a candidate failed: at this shape if it lacked memory or raised an error, else at all shapes."""
        code, reason = self._timer.failed[name].code, self._timer.failed[name].text
        if code == KILLED:  # as the kernel does if memory is short
            code, reason = MEMORY, f"{reason}, most likely for want of memory"
        code = MEMORY if code == LIMITED else code
        # torch.compile needs a compiler of the system's: its failure says nothing about the artifact
        refused = code == REFUSED or (code != MEMORY and self._candidates[name].role == COMPILED)
        where = index if code in (MEMORY, RAISED) else None
        self._out[name, where] = Timing(runtime=name, state=NOT_RUN if refused else FAILED, reason=reason)

    def _timing(self, name: str, index: int) -> Timing:
        series, sizes, role = self._series[index][name], self._sizes[index], self._candidates[name].role
        ratios, processes = {}, {}
        for kind, reference in self._candidates[name].references.items():
            if reference in self._candidates and self._is_complete(reference, index):
                other = self._series[index][reference].medians()
                ratios[kind], processes[kind] = statistics.ratio_of_processes(series.medians(), other)
        seconds = statistics.summarize([run for turns in series.turns for turn in turns for run in turn])
        first = series.ready[0]
        gpu = [answer["gpu_memory"] for answer in series.ready]
        return Timing(
            runtime=name,
            state=TIMED,
            note=self._notes[name],
            seconds=seconds,
            ratios=ratios,
            processes=processes,
            tokens_per_second=None if sizes.tokens is None else sizes.tokens / seconds.median,
            memory=None if role == LOWER_BOUND else max(answer["memory"] for answer in series.ready),
            gpu_memory=None if None in gpu else max(gpu),
            load_seconds=_median([answer["load_seconds"] for answer in self._loaded[name]]),
            build_seconds=_median([answer["build_seconds"] for answer in (*self._loaded[name], *series.ready)]),
            warmup_seconds=first["seconds"],
            engine={**self._loaded[name][0]["describe"], **first["describe"]},
        )


def _burst(seconds: float) -> int:
    """The timed runs in a turn, from the seconds of one. All turns have as many, so that slow turns count as much."""
    return max(BURST, min(math.ceil(MIN_BURST_SECONDS / max(seconds, 1e-9)), MAX_RUNS))


def _turn_seconds(run: float) -> float:
    """About how long a turn takes, with its untimed runs."""
    return run if run > LONG_RUN_SECONDS else max(run, MIN_BURST_SECONDS) + _burst(run) * run


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None
