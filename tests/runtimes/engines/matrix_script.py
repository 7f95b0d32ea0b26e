"""A stand-in for the child process of the matrix. It runs nothing, and its answers depend only on file names.

export fails for native, build crashes for function, and verify crashes if contrib is among the files.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from posexport.processes import serve


def answer(request: dict[str, Any]) -> dict[str, Any]:
    names = [Path(path).stem for path in request.get("paths", [request.get("path", "")])]
    folder = str(Path(request.get("paths", [request.get("path")])[0]).parent)
    if request["do"] == "export" and request["form"] == "native":
        raise ValueError(f"no such {folder}{os.sep}thing")
    if request["do"] == "build":
        if "function" in names[0]:
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"cell": {"state": "passed", "kernels": 6, "fused": "fp16" in names[0]}}
    if request["do"] == "verify":
        if any("contrib" in name for name in names):
            os.kill(os.getpid(), signal.SIGABRT)
        cell = {"state": "passed", "error": 1.2e-6, "eager": 1e-6, "ratio": 1.2, "cases": 8}
        cells = [[path, runtime, cell] for path in request["paths"] for runtime in request["runtimes"]]
        return {"cells": cells, "unreadable": []}
    return {}


if __name__ == "__main__":
    serve(answer)
