"""The child process that times one artifact on one runtime: `python -m posexport.bench_worker`.

It serves as `posexport.runtimes.worker` does; a request names what to `do`:
    open   {runtime_name, options, path, threads} -> {describe}                      loads the engine and the artifact
    shape  {spec, seed, warmup, batch, seq, ...}  -> {seconds, memory, gpu_memory}   binds inputs, runs `warmup` times
    time   {burst}                                -> {seconds: [...]}     one untimed run, then `burst` timed ones
The `kind` of a failure is "refused" where the engine says it can't run this, "failed" for anything else.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import psutil

from posexport.bench_shapes import Sizes, seeded_inputs
from posexport.errors import PosexportError
from posexport.models import read_spec
from posexport.runtimes import runtime
from posexport.runtimes.base import Runner
from posexport.runtimes.cuda import memory_used
from posexport.runtimes.worker import serve


class Worker:
    """State of the child between requests."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._call: Callable[[], float] | None = None
        self._before = 0
        self._gpu_before: int | None = None

    def open(self, runtime_name: str, options: dict[str, Any], path: str, threads: int | None) -> dict[str, Any]:
        row = runtime(runtime_name)
        compiled = options.pop("compiled", False)
        if row.package == "torch":
            import torch

            if threads:
                torch.set_num_threads(threads)
        elif threads and row.package == "onnxruntime":
            options["threads"] = threads
        __import__(row.package)
        self._gpu_before = _gpu_used(row.needs_gpu)  # first: it makes CUDA's context, which no engine is to answer for
        self._before = _forget_peak()
        loaded = attrs.evolve(row, options={**row.options, **options}).load(Path(path))
        if compiled:
            _compile(loaded)
        self._runner = loaded
        return {"describe": loaded.describe()}

    def shape(self, spec: dict[str, Any], seed: int, warmup: int, **sizes: int) -> dict[str, Any]:
        assert self._runner is not None
        self._call = None  # the memory of the shape before
        _forget_peak()
        start = time.perf_counter()
        self._call = self._runner.prepare(seeded_inputs(read_spec(spec), Sizes(**sizes), seed))
        for _ in range(warmup):
            self._call()
        gpu = _gpu_used(self._gpu_before is not None)
        return {
            "seconds": time.perf_counter() - start,
            "memory": max(_peak() - self._before, 0),
            "gpu_memory": None if gpu is None or self._gpu_before is None else max(gpu - self._gpu_before, 0),
        }

    def time(self, burst: int) -> dict[str, Any]:
        assert self._call is not None
        self._call()  # wakes the thread pool that slept while others ran
        return {"seconds": [self._call() for _ in range(burst)]}


def _compile(loaded: Any) -> None:
    """Compile the block of a torch runner in place; it is specialised for each shape, as a deployment would be."""
    import torch

    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    loaded._block.compile(dynamic=False)


def _forget_peak() -> int:
    """Resident bytes now, from where the peak counts anew (Linux; elsewhere the peak is what is resident)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """The most resident bytes since `_forget_peak`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def _gpu_used(wanted: bool) -> int | None:
    """Bytes in use on the GPU by everyone, or None where the driver doesn't say."""
    try:
        return memory_used() if wanted else None
    except (OSError, AttributeError):  # the figure is left out, the timing stands
        return None


def _answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    number, action = request.pop("id"), request.pop("do")
    try:
        done: dict[str, Any] = getattr(worker, action)(**request)
    except Exception as error:  # the parent decides what it means
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        text = first if isinstance(error, PosexportError) else f"{type(error).__name__}: {first}"
        refused = "NOT_IMPLEMENTED" in str(error) or isinstance(error, PosexportError)
        return {"id": number, "ok": False, "error": text[:300], "kind": "refused" if refused else "failed"}
    return {"id": number, "ok": True, **done}


if __name__ == "__main__":
    serve(functools.partial(_answer, Worker()))
