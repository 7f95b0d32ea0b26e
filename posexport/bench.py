"""The bench stage: latency and memory of an artifact on every runtime that is there, beside torch of the same block.

Each runtime has its own process, so that its memory can be told and a crash ends only itself. They are called in
alternation (posexport.timing); a turn is one untimed run, which wakes threads that slept, and then a few timed ones.
Quantiles are over all timed runs; the ratio to torch eager is over rounds, of the median run of each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport import timing
from posexport.bench_candidates import CANDIDATES, Candidate, choose
from posexport.bench_shapes import Sizes, Subject, read_subject
from posexport.errors import RequestError
from posexport.runtimes.pool import Worker

BURST = 3
OPEN_LIMIT, RUN_LIMIT = 900.0, 300.0
"""Seconds: to load and compile for one shape, and for one turn."""

BUSY = 0.2
TIMED, FAILED, NOT_RUN = "timed", "failed", "not run"


@attrs.frozen(kw_only=True)
class Timing:
    """One candidate at one shape: `state` is timed, failed or not run, with the reason for the last two.

    `note` says which options had no effect on it.
    """

    runtime: str
    state: str
    reason: str = ""
    note: str = ""
    seconds: timing.Summary | None = None
    ratio: timing.Ratio | None = None
    against: str = ""
    memory: int | None = None
    gpu_memory: int | None = None
    warmup_seconds: float | None = None
    engine: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Benchmark:
    """The result: every candidate at every shape."""

    file: str
    encoding: str
    form: str
    opset: int
    dtype: str
    rounds: int
    burst: int
    seed: int
    busy: float
    """The share of the CPU that other work took during the rounds: above `BUSY`, times mean little."""
    shapes: tuple[tuple[Sizes, tuple[Timing, ...]], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; times in seconds, memory in bytes."""
        head = {f.name: getattr(self, f.name) for f in attrs.fields(Benchmark) if f.name != "shapes"}
        shapes = [
            {**sizes.to_dict(), "results": [attrs.asdict(result) for result in results]}
            for sizes, results in self.shapes
        ]
        return {**head, "shapes": shapes}

    def states(self, name: str) -> set[str]:
        """The states of one candidate over all shapes."""
        return {result.state for _, results in self.shapes for result in results if result.runtime == name}


def bench(
    path: Path,
    *,
    runtimes: Sequence[str] = (),
    shapes: Sequence[str] = (),
    rounds: int = 20,
    warmup: int = 3,
    threads: int | None = None,
    cuda_graph: bool = False,
    seed: int = 0,
    progress: Callable[[str], object] = lambda step: None,
) -> Benchmark:
    """Time the artifact at `path`; torch eager and torch.compile are always among the candidates.

    `shapes` are texts like `batch=1,seq=128`; `threads` counts the threads of each runtime (default: its own choice).
    `progress` is called with what comes next. RequestError for names, sizes and files that can't be used.
    """
    chosen = choose(runtimes)
    subject = read_subject(path)
    sizes = subject.sizes(shapes)
    if rounds < 1 or warmup < 1:
        raise RequestError(f"rounds is {rounds} and warmup {warmup}: each must be at least 1.")
    with _Field(subject, threads, cuda_graph) as field:
        for candidate in chosen:
            progress(f"loading {candidate.name}")
            field.open(candidate, sizes)
        results = tuple((each, field.measure(each, rounds, warmup, seed, progress)) for each in sizes)
    return Benchmark(
        file=path.name,
        encoding=subject.spec.encoding.name,
        form=subject.form,
        opset=subject.opset,
        dtype=subject.spec.dtype,
        rounds=rounds,
        burst=BURST,
        seed=seed,
        busy=field.busy,
        shapes=results,
    )


class _Field:
    """The candidates of one benchmark: those that run have a process, the others a reason."""

    def __init__(self, subject: Subject, threads: int | None, cuda_graph: bool) -> None:
        self._subject, self._threads, self._cuda_graph = subject, threads, cuda_graph
        self._workers: dict[str, Worker] = {}
        self._notes: dict[str, str] = {}
        self._engines: dict[str, Mapping[str, str]] = {}
        self._out: dict[str, Timing] = {}
        self._names: list[str] = []
        self.busy = 0.0

    def __enter__(self) -> _Field:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def open(self, candidate: Candidate, sizes: Sequence[Sizes]) -> None:
        self._names.append(candidate.name)
        missing = candidate.missing(self._subject)
        if missing is not None:
            self._out[candidate.name] = Timing(runtime=candidate.name, state=NOT_RUN, reason=missing)
            return
        options = dict(candidate.options)
        if self._cuda_graph and candidate.takes("cuda_graph"):
            options["cuda_graph"] = True
        threads = self._threads if candidate.takes("threads") else None
        idle = ["--threads"] * (threads != self._threads)
        if self._cuda_graph and candidate.runtime.needs_gpu and "cuda_graph" not in options:
            idle.append("--cuda-graph")
        self._notes[candidate.name] = "; ".join(f"{option} has no effect on it" for option in idle)
        if candidate.runtime.home == "trt" and self._subject.plan_runtime is None:
            options["profile"] = self._subject.profile(sizes)
        fields = {"runtime_name": candidate.runtime.name, "options": options, "threads": threads}
        worker = self._workers[candidate.name] = Worker("posexport.bench_worker")
        path = str(candidate.path(self._subject).resolve())
        reply = self._ask(worker, candidate.name, "open", OPEN_LIMIT, path=path, **fields)
        if reply is not None:
            self._engines[candidate.name] = reply["describe"]

    def measure(
        self, sizes: Sizes, rounds: int, warmup: int, seed: int, progress: Callable[[str], object]
    ) -> tuple[Timing, ...]:
        """Every candidate at one shape, in their order. What fails stays failed for the shapes after it."""
        ready: dict[str, Mapping[str, Any]] = {}
        asked = {"spec": self._subject.spec.to_dict(), **sizes.to_dict(), "seed": seed, "warmup": warmup}
        for name, worker in self._alive().items():
            progress(f"warming up {name} at {sizes}")
            reply = self._ask(worker, name, "shape", OPEN_LIMIT, **asked)
            if reply is not None:
                ready[name] = reply
        calls = {name: self._turn(name, self._workers[name]) for name in ready}
        progress(f"timing {sizes}")
        done = lambda: progress(f"timing {sizes}")  # noqa: E731 (a step per round)
        others = timing.Others([pid for worker in self._alive().values() if (pid := worker.pid) is not None])
        turns = timing.interleave(calls, rounds, seed=seed, done=done) if calls else {}
        self.busy = max(self.busy, others.share())
        whole = {name: series for name, series in turns.items() if name not in self._out}
        return tuple(self._out.get(name) or self._timing(name, ready[name], whole) for name in self._names)

    def _alive(self) -> dict[str, Worker]:
        return {name: worker for name, worker in self._workers.items() if name not in self._out}

    def _turn(self, name: str, worker: Worker) -> Callable[[], list[float]]:
        def turn() -> list[float]:
            reply = None if name in self._out else self._ask(worker, name, "time", RUN_LIMIT, burst=BURST)
            return [] if reply is None else list(reply["seconds"])

        return turn

    def _ask(self, worker: Worker, name: str, do: str, limit: float, **fields: Any) -> Mapping[str, Any] | None:
        """A worker's answer; None once it is out, with the reason noted."""
        found = worker.ask({"do": do, **fields}, limit)
        if found["ok"]:
            return found
        # torch.compile needs a compiler of the system's: its failure says nothing about the artifact
        refused = found.get("kind") == "refused" or "compile" in name
        self._out[name] = Timing(runtime=name, state=NOT_RUN if refused else FAILED, reason=found["error"])
        worker.close()
        return None

    def _timing(self, name: str, ready: Mapping[str, Any], turns: Mapping[str, list[list[float]]]) -> Timing:
        against, own = CANDIDATES[name].against, turns[name]
        ratio = None
        if against in turns:
            typical = {each: [timing.quantile(turn, 0.5) for turn in turns[each]] for each in (name, against)}
            ratio = timing.ratio(typical[name], typical[against])
        return Timing(
            runtime=name,
            state=TIMED,
            note=self._notes[name],
            seconds=timing.summarize([seconds for turn in own for seconds in turn]),
            ratio=ratio,
            against=against if ratio else "",
            memory=ready["memory"],
            gpu_memory=ready["gpu_memory"],
            warmup_seconds=ready["seconds"],
            engine=self._engines[name],
        )
