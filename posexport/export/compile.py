"""The compile stage: an ONNX artifact becomes a TensorRT plan with its manifest.

Build time isn't written anywhere: the same command gives the same files, as far as the builder is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from posexport import __version__
from posexport.artifact.loaded import manifest_fault
from posexport.artifact.manifest import manifest_path
from posexport.artifact.onnx_artifact import Artifact, read_onnx
from posexport.artifact.onnx_file import external
from posexport.errors import RequestError, RuntimeMissingError
from posexport.files import json_bytes, sha256_of, staged
from posexport.runtimes import RUNTIMES
from posexport.runtimes.cuda import device
from posexport.runtimes.tensorrt.builder import BuildOptions, Built, Phase, build

__all__ = ["BuildOptions", "Built", "build", "compile_plan"]


def compile_plan(
    path: Path,
    output: Path,
    options: BuildOptions,
    phase: Phase = lambda _: None,
    doubt: Callable[[str], object] = lambda _: None,
) -> tuple[dict[str, Any], float]:
    """Build the ONNX artifact at `path` into the plan `output` with its manifest; returns it and the build's seconds.

    `doubt` is told why the manifest of the ONNX file is not of it, where it isn't: the plan is what the file says.
    Raises RequestError for a file, option or folder that can't be used and for a graph that the runtime refuses;
    RuntimeMissingError where the runtime can't be loaded. Every file is then as it was.
    """
    artifact = read_onnx(path)
    fault = manifest_fault(artifact)
    if fault is not None:
        doubt(fault)
    onnx_manifest = {} if fault is not None else artifact.manifest() or {}
    source = _source(artifact)
    _check_runtime_cache(options)
    built = build(artifact, options, phase)
    warmed = None
    if options.runtime_cache is not None:
        from posexport.runtimes.tensorrt.engine import warm_cache

        phase("compiling kernels for this GPU")
        warmed = warm_cache(options.runtime, built.plan, artifact, built.profiles, options.runtime_cache)
    described = {
        key: [{"name": name, "shape": list(shape), "dtype": dtype} for name, (shape, dtype) in values.items()]
        for key, values in (("inputs", artifact.inputs()), ("outputs", artifact.outputs()))
    }
    with staged() as files:
        sha256 = files.write(output, lambda file: file.write(memoryview(built.plan)))
        manifest: dict[str, Any] = {
            "file": output.name,
            "sha256": sha256,
            "version": __version__,
            "form": artifact.form,
            **{key: onnx_manifest[key] for key in ("weights",) if key in onnx_manifest},
            "spec": artifact.spec.to_dict(),
            **described,
            "opset": artifact.opset,
            "domains": dict(sorted((entry.domain, entry.version) for entry in artifact.model.opset_import)),
            "tools": {"onnx": metadata.version("onnx"), options.runtime: built.version},
            "onnx": source,
            "runtime": {"name": options.runtime, "version": built.version},
            "target_gpus": _targets(options),
            "profiles": built.profiles,
            "tf32": options.tf32,
            "memory_limit": options.memory_limit,
            "sizes": {"plan": memoryview(built.plan).nbytes, **built.memory},
            "kernels": built.kernels.to_dict(),
        }
        files.write(manifest_path(output), lambda file: file.write(json_bytes(manifest)))
        if options.timing_cache is not None and built.timing_cache is not None:
            files.write(options.timing_cache, lambda file: file.write(memoryview(built.timing_cache)))
        if options.runtime_cache is not None and warmed is not None:
            files.write(options.runtime_cache, lambda file: file.write(warmed))
    return manifest, built.seconds


def _check_runtime_cache(options: BuildOptions) -> None:
    """A runtime cache holds kernels that TensorRT for RTX compiles for the GPU at hand, when a plan first runs."""
    if options.runtime_cache is None:
        return
    if options.runtime != "tensorrt-rtx":
        raise RequestError(
            f"{options.runtime} compiles its kernels when it builds and so has no runtime cache: drop --runtime-cache, "
            "or use --timing-cache."
        )
    missing = RUNTIMES[options.runtime].missing()
    if missing is not None:
        raise RuntimeMissingError(f"a runtime cache is made by running the plan, which can't be done here, {missing}.")


def _source(artifact: Artifact) -> dict[str, Any]:
    """What a plan's manifest says of the ONNX file it was built from."""
    path = artifact.path
    places = {external(tensor).get("location", "") for tensor in artifact.model.graph.initializer} - {""}
    hashes = {name: sha256_of(path.with_name(name)) for name in sorted(places)}
    source = {"file": path.name, "sha256": sha256_of(path), "version": artifact.version}
    return {**source, **({"external_data": hashes} if hashes else {})}


def _targets(options: BuildOptions) -> list[str]:
    """The compute capabilities that a plan is for; a portable one names none."""
    if options.runtime == "tensorrt":
        return [device()[1]]
    return list(options.capabilities) or ["portable"]
