"""Timing candidates side by side: a process for each, rounds in alternation, and the memory of each process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from posexport.bench.result import HIGH_MACHINE_LOAD
from posexport.bench.rounds import TimingProcesses
from posexport.bench.tune.halving import Round
from posexport.bench.tune.programs import Programs
from posexport.bench.tune.result import Row
from posexport.files import real_path
from posexport.machine import SAME
from posexport.runtimes import RUNTIMES

BURST, WARMUP = 3, 2
"""Timed runs in a turn, and untimed runs after a process has started."""

SEED_STEP = 1000
"""The least difference between the seeds of two sets of rounds. Successive halving adds less to its seed."""


class CandidateTimer:
    """Times the candidates of a tuning. `candidates` has their rows by name.

    `seconds` is how long timing took. `runs` counts all runs, also untimed ones, and `turn` is the most runs of one
    turn. `machine_load` is the largest CPU share of other work. `memory` has the most bytes that each process took.
    """

    def __init__(self, programs: Programs, machine: Mapping[str, Any]) -> None:
        self._programs, self._machine = programs, {name: machine.get(name) for name in SAME}
        self.candidates: dict[str, Row] = {}
        self._calls = 0
        self.seconds, self.runs, self.turn, self.machine_load = 0.0, 0, 1, 0.0
        self.memory: dict[str, int] = {}

    def time_rounds(self, names: Sequence[str], rounds: int, seed: int) -> tuple[list[Round], Mapping[str, str]]:
        """Time them in interleaved rounds. Returns the seconds of each round, and why some have none.

        Calls are numbered, so that no rounds count twice. The next tuning repeats rounds that failed or ran beside
        other work.
        """
        self._calls += 1
        seed += SEED_STEP * self._calls
        request = self._programs.request
        entries = []
        for name in names:
            prepared = self._programs.prepared[self.candidates[name].program]
            entries.append([name, prepared.sha256, self._options(self.candidates[name]), dict(prepared.sizes)])
        key = {
            "what": "rounds",
            "entries": entries,
            "runtime": request.runtime,
            "rounds": rounds,
            "seeds": [seed, request.seed],
            "settings": [BURST, WARMUP],
            "machine": self._machine,
            "engines": self._programs.engines,
        }

        def reusable(fact: dict[str, Any]) -> bool:
            return not fact["failed"] and bool(fact["machine_load"] <= HIGH_MACHINE_LOAD)

        fact = self._programs.store.get(key, lambda: self._time(names, rounds, seed), reusable)
        self.seconds += fact["seconds"]
        self.runs += fact["runs"]
        self.turn = max(self.turn, fact["turn"])
        self.machine_load = max(self.machine_load, fact["machine_load"])
        for name, size in fact["memory"].items():
            self.memory[name] = max(size, self.memory.get(name, 0))
        return fact["rounds"], fact["failed"]

    def _options(self, row: Row) -> dict[str, Any]:
        """The options with which the engine is opened."""
        if self._programs.request.runtime.startswith("ort"):
            return {"io_binding": False, **self._programs.prepared[row.program].engine, **row.options}
        return {**row.options, **({"profile": self._programs.profile(row)} if "profile" in row.options else {})}

    def _time(self, names: Sequence[str], rounds: int, seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        memory: dict[str, int] = {}
        programs, request = self._programs, self._programs.request
        runtime = attrs.asdict(RUNTIMES[request.runtime])
        with TimingProcesses() as processes:
            for name in names:
                programs.progress(f"loading {name}")
                row = self.candidates[name]
                prepared, options = programs.prepared[row.program], self._options(row)
                path = str(real_path(programs.path(row.program)))
                if processes.ask(name, "open", runtime=runtime, options=options, path=path, threads=None):
                    asked: dict[str, Any] = {**prepared.inputs, "seed": request.seed, **prepared.sizes}
                    ready = processes.ask(name, "shape", warmup=WARMUP, **asked)
                    if ready is not None:
                        memory[name] = ready["memory"] if ready["gpu_memory"] is None else ready["gpu_memory"]
            programs.progress(f"timing {len(memory)} candidates")
            series, machine_load = processes.interleave(dict.fromkeys(memory, BURST), rounds, seed)
        timed = {name: turns for name, turns in series.items() if name not in processes.failed}
        # a short run follows an untimed one
        runs = [len(turn) + (len(turn) > 1) for turns in series.values() for turn in turns if turn]
        return {
            "rounds": [{name: median(turns[at]) for name, turns in timed.items()} for at in range(rounds)],
            "failed": {name: reason.text for name, reason in processes.failed.items()},
            "memory": memory,
            "runs": WARMUP * len(memory) + sum(runs),
            "turn": max(runs, default=1),
            "machine_load": machine_load,
            "seconds": time.perf_counter() - start,
        }
