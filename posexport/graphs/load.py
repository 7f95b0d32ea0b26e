"""Loads any ONNX file as a model to analyse and change. Weights in external data are mapped, not read."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from posexport.artifact.graph_file import GraphFile, read_graph
from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.errors import RequestError, shown
from posexport.graphs.opset_changes import means_the_same
from posexport.graphs.selections import with_selections
from posexport.graphs.sequences import without_sequences


class InvalidGraphError(RequestError):
    """The file's graph is not valid, for example because two nodes give the same name."""


def load_model(path: Path) -> ir.Model:
    """The model of an ONNX file; RequestError as `read_graph` raises it."""
    return model_of(read_graph(path))


def model_of(graph: GraphFile) -> ir.Model:
    """The model of a file that was read. It shares the weights with `graph`; those in external data stay on the disk.

    RequestError for external data with several names (hard links): a link may lead out of the file's folder.
    """
    for name in graph.external_files():
        if graph.path.with_name(name).stat().st_nlink > 1:
            raise RequestError(
                f"{str(graph.path)!r} keeps weights in {shown(name)}, which has several names (hard links): give a "
                "copy of it."
            )
    model = ir_of(graph)
    _settle_names(model)
    _sort(graph, model)
    return model


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence onnx_ir's warnings about a damaged graph: whatever reads the graph says what is wrong."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def ir_of(graph: GraphFile) -> ir.Model:
    """The graph as an onnx_ir model, with external data in the file's folder; InvalidGraphError if it isn't valid."""
    try:
        with without_warnings():
            model = ir.from_proto(graph.model)
    except Exception as error:  # one error for each level of the graph; the innermost says what is wrong
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InvalidGraphError(
            f"{str(graph.path)!r} holds no valid graph ({shown(str(cause), 200)}): export it again."
        ) from None
    _fix_initializers(model)
    for lacking in _without_source(model):
        raise InvalidGraphError(
            f"{str(graph.path)!r} holds no valid graph, no node, input or weight defines {shown(lacking.name)}: export "
            "it again."
        )
    for holder in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(holder, graph.path.parent.absolute())
    return model


def _without_source(model: ir.Model) -> Iterator[ir.Value]:
    """Values that are read although nothing gives them."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        read = (value for node in graph.all_nodes() for value in node.inputs if value is not None)
        for value in (*read, *graph.outputs):
            if value.producer() is None and not value.is_graph_input() and not value.is_initializer():
                yield value


def inlined(model: ir.Model, kept: str | None = None) -> ir.Model:
    """The same model, with calls of its functions replaced by their bodies.

    Functions of the domain `kept` stay, and so do those that can't be inlined (`_only_called`). InvalidGraphError if
    calls are wrong.
    """
    if model.functions:
        left = _only_called(model)
        try:
            InlinePass(criteria=lambda function: function.domain != kept and function.identifier() not in left)(model)
        except (ValueError, ir.passes.PreconditionError) as error:  # calls in a circle, or too many inputs
            raise InvalidGraphError(
                f"the graph calls a function wrongly ({shown(str(error), 200)}): export it again."
            ) from None
    return model


def _only_called(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """The functions whose bodies can't replace their calls.

    These are functions in which an operator means something else than in the graph, because of another opset, functions
    that get graphs, and functions that these call. A function whose operators are the same in the opset of the graph
    gets that opset.
    """
    opsets = {_settled(domain): version for domain, version in model.opset_imports.items()}
    pending: list[ir.OperatorIdentifier] = []
    for name, function in model.functions.items():
        domains = [*function.opset_imports]
        if not _has_graphs(function) and all(_fits(model, function, domain, opsets) for domain in domains):
            for domain in domains:
                function.opset_imports[domain] = opsets[_settled(domain)]
        else:
            pending.append(name)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        pending += [call for node in graph.all_nodes() if (call := _called(model, node)) and _has_graphs(node)]
    left: set[ir.OperatorIdentifier] = set()
    while pending:
        name = pending.pop()
        if name not in left:
            left.add(name)
            pending += [other for node in model.functions[name].all_nodes() if (other := _called(model, node))]
    return left


def _settled(domain: str) -> str:
    """The name of a domain, empty for the standard domain."""
    return "" if domain == "ai.onnx" else domain


def _called(model: ir.Model, node: ir.Node) -> ir.OperatorIdentifier | None:
    """The function that a node calls; None if it calls none."""
    name = node.op_identifier()
    return name if name in model.functions else None


def _has_graphs(one: ir.Node | ir.Function) -> bool:
    """Whether an attribute of a node, or a default of a function's attribute, is a graph."""
    return any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in one.attributes.values())


def _fits(model: ir.Model, function: ir.Function, domain: str, opsets: dict[str, int]) -> bool:
    """Whether the operators of a domain are the same in a function and in graphs with these opsets.

    `opsets` gets the domain if it lacks it.
    """
    name, own = _settled(domain), function.opset_imports[domain]
    other = opsets.setdefault(name, own)
    nodes = (node for node in function.all_nodes() if _settled(node.domain) == name and not _called(model, node))
    return own == other or all(not name and means_the_same(node, own, other) for node in nodes)


def live(model: ir.Model, kept: str | None = None) -> ir.Model:
    """`inlined`, with parts in place of sequences, with choices as Where, and without unused nodes of the main graph.

    posexport.graphs.sequences makes the parts, and posexport.graphs.selections the choices. A node is unused if no
    output of the graph is computed from it. Weights stay.
    """
    graph = inlined(model, kept).graph
    without_sequences(graph)
    with_selections(graph)
    pending = [*graph]
    while pending:
        node = pending.pop()
        if node.graph is graph and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
            pending += [
                source for value in node.inputs if value is not None and (source := value.producer()) is not None
            ]
    return model


def _sort(graph: GraphFile, model: ir.Model) -> None:
    """Sort nodes so that each comes after those that it reads, as ONNX requires.

    Some converters to float16 don't keep this order, and ONNX Runtime takes the file all the same. InvalidGraphError if
    there is no such order.
    """
    try:
        model.graph.sort()
        for function in model.functions.values():
            function.graph.sort()
    except ValueError:
        raise InvalidGraphError(
            f"the graph of {str(graph.path)!r} has a cycle of nodes: export the file again."
        ) from None


def _fix_initializers(model: ir.Model) -> None:
    """Remove the initializers from the inputs of a file of an IR version before 4.

    Such files must list all initializers as inputs, and runtimes take them as constants. In later versions, an
    initializer that is an input is a default value that callers may change.
    """
    if model.ir_version < _FIRST_WITH_CONSTANTS:
        given = [value for value in model.graph.inputs if not value.is_initializer()]
        model.graph.inputs.clear()
        model.graph.inputs.extend(given)


_FIRST_WITH_CONSTANTS = 4
"""The first IR version in which initializers needn't be inputs."""


def _settle_names(model: ir.Model) -> None:
    """Give the standard domain one name, and nodes unique names, as ONNX requires."""
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


_kept: dict[tuple[str, int, int], ir.Model] = {}


def model_at(path: Path) -> ir.Model:
    """The model of a file with its functions inlined. External data stays on the disk until it is read."""
    status = path.stat()
    key = (str(path), status.st_mtime_ns, status.st_size)
    if key not in _kept:
        _kept.clear()
        _kept[key] = inlined(ir_of(read_with_weights_on_disk(path)))
    return _kept[key]
