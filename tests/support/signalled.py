"""Runs a command and sends it a signal at a chosen moment.

    python signalled.py MODULE NAME CALL SIGNAL WHEN -- ARGUMENTS

Several moments can be given: MODULE NAME CALL SIGNAL WHEN MODULE NAME ... -- ARGUMENTS. The function NAME of MODULE
(such as `HashingFile.write`) is wrapped. At call number CALL, the process sends itself the SIGNAL, before or after the
function runs (WHEN). So the moment is the same in every run, without a clock.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any


def arm(module: str, name: str, call: int, number: int, when: str) -> None:
    """Wrap the function."""
    owner: Any = importlib.import_module(module)
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function, calls = getattr(owner, last), 0

    @functools.wraps(function)
    def signalled(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        due = calls == call
        if due and when == "before":
            os.kill(os.getpid(), number)
        result = function(*args, **kwargs)
        if due and when == "after":
            os.kill(os.getpid(), number)
        return result

    setattr(owner, last, signalled)


if __name__ == "__main__":
    if sys.platform != "win32":
        for ignored in (signal.SIGHUP, signal.SIGQUIT):  # nohup and background jobs of shells ignore these signals
            signal.signal(ignored, signal.SIG_DFL)
    end = sys.argv.index("--")
    moments, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    for module, name, call, number, when in zip(*[iter(moments)] * 5, strict=True):
        arm(module, name, int(call), int(number), when)
    sys.argv = ["posexport", *arguments]
    from posexport.cli import main

    main()
