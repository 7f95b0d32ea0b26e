"""A child process that runs artifacts in one engine: `python -P -m posexport.runtimes.worker [module]`.

It loads the engine of the named module before the first request, because engines take seconds to load. A request is
{module, path, options, inputs: [file], outputs: [file], limited, wide}, its answer {describe} (posexport.processes).
`limited`: the process may use only the memory that is free when the request comes. `wide` has the number of columns of
outputs of which only some columns are kept (posexport.runtimes.wide_outputs).

The process ends when its parent does: its input then ends, which a thread notices even while an engine runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from posexport import machine
from posexport.processes import serve
from posexport.runtimes.base import Arrays, GroupRunner, Runner
from posexport.runtimes.tensors import load_arrays, save_arrays
from posexport.runtimes.wide_outputs import with_few_columns


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Open the artifact, run every file of inputs, and write a file of outputs for each."""
    load = import_module(request["module"]).load
    if request["limited"]:
        machine.limit_to_what_is_free()
    runner: Runner = load(Path(request["path"]), request["options"])
    inputs = (load_arrays(Path(file), writable=True) for file in request["inputs"])
    outputs: Iterator[tuple[int, Arrays]] = enumerate(map(runner.run, inputs))
    if isinstance(runner, GroupRunner) and len(request["inputs"]) > 1:
        outputs = runner.run_all(list(inputs))
    for number, arrays in outputs:
        save_arrays(Path(request["outputs"][number]), with_few_columns(arrays, request["wide"]))
    return {"describe": runner.describe()}


if __name__ == "__main__":
    # workers run in parallel: a thread that waits in a loop for another one takes the core that the other needs
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    serve(answer, prepare=lambda: [import_module(name) for name in sys.argv[1:]])
