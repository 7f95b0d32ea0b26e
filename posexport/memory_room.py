"""Memory of this process: its peak, and a limit that turns "too much" into an error instead of the end of somebody.

Without a limit, Linux gives memory that isn't there and later kills whoever is largest. Under one, engines get a plain
"no" at the moment they ask, which costs only the run that asked.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil

HEADROOM = 512 * 2**20
"""Bytes left to everybody else."""

SHORT = ("bad_alloc", "bad allocation", "out of memory", "failed to allocate", "can't allocate", "cannot allocate")
"""How engines say that memory is short, in small letters."""


def is_short(error: BaseException) -> bool:
    """Whether an engine's error says that there was not enough memory."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in SHORT)


def limit_to_what_is_free(keep_free: int) -> None:
    """Let this process take what is free now, less `keep_free` and `HEADROOM` bytes, and no more (Linux only)."""
    if sys.platform != "linux":
        return
    import resource

    free = max(psutil.virtual_memory().available - keep_free - HEADROOM, HEADROOM)
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
