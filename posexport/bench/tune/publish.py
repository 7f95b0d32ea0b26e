"""The end of a tuning: the winner is verified under its own options, and written with a manifest that says why."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__
from posexport.artifact.manifest import OnnxManifest, PlanManifest, manifest_path
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.programs import TOOLS, PreparedProgram, Programs, versions
from posexport.bench.tune.result import Result, Row
from posexport.bench.tune.space import NARROW, Candidate
from posexport.files import HashingFile, staged
from posexport.machine import kept_to
from posexport.runtimes import RUNTIMES, Runtime
from posexport.verify.result import FAILED, PASSED

IMPORT = "tensorrt-import"

VERIFIED = ("graph_level", "threads", "io_binding")
"""Options under which a winner is verified."""


def verified(
    shelf: Programs, store: Store, runtime: str, candidate: Candidate, by_kernels: bool
) -> tuple[str | None, str]:
    """(None, or why the candidate is not known to be right; the runtime that was asked).

    Where plans can't run, what TensorRT's parser makes of the file is evaluated instead. Graph level, threads and I/O
    binding are the candidate's own; CUDA graphs, which only launch the same kernels in another way, are not.
    """
    row = RUNTIMES[IMPORT if by_kernels else runtime]
    options = {name: value for name, value in candidate.options if name in VERIFIED}
    row = attrs.evolve(row, options={**row.options, **options})

    def find() -> dict[str, Any]:
        state, reason = _verify(shelf.path(candidate.program), row)
        return {"state": state, "reason": reason}

    fitted = shelf.fit(candidate.program)
    assert isinstance(fitted, PreparedProgram)
    key = {"what": "verify", "sha256": fitted.sha256, "runtime": row.name, "options": options}
    key |= {"engines": shelf.engines, "tools": versions(TOOLS), "posexport": __version__}
    fact = store.get(key, find, lambda fact: fact["state"] == PASSED)
    return (None if fact["state"] == PASSED else str(fact["reason"])), row.name


def settings(runtime: str, candidate: Candidate, fitted: PreparedProgram) -> dict[str, Any]:
    """The winner's options as a deployment sets them: names of onnxruntime's SessionOptions, or a plan's profile."""
    options = dict(candidate.options)
    if runtime.startswith("ort"):
        levels = {None: "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
        found: dict[str, Any] = {
            "provider": f"{RUNTIMES[runtime].options['provider']}ExecutionProvider",
            "graph_optimization_level": levels[options.get("graph_level")],
            "intra_op_num_threads": options.get("threads") or kept_to(),
            "io_binding": bool(options.get("io_binding")),
        }
        return found | ({"enable_cuda_graph": True} if options.get("cuda_graph") else {})
    profile = list(fitted.profile) if options.get("profile") == NARROW else []
    return {"profile": profile, "cuda_graph": bool(options.get("cuda_graph"))}


@attrs.frozen(kw_only=True)
class Winner:
    """The winner's files as they will stand beside the output, checked, in a folder of the tuning's own."""

    won: Row
    ready: Mapping[str, Any]
    manifest: OnnxManifest | PlanManifest
    files: Path
    output: Path

    def publish(self, result: Result) -> Mapping[str, Any]:
        """Write them all, with `tune` in the manifest; what the result says of the winner, and of its file."""
        told = result.to_dict()
        winner = {**self.won.to_dict(), "settings": self.ready}
        entry = {"options": self.ready, **{name: told[name] for name in told if name not in ("kind", "version")}}
        manifest = manifest_path(self.output)
        with staged() as files:
            for made in sorted(self.files.iterdir()):
                if made.name != manifest.name:
                    files.write(self.output.with_name(made.name), partial(_copy, made))
            whole = attrs.evolve(self.manifest, tune={**entry, "winner": winner})
            files.write(manifest, lambda file: file.write(whole.to_bytes()))
        return {**winner, "file": self.output.name, "sha256": self.manifest.sha256}


def make_winner(
    shelf: Programs, store: Store, won: Row, runtime: str, fitted: PreparedProgram, output: Path
) -> Winner | str:
    """The winner under its name in `output`, or why it can't be published: it isn't what was verified.

    A plan is verified itself where it can run.
    """
    ready = settings(runtime, won.candidate, fitted)
    folder = store.files / "winner"
    folder.mkdir(exist_ok=True)
    onnx = folder / output.with_suffix(".onnx").name
    onnx_manifest = shelf.write(won.candidate.program, onnx)
    manifest: OnnxManifest | PlanManifest = onnx_manifest
    if not onnx_manifest.external_data:
        same = onnx_manifest.sha256 == fitted.sha256
    else:  # the file holds the name of its data, so they are compared under the name that was verified
        same = shelf.same_data(won.candidate.program, onnx_manifest)
    if not same:
        return "exported again it is another file than the one that was verified: its weights were changed meanwhile"
    if output.suffix == ".plan":
        from posexport.export.compile import compile_plan
        from posexport.runtimes.tensorrt.builder import BuildOptions

        plan = folder / output.name
        manifest, _ = compile_plan(onnx, plan, BuildOptions(runtime=runtime, profile=tuple(ready["profile"])))
        if RUNTIMES[runtime].missing() is None:
            state, reason = _verify(plan, RUNTIMES[runtime])
            if state != PASSED:
                return f"its plan did not verify on {runtime}: {reason}"
    return Winner(won=won, ready=ready, manifest=manifest, files=folder, output=output)


def _verify(path: Path, row: Runtime) -> tuple[str, str]:
    """(the state of its verdict, why it isn't passed)."""
    from posexport.verify.verifier import verify

    report = verify([path], runtimes={row.name: row})
    if report.unreadable:
        return FAILED, report.unreadable[0][1]
    return report.verdicts[0].state, report.verdicts[0].reason or "its outputs differ"


def _copy(source: Path, target: HashingFile) -> None:
    with source.open("rb") as file:
        shutil.copyfileobj(file, target)
