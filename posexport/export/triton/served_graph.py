"""Any ONNX file as Triton will serve it: inputs, outputs and dimensions are the graph's own."""

from __future__ import annotations

import attrs
import onnx

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.loaded import check_manifest
from posexport.errors import Reason, RequestError, shown
from posexport.export.triton.config import TYPES
from posexport.export.triton.served_artifact import BACKENDS, ServedArtifact, weight_files
from posexport.graphs.roles import Role
from posexport.graphs.told_roles import told_roles
from posexport.spec.contract import Shape, Values, read_dims


def served_graph(graph: GraphFile) -> ServedArtifact:
    """The file that was read; RequestError for tensors that Triton doesn't support, and for tensors without a shape."""
    manifest = check_manifest(graph)
    file = BACKENDS["onnxruntime"][1]
    inputs, outputs = _served("input", graph), _served("output", graph)
    domains = sorted(set(graph.domains()) - {"", "ai.onnx"})
    about = f"opset {graph.opset}{' and ' if domains else ''}{', '.join(domains)}"
    return ServedArtifact(
        backend="onnxruntime",
        spec=None,
        title=f"{graph.path.name}, a graph without a spec",
        inputs=inputs,
        outputs=outputs,
        usual={},
        profiles=None,
        operators=frozenset(node.op_type for node in graph.model.graph.node),
        manifest=None if manifest is None else attrs.evolve(manifest, file=file),
        files={
            file: (graph.path, None if manifest is None else manifest.sha256),
            **weight_files(graph, {} if manifest is None else manifest.external_data),
        },
        about=about,
        roles=_roles(graph),
    )


def _roles(graph: GraphFile) -> dict[str, Role] | Reason:
    """The roles of the graph's inputs, or the reason why they can't be guessed."""
    try:
        return told_roles(graph)
    except RequestError as error:
        return Reason("role", str(error).partition(": say it")[0].rstrip("."))


def _served(kind: str, graph: GraphFile) -> Values:
    infos = {info.name: info for info in (graph.model.graph.input if kind == "input" else graph.model.graph.output)}
    values = graph.inputs() if kind == "input" else graph.outputs()
    for name, (_, dtype) in values.items():
        if not infos[name].type.HasField("tensor_type") or dtype.lower() not in TYPES:
            raise RequestError(
                f"{str(graph.path)!r} has the {kind} {shown(name)} of type {shown(dtype)[1:-1]}, which Triton has no "
                "tensors of: cut the graph there."
            )
        if not infos[name].type.tensor_type.HasField("shape"):
            raise RequestError(
                f"{str(graph.path)!r} has the {kind} {shown(name)} without a shape, and Triton must know its "
                "dimensions: write it with onnx.shape_inference."
            )
    return {name: (_dimensions(infos[name], shape), dtype.lower()) for name, (shape, dtype) in values.items()}


def _dimensions(info: onnx.ValueInfoProto, shape: Shape) -> Shape:
    """The shape with numbers for fixed dimensions and names for others. Some files write -1, or a number as text."""
    return tuple("?" if isinstance(dim, int) and dim < 1 else dim for dim in read_dims(shape))
