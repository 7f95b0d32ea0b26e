"""Runs work in separate processes with limits of time and memory. They are forked from a process that has imported
everything."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 600
"""The time limit of a process, in seconds."""

MEMORY = 8 * 2**30
"""The limit of a process's address space, in bytes."""

PRELOADED = ["posexport.rewrite.files", "onnxscript.rewriter.ort_fusions", "transformers"]

Work = Callable[..., dict[str, Any]]
"""A function at module level. Its arguments and its result are plain data."""


def record_of(path: Path, work: Work, *arguments: Any) -> tuple[dict[str, Any], bool]:
    """The result of `work`, stored at `path`, and whether the work was done now. An existing file at `path` is reused.

    If the process ends without an answer, the result is {"ended": how}.
    """
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8"))), False
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_write, args=(path, work, arguments))
    process.start()
    process.join(SECONDS)
    late = process.is_alive()
    if late:
        process.kill()
    process.join()
    if not path.exists():
        how = f"it took more than {SECONDS} s" if late else f"the process ended with status {process.exitcode}"
        path.write_text(json.dumps({"ended": how}), encoding="utf-8")
    return record_of(path, work)[0], True


def _write(path: Path, work: Work, arguments: tuple[Any, ...]) -> None:
    """Runs in the process: does the work and writes its answer completely or not at all."""
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(work(*arguments), indent=1), encoding="utf-8")
    beside.replace(path)
