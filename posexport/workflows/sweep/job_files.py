"""The files that jobs read: what belongs to an artifact, by content, and how it gets into the folder of a job.

On the way to another machine a file is cut into pieces. There it is put together once, under its hash, and every job
that reads it gets a link: ten jobs about one artifact move it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.workflows.sweep.jobs import File

PIECE = 64 * 2**20
"""Bytes of one piece on its way."""

KEEP = 20 * 10**9
"""Bytes that the store of a machine keeps for later jobs."""


@attrs.define
class Hashes:
    """Files as jobs name them; each is read once."""

    _known: dict[Path, File] = attrs.field(factory=dict)

    def file(self, path: Path) -> File:
        """One file; RequestError where it can't be read."""
        if path not in self._known:
            if not path.is_file():
                raise RequestError(f"{str(path)!r} is not there: give the path of a file.")
            try:
                now = path.stat()
                self._known[path] = File(
                    name=path.name,
                    sha256=sha256_of(path),
                    size=now.st_size,
                    path=path,
                    changed=now.st_mtime_ns,
                )
            except OSError as error:
                raise RequestError(f"{str(path)!r} can't be read ({error.strerror}): give another file.") from None
        return self._known[path]

    def artifact(self, path: Path) -> tuple[File, ...]:
        """An artifact with its manifest and external data, and a plan with the ONNX file that it was built from."""
        return tuple(self.file(each) for each in dict.fromkeys((path, *_companions(path))))


def _companions(path: Path) -> Iterator[Path]:
    """What lies beside an artifact and belongs to it. A manifest that is none is left to the command to tell."""
    beside = path.with_name(path.name + ".json")
    data = path.with_name(path.name + ".data")
    if data.is_file():
        yield data
    if not beside.is_file():
        return
    yield beside
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        manifest = json.loads(beside.read_bytes())
        for name in manifest.get("external_data", {}):
            if Path(name).name == name and path.with_name(name).is_file():
                yield path.with_name(name)
        if path.suffix == ".plan":
            source = path.with_name(Path(manifest["onnx"]["file"]).name)
            if source.is_file() and source != path:
                yield source
                yield from _companions(source)


def pieces(file: File) -> Iterator[bytes]:
    """The bytes of a file here; RequestError where they are no longer those that it was named by."""
    sha256 = hashlib.sha256()
    try:
        with file.path.open("rb") as source:
            while piece := source.read(PIECE):
                sha256.update(piece)
                yield piece
    except OSError:
        sha256.update(b"gone")
    if sha256.hexdigest() != file.sha256:
        raise RequestError(f"{str(file.path)!r} has changed since the sweep began: start it again.")


class Store:
    """Files by their hashes in one folder of a machine; processes may share it."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        self._folder, self._keep = folder, keep

    def link(self, name: str, sha256: str, found: Iterable[bytes], into: Path) -> None:
        """Put a file into the folder `into`; `found`, its bytes, is asked only where the store lacks it.

        Raises ValueError where these bytes are others than `sha256` says.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()
        held = self._folder / sha256
        while not (_sound(held) and _link(held, into / name)):  # another process may drop it in between
            self._put(held, found)
        with contextlib.suppress(OSError):
            os.utime(held, ns=(time.time_ns(), held.stat().st_mtime_ns))  # when it was used; its content stays
        self._trim()

    def _check_owner(self) -> None:
        """PermissionError where others may write here: what lies under a hash would be anybody's."""
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(
                f"others may write into {self._folder}: remove it, or make it the user's own with mode 700"
            )

    def _put(self, held: Path, found: Iterable[bytes]) -> None:
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
        sha256 = hashlib.sha256()
        try:
            with os.fdopen(handle, "wb") as file:
                for piece in found:
                    sha256.update(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if sha256.hexdigest() != held.name:
                raise ValueError(f"the bytes of a file came as {sha256.hexdigest()[:12]}, not {held.name[:12]}")
            Path(temporary).replace(held)
            _READ[held] = _seen(held.lstat())
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _trim(self) -> None:
        """Drop what was not used for longest. Jobs that run have links of their own."""
        with contextlib.suppress(OSError):  # another process does the same
            files = sorted(((now := file.stat()).st_atime, now.st_size, file) for file in self._folder.iterdir())
            over = sum(size for _, size, _ in files) - self._keep
            for _, size, file in files:
                if over <= 0:
                    break
                file.unlink(missing_ok=True)
                over -= size


_READ: dict[Path, tuple[int, int, int]] = {}
"""Files of stores whose content was found to be what their name says, with the inode, size and time of change then."""


def _seen(now: os.stat_result) -> tuple[int, int, int]:
    return now.st_ino, now.st_size, now.st_mtime_ns


def _sound(held: Path) -> bool:
    """Whether a file is what its name says, a sha256; one that is not is removed. Reads it where it has changed."""
    try:
        now = held.lstat()
        if _READ.get(held) == _seen(now):
            return True
        if stat.S_ISREG(now.st_mode) and sha256_of(held) == held.name:
            _READ[held] = _seen(now)
            return True
        held.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return False


def _link(held: Path, target: Path) -> bool:
    """A second name for a file, or a copy where the file system has none; False where there is no file."""
    if not held.exists():
        return False
    try:
        os.link(held.resolve(), target)  # of a link the file, since a relative link would lead nowhere
    except FileNotFoundError:
        return False
    except OSError:
        shutil.copyfile(held, target)
    return True


def stage_files(files: Iterable[File], into: Path) -> None:
    """Put files of this machine into the folder `into`. RequestError where one has changed since it was named."""
    for file in files:
        try:
            now = file.path.stat()
        except OSError:
            now = None
        if now is None or now.st_size != file.size or now.st_mtime_ns != file.changed:
            raise RequestError(f"{str(file.path)!r} has changed since the sweep began: start it again.")
        _link(file.path, into / file.name)
