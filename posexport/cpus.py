"""The CPUs that this process may run on."""

from __future__ import annotations

import os


def usable() -> int:
    """How many CPUs this process may use: those of its affinity, where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kept_to() -> int:
    """How many CPUs this process is kept to, 0 where it has all: ONNX Runtime's own choice is a thread for each core of
    the machine, pinned to it, whatever the process may use."""
    return 0 if usable() == os.cpu_count() else usable()
