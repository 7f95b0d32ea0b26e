"""The CPUs that this process may run on."""

from __future__ import annotations

import os


def numbers() -> list[int]:
    """The CPUs that this process may use, as the system numbers them: those of its affinity, where there is one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable() -> int:
    """How many CPUs this process may use."""
    return len(numbers())


def kept_to() -> int:
    """How many CPUs this process is kept to, 0 where it has all: ONNX Runtime's own choice is a thread for each core of
    the machine, pinned to it, whatever the process may use."""
    cpus = usable()
    return 0 if cpus == os.cpu_count() else cpus
