"""Timing candidates side by side: a process for each, rounds in alternation, and what each process took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from posexport.bench.result import HIGH_MACHINE_LOAD
from posexport.bench.rounds import TimingProcesses
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import Round
from posexport.bench.tune.programs import PreparedProgram, Programs
from posexport.bench.tune.space import Candidate
from posexport.machine import SAME
from posexport.progress import Progress

BURST, WARMUP = 3, 2
"""Timed runs per turn, and untimed ones once a process is up."""

SEED_STEP = 1000
"""How far the seeds of two sets of rounds are apart at least: more than successive halving adds to its own."""


@attrs.define(kw_only=True)
class Cost:
    """What timing took: `runs` counts runs of any program, the untimed ones too; `turn` is the most of one turn."""

    seconds: float = 0.0
    runs: int = 0
    turn: int = 1


class CandidateTimer:
    """Times the candidates of a tuning, by name.

    `machine_load` is the largest share of the CPU that other work took, `memory` the bytes that a process took at most.
    """

    def __init__(
        self, programs: Programs, store: Store, runtime: str, machine: Mapping[str, Any], seed: int, progress: Progress
    ) -> None:
        self._programs, self._store, self._runtime, self._seed = programs, store, runtime, seed
        self._machine = {name: machine.get(name) for name in SAME}
        self._progress = progress
        self._entries: dict[str, tuple[Candidate, PreparedProgram]] = {}
        self._calls = 0
        self.cost, self.machine_load = Cost(), 0.0
        self.memory: dict[str, int] = {}

    def add(self, candidate: Candidate, prepared: PreparedProgram) -> None:
        """A candidate that may be asked for from now on."""
        self._entries[str(candidate)] = (candidate, prepared)

    def time_rounds(self, names: Sequence[str], rounds: int, seed: int) -> tuple[list[Round], Mapping[str, str]]:
        """Time them in interleaved rounds: the seconds of each round, and why some have none.

        Each call has its number, so that no rounds count twice. What was timed beside other work, and what failed, is
        timed anew by the next tuning.
        """
        self._calls += 1
        seed += SEED_STEP * self._calls
        entries = [self._entries[name] for name in names]
        key = {
            "what": "rounds",
            "entries": [[prepared.sha256, self._options(candidate, prepared)] for candidate, prepared in entries],
            "sizes": [dict(prepared.sizes) for _, prepared in entries],
            "runtime": self._runtime,
            "rounds": rounds,
            "seeds": [seed, self._seed],
            "settings": [BURST, WARMUP],
            "machine": self._machine,
            "engines": self._programs.engines,
        }

        def reusable(fact: dict[str, Any]) -> bool:
            return not any(fact["failed"]) and bool(fact["machine_load"] <= HIGH_MACHINE_LOAD)

        fact = self._store.get(key, lambda: self._time(names, rounds, seed), reusable)
        self.cost.seconds += fact["seconds"]
        self.cost.runs += fact["runs"]
        self.cost.turn = max(self.cost.turn, fact["turn"])
        self.machine_load = max(self.machine_load, fact["machine_load"])
        for name, size in zip(names, fact["memory"], strict=True):
            if size is not None:
                self.memory[name] = max(size, self.memory.get(name, 0))
        failed = {name: reason for name, reason in zip(names, fact["failed"], strict=True) if reason is not None}
        timed: list[Round] = [
            {name: seconds for name, seconds in zip(names, row, strict=True) if name not in failed}
            for row in fact["rounds"]
        ]
        return timed, failed

    def _options(self, candidate: Candidate, prepared: PreparedProgram) -> dict[str, Any]:
        """The options that the engine is opened with."""
        options = dict(candidate.options)
        if self._runtime.startswith("ort"):
            return {"io_binding": False, **options}
        if "profile" in options:
            options["profile"] = list(prepared.profile_under(options))
        return options

    def _time(self, names: Sequence[str], rounds: int, seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        memory: dict[str, int] = {}
        with TimingProcesses() as processes:
            for name in names:
                self._progress(f"loading {name}")
                candidate, prepared = self._entries[name]
                path = str(self._programs.path(candidate.program).resolve())
                options = self._options(candidate, prepared)
                if processes.ask(name, "open", runtime_name=self._runtime, options=options, path=path, threads=None):
                    asked: dict[str, Any] = {"spec": prepared.spec, "seed": self._seed, **prepared.sizes}
                    ready = processes.ask(name, "shape", warmup=WARMUP, **asked)
                    if ready is not None:
                        memory[name] = ready["memory"] if ready["gpu_memory"] is None else ready["gpu_memory"]
            self._progress(f"timing {len(memory)} candidates")
            series, machine_load = processes.interleave(dict.fromkeys(memory, BURST), rounds, seed)
        medians = {name: [median(turn) if turn else None for turn in turns] for name, turns in series.items()}
        # a short run has an untimed one before
        runs = [len(turn) + (len(turn) > 1) for turns in series.values() for turn in turns if turn]
        reasons = {name: reason.text for name, reason in processes.failed.items()}
        return {
            "rounds": list(zip(*(medians.get(name, [None] * rounds) for name in names), strict=True)),
            "failed": [reasons.get(name) for name in names],
            "memory": [memory.get(name) for name in names],
            "runs": WARMUP * len(memory) + sum(runs),
            "turn": max(runs, default=1),
            "machine_load": machine_load,
            "seconds": time.perf_counter() - start,
        }
