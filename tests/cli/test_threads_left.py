"""A command whose process has threads that code of the user has left running."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LEFT_RUNNING = """
import os, signal, sys, threading, time
from posexport.cli import Commands, main

def invoke(commands, ctx):
    threading.Thread(target=time.sleep, args=(50,)).start()
    print("works", flush=True)
    if {during}:
        os.kill(os.getpid(), signal.SIGTERM)
        [len("a") for _ in range(9)]

Commands.invoke = invoke
sys.argv = ["posexport", "list"]
main()
"""


@pytest.mark.parametrize("during", [True, False])
def test_a_thread_that_is_left_running_keeps_no_signal_from_ending_the_process(during: bool) -> None:
    """Code of the user may leave one; Python waits for it at its end."""
    command = [sys.executable, "-c", LEFT_RUNNING.format(during=during)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"
        if not during:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
            process.terminate()
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == (128 + signal.SIGTERM if during else -signal.SIGTERM)
    assert ("ended by SIGTERM" in stderr) == during
