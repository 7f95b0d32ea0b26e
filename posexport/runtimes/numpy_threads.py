"""One thread for numpy's matrix products and decompositions, where other processes need the cores.

The threads of OpenBLAS, which numpy's packages bring, wait for each other in a loop. While something else has their
cores, what takes a tenth of a second takes several.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ONE_THREAD: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""The environment of a process whose numpy takes one thread: OpenBLAS reads it once, when numpy is first imported."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Has a numpy that is first imported in the block take one thread, unless the user's environment says how many.

    The environment is then as before: child processes may have other libraries that read it.
    """
    new = [name for name in ONE_THREAD if name not in os.environ]
    os.environ.update({name: ONE_THREAD[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
