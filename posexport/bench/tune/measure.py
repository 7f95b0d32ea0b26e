"""Timing candidates side by side: a process for each, rounds in alternation, and what each process took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from posexport import __version__
from posexport.bench.result import HIGH_MACHINE_LOAD
from posexport.bench.rounds import Others, interleave
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import Round
from posexport.bench.tune.programs import LIMIT, PreparedProgram, Programs
from posexport.bench.tune.space import NARROW, Candidate
from posexport.machine import SAME
from posexport.processes import Worker, failure_of

BURST, WARMUP = 3, 2
"""Timed runs per turn, and untimed ones once a process is up."""


PLAY = 1000
"""How far the seeds of two plays are apart at least: more than a race adds to its own."""


@attrs.define(kw_only=True)
class Cost:
    """What timing took: `runs` counts runs of any program, the untimed ones too; `turn` is the most of one turn."""

    seconds: float = 0.0
    runs: int = 0
    turn: int = 1


class CandidateTimer:
    """The candidates of a tuning, by name; `play` is what posexport.tune.race asks for.

    `busy` is the largest share of the CPU that other work took, `memory` the bytes that a process took at most.
    """

    def __init__(
        self,
        shelf: Programs,
        store: Store,
        runtime: str,
        machine: Mapping[str, Any],
        seed: int,
        progress: Callable[[str], object],
    ) -> None:
        self._shelf, self._store, self._runtime, self._seed = shelf, store, runtime, seed
        self._machine = {name: machine.get(name) for name in SAME}
        self._progress = progress
        self._entries: dict[str, tuple[Candidate, PreparedProgram]] = {}
        self._plays = 0
        self.cost, self.machine_load = Cost(), 0.0
        self.memory: dict[str, int] = {}

    def add(self, candidate: Candidate, fitted: PreparedProgram) -> None:
        """A candidate that may be asked for from now on."""
        self._entries[str(candidate)] = (candidate, fitted)

    def play(self, names: Sequence[str], rounds: int, seed: int) -> tuple[list[Round], Mapping[str, str]]:
        """Time them in interleaved rounds: the seconds of each round, and why some have none.

        Each play of a tuning has its number, so that no rounds count twice. What was timed beside other work, and what
        failed, is timed anew by the next tuning.
        """
        self._plays += 1
        seed += PLAY * self._plays
        entries = [self._entries[name] for name in names]
        key = {
            "what": "rounds",
            "entries": [[fitted.sha256, self._options(*each)] for each in entries for fitted in [each[1]]],
            "sizes": [dict(fitted.sizes) for _, fitted in entries],
            "runtime": self._runtime,
            "rounds": rounds,
            "seeds": [seed, self._seed],
            "settings": [BURST, WARMUP],
            "machine": self._machine,
            "engines": self._shelf.engines,
            "posexport": __version__,
        }
        fact = self._store.get(key, lambda: self._time(list(names), rounds, seed), _stands)
        self.cost.seconds += fact["seconds"]
        self.cost.runs += fact["runs"]
        self.cost.turn = max(self.cost.turn, fact["turn"])
        self.machine_load = max(self.machine_load, fact["machine_load"])
        for place, size in enumerate(fact["memory"]):
            if size is not None:
                self.memory[names[place]] = max(size, self.memory.get(names[place], 0))
        failed = {names[place]: why for place, why in enumerate(fact["failed"]) if why is not None}
        found: list[Round] = [
            {names[place]: seconds for place, seconds in enumerate(each) if names[place] not in failed}
            for each in fact["rounds"]
        ]
        return found, failed

    def _options(self, candidate: Candidate, fitted: PreparedProgram) -> dict[str, Any]:
        """The options that the engine is opened with."""
        options = dict(candidate.options)
        if self._runtime.startswith("ort"):
            return {"io_binding": False, **options}
        if options.pop("profile", None) == NARROW:
            options["profile"] = list(fitted.profile)
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
                candidate, fitted = self._entries[name]
                path = str(self._shelf.path(candidate.program).resolve())
                options = self._options(candidate, fitted)
                opened = ask(name, "open", runtime_name=self._runtime, options=options, path=path, threads=None)
                if opened is None:
                    continue
                asked = {"spec": fitted.spec, "seed": self._seed, "warmup": WARMUP, **fitted.sizes}
                ready = ask(name, "shape", **asked)
                if ready is not None:
                    memory[name] = ready["memory"] if ready["gpu_memory"] is None else ready["gpu_memory"]
                    runs += WARMUP
            calls = {name: turn(name) for name in names if name not in failed}
            self._progress(f"timing {len(calls)} candidates")
            others = Others([pid for worker in workers.values() if (pid := worker.pid) is not None])
            series = interleave(calls, rounds, seed=seed) if calls else {}
            busy = others.share()
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
            "machine_load": busy,
            "seconds": time.perf_counter() - start,
        }


def _stands(fact: Mapping[str, Any]) -> bool:
    return bool(fact["machine_load"] <= HIGH_MACHINE_LOAD and not any(fact["failed"]))
