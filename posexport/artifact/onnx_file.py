"""ONNX files on disk: written with weights streamed from their tensors, read with external data left in its folder.

A protobuf message is a sequence of fields. The bytes of a model are therefore those of the model without weights,
followed by one field for each weight. Written this way, a block of any size needs no second copy of its weights in
memory.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import google.protobuf.message
import numpy as np
import onnx
import onnx.checker
import onnx.numpy_helper

from posexport.artifact.byte_range import ByteRange
from posexport.artifact.external import check_external, external
from posexport.artifact.manifest import changed
from posexport.artifact.onnx_limits import check_graph, check_size, check_texts, nodes_within
from posexport.errors import MismatchError, RequestError, shown, system_error
from posexport.files import MODEL_LIMIT, HashingFile, Staged, check_name, open_file, read_bytes
from posexport.machine import size_text

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

# Field numbers of onnx.proto. Wire type 2 is a length followed by that many bytes.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA = 7, 5, 9
EXTERNAL_FROM = 1_500_000_000
"""If weights have this many bytes or more, they go to `<file>.data` beside the file (protobuf ends at 2 GiB)."""

INLINE = 1024
"""The maximum number of bytes of an initializer that stays in the graph's own message."""

_ALIGN = 4096  # of a tensor in an external file, so that it can be mapped into memory
_TORCH: dict[int, tuple[str, int]] = {
    onnx.TensorProto.FLOAT: ("float32", 4),
    onnx.TensorProto.FLOAT16: ("float16", 2),
    onnx.TensorProto.BFLOAT16: ("bfloat16", 2),
    onnx.TensorProto.INT64: ("int64", 8),
}
"""torch's names for the dtypes that artifacts use, and the bytes of an element."""
_DATA = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
"""The fields of a tensor that may contain its data. One of them does; none if the data is in another file."""

_BITS: dict[int, int] = {
    number: bits
    for bits, names in {
        2: "INT2 UINT2",
        4: "INT4 UINT4 FLOAT4E2M1",
        8: "INT8 UINT8 BOOL FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0",
        16: "INT16 UINT16 FLOAT16 BFLOAT16",
        32: "INT32 UINT32 FLOAT",
        64: "INT64 UINT64 DOUBLE COMPLEX64",
        128: "COMPLEX128",
    }.items()
    for number in map(onnx.TensorProto.DataType.Value, names.split())
}
"""Bits of an element, for the dtypes of tensors that can be read."""

LARGEST_OPSET = 2**15
"""An opset that ONNX will not reach, because its numbers grow by two a year."""

_SLACK = 2**20  # bytes that external data may have after the last tensor


def weights_of(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the initializers that are streamed, by name, in the graph's order."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and _is_streamed(tensor)}


def _is_streamed(tensor: ir.TensorProtocol) -> bool:
    return int(tensor.dtype) != onnx.TensorProto.STRING and tensor.nbytes > INLINE


def lazy(
    name: str, shape: tuple[int, ...], dtype: ir.DataType, make: Callable[[], ir.TensorProtocol]
) -> ir.TensorProtocol:
    """Return a tensor that `make` creates each time it is written. A small tensor is created now."""
    import onnx_ir as ir

    tensor = ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=name)
    return tensor if tensor.nbytes > INLINE else make()


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """Return the model as protobuf without the initializers of `weights_of`."""
    import onnx_ir as ir

    everything = list(model.graph.initializers.items())
    for name in weights_of(model):
        model.graph.initializers.pop(name)
    try:
        return ir.to_proto(model)
    finally:
        model.graph.initializers.clear()
        model.graph.initializers.update(everything)


def check(model: ir.Model) -> None:
    """Run onnx's full check with shape inference. Inputs replace the weights, so that no weight is copied."""
    proto = skeleton(model)
    for name, tensor in weights_of(model).items():
        shape = [int(dim) for dim in tensor.shape]  # type: ignore[arg-type]
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, int(tensor.dtype), shape))
    onnx.checker.check_model(proto, full_check=True)


def write_inline(model: ir.Model, file: HashingFile, proto: onnx.ModelProto | None = None) -> None:
    """Write the model with its weights inside. `proto` is its skeleton, which is consumed."""
    proto = skeleton(model) if proto is None else proto
    graph = proto.graph.SerializeToString(deterministic=True)
    proto.ClearField("graph")
    parts = []
    for name, tensor in weights_of(model).items():
        head = _header(name, tensor) + field(_TENSOR_RAW_DATA, tensor.nbytes)
        parts.append((field(_GRAPH_INITIALIZER, len(head) + tensor.nbytes) + head, tensor))
    file.write(proto.SerializeToString(deterministic=True))
    file.write(field(_MODEL_GRAPH, len(graph) + sum(len(head) + tensor.nbytes for head, tensor in parts)))
    file.write(graph)
    for head, tensor in parts:
        file.write(head)
        _stream(tensor, file)


def write_external(model: ir.Model, path: Path, files: Staged) -> dict[str, str]:
    """Write the weights to `<file>.data` and the graph to `path`. Return the sha256 of each by file name."""
    proto = skeleton(model)
    tensors = [external_tensor(proto, name, tensor) for name, tensor in weights_of(model).items()]
    return write_with_data(proto, tensors, path, files)


@attrs.frozen(kw_only=True)
class ExternalData:
    """A tensor without its data, and a function that writes `length` bytes. Equal `place` means equal bytes."""

    tensor: onnx.TensorProto
    length: int
    write: Callable[[HashingFile], object]
    place: Hashable = None


def external_tensor(proto: onnx.ModelProto, name: str, tensor: ir.TensorProtocol) -> ExternalData:
    """Add an initializer to the model whose data will be external."""
    import onnx_ir as ir

    entry = proto.graph.initializer.add()
    entry.ParseFromString(_header(name, tensor))
    place = range_of(tensor) if isinstance(tensor, ir.ExternalTensor) else None
    return ExternalData(tensor=entry, length=tensor.nbytes, write=lambda file: _stream(tensor, file), place=place)


def write_with_data(
    proto: onnx.ModelProto, tensors: Iterable[ExternalData], path: Path, files: Staged
) -> dict[str, str]:
    """Write tensors of the model to `<file>.data`, and the model to `path`. Return the sha256 of each by file name."""
    data = data_path(path)

    def fill(file: HashingFile) -> None:
        offsets: dict[Hashable, int] = {}
        for each in tensors:
            offset = offsets.get(each.place) if each.place is not None else None
            if offset is None:
                file.write(b"\0" * (-file.size % _ALIGN))
                offset = offsets[each.place] = file.size
                each.write(file)
            each.tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", offset), ("length", each.length)):
                each.tensor.external_data.add(key=key, value=str(value))

    hashes = {data.name: files.write(data, fill)}
    hashes[path.name] = files.write(path, lambda file: file.write(proto.SerializeToString(deterministic=True)))
    return hashes


def check_room(folder: Path, size: int) -> None:
    """Raise RequestError if there is no room for `size` bytes, before gigabytes of them are written."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # writing to the folder says what is wrong
        return
    if size > free:
        raise RequestError(
            f"the weights take {size_text(size)} and {size_text(free)} are free in {str(folder)!r}: free some space "
            "or give another folder."
        )


def data_path(path: Path) -> Path:
    """Return `<file>.data`, which contains the weights of a large ONNX file."""
    return path.with_name(path.name + ".data")


def _header(name: str, tensor: ir.TensorProtocol) -> bytes:
    dims = [int(dim) for dim in tensor.shape]  # type: ignore[arg-type]
    header = onnx.TensorProto(name=name, dims=dims, data_type=int(tensor.dtype))
    if tensor.doc_string:
        header.doc_string = tensor.doc_string
    for key, value in tensor.metadata_props.items():
        header.metadata_props.add(key=key, value=value)
    return bytes(header.SerializeToString(deterministic=True))


def field(number: int, length: int) -> bytes:
    """Return tag and length of a length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _stream(tensor: ir.TensorProtocol, file: HashingFile) -> None:
    import onnx_ir as ir
    import torch

    if isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()
    if isinstance(tensor, ir.ExternalTensor):
        range_of(tensor).write(file)
        return
    raw = tensor.raw
    if isinstance(raw, torch.Tensor):
        flat = raw.detach().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)  # the tensor's own memory, no copy
    else:
        file.write(tensor.tobytes())


def range_of(tensor: ir.ExternalTensor) -> ByteRange:
    """Return where the bytes of a tensor are."""
    return ByteRange(path=Path(tensor.path), offset=tensor.offset or 0, length=tensor.nbytes)


def read(path: Path, expected: str | None = None) -> tuple[onnx.ModelProto, str]:
    """Read an ONNX file, with its external data left on disk. Return it with the sha256 of the bytes that were parsed.

    Raises RequestError for a file that is not complete, sound ONNX. MismatchError, before parsing, if the bytes do not
    have the `expected` sha256. Anything that could take far more time or memory than its size suggests is refused first
    (posexport.artifact.onnx_limits). External data must be in the file's own folder, because another path could read
    any file of the user.
    """
    check_name(path)
    with system_error(f"can't read {str(path)!r}", "give an existing .onnx file"):
        data = read_bytes(path, MODEL_LIMIT)
    sha256 = hashlib.sha256(data).hexdigest()
    if expected not in (None, sha256):
        raise MismatchError(path, changed(path), sha256=sha256)
    return parsed(path, data), sha256


def parsed(path: Path, data: bytes) -> onnx.ModelProto:
    """Return the model of a file that contains `data`. Raises the errors of `read`."""
    try:
        check_size(path, data)
        model = onnx.load_model_from_string(data)
    except (google.protobuf.message.DecodeError, ValueError):
        raise not_whole(path) from None
    check_texts(path, model)
    opsets = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not model.graph.node or not opsets or not all(0 < version < LARGEST_OPSET for version in opsets):
        raise RequestError(f"{str(path)!r} holds no ONNX graph of a known opset: export it again.")
    check_graph(path, model)
    ends: dict[Path, int] = {}
    for tensor in tensors_within(model):
        _check_tensor(path, tensor, ends)
    for target, end in ends.items():
        if target.stat().st_size > end + _SLACK and target.name != path.name:
            raise RequestError(
                f"{str(path)!r} keeps {size_text(end)} of weights in {target.name!r}, which is larger than that: "
                "restore it."
            )
    return model


def not_whole(path: Path) -> RequestError:
    """Return the error for a file that is not a complete protobuf message."""
    return RequestError(f"{str(path)!r} is not an ONNX file, or it is cut short: export it again.")


def load(path: Path) -> onnx.ModelProto:
    """Read an ONNX file with its external data. Raises the errors of `read`."""
    model, _ = read(path)
    with system_error(f"can't read the weights of {str(path)!r}", "restore the files beside it"):
        onnx.load_external_data_for_model(model, str(path.parent))
    return model


def tensors_within(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a file: initializers, and tensors in nodes, at any depth and in functions."""
    for holder in (model.graph, *model.functions):
        if isinstance(holder, onnx.GraphProto):
            yield from holder.initializer
        for graph, node in nodes_within(holder):
            if graph is not None:
                yield from graph.initializer
            if node is not None:
                for attribute in node.attribute:
                    yield from (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else []))


def _check_tensor(path: Path, tensor: onnx.TensorProto, ends: dict[Path, int]) -> None:
    """Raise RequestError unless a tensor has the data for its dimensions. `ends` gets the end of external data."""
    sound = tensor.data_type in _BITS and min(tensor.dims, default=0) >= 0
    held = [name for name in _DATA if (tensor.HasField(name) if name == "raw_data" else len(getattr(tensor, name)))]
    if len(held) > (0 if tensor.data_location == onnx.TensorProto.EXTERNAL else 1):
        raise RequestError(
            f"{str(path)!r} is damaged: {shown(tensor.name)} has its data twice, and runtimes may take either: export "
            "it again."
        )
    count = math.prod(tensor.dims)
    size = (count * _BITS.get(tensor.data_type, 0) + 7) // 8
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        target, end, stored = check_external(path, tensor)
        ends[target] = max(ends.get(target, 0), end)
        sound = sound and stored == size
    elif tensor.data_type == onnx.TensorProto.STRING:
        sound = len(tensor.string_data) == count
    elif tensor.HasField("raw_data"):
        sound = sound and len(tensor.raw_data) == size
    elif sound:
        try:
            sound = onnx.numpy_helper.to_array(tensor).size == count
        except Exception:  # too few or too many numbers, or numbers outside its dtype
            sound = False
    if not sound:
        raise RequestError(
            f"{str(path)!r} is damaged: {shown(tensor.name)} is not {shown(list(tensor.dims))}: export it again."
        )


def external_files(model: onnx.ModelProto) -> list[str]:
    """Return the names of the files that contain external data of a model, sorted."""
    outside = (tensor for tensor in tensors_within(model) if tensor.data_location == onnx.TensorProto.EXTERNAL)
    return sorted({external(tensor).get("location", "") for tensor in outside})


def tensor_of(path: Path, tensor: onnx.TensorProto) -> torch.Tensor:
    """Return an initializer of a file from `read` as a torch tensor of the file's own dtype, in memory of its own."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH[tensor.data_type][0])
    return torch.from_numpy(_bytes_of(path, tensor)).view(dtype).reshape(tuple(tensor.dims))


def array_of(path: Path, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """Do the same as `tensor_of` for numpy, which loads in a tenth of the time."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return _bytes_of(path, tensor).view(dtype).reshape(tuple(tensor.dims))


def _bytes_of(path: Path, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """Return the bytes of an initializer, in memory of their own."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return np.frombuffer(tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes(), dtype=np.uint8).copy()
    entry = external(tensor)
    length, offset = int(entry["length"]), int(entry.get("offset", "0"))
    with (
        system_error(f"can't read the weights of {str(path)!r}", "restore the files beside it"),
        open_file(path.parent / entry["location"]) as file,
    ):
        data = np.fromfile(file, dtype=np.uint8, count=length, offset=offset)
    if len(data) < length:
        raise RequestError(
            f"can't read the weights of {str(path)!r}, {shown(entry['location'])} was cut short meanwhile: restore it."
        )
    return data


def is_known(tensor: onnx.TensorProto) -> bool:
    """Whether `tensor_of` supports the dtype of a tensor."""
    return tensor.data_type in _TORCH
