"""Builds a TensorRT plan in memory and reads what the builder chose.

Only child processes do this: a file from somebody else may end the process that parses it. Networks are strongly typed.
TF32 is off by default, because it costs an fp32 graph half of its digits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import onnx

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.manifest import PlanKernels
from posexport.artifact.onnx_artifact import Artifact
from posexport.artifact.profiles import ShapeProfiles
from posexport.errors import RequestError, shown, system_error
from posexport.files import read_bytes
from posexport.machine import available
from posexport.progress import Progress, silent
from posexport.runtimes import gpu_missing
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.kernels import read_kernels, read_memory
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.runtimes.tensorrt.refusals import build_error, check_read, detail, parser_error
from posexport.spec.forms import ORT_ALONE


@attrs.frozen(kw_only=True)
class Built:
    """A plan in memory. `memory` is in bytes, None if the builder did not log it."""

    plan: Any
    version: str
    profiles: dict[str, dict[str, list[int]]]
    kernels: PlanKernels
    memory: dict[str, int | None]
    seconds: float
    timing_cache: Any = None
    runtime_cache: Any = None


@attrs.frozen(kw_only=True)
class Shapes:
    """What is known about a graph without a spec.

    It has the shapes {input: {min, opt, max}} that the plan takes, the names of the inputs' dimensions, and the number
    of attentions. Files may name one length differently in each input. The builder then takes the names for different
    lengths and doesn't fuse attention. So it gets the graph with these names.
    """

    profiles: dict[str, dict[str, list[int]]]
    dimensions: dict[str, list[int | str]]
    attentions: int


def build(
    artifact: GraphFile, options: BuildOptions, progress: Progress = silent, shapes: Shapes | None = None
) -> Built:
    """Build an ONNX file into a plan in memory; raises the errors of `posexport.export.compile.compile_plan`.

    `shapes` are needed for a file that is not an artifact of posexport; they replace the profile in the options.
    `progress` gets the builder's phases.
    """
    if isinstance(artifact, Artifact) and artifact.target == "ort":
        raise RequestError(f"{artifact.path.name!r} can't be compiled, {ORT_ALONE}.")
    if shapes is None:
        if not isinstance(artifact, Artifact):
            raise RequestError(f"{artifact.path.name!r} says nothing of its shapes: compile it with profiles.")
        shapes = Shapes(profiles=artifact.profiles(options.profile), dimensions={}, attentions=artifact.spec.layers)
    profiles, ours = shapes.profiles, isinstance(artifact, Artifact)
    name, file = options.runtime, str(artifact.path)
    trt = api.load(name)
    log, monitor = api.make_log(trt), _make_monitor(trt, progress)
    builder = api.create(trt.Builder, log)
    config = _configure(trt, builder, options)
    config.progress_monitor = monitor
    progress("parsing")
    network = api.make_network(trt, builder)
    parser = trt.OnnxParser(network, log)
    _check_functions(name, artifact, parser)
    check_read(name, file, artifact.model)
    dimensions = shapes.dimensions
    if not (parser.parse(_renamed(artifact, dimensions), file) if dimensions else parser.parse_from_file(file)):
        raise parser_error(name, file, parser, artifact.model)
    attention_layers = _allow_decomposing(trt, network)
    profile = builder.create_optimization_profile()
    for key, dims in profiles.items():
        try:
            profile.set_shape(key, *dims.values())
        except (RuntimeError, TypeError, ValueError) as error:
            raise RequestError(
                f"{name} can't take the profile {list(dims.values())} of {shown(key)}: give another --profile "
                f"(TensorRT says: {detail(str(error)) or type(error).__name__})."
            ) from None
    for tensor in map(network.get_input, range(network.num_inputs)):
        if tensor.is_shape_tensor:
            count = math.prod(tensor.shape)
            profile.set_shape_input(tensor.name, *([number] * count for number in _lengths(profiles)))
    config.add_optimization_profile(profile)
    start = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - start
    if plan is None:
        raise build_error(name, file, log.errors(), options, ours=ours)
    kernels = read_kernels(log.texts(), shapes.attentions)
    if kernels.count is None and gpu_missing() is None:  # some versions log no table, but an opened plan has one
        kernels = read_kernels(_inspected(trt, log, plan), shapes.attentions)
    if attention_layers and (fused := kernels.attention_kernels) is not None:
        kernels = attrs.evolve(kernels, decomposed_attention=max(0, attention_layers - fused))
    return Built(
        plan=plan,
        version=trt.__version__,
        profiles=profiles,
        kernels=kernels,
        memory=read_memory(log.texts()),
        seconds=seconds,
        timing_cache=config.get_timing_cache().serialize() if options.timing_cache else None,
    )


def _lengths(profiles: ShapeProfiles) -> tuple[int, int, int]:
    """The smallest, usual and largest number in an input that decides lengths, such as how full a cache is."""
    usual, longest = (max(dim for shapes in profiles.values() for dim in shapes[moment]) for moment in ("opt", "max"))
    return 0, usual, longest


def _renamed(graph: GraphFile, dimensions: Mapping[str, Sequence[int | str]]) -> bytes:
    """The file's bytes with these names and sizes of the dimensions of its inputs."""
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    for value in model.graph.input:
        for dim, name in zip(value.type.tensor_type.shape.dim, dimensions.get(value.name, ()), strict=False):
            if isinstance(name, int):
                dim.dim_value = name
            else:
                dim.dim_param = name
    del model.graph.value_info[:]  # they have the old names
    return bytes(model.SerializeToString())


def _allow_decomposing(trt: Any, network: Any) -> int:
    """Let the builder decompose attention for which it has no kernel (fp32, wide heads) instead of failing.

    Returns the number of attention layers in the network.
    """
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)
    layers = [layer for index in range(network.num_layers) if (layer := network.get_layer(index)).type == kind]
    for layer in layers:
        layer.__class__ = trt.IAttentionInputLayer
        layer.attention.decomposable = True
    return len(layers)


def _check_functions(name: str, artifact: GraphFile, parser: Any) -> None:
    """RequestError for a function that the engine would replace by an operator."""
    for function in artifact.model.functions:
        if parser.supports_operator(function.name):
            raise RequestError(
                f"{str(artifact.path)!r} holds a function {shown(function.name)}, and {name} has an operator of that "
                "name which it would run instead: rename the function, or export with --form decomposed."
            )


def _inspected(trt: Any, log: Any, plan: Any) -> list[str]:
    """The engine inspector's table of a new plan, in the format of the builder's table."""
    runtime = api.create(trt.Runtime, log)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return []
    return [engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.ONELINE)]


def _configure(trt: Any, builder: Any, options: BuildOptions) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # otherwise the builder does not log what it fused
    set_or_clear = config.set_flag if options.tf32 else config.clear_flag
    set_or_clear(trt.BuilderFlag.TF32)
    if options.memory_limit is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.memory_limit)
    targets = api.read_capabilities(trt, options.runtime, options.compute_capability)
    if targets:
        config.num_compute_capabilities = len(targets)
        for at, target in enumerate(targets):
            config.set_compute_capability(target, at)
    if options.timing_cache is not None:
        config.set_timing_cache(_timing_cache(config, options.runtime, options.timing_cache), False)
    return config


def _timing_cache(config: Any, runtime: str, path: Path) -> Any:
    if runtime == "tensorrt-rtx":
        raise RequestError(
            "tensorrt-rtx times no kernels when it builds and so has no timing cache: drop --timing-cache, or build "
            "with --runtime tensorrt."
        )
    with system_error(f"can't read the timing cache {str(path)!r}", "give a file"):
        stored = read_bytes(path, available()) if path.exists() else b""
    cache = config.create_timing_cache(stored)
    if cache is None:
        raise RequestError(f"{str(path)!r} is no timing cache of {runtime}: remove it, or give another file.")
    return cache


def _make_monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            progress(name)

        def step_complete(self, name: str, step: int) -> bool:
            return True  # False would end the build

        def phase_finish(self, name: str) -> None:
            pass

    return Monitor()
