"""The compile stage: builds a TensorRT plan with its manifest from an ONNX file.

Build time is not written to a file: the same command gives the same files, as far as the builder is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__
from posexport.artifact import profiles
from posexport.artifact.manifest import Builder, PlanKernels, PlanManifest, PlanSource, add_manifest, tensors_of
from posexport.artifact.signing import SigningKey, TrustedKey
from posexport.errors import Reason, RequestError, RuntimeMissingError
from posexport.export.compile_source import CompileSource, compile_source
from posexport.export.fused_attention import with_attentions
from posexport.export.support import unsupported_reason
from posexport.files import check_writable, staged
from posexport.graphs.attention.support import HEAD_DIMS
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES
from posexport.runtimes.cuda import device
from posexport.runtimes.tensorrt.build_process import build_in_child, build_process
from posexport.runtimes.tensorrt.builder import Built
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.spec.spec import Spec

DECOMPOSED_ATTENTION, SCRATCH_MEMORY = "decomposed-attention", "scratch-memory"
"""Codes of warnings."""

FP32, HEAD_DIM, SCORES, SPLIT, BUILDER = "fp32", "head-dim", "scores", "split", "builder"
"""Codes of reasons why attention is not one fused kernel for each layer."""

SCRATCH_LIMIT = 10**9
"""A plan that needs more bytes of scratch memory gets a warning."""


def compile_plan(
    path: Path,
    output: Path,
    options: BuildOptions,
    progress: Progress = silent,
    warn: Callable[[Reason], object] = lambda _: None,
    *,
    key: SigningKey | None = None,
    trusted: Sequence[TrustedKey] = (),
    roles: Mapping[str, str] | None = None,
) -> tuple[PlanManifest, float]:
    """Build any ONNX file at `path` into the plan `output` with its manifest; returns it and the build's seconds.

    `warn` gets a reason for each problem that does not prevent the plan, with one of the codes above. The plan's
    manifest is signed with `key`; one of the `trusted` keys must have signed the file's manifest. `roles` are the roles
    of inputs by name, for files that posexport didn't write and whose roles it can't guess.
    Raises RequestError for a file, option or folder that can't be used, for a file that contradicts its manifest or its
    spec, and for a graph that the runtime rejects; RuntimeMissingError if the runtime can't be loaded. No file is
    changed then.
    """
    check_writable(output, options.timing_cache, options.runtime_cache)
    with build_process() as worker:
        source = compile_source(path, options, progress, trusted, roles)
        _check_runtime_cache(options)
        built = build_in_child(worker, source.graph, options, progress, source.shapes)
    built = attrs.evolve(built, kernels=_explained(source, options, built.kernels))
    for warning in _warnings(source, options, built):
        warn(warning)
    graph, artifact, checked = source.graph, source.artifact, source.manifest
    gpus = (device()[1],) if options.runtime == "tensorrt" else options.compute_capability
    made: Any = {} if artifact is None else {"form": artifact.form, "weights": artifact.weight_source}
    with staged() as files:
        sha256 = files.write(output, lambda file: file.write(memoryview(built.plan)))
        manifest = PlanManifest(
            file=output.name,
            sha256=sha256,
            version=__version__,
            form=made.get("form") if checked is None else checked.form,
            weights=made.get("weights") if checked is None else checked.weights,
            spec=None if artifact is None else artifact.spec.to_dict(),
            inputs=tensors_of(source.inputs()),
            outputs=tensors_of(graph.outputs()),
            opset=graph.opset,
            domains=graph.domains(),
            tools={"onnx": metadata.version("onnx"), options.runtime: built.version},
            onnx=PlanSource(
                file=graph.path.name,
                sha256=graph.sha256,
                version=None if artifact is None else artifact.version,
                external_data=graph.external_sha256 if checked is None else checked.external_data,
            ),
            runtime=Builder(name=options.runtime, version=built.version),
            target_gpus=gpus or ("portable",),
            profiles={
                name: {moment: tuple(shape) for moment, shape in shapes.items()}
                for name, shapes in built.profiles.items()
            },
            tf32=options.tf32,
            memory_limit=options.memory_limit,
            sizes={"plan": memoryview(built.plan).nbytes, **built.memory},
            kernels=built.kernels,
        )
        manifest = add_manifest(files, output, manifest, key)
        if options.timing_cache is not None and built.timing_cache is not None:
            files.write(options.timing_cache, lambda file: file.write(memoryview(built.timing_cache)))
        if options.runtime_cache is not None and built.runtime_cache is not None:
            files.write(options.runtime_cache, lambda file: file.write(built.runtime_cache))
    return manifest, built.seconds


def _explained(source: CompileSource, options: BuildOptions, kernels: PlanKernels) -> PlanKernels:
    """The kernels with the reason why attention is not fused: for a block by its spec, otherwise for each attention."""
    if source.artifact is None:
        return with_attentions(kernels, source.attentions, source.unknown, options.runtime)
    return attrs.evolve(kernels, unfused=unfused_reason(source.artifact.spec, source.artifact.form, kernels))


def _warnings(source: CompileSource, options: BuildOptions, built: Built) -> Iterator[Reason]:
    """Why the new plan may be slow or use much memory."""
    kernels, scratch = built.kernels, built.memory["scratch"]
    if kernels.decomposed_attention:
        where = "" if source.artifact is None else f" in {source.artifact.spec.dtype}"
        yield Reason(
            DECOMPOSED_ATTENTION,
            f"{options.runtime} has no fused kernel for {kernels.decomposed_attention} of {kernels.attention_layers} "
            f"Attention nodes{where} and decomposes them, which is slower and takes more memory",
        )
    if scratch is not None and scratch > SCRATCH_LIMIT:
        ranges = profiles.ranges_of(built.profiles, {name: shape for name, (shape, _) in source.inputs().items()})
        where, advice = "the graph's fixed shapes", "export smaller ones"
        if ranges:
            which = "the profile" if options.profile else "the default profile"
            where = f"the largest sizes of {which} {' '.join(f'{dim}={sizes}' for dim, sizes in ranges.items())}"
            lower = " ".join(f"--profile {request}" for request in profiles.lower_requests(ranges))
            advice = f"give lower ones, such as {lower}" if lower else "give lower ones with --profile"
        yield Reason(
            SCRATCH_MEMORY,
            f"scratch memory is {scratch / 1e9:.1f} GB, which a run takes on the GPU beside the weights, "
            f"for {where}: {advice}",
        )


def unfused_reason(spec: Spec, form: str, kernels: PlanKernels) -> Reason | None:
    """Why attention is not fused in the kernels of a plan; None if it is fused, or if that is not known."""
    if kernels.fused_attention is not False:
        return None
    if spec.dtype == "fp32":
        return Reason(FP32, "fp32 has no fused attention kernel: export with --dtype fp16 or bf16")
    if spec.head_dim not in HEAD_DIMS:
        return Reason(
            HEAD_DIM,
            f"head_dim is {spec.head_dim}, and fused attention kernels take {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}: choose "
            "another number of heads or --head-dim",
        )
    if (count := kernels.attention_kernels) and count > kernels.attention_layers:
        return Reason(
            SPLIT,
            f"the builder made {count} attention kernels of {kernels.attention_layers} layers: give narrower shapes "
            "with --profile",
        )
    encodings = [kind.encoding for kind in spec.distinct_layers()]
    scoring = [encoding.name for encoding in encodings if encoding.hook == "score"]
    if scoring and form in ("decomposed", "function"):
        others = [name for name in ("native", "contrib") if unsupported_reason(spec, name, "tensorrt") is None]
        advice = f"export with --form {others[0]}" if others else "no other form can carry this block for TensorRT"
        return Reason(
            SCORES,
            f"{scoring[0]} computes scores from positions and content together, which the builder does not fuse with "
            f"attention in the form {form}: {advice}",
        )
    return Reason(BUILDER, "the builder chose several kernels for it: compare forms with 'posexport tune'")


def _check_runtime_cache(options: BuildOptions) -> None:
    """RequestError for a runtime cache that the runtime doesn't have; RuntimeMissingError if the plan can't run here.

    A runtime cache contains kernels that TensorRT for RTX compiles for the installed GPU when a plan first runs.
    """
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
