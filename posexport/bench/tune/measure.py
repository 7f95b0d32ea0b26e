"""Timing candidates side by side: a process for each, rounds in alternation, and what each process took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from posexport import __version__
from posexport.bench.result import HIGH_MACHINE_LOAD
from posexport.bench.rounds import MachineLoad, interleave
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import Round
from posexport.bench.tune.programs import LIMIT, PreparedProgram, Programs
from posexport.bench.tune.space import NARROW, Candidate
from posexport.machine import SAME
from posexport.processes import Worker, failure_of
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
        self,
        programs: Programs,
        store: Store,
        runtime: str,
        machine: Mapping[str, Any],
        seed: int,
        progress: Progress,
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
            "posexport": __version__,
        }
        fact = self._store.get(key, lambda: self._time(list(names), rounds, seed), _is_reusable)
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
        if options.pop("profile", None) == NARROW:
            options["profile"] = list(prepared.profile)
        return options

    def _time(self, names: list[str], rounds: int, seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        failed: dict[str, str] = {}
        memory: dict[str, int] = {}
        runs, turn_runs = 0, 1
        workers = {name: Worker("posexport.bench.worker") for name in names}

        def ask(name: str, do: str, **fields: Any) -> Mapping[str, Any] | None:
            reply = workers[name].ask({"do": do, **fields}, LIMIT)
            reason = failure_of(reply)
            if reason is None:
                return reply
            failed[name] = reason.text
            workers[name].close()
            return None

        def turn(name: str) -> Callable[[], float | None]:
            def once() -> float | None:
                nonlocal runs, turn_runs
                reply = None if name in failed else ask(name, "time", burst=BURST)
                if reply is None:
                    return None
                taken = len(reply["seconds"]) + (len(reply["seconds"]) > 1)  # a short run has an untimed one before
                runs, turn_runs = runs + taken, max(turn_runs, taken)
                return float(median(reply["seconds"]))

            return once

        try:
            for name in names:
                self._progress(f"loading {name}")
                candidate, prepared = self._entries[name]
                path = str(self._programs.path(candidate.program).resolve())
                options = self._options(candidate, prepared)
                opened = ask(name, "open", runtime_name=self._runtime, options=options, path=path, threads=None)
                if opened is None:
                    continue
                asked = {"spec": prepared.spec, "seed": self._seed, "warmup": WARMUP, **prepared.sizes}
                ready = ask(name, "shape", **asked)
                if ready is not None:
                    memory[name] = ready["memory"] if ready["gpu_memory"] is None else ready["gpu_memory"]
                    runs += WARMUP
            calls = {name: turn(name) for name in names if name not in failed}
            self._progress(f"timing {len(calls)} candidates")
            load = MachineLoad([pid for worker in workers.values() if (pid := worker.pid) is not None])
            series = interleave(calls, rounds, seed=seed) if calls else {}
            machine_load = load.share()
        finally:
            for worker in workers.values():
                worker.close()
        return {
            "rounds": [
                [series[name][number] if name in series else None for name in names]
                for number in range(rounds if calls else 0)
            ],
            "failed": [failed.get(name) for name in names],
            "memory": [memory.get(name) for name in names],
            "runs": runs,
            "turn": turn_runs,
            "machine_load": machine_load,
            "seconds": time.perf_counter() - start,
        }


def _is_reusable(fact: Mapping[str, Any]) -> bool:
    return bool(fact["machine_load"] <= HIGH_MACHINE_LOAD and not any(fact["failed"]))
