"""The child process that times one artifact on one runtime: `python -m posexport.bench.worker`.

It serves as `posexport.runtimes.worker` does; a request names what to `do`:
    open   {runtime, role, options, path, threads} -> {describe, load_seconds, build_seconds}   loads the artifact;
                               `runtime` is the row of posexport.runtimes as plain data
    shape  {spec or roles, seed, warmup, keep_free, method, batch, seq, ...}   binds inputs, runs up to `warmup` times;
                               sizes are by the contract of a spec, or by the meanings of axes if there are roles;
                               `method` is the method of the lower bound, if it is known
           -> {seconds, run_seconds, build_seconds, memory, resident, gpu_memory, describe}
    time   {burst[, wake]}  -> {seconds: [...]}   untimed runs for `wake` seconds, at least one, then `burst` timed ones
    make   {role, path, source[, spec][, roles, dtype, requests]} -> {}   writes the file of an alternative, or the work
                               of a graph at all sizes (posexport.bench.graph_work)

The code of a failure is "refused" if the engine says that it can't run this, "memory" if memory was not enough, and
"failed" for anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from posexport import machine
from posexport.bench.candidates import EXPORTED, LOWER_BOUND
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.errors import PosexportError, Reason
from posexport.jsondata import read_json, structure, unstructure
from posexport.models import read_spec
from posexport.processes import FAILED, MEMORY, REFUSED, serve
from posexport.runtimes import TENSORRT, Runtime
from posexport.runtimes.base import Arrays, MethodRunner, Runner
from posexport.runtimes.cuda import memory_used

LONG_RUN_SECONDS = 0.25
"""A run of more seconds is timed once in a turn, with no run before it. Threads wake within milliseconds."""

WARMUP_SECONDS = 5.0
"""Seconds after which warming up ends, but not before the second run, because the first may compile."""


class Worker:
    """State of the child between requests."""

    def __init__(self) -> None:
        self._runner: Runner  # set by `open`
        self._call: Callable[[], float] = _not_prepared
        self._before = 0
        self._gpu_before: int | None = None
        self._limited = self._compiled = False
        self._last = 0.0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of the method that a request names."""
        done: dict[str, Any] = getattr(self, request.pop("do"))(**request)
        return done

    def open(
        self, runtime: dict[str, Any], options: dict[str, Any], path: str, threads: int | None, role: str = ""
    ) -> dict[str, Any]:
        row = Runtime(**runtime)
        self._limited = not row.needs_gpu
        self._compiled = options.get("compiled", False)
        if row.package == "torch":
            import torch

            if threads:
                torch.set_num_threads(threads)
        elif threads and row.package == "onnxruntime":
            options["threads"] = threads
        import_module(row.package)
        self._gpu_before = _gpu_used(row.needs_gpu)  # first: it makes CUDA's context, which is not the engine's
        self._before = machine.forget_peak()
        start = time.perf_counter()
        if role == LOWER_BOUND:
            self._runner = _lower_bound(Path(path), row.options["device"], threads)
        else:
            self._runner = attrs.evolve(row, options={**row.options, **options}).load(Path(path))
        seconds = time.perf_counter() - start
        built = row.module == TENSORRT and path.endswith(".onnx")
        return {
            "describe": self._runner.describe(),
            "load_seconds": seconds,
            "build_seconds": seconds if built else None,
        }

    def shape(
        self,
        spec: dict[str, Any] | None = None,
        *,
        seed: int,
        warmup: int,
        roles: list[Any] | None = None,
        keep_free: int = 0,
        method: str | None = None,
        **sizes: int,
    ) -> dict[str, Any]:
        if isinstance(self._runner, MethodRunner):
            self._runner.method, self._runner.sizes = method, sizes
        self._call = _not_prepared  # frees the memory of the previous shape
        if self._limited:
            machine.limit_to_what_is_free(keep_free)
        machine.forget_peak()
        start = time.perf_counter()
        if roles is not None:
            inputs = _inputs_by_role(roles, sizes, seed)
        else:
            inputs = seeded_inputs(read_spec(spec or {}), Sizes.of(sizes), seed)
        self._call = self._runner.prepare(inputs)
        before = time.perf_counter()
        runs = [self._call()]
        built = time.perf_counter() - before
        while len(runs) < warmup and (len(runs) < 2 or time.perf_counter() - start < WARMUP_SECONDS):
            runs.append(self._call())
        self._last = runs[-1]
        gpu = _gpu_used(self._gpu_before is not None)
        return {
            "seconds": time.perf_counter() - start,
            "run_seconds": self._last,
            "build_seconds": built if self._compiled else None,
            "memory": max(machine.peak() - self._before, 0),
            "resident": max(machine.resident() - self._before, 0),
            "gpu_memory": None if gpu is None or self._gpu_before is None else max(gpu - self._gpu_before, 0),
            "describe": self._runner.describe(),
        }

    def time(self, burst: int, wake: float = 0.0) -> dict[str, Any]:
        if self._last > LONG_RUN_SECONDS:
            return {"seconds": [self._call()]}
        # threads sleep while others run; when they wake, they share a CPU for some milliseconds, and runs are slower
        start = time.perf_counter()
        self._call()
        while time.perf_counter() - start < wake:
            self._call()
        return {"seconds": [self._call() for _ in range(burst)]}

    def make(
        self, role: str, path: str, source: str, spec: dict[str, Any] | None = None, **graph: Any
    ) -> dict[str, Any]:
        from posexport.bench import alternatives

        if role == LOWER_BOUND:
            machine.limit_to_what_is_free()
            _write_works(Path(path), Path(source), **graph)
        elif role == EXPORTED:
            alternatives.write_plain(Path(source), Path(path))
        else:
            alternatives.write_optimized(Path(source), Path(path), read_spec(spec or {}))
        return {}


def _not_prepared() -> float:
    raise RuntimeError("a shape must be prepared before it is timed")


def _lower_bound(path: Path, device: str, threads: int | None) -> Runner:
    """The lower bound of an artifact, or of a graph whose work is in this file."""
    from posexport.bench.lower_bound import LowerBoundRunner, of_spec
    from posexport.bench.work import Work

    if path.suffix == ".json":
        data = read_json(path)
        works = {tuple(sorted(sizes.items())): structure(one, Work) for sizes, one in data["works"]}
        return LowerBoundRunner(lambda _, sizes: works[tuple(sorted(sizes.items()))], data["dtype"], device, threads)
    from posexport.artifact.onnx_artifact import read_onnx

    return of_spec(read_onnx(path).spec, device, threads)


def _write_works(path: Path, source: Path, roles: list[Any], dtype: str, requests: list[dict[str, int]]) -> None:
    """Write the work of a graph at each of these sizes."""
    import torch

    from posexport.bench.graph_work import works_of
    from posexport.files import write_json
    from posexport.graphs.roles import Role
    from posexport.models.weights import TORCH_DTYPES

    itemsize = getattr(torch, TORCH_DTYPES[dtype]).itemsize
    works = works_of(source, [structure(one, Role) for one in roles], requests, itemsize)
    write_json(path, {"dtype": dtype, "works": list(zip(requests, map(unstructure, works), strict=True))})


def _inputs_by_role(data: list[Any], sizes: dict[str, int], seed: int) -> Arrays:
    """Inputs of a graph of another tool. Positions follow the cached ones, and nothing is padded."""
    import numpy as np

    from posexport.graphs.draw import draw_inputs
    from posexport.graphs.roles import Role

    roles = {role.name: role for role in (structure(one, Role) for one in data)}
    return draw_inputs(roles, sizes, np.random.default_rng(seed)).arrays


def _gpu_used(on_gpu: bool) -> int | None:
    """Bytes in use on the GPU by all processes, or None if the driver doesn't say."""
    try:
        return memory_used() if on_gpu else None
    except (OSError, AttributeError):  # without this number, the timing is still valid
        return None


def explain(error: Exception) -> Reason:
    """The code of an error and its first line. The parent process decides what it means."""
    first, kind = next((line for line in str(error).splitlines() if line.strip()), ""), type(error).__name__
    if isinstance(error, PosexportError):
        return Reason(REFUSED, first[:300])
    if kind == "NotImplemented":  # onnxruntime's exception
        return Reason(REFUSED, f"{kind}: {first}"[:300])
    if machine.is_short(error):
        return Reason(MEMORY, f"out of memory: {kind}: {first}"[:300])
    return Reason(FAILED, f"{kind}: {first}"[:300])


if __name__ == "__main__":
    serve(Worker().answer, explain)
