"""TensorRT and TensorRT for RTX: a plan, or a `.onnx` that is built first, run by polygraphy's TrtRunner.

Options: `module` ("tensorrt" or "tensorrt_rtx"), `profile` (requests as `posexport compile --profile` takes them, for a
`.onnx`), `cuda_graph` (record the run once and replay it when timed), `sha256` (of a plan, as the caller checked it).

A plan is code, so it is opened only if its manifest matches it and names this runtime and version. Tensors are passed
as bytes, because numpy has no bf16. So the plan's own tensors must have the dtypes that its manifest states: otherwise
kernels would read beyond the end of a buffer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posexport.artifact.manifest import values_of
from posexport.artifact.plan import check_builder, check_plan
from posexport.artifact.profiles import ShapeProfiles, check_shapes
from posexport.errors import RequestError, RuntimeMissingError, system_error
from posexport.files import read_bytes
from posexport.machine import available
from posexport.runtimes import RUNTIMES
from posexport.runtimes.base import Arrays, check_options
from posexport.runtimes.cuda import by_events, captured, device, load_runtime
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.contract import Values

if TYPE_CHECKING:
    from posexport.artifact.graph_file import GraphFile

_OPTIONS = ("module", "profile", "cuda_graph", "sha256")

_DTYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}
"""posexport's dtypes by TensorRT's."""


class PlanRunner:
    """One engine with its outputs. Device memory is allocated for the given shapes, not for the largest."""

    def __init__(
        self,
        trt: Any,
        plan: Any,
        name: str,
        profiles: ShapeProfiles,
        inputs: Values,
        outputs: Values,
        cuda_graph: bool = False,
    ) -> None:
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(name == "tensorrt-rtx"))  # read when polygraphy is imported
        self._trt, self._name, self._cuda_graph = trt, name, cuda_graph
        self._profiles, self._outputs = profiles, {output: dtype for output, (_, dtype) in outputs.items()}
        self._held: list[Any] = []
        self._cache: Any = None
        self._log = api.make_log(trt)
        self._runtime = api.create(trt.Runtime, self._log)  # must live as long as the engine, like the log
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            if not _serves_gpu(trt, self._runtime, plan):
                raise RuntimeMissingError(
                    f"the plan does not support this GPU (compute capability {device()[1]}): {name} "
                    f"{trt.__version__} builds for {', '.join(api.capabilities(trt))}."
                )
            raise RuntimeError(f"{name} can't open the plan: {'; '.join(self._log.errors()) or 'it gives no reason'}")
        _check_tensors(self._engine, {"INPUT": inputs, "OUTPUT": outputs})
        self._cuda = load_runtime()
        from polygraphy.backend.trt import TrtRunner

        self._runner = TrtRunner(self._engine, allocation_strategy="runtime")
        self._runner.activate()

    def run(self, inputs: Arrays) -> Arrays:
        from polygraphy.common import FormattedArray

        check_shapes(self._profiles, {name: array.shape for name, array in inputs.items()})
        feed = {name: FormattedArray(_bytes(array), shape=array.shape) for name, array in inputs.items()}
        raw = self._runner.infer(feed, check_inputs=False, return_raw_buffers=True)
        return {
            name: np.frombuffer(raw[name].array.tobytes(), dtype=NUMPY_DTYPES[dtype]).reshape(tuple(raw[name].shape))
            for name, dtype in self._outputs.items()
        }

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        check_shapes(self._profiles, {name: array.shape for name, array in inputs.items()})
        for handle in reversed(self._held[1:]):  # of the last `prepare`; its context needs no call
            handle.free()  # polygraphy frees memory and streams on request only
        self._held.clear()
        context = self._context()
        stream, raw = self._cuda.Stream(), self._cuda.DeviceArray.raw
        held = self._held = [context, stream]  # everything that must outlive the calls
        for name, array in inputs.items():
            data = _bytes(array)
            held.append(raw((data.nbytes,)).copy_from(data))
            _check(context.set_input_shape(name, array.shape), f"set the shape of {name}")
            _check(context.set_tensor_address(name, held[-1].ptr), f"bind {name}")
        for name, dtype in self._outputs.items():
            size = int(np.prod(tuple(context.get_tensor_shape(name)))) * NUMPY_DTYPES[dtype].itemsize
            held.append(raw((size,)))
            _check(context.set_tensor_address(name, held[-1].ptr), f"bind {name}")
        size = context.update_device_memory_size_for_shapes()
        held.append(raw((size,)))
        context.set_device_memory(held[-1].ptr, size)

        def enqueue() -> None:
            if not held:
                raise RuntimeError("a later prepare freed the buffers of this run")
            _check(context.execute_async_v3(stream.ptr), "run the plan")

        cuda = self._cuda.wrapper()
        enqueue()  # the first run compiles kernels, which can't be recorded in a graph
        stream.synchronize()
        return by_events(cuda, stream.ptr, captured(cuda, stream.ptr, enqueue) if self._cuda_graph else enqueue)

    def _context(self) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is None:
            return self._engine.create_execution_context(strategy)
        config, cache = self._cache
        config.set_execution_context_allocation_strategy(strategy)
        _check(config.set_runtime_cache(cache), "use the runtime cache")
        return self._engine.create_execution_context(config)

    def warm(self, inputs: Arrays, stored: bytes) -> bytes:
        """Run once; returns TensorRT for RTX's cache of the kernels that it compiled for this GPU.

        The kernels of `stored` (an earlier cache, or empty) are kept, unless it is of another GPU or version.
        """
        config = self._engine.create_runtime_config()
        self._cache = (config, config.create_runtime_cache())
        if stored:
            self._cache[1].deserialize(stored)
        self.prepare(inputs)()
        return bytes(memoryview(self._cache[1].serialize()))

    def describe(self) -> dict[str, str]:
        return {"engine": self._name, "version": self._trt.__version__, "device": device()[0]}


def load(path: Path, options: Mapping[str, Any]) -> PlanRunner:
    """Open a `.plan`, or build a `.onnx` artifact and open that.

    Raises RequestError for a plan that does not match its manifest or that another runtime or version built,
    RuntimeMissingError if the engine or a GPU is missing. The plan is not deserialised then.
    """
    check_options("tensorrt", options, _OPTIONS)
    name = str(options["module"]).replace("_", "-")
    cuda_graph = bool(options.get("cuda_graph"))
    if path.suffix != ".plan":
        trt = _engine(name)
        from posexport.artifact.onnx_artifact import read_onnx
        from posexport.runtimes.tensorrt.builder import build
        from posexport.runtimes.tensorrt.options import BuildOptions

        artifact = read_onnx(path)
        built = build(artifact, BuildOptions(runtime=name, profile=tuple(options.get("profile") or ())))
        return PlanRunner(trt, built.plan, name, built.profiles, artifact.inputs(), artifact.outputs(), cuda_graph)
    manifest = check_plan(path)
    check_builder(path, manifest, name)
    trt = _engine(name)
    check_builder(path, manifest, name, trt.__version__)
    with system_error(f"can't read {str(path)!r}", "give a plan that fits into the memory that is free"):
        plan = read_bytes(path, available())
    # check the bytes that are opened: the file was checked before, here or (with the option) by the caller
    if {hashlib.sha256(plan).hexdigest()} != {manifest.sha256, options.get("sha256", manifest.sha256)}:
        raise RequestError(f"{str(path)!r} changed while it was being opened: build it again.")
    inputs, outputs = values_of(manifest.inputs), values_of(manifest.outputs)
    return PlanRunner(trt, plan, name, manifest.profiles, inputs, outputs, cuda_graph)


def warm_cache(name: str, plan: Any, artifact: GraphFile, profiles: ShapeProfiles, file: Path) -> bytes:
    """The runtime cache of a new plan, run once at the shapes it is tuned for; `file` may contain an earlier cache.

    Raises RuntimeMissingError without a GPU to compile kernels for.
    """
    trt = _engine(name)
    values = artifact.inputs()
    inputs = {key: np.zeros(profiles[key]["opt"], NUMPY_DTYPES[dtype]) for key, (_, dtype) in values.items()}
    runner = PlanRunner(trt, plan, name, profiles, values, artifact.outputs())
    return runner.warm(inputs, read_bytes(file, available()) if file.exists() else b"")


def _engine(name: str) -> Any:
    missing = RUNTIMES[name].missing()
    if missing is not None:
        raise RuntimeMissingError(f"{name} can't run here, {missing}.")
    return api.load(name)


def _check_tensors(engine: Any, stated: Mapping[str, Values]) -> None:
    """Raise RuntimeError unless an engine has the inputs and outputs that are stated (by mode), with their dtypes."""
    found: dict[str, dict[str, str]] = {mode: {} for mode in stated}
    for index in range(engine.num_io_tensors):
        tensor = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(tensor).name
        found[engine.get_tensor_mode(tensor).name][tensor] = _DTYPES.get(kind, kind)
    for mode, values in stated.items():
        expected = {tensor: dtype for tensor, (_, dtype) in values.items()}
        if found[mode] != expected:
            own, wanted = (", ".join(f"{a} {b}" for a, b in each.items()) for each in (found[mode], expected))
            raise RuntimeError(
                f"the plan is not what its manifest or file says: its {mode.lower()}s are {own}, instead of {wanted}"
            )


def _serves_gpu(trt: Any, runtime: Any, plan: Any) -> bool:
    """Whether a plan that could not be opened is for a GPU like this one, as far as the engine can tell."""
    wrong = getattr(trt, "EngineInvalidityDiagnostics", None)
    if wrong is not None and hasattr(runtime, "get_engine_validity"):
        _, problems = runtime.get_engine_validity(plan)
        if int(problems):
            return not int(problems) & int(wrong.UNSUPPORTED_CC)
    known = api.capabilities(trt)
    try:
        return not known or device()[1] in known
    except OSError:
        return True


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a tensor; one byte for an empty cache, because its input needs an address."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.zeros(1, np.uint8)


def _check(done: bool, action: str) -> None:
    if not done:
        raise RuntimeError(f"TensorRT could not {action}")
