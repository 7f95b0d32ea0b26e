"""Refuses commands that can't work within the user's limit on memory (`ulimit -v`, `ulimit -d`, a batch system).

Libraries that run out of memory while they are loaded may crash, wait forever, or raise anything. So if there is a
limit, a child process with the same limit first loads them and takes some more memory. How much they need depends on
the machine (each CPU has a thread, and each thread its buffers), so it is tried, not looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from posexport.errors import RequestError
from posexport.machine import set_limit

_LIGHT = ("inspect", "package", "positions", "report")
"""Commands that load no engine."""

_LIBRARIES = ("numpy", "onnx")
_ENGINES = (*_LIBRARIES, "torch", "onnxruntime")

_LEAST = 256 * 2**20  # bytes that a command needs to read a small file and work on it, without its libraries
_SECONDS = 60.0  # the most for loading: with little memory left, libraries may wait for more


def check_limit(command: str) -> None:
    """RequestError if the limit on this process's memory is too small for `command`."""
    limit = set_limit()
    if limit is None:
        return
    import subprocess

    modules = _LIBRARIES if command in _LIGHT else _ENGINES
    libraries = f"its libraries ({', '.join(modules)})"
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-m", __name__, *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
        if tried.returncode == 0:
            return
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"posexport {command} did not load {libraries} in {_SECONDS:g} seconds: either {limit} is too small for "
            "them, so raise it, or lift it, or the machine has too much else to do, so try again later."
        ) from None
    except OSError:
        pass
    raise RequestError(
        f"there is not enough memory for posexport {command}, {limit} is too small for {libraries} and some work: "
        "raise it, or lift it."
    )


def _try(modules: Sequence[str]) -> None:
    """Load the modules, start torch's threads, and take as much memory as a small piece of work."""
    from contextlib import suppress
    from importlib import import_module
    from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

    def take(size: int) -> None:
        mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS).close()

    take(_LEAST * (2 if "torch" in modules else 1))  # fails at once if there is much too little
    for name in modules:
        with suppress(ModuleNotFoundError):
            import_module(name)
    if "torch" in sys.modules:
        ones = sys.modules["torch"].ones(512, 512)
        _ = ones @ ones
    take(_LEAST)


if __name__ == "__main__":
    _try(sys.argv[1:])
