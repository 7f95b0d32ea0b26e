"""What an ONNX file may ask for: limits that are checked before anything is parsed, inlined or made.

A small file can stand for far more than its bytes. An empty node has 2 bytes in the file and 80 times that in memory;
40 functions that call each other twice are 2^40 nodes once they are inlined, as TensorRT and ONNX Runtime do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from posexport.artifact.byte_range import FileBytes
from posexport.errors import RequestError, shown
from posexport.machine import available, size_text

MOST_NODES = 500_000
"""Nodes of a graph with its subgraphs, its functions inlined. A stack of 1,000 layers has less than a third of that."""

DEEPEST_CALLS = 64
"""Functions that call each other, one inside the other."""

LARGEST_STRUCTURE = 2**28
"""Bytes of a file that are not the numbers of its weights."""

_IN_MEMORY = 80  # bytes that a byte of structure takes once it is parsed, at most (measured with empty nodes)
_TEXT, _MESSAGE = 9, 11  # types of fields in protobuf's descriptors
_VARINT, _FIXED64, LENGTH, _FIXED32 = 0, 1, 2, 5

_WITHIN: dict[str, dict[int, str]] = {
    "model": {7: "main graph", 25: "function"},
    "main graph": {1: "node", 5: "initializer"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
"""The messages that lead to weights, which nodes may hold too, by the numbers of their fields in onnx.proto."""

_RAW_DATA = 9
_NUMBERS = {4: 1, 5: 4, 7: 8, _RAW_DATA: 1, 10: 1, 11: 8}
"""The fields of a tensor that hold its numbers in a row, and how many bytes one of theirs takes in memory, at most."""

_LARGE_NODE = 1024
"""Bytes from which a node is looked into: smaller ones hold no weights that matter."""

_MOST_FIELDS = 10 * MOST_NODES
"""Fields of a file that are looked at, and of one message."""

_DEEPEST = 100
"""Messages inside of each other: protobuf reads no more."""

Function = tuple[str, str, str]
"""Domain, name and overload of a function."""


def check_size(path: Path, data: bytes | FileBytes) -> None:
    """RequestError for a file whose graph would not fit into memory; ValueError where it is no protobuf message."""
    stored, parsed = _weights(data)
    structure = len(data) - stored
    if structure > LARGEST_STRUCTURE:
        raise RequestError(
            f"{str(path)!r} has {size_text(structure)} beside its weights, at most {size_text(LARGEST_STRUCTURE)} are "
            "read: export it again."
        )
    needed = structure * _IN_MEMORY + parsed
    if needed > (free := available()):
        raise RequestError(
            f"{str(path)!r} may take {size_text(needed)} to read and {size_text(free)} of memory are free: free some."
        )


def _weights(data: bytes | FileBytes) -> tuple[int, int]:
    """The bytes of the numbers of weights in a file, and those that they take in memory: the raw data of initializers
    stays on the disk, of others there is a copy. ValueError for more fields than a graph has that is taken."""
    stored = parsed = count = 0
    inside = [("model", fields(data, 0, len(data)))]
    while inside:
        message, left = inside[-1]
        field = next(left, None)
        if field is None:
            inside.pop()
            continue
        count += 1
        if count > _MOST_FIELDS:
            raise ValueError("too many fields")
        if field.kind != LENGTH:
            continue
        size, inner = field.end - field.start, _WITHIN.get(message, {}).get(field.number)
        if inner is not None and (inner != "node" or size >= _LARGE_NODE) and len(inside) < _DEEPEST:
            inside.append((inner, fields(data, field.start, field.end)))
        elif message in ("initializer", "tensor") and field.number in _NUMBERS:
            stored += size
            if message != "initializer" or field.number != _RAW_DATA:
                parsed += 2 * size * _NUMBERS[field.number]
    return stored, parsed


class Field(NamedTuple):
    """A field of a protobuf message: it begins at `begin` with its tag, its value is from `start` to `end`."""

    number: int
    kind: int
    begin: int
    start: int
    end: int


def fields(data: bytes | FileBytes, start: int, end: int) -> Iterator[Field]:
    """The fields of a protobuf message in these bytes; ValueError where it isn't whole."""
    at, count = start, 0
    while at < end:
        count += 1
        if count > _MOST_FIELDS:
            raise ValueError("too many fields")
        begin = at
        tag, at = _varint(data, at, end)
        kind, number = tag & 7, tag >> 3
        if kind == _VARINT:
            value, (_, at) = at, _varint(data, at, end)
            yield Field(number, kind, begin, value, at)
            continue
        if kind == LENGTH:
            size, at = _varint(data, at, end)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("an unknown kind of field")
        if size > end - at:
            raise ValueError("cut short")
        yield Field(number, kind, begin, at, at + size)
        at += size


def _varint(data: bytes | FileBytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("no number")


def nodes_within(
    holder: onnx.GraphProto | onnx.FunctionProto,
) -> Iterator[tuple[onnx.GraphProto | None, onnx.NodeProto | None]]:
    """Every node of a graph or function, as (None, node), and every subgraph of theirs, as (subgraph, None)."""
    holders: list[onnx.GraphProto | onnx.FunctionProto] = [holder]
    while holders:
        for node in holders.pop().node:
            yield None, node
            for attribute in node.attribute:
                for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                    yield graph, None
                    holders.append(graph)


def check_texts(path: Path, model: onnx.ModelProto) -> None:
    """RequestError for a name or another text of the file that is not UTF-8: protobuf gives it as bytes."""
    messages: list[Any] = [model]
    while messages:
        for field, value in messages.pop().ListFields():
            if field.type == _TEXT:
                if any(isinstance(text, bytes) for text in ([value] if isinstance(value, str | bytes) else value)):
                    raise RequestError(f"{str(path)!r} holds a {field.name} that is not UTF-8: export it again.")
            elif field.type == _MESSAGE:
                messages += value if field.is_repeated else [value]


RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
"""Operators of ONNX that give other results each time."""


def check_graph(path: Path, model: onnx.ModelProto) -> None:
    """RequestError for a graph that defines a weight twice, has too many nodes once its functions are inlined, or can't
    be, and for a function with more than numbers and texts by default."""
    weights = Counter(tensor.name for tensor in model.graph.initializer)
    weights.update(name for node in model.graph.node for name in node.output if name in weights)
    twice = next((name for name, times in weights.items() if times > 1), None)
    if twice is not None:
        raise RequestError(f"{str(path)!r} defines the weight {shown(twice)} twice: export it again.")
    functions: dict[Function, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise RequestError(f"{str(path)!r} holds two functions {shown(function.name)}: export it again.")
        functions[key] = function
        for attribute in function.attribute_proto:
            if not _is_plain(attribute):
                raise RequestError(
                    f"{str(path)!r} holds a function {shown(function.name)} whose attribute {shown(attribute.name)} is "
                    "a graph, a sparse tensor or data of another file by default: export it again."
                )
    calls = {key: _count(path, function, functions.keys()) for key, function in functions.items()}
    try:
        order = list(TopologicalSorter({key: list(counts[1]) for key, counts in calls.items()}).static_order())
    except CycleError as error:
        raise RequestError(
            f"{str(path)!r} holds a function {shown(error.args[1][0][1])} that calls itself: export it again."
        ) from None
    sizes: dict[Function, int] = {}
    depths: dict[Function, int] = {}
    for key in order:
        nodes, called = calls[key]
        sizes[key] = nodes + sum(sizes[name] * times for name, times in called.items())
        depths[key] = 1 + max((depths[name] for name in called), default=0)
    nodes, called = _count(path, model.graph, functions.keys())
    total = nodes + sum(sizes[name] * times for name, times in called.items())
    if total > MOST_NODES:
        text = f"{total:,}" if total < 10**15 else "more than 10^15"
        raise RequestError(
            f"{str(path)!r} has {text} nodes once its functions are inlined, at most {MOST_NODES:,} are taken: "
            "export it again."
        )
    if max(depths.values(), default=0) > DEEPEST_CALLS:
        raise RequestError(
            f"{str(path)!r} holds functions that call each other {max(depths.values())} deep, at most {DEEPEST_CALLS} "
            "are taken: export it again."
        )
    if any(graph.sparse_initializer for graph in _graphs(model)):
        raise _sparse(path)


def _is_plain(attribute: onnx.AttributeProto) -> bool:
    """Whether an attribute holds no graph, no sparse tensor and no data of other files."""
    if attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
        return False
    return not any(tensor.external_data or tensor.data_location for tensor in (attribute.t, *attribute.tensors))


def _sparse(path: Path) -> RequestError:
    return RequestError(f"{str(path)!r} holds sparse tensors, which posexport doesn't read: export it again.")


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    yield model.graph
    for holder in (model.graph, *model.functions):
        yield from (graph for graph, _ in nodes_within(holder) if graph is not None)


def _count(
    path: Path, holder: onnx.GraphProto | onnx.FunctionProto, functions: Collection[Function]
) -> tuple[int, Counter[Function]]:
    """The nodes of a graph or function that are operators, and how often it calls each function; RequestError for too
    many of them, for one that holds a sparse tensor, and for one whose results differ from run to run."""
    nodes, called = 0, Counter[Function]()
    modes = set[str]()
    for _, node in nodes_within(holder):
        if node is None:
            continue
        nodes += 1
        if nodes > MOST_NODES:
            raise RequestError(f"{str(path)!r} has more than {MOST_NODES:,} nodes, so it is not read: export it again.")
        if any(one.HasField("sparse_tensor") or one.sparse_tensors for one in node.attribute):
            raise _sparse(path)
        if node.domain in ("", "ai.onnx"):
            if node.op_type in RANDOM:
                raise _random(path, node.op_type, "export it again")
            if node.op_type == "Dropout":
                modes.update(filter(None, node.input[2:3]))
        key = (node.domain, node.op_type, node.overload)
        if key in functions:
            called[key] += 1
    if modes - set(_false_values(holder) if modes else ()):
        raise _random(path, "Dropout", "export it again in evaluation mode")
    return nodes, called


def _random(path: Path, operator: str, advice: str) -> RequestError:
    return RequestError(f"{str(path)!r} holds the operator {operator}, whose results differ from run to run: {advice}.")


def _false_values(holder: onnx.GraphProto | onnx.FunctionProto) -> Iterator[str]:
    """The names of constants that are the truth value False."""
    graphs = [holder, *(graph for graph, _ in nodes_within(holder) if graph is not None)]
    for graph in graphs:
        tensors = [(tensor.name, tensor) for tensor in getattr(graph, "initializer", ())]
        for node in graph.node:
            if node.op_type == "Constant" and len(node.output) == 1:
                tensors += [(node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value"]
        for name, tensor in tensors:
            small = tensor.data_type == onnx.TensorProto.BOOL and not tensor.dims and not tensor.external_data
            if small and not any(tensor.raw_data) and not any(tensor.int32_data):
                yield name
