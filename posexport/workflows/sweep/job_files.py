"""The files that jobs read: what belongs to an artifact, by content, and how files get into a job's folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import attrs

from posexport.artifact.manifest import PlanManifest, read_manifest, read_manifest_of
from posexport.errors import RequestError, system_error
from posexport.files import HashingFile, not_a_file, open_file, real_path, sha256_of
from posexport.workflows.sweep.jobs import File

CHUNK = 64 * 2**20
"""The most bytes of a file that are in memory at a time."""


@attrs.define
class Hashes:
    """Files in the form that jobs use. Each is read once."""

    _known: dict[Path, File] = attrs.field(factory=dict)

    def file(self, path: Path) -> File:
        """One file. RequestError if it can't be read."""
        if path not in self._known:
            if problem := not_a_file(path):
                raise RequestError(f"{str(path)!r} is {problem}: give the path of a file.")
            with system_error(f"{str(path)!r} can't be read", "give another file"):
                now = path.stat()
                self._known[path] = File(
                    name=path.name, sha256=sha256_of(path), size=now.st_size, path=path, changed=now.st_mtime_ns
                )
        return self._known[path]

    def artifact(self, path: Path) -> tuple[File, ...]:
        """An artifact with its manifest and external data, and a plan with the ONNX file that it was built from."""
        return tuple(self.file(part) for part in dict.fromkeys((path, *_companions(path))))


def _companions(path: Path) -> Iterator[Path]:
    """The files beside an artifact that belong to it. The command itself reports a manifest that can't be read."""
    home = real_path(path.parent)
    for file in map(path.with_name, (f"{path.name}.data", *_weight_files(path))):
        if file.is_file() and real_path(file).parent == home:  # weights that a link takes from elsewhere are refused
            yield file
    for file in map(path.with_name, (f"{path.name}.json", f"{path.name}.json.sig")):
        if os.path.lexists(file):  # also if it is not a file, which is refused: it must not pass as a missing manifest
            yield file
    if path.suffix == ".plan":
        with contextlib.suppress(RequestError):
            manifest = read_manifest_of(PlanManifest, path)
            source = None if manifest is None else path.with_name(manifest.onnx.file)
            if source is not None and source.is_file() and source.suffix == ".onnx":
                yield source
                yield from _companions(source)


def _weight_files(path: Path) -> Collection[str]:
    """The names of the files of weights: those in the manifest, or those in the graph of an ONNX file without one."""
    with contextlib.suppress(RequestError):
        if (manifest := read_manifest(path)) is not None:
            return manifest.external_data
        if path.suffix == ".onnx":
            from posexport.artifact import onnx_file  # onnx takes long to import, and most artifacts have a manifest

            return onnx_file.external_files(onnx_file.read(path)[0])
    return ()


def chunks(file: File) -> Iterator[bytes]:
    """The bytes of a file of this machine, at most CHUNK at a time. RequestError if they have changed."""
    sha256 = hashlib.sha256()
    try:
        with open_file(file.path) as source:
            while chunk := source.read(CHUNK):
                sha256.update(chunk)
                yield chunk
    except OSError:
        sha256.update(b"gone")
    if sha256.hexdigest() != file.sha256:
        raise _changed(file)


def write_chunks(path: Path, sha256: str, parts: Iterable[bytes]) -> None:
    """Write a file from its bytes. ValueError, and no file, if they have another hash than `sha256`."""
    with path.open("wb") as file:
        hashing = HashingFile(file)
        for part in parts:
            hashing.write(part)
    written = hashing.sha256.hexdigest()
    if written != sha256:
        path.unlink()
        raise ValueError(f"the bytes of {path.name} arrived as {written[:12]}, not {sha256[:12]}")


def stage_files(files: Iterable[File], into: Path) -> None:
    """Link files of this machine into the folder `into`, or copy them if the file system has no links.

    RequestError if a file has changed since it was named.
    """
    for file in files:
        try:
            now = file.path.stat()
        except OSError:
            raise _changed(file) from None
        if now.st_size != file.size or now.st_mtime_ns != file.changed:
            raise _changed(file)
        try:
            os.link(real_path(file.path), into / file.name)  # a relative symbolic link would lead nowhere
        except OSError:
            shutil.copyfile(file.path, into / file.name)


def _changed(file: File) -> RequestError:
    return RequestError(f"{str(file.path)!r} has changed since the sweep began: start it again.")
