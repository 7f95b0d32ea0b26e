"""A graph that anyone wrote, written to a new file: every weight with its bytes, streamed from wherever it lies.

Weights of any dtype go through memory one at a time, and those in external data in pieces. What lay in the external
data of the original, of however many files, goes to `<file>.data` beside the new file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import onnx

from posexport.artifact import onnx_file
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.onnx_file import EXTERNAL_FROM, ExternalData
from posexport.errors import RequestError, system_error
from posexport.files import HashingFile, Staged, open_file

if TYPE_CHECKING:
    import onnx_ir as ir

_PIECE = 2**22  # bytes of external data that are read at a time


def write_graph(
    model: ir.Model, source: Path, path: Path, files: Staged, external_from: int = EXTERNAL_FROM
) -> dict[str, str]:
    """Write a model that was read from the folder `source` to `path`; returns the sha256 of each file by name.

    Its weights go to `<file>.data` where they take `external_from` bytes or more, or where some lay in external data.
    RequestError where the folder can't be written, or the weights can't be read.
    """
    import onnx_ir as ir

    proto, weights = onnx_file.skeleton(model), onnx_file.weights_of(model)
    inner = _within(proto, source)
    size = sum(tensor.nbytes for tensor in weights.values()) + sum(each.length for each in inner)
    onnx_file.check_room(path.parent, size)
    outside = inner or any(isinstance(tensor, ir.ExternalTensor) for tensor in weights.values())
    if not outside and size < external_from:
        return {path.name: files.write(path, lambda file: onnx_file.write_inline(model, file))}
    tensors = [_external_tensor(proto, name, tensor) for name, tensor in weights.items()]
    return onnx_file.write_with_data(proto, [*tensors, *inner], path, files)


def copy_graph(graph: GraphFile, path: Path, files: Staged) -> dict[str, str]:
    """Write a file that was read to `path`, as it is but for the name of its external data, as `write_graph` does."""
    if graph.external_files():
        proto = onnx.ModelProto()
        proto.CopyFrom(graph.model)
        tensors = _within(proto, graph.path.parent)
        onnx_file.check_room(path.parent, sum(each.length for each in tensors))
        return onnx_file.write_with_data(proto, tensors, path, files)
    whole = _Range(path=graph.path, offset=0, length=graph.path.stat().st_size)
    onnx_file.check_room(path.parent, whole.length)
    sha256 = files.write(path, whole.write)
    if sha256 != graph.sha256:
        raise RequestError(f"{str(graph.path)!r} was changed meanwhile: run the command again.")
    return {path.name: sha256}


@attrs.frozen(kw_only=True)
class _Range:
    """Bytes of a file."""

    path: Path
    offset: int
    length: int

    def write(self, file: HashingFile) -> None:
        for piece in self._pieces():
            file.write(piece)

    def read(self) -> bytes:
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        what = f"can't read the weights in {str(self.path)!r}"
        with system_error(what, "restore the file"), open_file(self.path) as source:
            source.seek(self.offset)
            left = self.length
            while left:
                piece = source.read(min(_PIECE, left))
                if not piece:
                    raise RequestError(f"{what}, it was cut short meanwhile: restore it.")
                left -= len(piece)
                yield piece


def _within(proto: onnx.ModelProto, source: Path) -> list[ExternalData]:
    """The tensors of `proto` whose data lies in files of the folder `source`; small data is put into the message."""
    found = []
    for tensor in onnx_file.tensors_within(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = onnx_file.external(tensor)
            place = _Range(
                path=source / entry["location"], offset=int(entry.get("offset", "0")), length=int(entry["length"])
            )
            tensor.ClearField("external_data")
            if place.length > onnx_file.INLINE:
                found.append(ExternalData(tensor=tensor, length=place.length, write=place.write, place=place))
            else:
                tensor.ClearField("data_location")
                tensor.raw_data = place.read()
    return found


def _external_tensor(proto: onnx.ModelProto, name: str, tensor: ir.TensorProtocol) -> ExternalData:
    import onnx_ir as ir

    made = onnx_file.external_tensor(proto, name, tensor)
    if not isinstance(tensor, ir.ExternalTensor):
        return made
    place = _Range(path=Path(tensor.path), offset=tensor.offset or 0, length=tensor.nbytes)
    return attrs.evolve(made, write=place.write, place=place)
