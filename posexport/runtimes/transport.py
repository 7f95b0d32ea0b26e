"""Arrays between processes: one .npz file each way, whose entries carry any name and any dtype, bf16 by its bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import BF16

_NAMES = "names"


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write `arrays` to `path`; names of any kind are kept apart from the file's own entries.

    Raises TypeError for what is no array or has no text as its name, ValueError for an array of Python objects.
    """
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r} is {type(array).__name__}: tensors are numpy arrays by name")
    entries: dict[str, Any] = {
        f"a{index}": array.view(np.uint16) if array.dtype == BF16 else array
        for index, array in enumerate(np.ascontiguousarray(array).reshape(array.shape) for array in arrays.values())
    }
    listed = json.dumps([[name, array.dtype == BF16] for name, array in arrays.items()])
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **(entries | {_NAMES: np.frombuffer(listed.encode(), dtype=np.uint8)}))


def load_arrays(path: Path) -> Arrays:
    """Read what `save_arrays` wrote."""
    with np.load(path, allow_pickle=False) as file:
        listed = json.loads(file[_NAMES].tobytes())
        return {
            name: file[f"a{index}"].view(BF16) if bf16 else file[f"a{index}"]
            for index, (name, bf16) in enumerate(listed)
        }
