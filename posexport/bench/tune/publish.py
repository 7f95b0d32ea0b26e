"""The end of a tuning: the winner is verified under its own options, and written with the tuning in its manifest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.manifest import OnnxManifest, PlanManifest, add_manifest, manifest_path
from posexport.artifact.signing import signature_path
from posexport.bench.tune.programs import TOOLS, Programs
from posexport.bench.tune.result import Result, Row
from posexport.files import HashingFile, sha256_of, staged
from posexport.jsondata import unstructure
from posexport.machine import kept_to, versions
from posexport.runtimes import RUNTIMES, Runtime
from posexport.verify.result import FAILED, PASSED


def verified(programs: Programs, row: Row, by_kernels: bool) -> tuple[str | None, str]:
    """(None, or why the candidate is not known to be right; the runtime that was asked).

    If plans can't run, the result of TensorRT's parser is evaluated instead. All options of a session are the
    candidate's own, except CUDA graphs, which only launch the same kernels in another way.
    """
    runtime = RUNTIMES["tensorrt-import" if by_kernels else programs.request.runtime]
    options = {name: value for name, value in row.options.items() if name not in ("cuda_graph", "profile")}
    runtime = attrs.evolve(runtime, options={**runtime.options, **options})

    def find() -> dict[str, Any]:
        state, reason = _verify(programs, programs.path(row.program), runtime)
        return {"state": state, "reason": reason}

    key = {
        "what": "verify",
        "sha256": programs.prepared[row.program].sha256,
        "runtime": runtime.name,
        "options": options,
        "engines": programs.engines,
        "tools": versions(TOOLS),
        **({} if programs.against is None else {"against": sha256_of(programs.against), "roles": dict(programs.roles)}),
    }
    fact = programs.store.get(key, find, lambda fact: fact["state"] == PASSED)
    return (None if fact["state"] == PASSED else str(fact["reason"])), runtime.name


def settings(programs: Programs, row: Row) -> dict[str, Any]:
    """The winner's options as a deployment sets them: names in onnxruntime's SessionOptions, or a plan's profile."""
    options, runtime = row.options, programs.request.runtime
    if not runtime.startswith("ort"):
        return {"profile": programs.profile(row), "cuda_graph": bool(options.get("cuda_graph"))}
    session: dict[str, Any] = {
        "provider": f"{RUNTIMES[runtime].options['provider']}ExecutionProvider",
        "graph_optimization_level": f"ORT_ENABLE_{options.get('graph_level', 'all').upper()}",
        "intra_op_num_threads": options.get("threads") or kept_to(),
        "io_binding": bool(options.get("io_binding")),
    }
    if options.get("denormal_as_zero"):
        session["session.set_denormal_as_zero"] = "1"
    return session | ({"enable_cuda_graph": True} if options.get("cuda_graph") else {})


def publish(programs: Programs, row: Row, output: Path, result: Result) -> Row | str:
    """Write the winner to `output`, with `tune` in the manifest. Returns its row with its settings and its file.

    If it is not what was verified, it returns the reason and writes nothing. A plan is verified itself if it can run.
    """
    runtime, options = programs.request.runtime, settings(programs, row)
    folder = programs.store.files / "winner"
    folder.mkdir(exist_ok=True)
    onnx = folder / output.with_suffix(".onnx").name
    onnx_manifest = programs.write(row.program, onnx)
    manifest: OnnxManifest | PlanManifest = onnx_manifest
    if not programs.is_same(row.program, onnx_manifest):
        return "a new export differs from the file that was verified: its weights were changed meanwhile"
    if output.suffix == ".plan":
        from posexport.export.compile import compile_plan
        from posexport.runtimes.tensorrt.options import BuildOptions

        plan = folder / output.name
        manifest, _ = compile_plan(onnx, plan, BuildOptions(runtime=runtime, profile=tuple(options["profile"])))
        if RUNTIMES[runtime].missing() is None:
            state, reason = _verify(programs, plan, RUNTIMES[runtime])
            if state != PASSED:
                return f"its plan did not verify on {runtime}: {reason}"
    data = result.to_dict()
    winner = attrs.evolve(row, settings=options)
    entry = {"options": options, **{name: data[name] for name in data if name not in ("kind", "version")}}
    with staged() as files:
        signed = manifest_path(output)
        for made in sorted(folder.iterdir()):
            if made.name not in (signed.name, signature_path(signed).name):
                files.write(output.with_name(made.name), partial(HashingFile.copy, source=made))
        if programs.key is None:
            files.remove(signature_path(manifest_path(output.with_suffix(".onnx"))))
        whole = attrs.evolve(manifest, tune={**entry, "winner": unstructure(winner)})
        add_manifest(files, output, whole, programs.key)
    return attrs.evolve(winner, file=output.name, sha256=manifest.sha256)


def _verify(programs: Programs, path: Path, row: Runtime) -> tuple[str, str]:
    """(the state of its verdict, why it isn't passed).

    A file is compared with the tuned file. The tuned file itself is compared with its own evaluation in float64.
    """
    from posexport.verify.verifier import verify

    against = None if programs.against == path else programs.against
    report = verify([path], runtimes={row.name: row}, against=against, roles=programs.roles)
    if report.unreadable:
        return FAILED, report.unreadable[0].error
    return report.verdicts[0].state, report.verdicts[0].reason or "its outputs differ"
