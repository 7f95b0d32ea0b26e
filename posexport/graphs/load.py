"""Any ONNX file as a model that is analysed and changed; weights in external data are mapped, not read."""

from __future__ import annotations

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
    return model
