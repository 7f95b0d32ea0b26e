"""Arrays between processes: one file each way, whose entries carry any name and most dtypes, bf16 by its bits.

safetensors, not .npz: numpy reads each header of an .npz with Python's parser, whose state Python 3.11 shares between
threads, so that a parse in another thread at that moment (torch's exporter does some) fails with a SystemError.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import BF16

_NAMES = "names"


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write `arrays` to `path`.

    Raises TypeError for what is no array or has no text as its name, ValueError for a dtype that doesn't travel.
    """
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r} is {type(array).__name__}: tensors are numpy arrays by name")
        if array.dtype.kind not in "biuf" and array.dtype != BF16:
            raise ValueError(f"{name!r} is {array.dtype}: tensors are numbers or booleans")
    entries = {
        f"a{index}": array.view(np.uint16) if array.dtype == BF16 else array
        for index, array in enumerate(np.ascontiguousarray(array).reshape(array.shape) for array in arrays.values())
    }
    listed = json.dumps([[name, array.dtype == BF16] for name, array in arrays.items()])
    path.write_bytes(save(entries, {_NAMES: listed}))


def load_arrays(path: Path) -> Arrays:
    """Read what `save_arrays` wrote."""
    with safe_open(path, framework="numpy") as file:
        listed = json.loads(file.metadata()[_NAMES])
        entries = [file.get_tensor(f"a{index}") for index in range(len(listed))]
    return {name: entry.view(BF16) if bf16 else entry for (name, bf16), entry in zip(listed, entries, strict=True)}
