"""Shared set-up: one thread per engine (tests run in parallel processes), hypothesis without deadlines, interrupts that
arrive whatever the parent of this process ignores, and torch's list of composite operators made once per process."""

import functools
import os
import signal
import subprocess

os.environ.setdefault("OMP_NUM_THREADS", "1")

import forks
import hypothesis
import pytest
import torch._export.utils

from posexport import processes

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

# Each export lists all composite operators of torch anew, a sixth of its time. The list does not change.
torch._export.utils._materialize_cpp_cia_ops = functools.cache(torch._export.utils._materialize_cpp_cia_ops)

forks.install()


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as the product starts them, for tests of just that."""
    monkeypatch.setattr(processes, "subprocess", subprocess)
