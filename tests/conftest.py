"""Shared set-up: one thread per engine (tests run in parallel processes), hypothesis without deadlines, interrupts that
arrive whatever the parent of this process ignores, and torch's list of composite operators made once per process."""

import functools
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch._export.utils

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

# Each export lists all composite operators of torch anew, a sixth of its time. The list does not change.
torch._export.utils._materialize_cpp_cia_ops = functools.cache(torch._export.utils._materialize_cpp_cia_ops)
