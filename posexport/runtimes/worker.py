"""A child process that runs artifacts in one engine: `python -P -m posexport.runtimes.worker`. Others may `serve` too.

One JSON object a line on stdin, {id, module, path, options, inputs: [file], outputs: [file]}, is answered by one on
stdout, {id, ok, describe} or {id, ok: false, error[, kind]}. Engines write to stdout as they please: before one is
loaded, file descriptor 1 becomes stderr, and answers go through a copy of the old one.

The process ends when its parent does: its input then ends, which a thread of its own notices even while an engine runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from posexport.errors import PosexportError
from posexport.runtimes.base import Runner
from posexport.runtimes.transport import load_arrays, save_arrays

_PR_SET_PDEATHSIG = 1


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Load, run every file of inputs, and write every file of outputs; what the engine raises becomes one sentence."""
    try:
        load = import_module(request["module"]).load
        runner: Runner = load(Path(request["path"]), request["options"])
        files = [Path(outputs) for outputs in request["outputs"]]
        given = (load_arrays(Path(inputs)) for inputs in request["inputs"])
        run_all = getattr(runner, "run_all", None)  # of one that reads weights anew for each run
        made = run_all(list(given)) if run_all is not None else map(runner.run, given)
        for file, outputs in zip(files, made, strict=True):
            save_arrays(file, outputs)
        return {"id": request["id"], "ok": True, "describe": runner.describe()}
    except PosexportError as error:
        return {"id": request["id"], "ok": False, "error": str(error), "kind": type(error).__name__}
    except Exception as error:
        return {"id": request["id"], "ok": False, "error": f"{type(error).__name__}: {error}"}


def end_with_parent() -> None:
    """Ctrl-C is the parent's to handle; on Linux the kernel kills this process when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported; it leaves no core file behind


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        answers.write(json.dumps(answer(json.loads(waiting.get()))) + "\n")


if __name__ == "__main__":
    serve(answer)
