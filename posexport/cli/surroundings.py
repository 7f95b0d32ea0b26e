"""The surroundings of a command: open standard streams, signals that end it cleanly, and temporary files that are
removed with it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from posexport.temporary import ENDING_SIGNALS

_ALARM = getattr(signal, "SIGALRM", None)  # Windows has none
WAIT_SECONDS, MOST_WAITS = 0.02, 500
"""How long, and how often, a signal waits for the end of an import: that of torch takes seconds."""


def open_streams() -> None:
    """Open stdin, stdout and stderr if they are closed, and let stdout take any character.

    Otherwise the next opened file would get the number of stdout, and engines would print into it. Writing to a stdout
    that was closed fails, as in the system's own commands. Text for a closed stderr is dropped.
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
        sys.stdout.reconfigure(errors="replace")  # names and messages may contain characters that its encoding lacks


def drop_output() -> None:
    """Discard the text that is still in the buffers of stdout and stderr, if it can't be written.

    Otherwise the interpreter tries to write it again when it ends.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                if stream.fileno() == number:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, number)
                    os.close(nowhere)


class Interrupts:
    """The signals that end a command.

    `received` has them in the order of arrival. Each raises KeyboardInterrupt until `held` is True. After that they are
    only noted, so that nothing keeps the command from cleaning up.

    `held` must be set by the first line of a `finally` in the command's own frame: Python runs handlers only at calls
    and jumps, so there is no moment between the end of the work and that line.

    Python raises KeyboardInterrupt wherever the main thread is. During an import, the error may become another one, be
    swallowed, or end the process if a compiled module calls Python. So it waits until no import is under way, but not
    forever. While an object is freed, Python prints and drops the error: then it is raised again a moment later,
    silently. A signal that has another handler, or is ignored, as after `nohup`, is left alone. Outside the main
    thread, all signals are left alone.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.held = False
        self._waits = 0
        self._waiting = False  # whether the next alarm is our own
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def begin(self) -> None:
        """Handle the signals whose handlers are Python's own."""
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING_SIGNALS:
            if (handler := signal.getsignal(number)) in defaults:
                self._before[number] = handler
                signal.signal(number, self._note)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped

    def end(self) -> None:
        """Restore the handlers of the signals."""
        if _ALARM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if sys.unraisablehook == self._dropped:
            sys.unraisablehook = self._hook

    def ignore(self) -> None:
        """Ensure that no signal changes how the process ends: at its very end, Python restores the system's
        handlers.

        Python waits for threads that code of the user has left running, maybe forever. Then signals end the process as
        usual, and if one has already ended the command, the process doesn't wait.
        """
        ending = signal.SIG_DFL if _threads_left() else signal.SIG_IGN
        for number in self._before:
            signal.signal(number, ending)

    def leave(self, code: int) -> None:
        """End the process if a signal has ended the command and threads would keep it. All else is removed and
        written."""
        if self.received and _threads_left():
            os._exit(code)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == _ALARM and self._waiting:
            self._waiting, self._waits = False, self._waits + 1
        else:
            self.received.append(number)
        self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        if self.held:
            return
        if not (_imports(frame) and self._again()):
            raise KeyboardInterrupt

    def _again(self) -> bool:
        """Interrupt a moment later; False if that isn't possible, or has happened too often."""
        if _ALARM not in self._before or self._waits >= MOST_WAITS:
            return False
        self._waiting = True
        signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        return True

    def _dropped(self, given: sys.UnraisableHookArgs) -> None:
        ours = self.received and issubclass(given.exc_type, KeyboardInterrupt)
        if not ours or (not self.held and not self._again()):
            self._hook(given)


def _threads_left() -> bool:
    """Whether there are threads for which Python waits at its end."""
    return any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate())


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is imported in this frame, or in one that called it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
