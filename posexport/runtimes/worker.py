"""A child process that runs artifacts in one engine: `python -P -m posexport.runtimes.worker`. Others may `serve` too.

One JSON object a line on stdin, {id, module, path, options, inputs: [file], outputs: [file]}, is answered by one on
stdout, {id, ok, describe} or {id, ok: false, error[, kind]}. Engines write to stdout as they please: before one is
loaded, file descriptor 1 becomes stderr, and answers go through a copy of the old one.

The process ends when its parent does: its input then ends, which a thread of its own notices even while an engine runs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from posexport.errors import PosexportError
from posexport.processes import serve
from posexport.runtimes.base import Runner
from posexport.runtimes.transport import load_arrays, save_arrays


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


if __name__ == "__main__":
    serve(answer)
