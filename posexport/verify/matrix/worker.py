"""The child process that measures entries of the matrix: `python -m posexport.verify.matrix.worker`.

It serves as `posexport.runtimes.worker` does; a request names what to `do`:

    export  {spec, form, target, path}     -> {}                                     writes the file, seeded weights
    build   {path, builder}                -> {cell: {...}}                           builds a plan in memory
    verify  {paths, runtimes, time_limit}  -> {cells: [[path, runtime, {...}], ...], unreadable: [[path, reason], ...]}

A cell has the arguments of `_Job._cell` (posexport.verify.matrix.run).

Each engine, here and in the children of `verify`, gets one thread: other workers measure at the same time, and sums
keep their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for every child of this process

from posexport.errors import RuntimeMissingError
from posexport.models import read_spec
from posexport.processes import serve
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import ORT_ALONE
from posexport.verify.eligibility import UNSUPPORTED
from posexport.verify.result import NOT_RUN, PASSED, Verdict


def export(spec: dict[str, Any], form: str, target: str, path: str) -> dict[str, Any]:
    """Write an artifact to `path`."""
    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.export.exporter import export as export_block
    from posexport.models.weights import seeded_weights

    block = read_spec(spec)
    write_onnx(export_block(block, seeded_weights(block, 0), form=form, target=target), Path(path))
    return {}


def build(path: str, builder: str) -> dict[str, Any]:
    """Build a plan with the default profiles of `posexport compile`, and count its kernels."""
    from posexport.artifact.onnx_artifact import read_onnx
    from posexport.runtimes.tensorrt.builder import build as build_plan
    from posexport.runtimes.tensorrt.options import BuildOptions

    artifact = read_onnx(Path(path))
    if artifact.target == "ort":
        return {"cell": {"state": NOT_RUN, "reason": ORT_ALONE}}
    try:
        kernels = build_plan(artifact, BuildOptions(runtime=builder)).kernels
    except RuntimeMissingError as error:
        return {"cell": {"state": NOT_RUN, "reason": str(error).rstrip("."), "lasting": False}}
    if kernels.count is None:
        return {"cell": {"state": NOT_RUN, "reason": f"it builds, but its kernels are not known: {kernels.unknown}"}}
    return {"cell": {"state": PASSED, "kernels": kernels.count, "fused": kernels.fused_attention}}


REACH = {"seq": 600}
"""The number of keys that inputs reach. Longer inputs would take too long for a table of thousands of cells."""


def verify(paths: list[str], runtimes: list[str], time_limit: float) -> dict[str, Any]:
    """Verify artifacts on runtimes."""
    from posexport.verify.verifier import verify as run

    rows = {name: RUNTIMES[name] for name in runtimes}
    report = run([Path(path) for path in paths], runtimes=rows, time_limit=time_limit, reach=REACH)
    return {
        "cells": [[verdict.artifact, verdict.runtime, _cell(verdict)] for verdict in report.verdicts],
        "unreadable": [[file.artifact, file.error] for file in report.unreadable],
    }


def _cell(verdict: Verdict) -> dict[str, Any]:
    """The cell of a verdict. Numbers have two significant digits."""

    def two_digits(number: float | None) -> float | None:
        return None if number is None else float(f"{number:.1e}")

    error, eager = (None, None) if verdict.worst is None else (verdict.worst.max_error, verdict.worst.torch_error)
    return {
        "state": verdict.state,
        "reason": "; ".join(text for text in (verdict.reason, verdict.where) if text) or None,
        "error": two_digits(error),
        "eager": two_digits(eager),
        "ratio": two_digits(error / eager) if error is not None and eager else None,
        "cases": verdict.cases or None,
        "lasting": verdict.state != NOT_RUN or verdict.reason_code == UNSUPPORTED,
    }


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {"export": export, "build": build, "verify": verify}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request names. An exception makes the cell a failed one, with the reason."""
    return ACTIONS[request.pop("do")](**request)


if __name__ == "__main__":
    serve(answer)
