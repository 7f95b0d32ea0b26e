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
from posexport.jsondata import unstructure
from posexport.machine import kept_to
from posexport.runtimes import RUNTIMES, Runtime
from posexport.verify.result import FAILED, PASSED

IMPORT = "tensorrt-import"

VERIFIED = ("graph_level", "threads", "io_binding")
"""Options under which a winner is verified."""


def verified(
    programs: Programs,
    store: Store,
    runtime: str,
    candidate: Candidate,
    prepared: PreparedProgram,
    by_kernels: bool,
) -> tuple[str | None, str]:
    """(None, or why the candidate is not known to be right; the runtime that was asked).

    Where plans can't run, what TensorRT's parser makes of the file is evaluated instead. Graph level, threads and I/O
    binding are the candidate's own; CUDA graphs, which only launch the same kernels in another way, are not.
    """
    row = RUNTIMES[IMPORT if by_kernels else runtime]
    options = {name: value for name, value in candidate.options if name in VERIFIED}
    row = attrs.evolve(row, options={**row.options, **options})

    def find() -> dict[str, Any]:
        state, reason = _verify(programs.path(candidate.program), row)
        return {"state": state, "reason": reason}

    key = {"what": "verify", "sha256": prepared.sha256, "runtime": row.name, "options": options}
    key |= {"engines": programs.engines, "tools": versions(TOOLS), "posexport": __version__}
    fact = store.get(key, find, lambda fact: fact["state"] == PASSED)
    return (None if fact["state"] == PASSED else str(fact["reason"])), row.name


def settings(runtime: str, candidate: Candidate, prepared: PreparedProgram) -> dict[str, Any]:
    """The winner's options as a deployment sets them: names of onnxruntime's SessionOptions, or a plan's profile."""
    options = dict(candidate.options)
    if runtime.startswith("ort"):
        levels = {None: "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
        session: dict[str, Any] = {
            "provider": f"{RUNTIMES[runtime].options['provider']}ExecutionProvider",
            "graph_optimization_level": levels[options.get("graph_level")],
            "intra_op_num_threads": options.get("threads") or kept_to(),
            "io_binding": bool(options.get("io_binding")),
        }
        return session | ({"enable_cuda_graph": True} if options.get("cuda_graph") else {})
    profile = list(prepared.profile) if options.get("profile") == NARROW else []
    return {"profile": profile, "cuda_graph": bool(options.get("cuda_graph"))}


@attrs.frozen(kw_only=True)
class Winner:
    """The winner's files as they will stand beside the output, checked, in a folder of the tuning's own."""

    row: Row
    settings: Mapping[str, Any]
    manifest: OnnxManifest | PlanManifest
    files: Path
    output: Path

    def publish(self, result: Result) -> Row:
        """Write them all, with `tune` in the manifest; the winner's row with its settings and its file."""
        data = result.to_dict()
        winner = attrs.evolve(self.row, settings=self.settings)
        entry = {"options": self.settings, **{name: data[name] for name in data if name not in ("kind", "version")}}
        manifest = manifest_path(self.output)
        with staged() as files:
            for made in sorted(self.files.iterdir()):
                if made.name != manifest.name:
                    files.write(self.output.with_name(made.name), partial(_copy, made))
            whole = attrs.evolve(self.manifest, tune={**entry, "winner": unstructure(winner)})
            files.write(manifest, lambda file: file.write(whole.to_bytes()))
        return attrs.evolve(winner, file=self.output.name, sha256=self.manifest.sha256)


def make_winner(
    programs: Programs, store: Store, row: Row, runtime: str, prepared: PreparedProgram, output: Path
) -> Winner | str:
    """The winner under its name in `output`, or why it can't be published: it isn't what was verified.

    A plan is verified itself where it can run.
    """
    options = settings(runtime, row.candidate, prepared)
    folder = store.files / "winner"
    folder.mkdir(exist_ok=True)
    onnx = folder / output.with_suffix(".onnx").name
    onnx_manifest = programs.write(row.candidate.program, onnx)
    manifest: OnnxManifest | PlanManifest = onnx_manifest
    if not onnx_manifest.external_data:
        same = onnx_manifest.sha256 == prepared.sha256
    else:  # the file holds the name of its data, so they are compared under the name that was verified
        same = programs.same_data(row.candidate.program, onnx_manifest)
    if not same:
        return "exported again it is another file than the one that was verified: its weights were changed meanwhile"
    if output.suffix == ".plan":
        from posexport.export.compile import compile_plan
        from posexport.runtimes.tensorrt.options import BuildOptions

        plan = folder / output.name
        manifest, _ = compile_plan(onnx, plan, BuildOptions(runtime=runtime, profile=tuple(options["profile"])))
        if RUNTIMES[runtime].missing() is None:
            state, reason = _verify(plan, RUNTIMES[runtime])
            if state != PASSED:
                return f"its plan did not verify on {runtime}: {reason}"
    return Winner(row=row, settings=options, manifest=manifest, files=folder, output=output)


def _verify(path: Path, row: Runtime) -> tuple[str, str]:
    """(the state of its verdict, why it isn't passed)."""
    from posexport.verify.verifier import verify

    report = verify([path], runtimes={row.name: row})
    if report.unreadable:
        return FAILED, report.unreadable[0].error
    return report.verdicts[0].state, report.verdicts[0].reason or "its outputs differ"


def _copy(source: Path, target: HashingFile) -> None:
    with source.open("rb") as file:
        shutil.copyfileobj(file, target)
