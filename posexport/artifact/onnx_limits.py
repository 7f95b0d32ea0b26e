"""Limits for ONNX files. They are checked before anything is parsed, inlined or created.

A small file can expand to far more than its bytes. An empty node has 2 bytes in the file and 80 times as many in
memory. 40 functions that call each other twice are 2^40 nodes after inlining, which TensorRT and ONNX Runtime do.
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
"""The maximum number of nodes with subgraphs and inlined functions. 1,000 layers have less than a third."""

DEEPEST_CALLS = 64
"""The maximum depth of functions that call each other."""

LARGEST_STRUCTURE = 2**28
"""The maximum number of bytes of a file without the numbers of its weights."""

_IN_MEMORY = 80  # maximum bytes in memory for a byte of structure (measured with empty nodes)
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
"""The messages that lead to weights, by the numbers of their fields in onnx.proto. Nodes may contain weights too."""

_RAW_DATA = 9
_NUMBERS = {4: 1, 5: 4, 7: 8, _RAW_DATA: 1, 10: 1, 11: 8}
"""The fields of a tensor that contain its numbers in sequence, and the maximum bytes in memory for one byte of each."""

_LARGE_NODE = 1024
"""Nodes with at least this many bytes are searched. Smaller nodes contain no weights that matter."""

_MOST_FIELDS = 10 * MOST_NODES
"""The maximum number of fields that are read in a file, and in one message."""

_DEEPEST = 100
"""The maximum depth of messages. protobuf reads no deeper."""

Function = tuple[str, str, str]
"""Domain, name and overload of a function."""


def check_size(path: Path, data: bytes | FileBytes) -> None:
    """Raise RequestError for a graph that would not fit into memory. ValueError for an invalid protobuf message."""
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
    """Return the bytes of the numbers of weights in a file, and the bytes that they take in memory.

    The raw data of initializers stays on disk. Other numbers are copied. ValueError for more fields than the limit.
    """
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
    """A field of a protobuf message. It begins at `begin` with its tag. Its value is from `start` to `end`."""

    number: int
    kind: int
    begin: int
    start: int
    end: int


def fields(data: bytes | FileBytes, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of a protobuf message in these bytes. ValueError if it is not complete."""
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
    """Return the number that begins at `at`, and where it ends."""
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
    """Yield every node of a graph or function as (None, node), and every subgraph in them as (subgraph, None)."""
    holders: list[onnx.GraphProto | onnx.FunctionProto] = [holder]
    while holders:
        for node in holders.pop().node:
            yield None, node
            for attribute in node.attribute:
                for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                    yield graph, None
                    holders.append(graph)


def check_texts(path: Path, model: onnx.ModelProto) -> None:
    """Raise RequestError for a name or another text that is not UTF-8. protobuf returns such a text as bytes."""
    messages: list[Any] = [model]
    while messages:
        for field, value in messages.pop().ListFields():
            if field.type == _TEXT:
                if any(isinstance(text, bytes) for text in ([value] if isinstance(value, str | bytes) else value)):
                    raise RequestError(f"{str(path)!r} holds a {field.name} that is not UTF-8: export it again.")
            elif field.type == _MESSAGE:
                messages += value if field.is_repeated else [value]


RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
"""Operators of ONNX with other results in each run."""


def check_graph(path: Path, model: onnx.ModelProto) -> None:
    """Raise RequestError for a graph with a weight that is defined twice, or with too many nodes after inlining.

    Also for functions that call themselves, and for a function with defaults other than numbers and texts.
    """
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
    """Whether an attribute contains no graph, no sparse tensor and no data in other files."""
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
    """Return the number of operator nodes of a graph or function, and how often it calls each function.

    RequestError for too many nodes, for a sparse tensor, and for an operator whose results differ from run to run.
    """
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
    """Yield the names of constants that are the boolean False."""
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
