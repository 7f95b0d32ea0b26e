"""Reads an ONNX file without the weights inside it. They stay on disk as external data of the file itself.

A protobuf message is a sequence of fields. The raw data of large initializers is cut out of the sequence and replaced
with a reference to its place. The rest is parsed and checked like any other file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx

from posexport.artifact import onnx_file
from posexport.artifact.byte_range import FileBytes
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.manifest import changed
from posexport.artifact.onnx_limits import LENGTH, Field, check_size, fields
from posexport.errors import MismatchError, system_error
from posexport.files import MODEL_LIMIT, check_name, open_file, real_path

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of onnx.proto
_DATA_FIELDS = {4, 5, 6, 7, _RAW_DATA, 10, 11, 13, 14}
"""The fields of a tensor that contain its data, or say where it is."""


def read_with_weights_on_disk(path: Path, expected: str | None = None) -> GraphFile:
    """Read any ONNX file with its weights left on disk. Raises the errors of `read_graph`.

    A file is read completely if its name is a link to another folder, or if it has several names. External data must
    not come from another folder.
    """
    check_name(path)
    with system_error(f"can't read {str(path)!r}", "give an existing .onnx file"), open_file(path, MODEL_LIMIT) as file:
        if not _is_elsewhere(path) and path.stat().st_size:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if expected not in (None, sha256):
                raise MismatchError(path, changed(path), sha256=sha256)
            data = FileBytes(file, file.tell())
            try:
                check_size(path, data)
                reduced = _without_weights(data, path.name)
            except ValueError:
                raise onnx_file.not_whole(path) from None
            return GraphFile(path=path, sha256=sha256, model=onnx_file.parsed(path, reduced))
    model, sha256 = onnx_file.read(path, expected)
    return GraphFile(path=path, sha256=sha256, model=model)


def around_weights(path: Path) -> bytes | None:
    """Return the same file as a message in which its large weights are external data of the file.

    None for a file that is read completely, or whose message cannot be parsed.
    """
    with open_file(path, MODEL_LIMIT) as file:
        try:
            return None if _is_elsewhere(path) else _without_weights(FileBytes(file, path.stat().st_size), path.name)
        except ValueError:
            return None


def _is_elsewhere(path: Path) -> bool:
    """Whether a file is in another folder, or has several names."""
    return real_path(path) != real_path(path.parent) / path.name or path.stat().st_nlink > 1


def _without_weights(data: FileBytes, name: str) -> bytes:
    """Return the bytes of a model with its large initializers as external data of the file of this `name`."""
    parts, at = list[bytes](), 0
    for field in fields(data, 0, len(data)):
        if (field.number, field.kind) == (_GRAPH, LENGTH):
            parts += [data[at : field.begin], _message(_GRAPH, _graph(data, field, name))]
            at = field.end
    return b"".join([*parts, data[at:]])


def _graph(data: FileBytes, graph: Field, name: str) -> bytes:
    parts, at = list[bytes](), graph.start
    for field in fields(data, graph.start, graph.end):
        if (field.number, field.kind) == (_INITIALIZER, LENGTH):
            raw = _raw_data(data, field)
            if raw is not None:
                kept = data[field.start : raw.begin] + data[raw.end : field.end] + _reference(name, raw)
                parts += [data[at : field.begin], _message(_INITIALIZER, kept)]
                at = field.end
    return b"".join([*parts, data[at : graph.end]])


def _raw_data(data: FileBytes, tensor: Field) -> Field | None:
    """Return the only data of a tensor, if it is raw and large."""
    found = [field for field in fields(data, tensor.start, tensor.end) if field.number in _DATA_FIELDS]
    if len(found) == 1 and found[0].number == _RAW_DATA and found[0].end - found[0].start > onnx_file.INLINE:
        return found[0]
    return None


def _reference(name: str, raw: Field) -> bytes:
    """Return the fields of a tensor that say where its data is."""
    tensor = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", name), ("offset", raw.start), ("length", raw.end - raw.start)):
        tensor.external_data.add(key=key, value=str(value))
    return bytes(tensor.SerializeToString())


def _message(number: int, message: bytes) -> bytes:
    return onnx_file.field(number, len(message)) + message
