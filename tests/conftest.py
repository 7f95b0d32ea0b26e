"""Shared set-up: one thread per engine (tests run in parallel processes), hypothesis without deadlines, interrupts that
arrive whatever the parent of this process ignores, and torch's table of translations compiled once per process."""

import functools
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
from onnxscript._framework_apis import torch_2_5 as for_torch

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

# Each export compiles 500 functions of torchlib from their sources anew: a third of its time. They don't change.
for_torch.get_torchlib_ops = functools.cache(for_torch.get_torchlib_ops)
