"""Reading files that people name, and writing files completely or not at all, under temporary names meanwhile."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from posexport import temporary
from posexport.errors import RequestError, system_error
from posexport.temporary import Temporary, uninterrupted

TEXT_LIMIT = 64 * 2**20
"""The most bytes that are read of a JSON file: manifests, results, config.json, the index of a checkpoint."""

_HOLLOW_FROM = 2**30  # bytes from which a file is checked for holes

MODEL_LIMIT = 2**31 - 1
"""The most bytes of an ONNX file. protobuf has no larger messages."""


_ARTIFACTS = (".onnx", ".plan")
_BESIDE = (".json", ".json.sig", ".data")
"""The endings of the names of files that belong to an artifact: its manifest, the signature, its weights."""

_CHECKPOINT = ("config.json", "model.safetensors.index.json")

_inputs: dict[tuple[int, int], Path] | None = None
"""What the current command reads, by device and inode number. None if there is no such command."""


def protected_inputs() -> AbstractContextManager[None]:
    """While the block runs, refuse to write over any file that it reads or that it gave to `protect`.

    Files are recognised by their identity, whatever names or links lead to them.
    """
    return _with_inputs({})


def renewed() -> AbstractContextManager[None]:
    """What is read in the block may be written again. This is for state that a command keeps in its own files."""
    return _with_inputs(None)


@contextmanager
def _with_inputs(inputs: dict[tuple[int, int], Path] | None) -> Iterator[None]:
    global _inputs
    before, _inputs = _inputs, inputs
    try:
        yield
    finally:
        _inputs = before


def protect(path: Path) -> None:
    """Protect the file at `path` from writes of the current command, with the manifest, signature and weights beside an
    artifact, and the files of a checkpoint's folder. Files that don't exist are ignored."""
    if _inputs is None:
        return
    files = [path]
    if path.suffix in _ARTIFACTS:
        files += [path.with_name(path.name + ending) for ending in _BESIDE]
    for file in files:
        with suppress(OSError, ValueError):
            place = file.absolute()
            _inputs[_identity(place)] = place
    with suppress(OSError, ValueError):
        if path.is_dir():
            for file in (*path.glob("*.safetensors"), *map(path.joinpath, _CHECKPOINT)):
                protect(file)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _input_at(target: Path) -> Path | None:
    """The input of the current command that is at `target`, or None. An input that is gone is not counted, because
    another file may have got its number."""
    if not _inputs:
        return None
    with suppress(OSError):
        identity = _identity(target)
        if (path := _inputs.get(identity)) is not None and _identity(path) == identity:
            return path
    return None


class HashingFile:
    """A binary file that is being written, with the sha256 and the size of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self.size += len(data)
        self._file.write(data)

    def copy(self, source: Path) -> None:
        """Write the content of another file, in pieces."""
        with open_file(source) as file:
            shutil.copyfileobj(file, self, 1 << 22)


class Staged:
    """Files that wait under temporary names beside their targets. `renames` has each with its target."""

    def __init__(self) -> None:
        self.renames: list[tuple[Temporary, Path]] = []
        self.removals: list[Path] = []

    def remove(self, target: Path) -> None:
        """Remove the file at `target`, if there is one, after the others have their names."""
        check_target(target)
        self.removals.append(target)

    def take(self, made: Path, target: Path) -> None:
        """Put a file that was made on the same file system at `target`."""
        check_target(target)
        self.renames.append((Temporary(made), target))

    def write(self, target: Path, fill: Callable[[HashingFile], object]) -> str:
        """Write the file for `target`, and return its sha256. RequestError if the folder can't be written."""
        check_target(target)
        place = _place(target)
        if any(place == _place(other) for _, other in self.renames):
            raise _written_twice(target)
        with system_error(f"can't write to the folder {str(target.parent)!r}", "give an existing, writable one"):
            made, descriptor = temporary.file(target)
        self.renames.append((made, target))
        with os.fdopen(descriptor, "wb") as file:
            hashing = HashingFile(file)
            fill(hashing)
            file.flush()
            os.fsync(file.fileno())
        return hashing.sha256.hexdigest()


@contextmanager
def staged() -> Iterator[Staged]:
    """Files that appear together at the end of the block, or not at all if it raises or is interrupted."""
    files = Staged()
    try:
        with system_error("can't write the output", "give another name or folder"):
            yield files
            with uninterrupted():
                for made, target in files.renames:
                    made.path.replace(target)
                    made.keep()
                files.renames.clear()
                for stale in files.removals:
                    stale.unlink(missing_ok=True)
    finally:
        for made, _ in files.renames:
            made.remove()


def real_path(path: Path) -> Path:
    """The path with its symbolic links followed. A link that leads to itself stays, and is refused when it is opened.
    `Path.resolve` raises RuntimeError for it before Python 3.13."""
    return Path(os.path.realpath(path))


def is_there(path: Path) -> bool:
    """Whether a path leads to anything. RequestError if the system can't tell, as for links that form a circle."""
    nothing = (FileNotFoundError, NotADirectoryError, ValueError)  # a NUL, or half of a surrogate pair, names nothing
    with system_error(f"can't read {str(path)!r}", "give another"), suppress(*nothing):
        path.stat()
        return True
    return False


def not_a_file(path: Path) -> str | None:
    """Why a path is not that of a regular file, as the end of "it is ...". None if it is one."""
    if path.is_file():
        return None
    return "no regular file" if is_there(path) else "not there"


def check_name(path: Path) -> None:
    """RequestError for a path that is not UTF-8, because manifests can't name it and engines can't open it."""
    try:
        os.fspath(path.absolute()).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{str(path)!r} has a name that is not UTF-8: rename it, or its folder.") from None


def check_target(target: Path) -> None:
    """RequestError if a file can't be written at `target`: for an invalid name, a folder, a device or a pipe, and a
    file that the current command reads (`protected_inputs`)."""
    check_name(target)
    problem = f"output {str(target)!r} can't be written"
    with system_error(problem, "give another name"), suppress(FileNotFoundError, ValueError):
        target.lstat()  # says what is wrong with the name, and with the folders in it
    if target.is_dir():
        raise RequestError(f"output {str(target)!r} is a folder: give the name of a file.")
    if (target.exists() and not target.is_file()) or os.path.realpath(target.parent) == "/dev":
        raise RequestError(f"output {str(target)!r} is a device or a pipe: give the name of a file.")
    if (read := _input_at(target)) is not None:
        as_what = "" if read == target.absolute() else f", as {str(read)!r}"
        raise RequestError(f"output {str(target)!r} is a file that this command reads{as_what}: give another name.")


def _place(target: Path) -> Path:
    """The place of a file. Links to its folder are followed, but a link at the place itself is replaced."""
    return real_path(target.parent) / target.name


def check_writable(*targets: Path | None) -> None:
    """RequestError if a file, or the manifest beside it, can't be written at one of the given `targets`, or if two
    would be at one place. This is checked before the work whose results go there."""
    places: list[Path] = []
    for target in filter(None, targets):
        beside = _BESIDE[:2] if target.suffix in _ARTIFACTS else ()  # weights may be inside
        for path in (target, *(target.with_name(target.name + ending) for ending in beside)):
            check_target(path)
            if _place(path) in places:
                raise _written_twice(path)
            places.append(_place(path))
        with system_error(f"output {str(target)!r} can't be written", "give a file in a folder that can be"):
            made, descriptor = temporary.file(target)
            os.close(descriptor)
            made.remove()


def _written_twice(target: Path) -> RequestError:
    return RequestError(f"two files would be written to {str(target)!r}: name two.")


def check_output(target: Path, ending: str) -> None:
    """RequestError unless a file with this ending, such as ".onnx", and its manifest can be written at `target`."""
    if target.suffix != ending:
        stem = target.stem.strip(".").removesuffix(ending)  # the whole name of ".onnx" is its stem
        stem = "block" if stem in ("", ending[1:]) else stem
        raise RequestError(f"output {str(target)!r} must end in {ending}: name it like {stem}{ending}.")
    if not target.parent.is_dir():
        raise RequestError(f"output folder {str(target.parent)!r} is not there: make it first, or give another.")
    if ending in _ARTIFACTS:
        check_companions(target)
    check_writable(target)


def check_companions(target: Path) -> None:
    """RequestError if files of the artifact `target` would have names that are too long for its file system. The folder
    need not exist yet. This is checked before the work."""
    longest = target.name + max(_BESIDE, key=len)
    with system_error(f"output {str(target)!r} can't have {longest!r} beside it", "give another name"):
        folder = next(folder for folder in target.absolute().parents if folder.is_dir())
        for path in (target.with_name(longest), folder / longest):
            with suppress(FileNotFoundError, NotADirectoryError, ValueError):  # `check_target` reports these
                path.lstat()


def open_file(path: Path, limit: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading bytes. Every file of a person is opened here (tests/design checks this).

    Raises OSError for what can't be read, for anything but a regular file (a pipe or a device may never end), and for
    more than `limit` bytes. The file that was opened is checked, even if another one takes its place meanwhile.
    """
    try:
        _check_regular(path, os.stat(path))  # noqa: PTH116 (a device is not opened, which may already do something)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe would wait for its end
        descriptor = os.open(path, flags)
    except ValueError:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have such a name", str(path)) from None
    try:
        status = os.fstat(descriptor)
        _check_regular(path, status)
        if limit is not None and status.st_size > limit:
            raise _too_large(path, limit)
        if _is_hollow(descriptor, status):
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, nearly all of which are a hole", str(path))
        protect(path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
        kind = next((name for holds, name in kinds.items() if holds(status.st_mode)), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _is_hollow(descriptor: int, status: os.stat_result) -> bool:
    """Whether a file is large and stores almost nothing. It costs nothing to make, and hours to read."""
    stored = getattr(status, "st_blocks", status.st_size) * 512
    if status.st_size < _HOLLOW_FROM or stored > status.st_size // 64:
        return False
    try:  # some network file systems count no blocks, and know no holes
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except (OSError, AttributeError):
        return False
    return hole < status.st_size


def _too_large(path: Path, limit: int) -> OSError:
    size = f"{limit / 2**20:,.0f} MiB" if limit >= 2**20 else f"{limit} bytes"
    return OSError(errno.EFBIG, f"it is larger than {size}, the most that is read", str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file. OSError as in `open_file`."""
    with open_file(path, limit) as file:
        data = file.read(os.fstat(file.fileno()).st_size + 1)
        while more := file.read(min(2**20, limit + 1 - len(data))):  # a file in /proc has more bytes than its size says
            data += more
            if len(data) > limit:
                raise _too_large(path, limit)
    return data


def check_regular(path: Path, limit: int | None = None) -> None:
    """OSError as in `open_file`, for a file that a library opens by its path."""
    open_file(path, limit).close()


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON as posexport writes it to files: indented, keys in the given order. What UTF-8 lacks is escaped, such as
    bytes of a file's name that are not text."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write one JSON file, whole or not at all."""
    with staged() as files:
        files.write(path, lambda file: file.write(json_bytes(data)))


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces. OSError as in `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(
    target: Path, fill: Callable[[Path], None], beside: Mapping[Path, bytes] | None = None, *, replace: bool = True
) -> bool:
    """Make the folder `target` from what `fill` writes into the empty folder that it is given.

    What is at `target` is replaced, and the small files `beside` (path to bytes) change with it. Without `replace`, the
    folder replaces nothing: False is returned if something is there by then. Raises RequestError if the place can't be
    written, or contains what the current command reads. Unless it returns True, everything is as it was.
    """
    for path in beside or {}:
        check_target(path)
    for path in list((_inputs or {}).values()):
        if real_path(target) in real_path(path).parents:
            raise RequestError(f"output {str(target)!r} holds {str(path)!r}, which this command reads: give another.")
    with system_error(f"can't write the folder {str(target)!r}", "give another place"), ExitStack() as stack:
        aside = stack.enter_context(temporary.folder_beside(target))
        made = aside / "new"
        made.mkdir()
        fill(made)
        moves = [(made, target)]
        for number, (path, data) in enumerate((beside or {}).items()):
            file = aside / f"new-{number}"
            file.write_bytes(data)
            moves.append((file, path))
        with uninterrupted():
            return _move(moves, aside, replace)


def _move(moves: list[tuple[Path, Path]], aside: Path, replace: bool) -> bool:
    """Rename each to its place, after moving away what is there. All moves are undone if one fails. Without `replace`,
    returns False if something is at the place of the first."""
    with ExitStack() as undo:
        for number, (source, place) in enumerate(moves):
            if (replace or number) and place.exists():
                old = place.rename(aside / f"old-{number}")
                undo.callback(old.rename, place)
            try:
                moved = source.rename(place)
            except OSError:
                if replace or number or not place.exists():
                    raise
                return False
            undo.callback(moved.rename, source)
        undo.pop_all()
    return True
