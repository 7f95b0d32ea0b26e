"""Writing files whole or not at all: to temporary names beside their targets, renamed together at the end; and reading
those that people name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from posexport.errors import RequestError


class HashingFile:
    """A binary file being written, with the sha256 and the size of what went into it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self.size += len(data)
        self._file.write(data)


class Staged:
    """Files that wait under temporary names beside their targets."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, Path]] = []

    def write(self, target: Path, fill: Callable[[HashingFile], object]) -> str:
        """Write what shall stand at `target`; returns the sha256 of its bytes.

        Raises RequestError where the folder is not there or can't be written.
        """
        import tempfile

        check_target(target)
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        except OSError as error:
            raise RequestError(
                f"can't write to the folder {str(target.parent)!r} ({error.strerror}): give an existing, writable one."
            ) from None
        self._files.append((Path(name), target))
        with os.fdopen(handle, "wb") as file:
            hashing = HashingFile(file)
            fill(hashing)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp makes files for their owner only
        return hashing.sha256.hexdigest()

    def commit(self) -> None:
        """Rename every file to its target."""
        with uninterrupted():
            for temporary, target in self._files:
                temporary.replace(target)
            self._files.clear()

    def discard(self) -> None:
        """Remove what wasn't committed."""
        for temporary, _ in self._files:
            temporary.unlink(missing_ok=True)


@contextmanager
def staged() -> Iterator[Staged]:
    """Files that appear together at the end of the block, or not at all where it raises or is interrupted."""
    files = Staged()
    try:
        yield files
        files.commit()
    except OSError as error:
        raise RequestError(
            f"can't write the output ({error.strerror}): free some space or give another folder."
        ) from None
    finally:
        files.discard()


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
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent):
            pass
    except OSError as error:
        raise RequestError(
            f"output {str(target)!r} can't be written ({error.strerror}): give a file in a folder that can be."
        ) from None


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

    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
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
    except OSError as error:
        raise RequestError(
            f"can't write the folder {str(target)!r} ({error.strerror}): give another place, or free some space."
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _move(moves: list[tuple[Path, Path]], aside: Path) -> None:
    """Rename each to its place, what is there out of the way; all back where one can't be."""
    done: list[tuple[Path, Path]] = []

    def rename(source: Path, place: Path) -> None:
        source.rename(place)
        done.append((source, place))

    try:
        for number, (source, place) in enumerate(moves):
            if place.exists():
                rename(place, aside / f"old-{number}")
            rename(source, place)
    except OSError:
        for source, place in reversed(done):
            place.rename(source)
        raise
