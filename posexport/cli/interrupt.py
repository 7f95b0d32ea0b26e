"""Ctrl-C, whatever becomes of it on its way up.

Python raises KeyboardInterrupt wherever the main thread is. In the middle of another package's import, or in a handler
of its errors, it may come out as some other error, or be swallowed: torch, interrupted while it loads a part of itself,
then lacks an attribute.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for whatever error ends the block after Ctrl-C; yields the signals that came, as a list
    that grows.

    Nothing is done, and the list stays empty, where SIGINT is somebody else's or ignored, and outside the main thread.
    """
    came: list[int] = []
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield came
    except Exception:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
