"""Writes a graph by any tool to a new file. The bytes of each weight are copied from where they are.

Weights of any dtype are in memory one at a time, and weights in external data in pieces. External data of the original,
in any number of files, goes to `<file>.data` beside the new file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from posexport.artifact import onnx_file
from posexport.artifact.byte_range import ByteRange
from posexport.artifact.external import external
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.onnx_file import EXTERNAL_FROM, ExternalData
from posexport.errors import RequestError
from posexport.files import Staged

if TYPE_CHECKING:
    import onnx_ir as ir


def write_graph(
    model: ir.Model, source: Path, path: Path, files: Staged, external_from: int = EXTERNAL_FROM
) -> dict[str, str]:
    """Write a model that was read from the file `source` to `path`. Return the sha256 of each file by name.

    Its weights go to `<file>.data` if they have `external_from` bytes or more, or if some were in external data.
    RequestError if the folder cannot be written, or the weights cannot be read.
    """
    proto, weights = onnx_file.skeleton(model), onnx_file.weights_of(model)
    inner = _within(proto, source)
    size = sum(tensor.nbytes for tensor in weights.values()) + sum(each.length for each in inner)
    onnx_file.check_room(path.parent, size)
    outside = inner or any(_lies_elsewhere(tensor, source) for tensor in weights.values())
    if not outside and size < external_from:
        return {path.name: files.write(path, lambda file: onnx_file.write_inline(model, file, proto))}
    tensors = [onnx_file.external_tensor(proto, name, tensor) for name, tensor in weights.items()]
    return onnx_file.write_with_data(proto, [*tensors, *inner], path, files)


def copy_graph(graph: GraphFile, path: Path, files: Staged) -> dict[str, str]:
    """Write a file that was read to `path`. Only the name of its external data changes, as in `write_graph`."""
    if graph.external_files():
        proto = onnx.ModelProto()
        proto.CopyFrom(graph.model)
        tensors = _within(proto, graph.path)
        onnx_file.check_room(path.parent, sum(each.length for each in tensors))
        if not tensors:  # all are small, and now in the message
            return {path.name: files.write(path, lambda file: file.write(proto.SerializeToString(deterministic=True)))}
        return onnx_file.write_with_data(proto, tensors, path, files)
    whole = ByteRange(path=graph.path, offset=0, length=graph.path.stat().st_size)
    onnx_file.check_room(path.parent, whole.length)
    sha256 = files.write(path, whole.write)
    if sha256 != graph.sha256:
        raise RequestError(f"{str(graph.path)!r} was changed meanwhile: run the command again.")
    return {path.name: sha256}


def _lies_elsewhere(tensor: ir.TensorProtocol, source: Path) -> bool:
    """Whether a weight is in another file than the graph."""
    import onnx_ir as ir

    return isinstance(tensor, ir.ExternalTensor) and str(tensor.location) != source.name


def _within(proto: onnx.ModelProto, source: Path) -> list[ExternalData]:
    """Return the tensors of `proto` whose data is beside the file `source`.

    Data that is small, or in the file itself, is put into the message instead.
    """
    found = []
    for tensor in onnx_file.tensors_within(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = external(tensor)
            place = ByteRange(
                path=source.with_name(entry["location"]),
                offset=int(entry.get("offset", "0")),
                length=int(entry["length"]),
            )
            tensor.ClearField("external_data")
            if place.length > onnx_file.INLINE and entry["location"] != source.name:
                found.append(ExternalData(tensor=tensor, length=place.length, write=place.write, place=place))
            else:
                tensor.ClearField("data_location")
                tensor.raw_data = place.read()
    return found
