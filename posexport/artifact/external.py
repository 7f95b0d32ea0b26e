"""The place of tensor data that an ONNX file stores in another file of its folder. Checks external-data entries."""

from __future__ import annotations

from pathlib import Path

import onnx

from posexport.errors import RequestError, shown
from posexport.files import real_path

_KEYS = ("location", "offset", "length", "checksum")
"""Allowed entries of external data. Some libraries know others: a folder to start from (`basepath`), and weights that
ONNX Runtime has packed and uses instead of the tensor's own (`prepacked_0`)."""


def check_external(path: Path, tensor: onnx.TensorProto) -> tuple[Path, int, int]:
    """Return the file in the same folder that contains a tensor's data, the end of the data in it, and its length.

    If the tensor does not state the length, the length is the rest of the file. It is then written into the tensor.
    """
    entry = external(tensor)
    keys = [each.key for each in tensor.external_data]
    if len(keys) > len(entry) or not entry.keys() <= set(_KEYS):
        raise RequestError(
            f"{str(path)!r} describes the place of {shown(tensor.name)} by {shown(keys)}, which runtimes may read "
            f"differently: only {', '.join(_KEYS)} are allowed, each once, so export it again."
        )
    location = entry.get("location", "")
    home = real_path(path.parent)
    bare = location and "\0" not in location and Path(location).name == location
    if not bare or real_path(home / location).parent != home:
        raise RequestError(
            f"{str(path)!r} keeps {shown(tensor.name)} in {shown(location)}, outside its own folder: export it again."
        )
    target = home / location
    size = target.stat().st_size if target.is_file() else -1
    offset = _number(path, tensor, "offset", entry.get("offset", "0"))
    length = _number(path, tensor, "length", entry.get("length", str(max(size - offset, 0))))
    if size < offset + length:
        raise RequestError(
            f"{str(path)!r} keeps {shown(tensor.name)} in {shown(location)}, which is missing or cut short: restore it."
        )
    if "length" not in entry:
        tensor.external_data.add(key="length", value=str(length))
    return target, offset + length, length


def _number(path: Path, tensor: onnx.TensorProto, what: str, text: str) -> int:
    """Read the offset or the length of external data."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RequestError(
            f"{str(path)!r} is damaged: {shown(tensor.name)} has the {what} {shown(text)}, which is no number of "
            "bytes: export it again."
        )
    return int(text)


def external(tensor: onnx.TensorProto) -> dict[str, str]:
    """Return the external-data entries of a tensor: location, offset, length."""
    return {entry.key: entry.value for entry in tensor.external_data}
