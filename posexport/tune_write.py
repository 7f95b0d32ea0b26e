"""The end of a tuning: the winner is verified under its own options, and written with a manifest that says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__
from posexport.artifact import manifest_path
from posexport.files import write_json
from posexport.runtimes import RUNTIMES
from posexport.tune_result import Result, Row
from posexport.tune_shelf import TOOLS, Fitted, Shelf, versions
from posexport.tune_space import NARROW, Candidate
from posexport.tune_store import Store

IMPORT = "tensorrt-import"


def verified(
    shelf: Shelf, store: Store, runtime: str, candidate: Candidate, by_kernels: bool
) -> tuple[str | None, str]:
    """(None, or why the candidate is not known to be right; the runtime that was asked).

    Where plans can't run, what TensorRT's parser makes of the file is evaluated instead.
    """
    row = RUNTIMES[IMPORT if by_kernels else runtime]
    options = {name: value for name, value in candidate.options if name in ("graph_level", "threads")}
    row = attrs.evolve(row, options={**row.options, **options})

    def find() -> dict[str, Any]:
        from posexport.verify import verify

        report = verify([shelf.path(candidate.program)], runtimes={row.name: row})
        if report.broken:
            return {"state": "failed", "reason": report.broken[0][1]}
        verdict = report.verdicts[0]
        return {"state": verdict.state, "reason": verdict.reason or "its outputs differ"}

    fitted = shelf.fit(candidate.program)
    assert isinstance(fitted, Fitted)
    key = {"what": "verify", "sha256": fitted.sha256, "runtime": row.name, "options": options}
    key |= {"engines": shelf.engines, "tools": versions(TOOLS), "posexport": __version__}
    fact = store.get(key, find)
    return (None if fact["state"] == "passed" else str(fact["reason"])), row.name


def settings(runtime: str, candidate: Candidate, fitted: Fitted) -> dict[str, Any]:
    """The winner's options as a deployment sets them: names of onnxruntime's SessionOptions, or a plan's profile."""
    options = dict(candidate.options)
    if runtime.startswith("ort"):
        levels = {None: "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
        found: dict[str, Any] = {
            "provider": f"{RUNTIMES[runtime].options['provider']}ExecutionProvider",
            "graph_optimization_level": levels[options.get("graph_level")],
            "intra_op_num_threads": options.get("threads", 0),
            "io_binding": bool(options.get("io_binding")),
        }
        return found | ({"enable_cuda_graph": True} if options.get("cuda_graph") else {})
    profile = list(fitted.profile) if options.get("profile") == NARROW else []
    return {"profile": profile, "cuda_graph": bool(options.get("cuda_graph"))}


def write_winner(
    shelf: Shelf, won: Row, runtime: str, fitted: Fitted, output: Path
) -> Callable[[Result], Mapping[str, Any]]:
    """Write the artifact; the function that comes back writes `tune` into its manifest, once the result is whole, and
    gives what the result says of the files."""
    ready = settings(runtime, won.candidate, fitted)
    onnx = output.with_suffix(".onnx")
    manifest = shelf.write(won.candidate.program, onnx)
    if output.suffix == ".plan":
        from posexport.compile import compile_plan
        from posexport.trt_build import BuildOptions

        manifest, _ = compile_plan(onnx, output, BuildOptions(runtime=runtime, profile=tuple(ready["profile"])))

    def describe(result: Result) -> Mapping[str, Any]:
        told = result.to_dict()
        winner = {**won.to_dict(), "settings": ready}
        entry = {"options": ready, **{name: told[name] for name in told if name not in ("kind", "version")}}
        write_json(manifest_path(output), {**manifest, "tune": {**entry, "winner": winner}})
        return {**winner, "file": output.name, "sha256": manifest["sha256"]}

    return describe
