"""Reading files that people name; writing files whole or not at all, under temporary names until all are complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from posexport.errors import RequestError, system_error


class HashingFile:
    """A binary file being written, with the sha256 and the size of what went into it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self.size += len(data)
        self._file.write(data)


class Staged:
    """Files that wait under temporary names beside their targets; `renames` holds the two paths of each."""

    def __init__(self) -> None:
        self.renames: list[tuple[Path, Path]] = []
        self.removals: list[Path] = []

    def remove(self, target: Path) -> None:
        """Remove the file at `target`, where there is one, once the others have their names."""
        check_target(target)
        self.removals.append(target)

    def write(self, target: Path, fill: Callable[[HashingFile], object]) -> str:
        """Write what shall stand at `target`, and return its sha256; RequestError where the folder can't be written."""
        import tempfile

        check_target(target)
        with system_error(f"can't write to the folder {str(target.parent)!r}", "give an existing, writable one"):
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        self.renames.append((Path(name), target))
        with os.fdopen(handle, "wb") as file:
            hashing = HashingFile(file)
            fill(hashing)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp makes files for their owner only
        return hashing.sha256.hexdigest()


@contextmanager
def staged() -> Iterator[Staged]:
    """Files that appear together at the end of the block, or not at all where it raises or is interrupted."""
    files = Staged()
    try:
        with system_error("can't write the output", "free some space or give another folder"):
            yield files
            with uninterrupted():
                for temporary, target in files.renames:
                    temporary.replace(target)
                files.renames.clear()
                for stale in files.removals:
                    stale.unlink(missing_ok=True)
    finally:
        for temporary, _ in files.renames:
            temporary.unlink(missing_ok=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C while the renames run, so that no file stands beside another one's manifest."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_target(target: Path) -> None:
    """RequestError where a file can't stand at `target`: a folder does, or what a rename would take from the system."""
    if target.is_dir():
        raise RequestError(f"output {str(target)!r} is a folder: give the name of a file.")
    if (target.exists() and not target.is_file()) or target.parent.resolve() == Path("/dev"):
        raise RequestError(f"output {str(target)!r} is a device or a pipe: give the name of a file.")


def check_writable(target: Path) -> None:
    """RequestError where no file can be written at `target`: checked before the work whose result goes there."""
    import tempfile

    check_target(target)
    with system_error(f"output {str(target)!r} can't be written", "give a file in a folder that can be"):
        tempfile.NamedTemporaryFile(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent).close()


def check_output(target: Path, ending: str) -> None:
    """RequestError unless a file of this ending, such as ".onnx", can be written at `target`."""
    if target.suffix != ending:
        raise RequestError(f"output {str(target)!r} must end in {ending}: name it like {target.stem}{ending}.")
    if not target.parent.is_dir():
        raise RequestError(f"output folder {str(target.parent)!r} is not there: make it first, or give another.")
    check_writable(target)


def read_bytes(path: Path) -> bytes:
    """What a file or a pipe holds; OSError for a device, which may never end."""
    if path.is_char_device() or path.is_block_device():
        raise OSError(errno.EINVAL, "it is a device", str(path))
    return path.read_bytes()


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table in a TOML file, which `what` names in words; RequestError where there is none."""
    import tomllib

    try:
        return tomllib.loads(read_bytes(path).decode())
    except OSError as error:
        raise RequestError(f"{what} {str(path)!r} can't be read ({error.strerror}): give a TOML file.") from None
    except UnicodeDecodeError:
        raise RequestError(f"{what} {str(path)!r} is not TOML, whose text is UTF-8: save it as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} {str(path)!r} is not TOML ({error}): fix it.") from None


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON as posexport writes it to files: indented, keys in the given order."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write one JSON file, whole or not at all."""
    with staged() as files:
        files.write(path, lambda file: file.write(json_bytes(data)))


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(target: Path, fill: Callable[[Path], None], beside: Mapping[Path, bytes] | None = None) -> None:
    """Make the folder `target` of what `fill` writes into the empty folder that it is given.

    What stands there gives way, and the small files `beside` (path to bytes) change with it. Raises RequestError where
    the place can't be written; whatever is raised, everything is then as it was.
    """
    import tempfile

    with (
        system_error(f"can't write the folder {str(target)!r}", "give another place, or free some space"),
        ExitStack() as stack,
    ):
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        # not TemporaryDirectory, which raises where files of another user are left of the old folder
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        made = temporary / "new"
        made.mkdir()
        fill(made)
        moves = [(made, target)]
        for number, (path, data) in enumerate((beside or {}).items()):
            file = temporary / f"new-{number}"
            file.write_bytes(data)
            moves.append((file, path))
        with uninterrupted():
            _move(moves, temporary)


def _move(moves: list[tuple[Path, Path]], aside: Path) -> None:
    """Rename each to its place, what is there out of the way; all back where one can't be."""
    with ExitStack() as undo:
        for number, (source, place) in enumerate(moves):
            if place.exists():
                old = place.rename(aside / f"old-{number}")
                undo.callback(old.rename, place)
            moved = source.rename(place)
            undo.callback(moved.rename, source)
        undo.pop_all()
