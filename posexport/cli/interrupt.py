"""Ctrl-C, however other packages treat it.

Python raises KeyboardInterrupt wherever the main thread is. In the middle of another package's import, or in a handler
of its errors, it may become some other error, or be swallowed: torch, interrupted while it imports a part of itself,
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
    """Raise KeyboardInterrupt in place of any error that ends the block after Ctrl-C; yields a list to which the
    signals are appended as they arrive.

    The list stays empty, and nothing else is done, where another handler of SIGINT is set, where it is ignored, and
    outside the main thread.
    """
    received: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    except Exception:
        if received:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
