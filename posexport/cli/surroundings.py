"""What surrounds a command: standard streams that are open, signals that end it cleanly, and temporary files that go
away with it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from posexport.temporary import ENDING_SIGNALS


def open_streams() -> None:
    """Give stdin, stdout and stderr a file where they are closed, and let stdout take any character.

    Otherwise the next file that is opened would get the number of stdout, and engines would print into it. Writing to a
    stdout that was closed fails, as the system's own commands do; what goes to a closed stderr is dropped.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names and messages may hold what its encoding lacks


def drop_output() -> None:
    """Send what is still to be written to stdout and stderr nowhere: they can't be written, and the interpreter tries
    again at its end."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                if stream.fileno() == number:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, number)
                    os.close(nowhere)


@contextmanager
def interrupts(received: list[int]) -> Iterator[None]:
    """Raise KeyboardInterrupt in place of any error that ends the block after one of ENDING_SIGNALS, and append the
    signals to `received` as they arrive.

    Python raises KeyboardInterrupt wherever the main thread is. In the middle of another package's import, or in a
    handler of its errors, it may become some other error, or be swallowed: torch, interrupted while it imports a part
    of itself, then lacks an attribute. A signal that has another handler, or is ignored, as after `nohup`, is left
    alone; so are all of them outside the main thread.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {
        number: handler
        for number in ENDING_SIGNALS
        if in_main_thread and (handler := signal.getsignal(number)) in defaults
    }

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, note)
    try:
        yield
    except Exception:
        if received:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
