"""Any ONNX file, written by any tool: its graph, read and checked, with the weights left on disk."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import attrs
import onnx

from posexport.artifact import onnx_file
from posexport.files import sha256_of
from posexport.spec.contract import Shape

_DTYPES = {1: "fp32", 10: "fp16", 16: "bf16", 7: "int64", 6: "int32", 11: "fp64", 9: "bool"}


@attrs.frozen(kw_only=True)
class GraphFile:
    """An ONNX file, read and checked. Weights in external data stay on disk until they are needed.

    `sha256` is the hash of the bytes that were read. The hashes of external data are computed when they are first
    needed.
    """

    path: Path
    sha256: str
    model: onnx.ModelProto

    @property
    def opset(self) -> int:
        """The opset of the default domain."""
        return int(next(entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx")))

    @functools.cached_property
    def external_sha256(self) -> dict[str, str]:
        """The sha256 of each file of external data, by name."""
        return {name: sha256_of(self.path.with_name(name)) for name in self.external_files()}

    def external_files(self) -> list[str]:
        """Return the names of the files of external data, sorted. The file itself is never included."""
        return [name for name in onnx_file.external_files(self.model) if name != self.path.name]

    @property
    def holds_external_data(self) -> bool:
        """Whether the file contains external data of its own tensors."""
        return self.path.name in onnx_file.external_files(self.model)

    def inputs(self) -> dict[str, tuple[Shape, str]]:
        """Return the graph's inputs: name to (shape, dtype). A dynamic dimension is a name.

        Weights that old files list among the inputs are left out.
        """
        weights = {tensor.name for tensor in self.model.graph.initializer}
        return values_of_infos(info for info in self.model.graph.input if info.name not in weights)

    def outputs(self) -> dict[str, tuple[Shape, str]]:
        """Return the graph's outputs in the same way as `inputs`."""
        return values_of_infos(self.model.graph.output)

    def domains(self) -> dict[str, int]:
        """Return the version of each operator domain, sorted by name."""
        return dict(sorted((entry.domain, entry.version) for entry in self.model.opset_import))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file, by key."""
        return {entry.key: entry.value for entry in self.model.metadata_props}


def read_graph(path: Path, expected: str | None = None) -> GraphFile:
    """Read any ONNX file. RequestError if it is damaged or exceeds a limit.

    MismatchError, before anything is parsed, if its bytes do not have the `expected` sha256 of its manifest.
    """
    model, sha256 = onnx_file.read(path, expected)
    return GraphFile(path=path, sha256=sha256, model=model)


def dtype_name(number: int) -> str:
    """Return posexport's name of an element type, or else onnx's name, or else `type 99`."""
    known = onnx.TensorProto.DataType
    return _DTYPES.get(number) or (known.Name(number) if number in known.values() else f"type {number}")


def values_of_infos(infos: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[Shape, str]]:
    """Return inputs or outputs of a graph: name to (shape, dtype). A dynamic dimension is a name."""
    values: dict[str, tuple[Shape, str]] = {}
    for info in infos:
        tensor = info.type.tensor_type
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
        values[info.name] = (shape, dtype_name(tensor.elem_type))
    return values
