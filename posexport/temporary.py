"""Temporary files and folders. Each has a name of posexport, and is removed however the process ends.

A path is registered before it exists. The end of a command (`remove_since`), or of the interpreter, therefore removes
what a signal kept the code from removing. Only SIGKILL and a crash leave something behind. For these, each file and
folder is locked (flock) as long as its process lives. Before a new one is made, those of the same kind beside it whose
lock is free are removed. Nothing else is removed: no file of another user or of a living process, no link and no other
name.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posexport.errors import RequestError

try:
    import fcntl
except ImportError:  # Windows: without locks nothing is known of other processes, so nothing of theirs is removed
    fcntl = None  # type: ignore[assignment]

PREFIX = "posexport-"
"""The beginning of the names of folders in the system's folder for temporary files."""

_ENDING = (
    *("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"),
    *("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGPOLL", "SIGPWR", "SIGSTKFLT"),
)
ENDING_SIGNALS = tuple(getattr(signal, name) for name in _ENDING if hasattr(signal, name))
"""The signals that end a process and let it clean up: Ctrl-C, SIGQUIT, a request to end, a terminal that is closed,
those by which batch systems say that its time is over, and timers and other signals from outside whose default is to
end it. SIGQUIT asks for a core file too, but people (Ctrl-\\) and containers (STOPSIGNAL) send it to end a command; the
others that ask for one tell of a fault in the process itself."""

_RANDOM_BYTES = 8
FOLDER_NAME_LENGTH = len(PREFIX) + 2 * _RANDOM_BYTES
"""The number of characters of the name that a folder gets by default."""

_LONGEST = 200  # bytes of a target's name: with what is added it must fit into the 255 of a file system
_NAME = re.compile(rf".+[0-9a-f]{{{2 * _RANDOM_BYTES}}}(\.tmp)?", re.DOTALL)

_registered: dict[Temporary | Running, None] = {}
"""What this process has made and not removed yet, in the order of creation."""

_leftovers: dict[Path, list[str]] = {}
"""By folder, the names that may be leftovers, listed when this process first made something there."""


class Temporary:
    """One file or folder of this process, `path`, until it is removed or kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        _registered[self] = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

    def lock(self, descriptor: int) -> bool:
        """Lock it through the open `descriptor` as long as this process lives. False if it was removed before."""
        self._lock = descriptor
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: then nobody removes leftovers from it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        return False

    def keep(self) -> None:
        """Leave it where it is, or to whoever renamed it."""
        _registered.pop(self, None)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def remove(self) -> None:
        """Remove it with what it contains, as far as the system allows. Harmless if it is gone.

        What another thread writes into it meanwhile may keep it there. It is tried again when all threads have ended.
        """
        if self in _registered:
            _remove(self.path)
            if not os.path.lexists(self.path):
                self.keep()


def usual_parent() -> Path:
    """The system's folder for temporary files. RequestError if there is none that can be written to.

    Call it before torch exports or compiles: torch needs the folder too, and its errors don't say so.
    """
    import tempfile

    try:
        return Path(tempfile.gettempdir())
    except OSError as error:  # it names all that were tried
        raise RequestError(f"{error.strerror or error}: set TMPDIR to a folder with free space.") from None


def folder(parent: Path | None = None, prefix: str = PREFIX, suffix: str = "") -> Temporary:
    """A new folder for this user only, in `parent` (default: the system's folder for temporary files).

    OSError if none can be made, RequestError if the system has no such folder.
    """
    parent = parent or usual_parent()
    while True:
        made = _named(parent, prefix, suffix)
        try:
            made.path.mkdir(mode=0o700)
        except OSError:
            made.keep()
            raise
        if fcntl is None:  # Windows, which opens no folders
            return made
        with suppress(FileNotFoundError):
            if made.lock(os.open(made.path, os.O_RDONLY)):
                return made
        made.keep()  # another process took it for a leftover in the moment before it was locked


def folder_beside(target: Path) -> Temporary:
    """A new folder beside `target`, on the same file system, so that its content can be renamed to `target`."""
    return folder(target.parent, _hidden(target), ".tmp")


def file(target: Path) -> tuple[Temporary, int]:
    """A new file beside `target` that can be renamed to it, and a descriptor that writes to it.

    OSError if none can be made.
    """
    while True:
        made = _named(target.parent, _hidden(target), ".tmp")
        try:
            writes = os.open(made.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        except OSError:
            made.keep()
            raise
        if made.lock(os.dup(writes)):
            return made, writes
        os.close(writes)
        made.keep()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back the signals that end a process while files are renamed or leftovers are removed.

    No file is then left beside another one's manifest. The handlers are replaced in the main thread, because only this
    thread runs handlers. A blocked signal would reach another thread, and then the handler anyway.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.getsignal(number)  # first: a signal may come right after the next line
                    signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


class Running:
    """Something with child processes that may write into folders of this process.

    `end` ends them for good and waits for that. It is called before the folders are removed, unless they have `ended`
    before.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        _registered[self] = None

    def ended(self) -> None:
        """Say that no process of it is left, and that none will be started."""
        _registered.pop(self, None)

    def remove(self) -> None:
        """End the processes."""
        if self in _registered:
            self._end()
            self.ended()


def registered() -> list[Temporary | Running]:
    """What this process has made and not removed yet, in the order of creation."""
    return list(_registered)


def remove_since(before: Sequence[Temporary | Running]) -> None:
    """Remove what was made after `registered` gave `before`, processes first. Call it where no signal raises."""
    earlier = set(before)
    made = [each for each in reversed(registered()) if each not in earlier]
    for each in sorted(made, key=lambda each: isinstance(each, Temporary)):
        each.remove()


def _hidden(target: Path) -> str:
    """The beginning of the names of what waits beside `target`."""
    return f".{target.name if len(os.fsencode(target.name)) <= _LONGEST else target.name[: _LONGEST // 4]}."


def _named(parent: Path, prefix: str, suffix: str) -> Temporary:
    """One that doesn't exist yet. Leftovers of the same names are removed before."""
    _remove_leftovers(parent, prefix, suffix)
    return Temporary(parent / f"{prefix}{os.urandom(_RANDOM_BYTES).hex()}{suffix}")


def _remove_leftovers(parent: Path, prefix: str, suffix: str) -> None:
    """Remove what ended processes left in `parent` under such names. Each process lists the folder once."""
    if fcntl is None:
        return
    place = parent.absolute()
    if place not in _leftovers:
        _leftovers[place] = []
        with suppress(OSError), os.scandir(place) as entries:
            _leftovers[place] = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    length = len(prefix) + 2 * _RANDOM_BYTES + len(suffix)
    for name in list(_leftovers[place]):
        if name.startswith(prefix) and name.endswith(suffix) and len(name) == length:
            with suppress(ValueError):  # another thread was faster
                _leftovers[place].remove(name)
            _remove_leftover(place / name)


def _remove_leftover(path: Path) -> None:
    """Remove a leftover that belongs to this user and whose lock is free."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a link, or one of another user
        return
    try:
        status = os.fstat(lock)
        if status.st_uid == os.getuid() and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    except OSError:  # locked, so its process lives; or the file system has no locks
        pass
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    with suppress(OSError, RecursionError):  # posexport makes no folders that are a thousand deep
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        import shutil

        shutil.rmtree(path, ignore_errors=True)


def _remove_all() -> None:
    remove_since(())


def _forget() -> None:
    """In a forked child, forget what is registered: it belongs to the parent."""
    _registered.clear()


atexit.register(_remove_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
