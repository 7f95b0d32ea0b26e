"""The child process that examines programs without timing them: `python -m posexport.bench.tune.worker`.

It serves requests like `posexport.runtimes.worker`. If an engine crashes on a file, only this process ends. A request
names what to `do`:
    identify  {path, runtime_name, level} -> {identity}    the graph as the runtime sees it, as a hash
    kernels   {path, runtime_name, profile} -> {kernels, memory, size, version}    what TensorRT's builder chose

Two files have the same identity if ONNX Runtime's optimizer turns them into the same graph. For TensorRT, they must be
the same after functions are inlined. The same graph has the same operators with the same attributes and constants on
the same values. Names, the order of independent nodes, opset numbers and attributes with default values don't matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from posexport import temporary
from posexport.bench.worker import explain
from posexport.jsondata import unstructure
from posexport.processes import serve

LARGEST = 1_000_000_000
"""Files of more bytes are equal only to themselves. To compare them, the optimizer would have to write them anew."""


def identify(path: str, runtime_name: str, level: str | None) -> dict[str, Any]:
    """The identity of a file at a level of optimization. The file is opened as the runtime would open it."""
    import onnx.inliner

    from posexport.artifact import onnx_file

    file = Path(path)
    files = (file, file.with_name(f"{file.name}.data"))
    if sum(part.stat().st_size for part in files if part.exists()) > LARGEST:
        return {"identity": f"{file.name} {level}"}
    if not runtime_name.startswith("ort"):
        return {"identity": identity(onnx.inliner.inline_local_functions(onnx_file.load(file)))}
    import onnxruntime

    from posexport.runtimes import ort, runtime

    settings = ort.session_options(level=level or "all")
    provider = f"{runtime(runtime_name).options['provider']}ExecutionProvider"
    with temporary.folder() as folder:
        written = folder / "optimized.onnx"
        settings.optimized_model_filepath = str(written)
        onnxruntime.InferenceSession(path, settings, providers=[provider])
        return {"identity": identity(onnx_file.load(written))}


def kernels(path: str, runtime_name: str, profile: list[str]) -> dict[str, Any]:
    """The kernel table, planned memory and size in bytes of a plan built in memory."""
    from posexport.artifact.onnx_artifact import read_onnx
    from posexport.runtimes.tensorrt.builder import build
    from posexport.runtimes.tensorrt.options import BuildOptions

    built = build(read_onnx(Path(path)), BuildOptions(runtime=runtime_name, profile=tuple(profile)))
    size = memoryview(built.plan).nbytes
    return {"kernels": unstructure(built.kernels), "memory": built.memory, "size": size, "version": built.version}


def identity(model: Any) -> str:
    """A hash of what an onnx.ModelProto computes, from its inputs through every node to its outputs."""
    graph = model.graph
    known = {value.name: f"input {value.name}" for value in graph.input}
    known |= {tensor.name: _tensor(tensor) for tensor in graph.initializer}
    imported = {entry.domain: entry.version for entry in model.opset_import}
    for node in graph.node:  # in topological order, as the standard demands
        parts = [node.domain, node.op_type, *(known.get(name, "") for name in node.input), *_attributes(node, imported)]
        digest = _digest(parts)
        known |= {name: f"{digest}.{place}" for place, name in enumerate(node.output) if name}
    return _digest(f"{value.name} {known.get(value.name)}" for value in graph.output)


def _attributes(node: Any, imported: dict[str, int]) -> list[str]:
    """Attributes by name, without those that have their default value."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, imported.get(node.domain, 1), node.domain)
        usual = {name: one.default_value for name, one in schema.attributes.items() if one.default_value.type}
    except onnx.defs.SchemaError:  # an operator of ONNX Runtime's own
        usual = {}
    parts = []
    for given in node.attribute:
        value = onnx.helper.get_attribute_value(given)
        if given.name in usual and value == onnx.helper.get_attribute_value(usual[given.name]):
            continue
        if given.type == onnx.AttributeProto.TENSOR:
            value = _tensor(given.t)
        elif given.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
            value = given.SerializeToString(deterministic=True)
        parts.append(f"{given.name}={value!r}")
    return sorted(parts)


def _tensor(tensor: Any) -> str:
    from onnx import numpy_helper

    array = numpy_helper.to_array(tensor)
    return _digest([f"{tensor.data_type} {array.shape}", hashlib.sha256(array.tobytes()).hexdigest()])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {"identify": identify, "kernels": kernels}

if __name__ == "__main__":
    serve(lambda request: _ACTIONS[request.pop("do")](**request), explain)
