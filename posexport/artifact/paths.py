"""Paths that people give for artifacts, checked in milliseconds. Loads no engine and reads only headers of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from posexport.artifact.folders import files_below
from posexport.errors import RequestError, system_error
from posexport.files import MODEL_LIMIT, is_there, not_a_file, open_file

SUFFIXES = (".onnx", ".plan")

_MAKERS = {".onnx": "export", ".plan": "compile"}
_GRAPH = 7  # the number of the field `graph` in onnx.ModelProto
_MODEL_FIELDS = {*range(1, 9), 14, 20, 25, 26}
_MOST_FIELDS = 100_000  # of a model; each function and each metadata entry is one
_VARINT, _LENGTH = 0, 2  # wire types of protobuf


def find_artifacts(paths: Sequence[Path]) -> list[Path]:
    """Return the artifacts at `paths` and in folders among them, each once. RequestError if there are none."""
    artifacts: dict[str, Path] = {}
    for path in paths:
        if not is_there(path):
            raise RequestError(f"{str(path)!r} is not there: give .onnx or .plan files, or a folder that holds some.")
        if path.is_dir():
            # Broken links and pipes are included. Whoever reads them says that they are not artifacts.
            inside = [file for file in files_below(path) if file.suffix in SUFFIXES]
            if not inside:
                raise RequestError(f"the folder {str(path)!r} holds no .onnx or .plan: give a folder with artifacts.")
        elif path.suffix in SUFFIXES:
            inside = [path]
        else:
            raise RequestError(
                f"{str(path)!r} is neither .onnx nor .plan nor a folder: give such files, or a folder that holds some."
            )
        for file in inside:
            # a link has its own name, and therefore its own manifest
            artifacts.setdefault(str(Path(os.path.realpath(file.parent), file.name)), file)
    return list(artifacts.values())


def check_artifact(path: Path) -> None:
    """Raise RequestError unless `path` is a file with the suffix of an artifact. An ONNX file must be complete."""
    if path.suffix not in SUFFIXES:
        raise RequestError(
            f"{str(path)!r} is neither .onnx nor .plan: give an ONNX file or a plan, whose name ends so."
        )
    if problem := not_a_file(path):
        raise RequestError(
            f"{str(path)!r} is {problem}: give another path, or make it with 'posexport {_MAKERS[path.suffix]}'."
        )
    if path.suffix == ".onnx":
        check_onnx(path)


def check_onnx(path: Path) -> None:
    """Raise RequestError unless the file is a protobuf message with the fields of an ONNX model, including a graph."""
    with system_error(f"can't read {str(path)!r}", "give an existing .onnx file"), open_file(path, MODEL_LIMIT) as file:
        fields = _fields(file, os.fstat(file.fileno()).st_size)
    if fields == set():
        raise RequestError(f"{str(path)!r} is empty: export it again.")
    if fields is None:
        raise RequestError(f"{str(path)!r} is not an ONNX file, or it is cut short: export it again.")
    if _GRAPH not in fields:
        raise RequestError(f"{str(path)!r} holds no ONNX graph of a known opset: export it again.")


def _fields(file: BinaryIO, size: int) -> set[int] | None:
    """Return the numbers of the fields of an ONNX model. None for a file that is incomplete or has other fields."""
    numbers: set[int] = set()
    read = 0
    while file.tell() < size:
        read += 1
        tag = _varint(file)
        value = None if tag is None or tag & 7 not in (_VARINT, _LENGTH) else _varint(file)
        if tag is None or value is None:
            return None
        if tag & 7 == _LENGTH:
            if value > size - file.tell():  # for example 2^64, to which no file can seek
                return None
            file.seek(value, os.SEEK_CUR)
        numbers.add(tag >> 3)
        if read > _MOST_FIELDS or not numbers <= _MODEL_FIELDS:  # a gigabyte of two-byte fields would take an hour
            return None
    return numbers


def _varint(file: BinaryIO) -> int | None:
    """Return the next number. None if the file ends within it, or if it has more than 64 bits."""
    number = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return number
    return None


ENCODER, DECODER = "encoder", "decoder"
"""The parts of an encoder-decoder. Each has its own file."""


def path_of_part(path: Path, part: str) -> Path:
    """Return the file of a part of the model at `path`: `encoder_model.onnx` for the encoder of `model.onnx`."""
    return path.with_name(f"{part}_{path.name}") if part else path


def encoder_beside(decoder: Path) -> Path | None:
    """Return the encoder's file of a decoder. None if the file is not named like a decoder, or has no encoder."""
    begin = f"{DECODER}_"
    if not decoder.name.startswith(begin):
        return None
    encoder = path_of_part(decoder.with_name(decoder.name.removeprefix(begin)), ENCODER)
    return encoder if is_there(encoder) else None


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of files with only the folders that distinguish them, so that no result shows a home folder."""
    depth = dict.fromkeys(paths, 1)
    while True:
        names = ["/".join(path.absolute().parts[-depth[path] :]) for path in paths]
        twice = [path for path, name in zip(paths, names, strict=True) if names.count(name) > 1]
        growing = [path for path in twice if depth[path] < len(path.absolute().parts)]
        if not growing:
            return names
        for path in growing:
            depth[path] += 1
