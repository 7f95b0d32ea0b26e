"""Shared set-up: one thread per engine (tests run in parallel processes) and hypothesis without deadlines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")
