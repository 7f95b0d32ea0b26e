"""Memory of this process: its peak, and a limit that turns "too much" into an error instead of the end of somebody.

Without a limit, Linux gives memory that isn't there and later kills whoever is largest. Under one, engines get a plain
"no" at the moment they ask, which costs only the run that asked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

HEADROOM = 512 * 2**20
"""Bytes left to everybody else."""

SHORT = ("bad_alloc", "bad allocation", "out of memory", "failed to allocate", "can't allocate", "cannot allocate")
"""How engines say that memory is short, in small letters."""


_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available() -> int:
    """Bytes that can be had without swapping: what the machine has, or what the container's limit leaves if less."""
    return min(int(psutil.virtual_memory().available), *_below_limits())


def _below_limits() -> Iterator[int]:
    """What each limit on this process's control groups (Linux, both versions) leaves; files that are only cached there
    make room."""
    yield sys.maxsize
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CGROUPS / ("memory" if controllers else "")
            limit, used = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
            inner = root / own.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                        most = int((folder / f"memory.{limit}").read_text())
                        now = int((folder / f"memory.{used}").read_text())
                        yield max(most - now + _cached(folder), 0)


def _cached(folder: Path) -> int:
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return next((int(size) for name, size in rows if name in ("inactive_file", "total_inactive_file")), 0)


def is_short(error: BaseException) -> bool:
    """Whether an engine's error says that there was not enough memory."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in SHORT)


def limit_to_what_is_free(keep_free: int) -> None:
    """Let this process take what is free now, less `keep_free` and `HEADROOM` bytes, and no more (Linux only)."""
    if sys.platform != "linux":
        return
    import resource

    free = max(available() - keep_free - HEADROOM, HEADROOM)
    with contextlib.suppress(ValueError, OSError):  # a lower limit of the system's stands
        resource.setrlimit(resource.RLIMIT_DATA, (_data() + free, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def forget_peak() -> int:
    """Resident bytes now, from where the peak counts anew (Linux; elsewhere the peak is what is resident)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident()


def resident() -> int:
    """Resident bytes now."""
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most resident bytes since `forget_peak`."""
    return _status("VmHWM:") or resident()


def _data() -> int:
    """Bytes that count against the limit now."""
    return _status("VmData:") or resident()


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
