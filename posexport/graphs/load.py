"""Any ONNX file as a model that is analysed and changed; weights in external data are mapped, not read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir

from posexport.artifact.graph_file import GraphFile, read_graph
from posexport.errors import RequestError, shown


def load_model(path: Path) -> ir.Model:
    """The model of an ONNX file; RequestError as `read_graph` raises it."""
    return model_of(read_graph(path))


def model_of(graph: GraphFile) -> ir.Model:
    """The model of a file that was read. It shares the weights with `graph`, those in external data stay on the disk.

    RequestError for external data with several names: a link may lead out of the file's folder.
    """
    for name in graph.external_files():
        if graph.path.with_name(name).stat().st_nlink > 1:
            raise RequestError(
                f"{str(graph.path)!r} keeps weights in {shown(name)}, which has several names (hard links): give a "
                "copy of it."
            )
    model = ir.from_proto(graph.model)
    ir.external_data.set_base_dir(model.graph, graph.path.parent.absolute())
    for function in model.functions.values():
        ir.external_data.set_base_dir(function.graph, graph.path.parent.absolute())
    _settle_names(model)
    return model


def _settle_names(model: ir.Model) -> None:
    """One name of the standard's domain, and names of nodes that are no other's, as ONNX asks for."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in graph.all_nodes():
            node.domain = "" if node.domain == "ai.onnx" else node.domain
        if "ai.onnx" in graph.opset_imports:
            graph.opset_imports.setdefault("", graph.opset_imports.pop("ai.onnx"))
    counts = Counter(node.name for node in model.graph.all_nodes() if node.name)
    taken = set(counts)
    for node in model.graph.all_nodes():
        name = node.outputs[0].name if node.outputs else None
        if node.name and counts[node.name] > 1 and name and name not in taken:
            node.name = name
            taken.add(name)
