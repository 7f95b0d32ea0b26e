"""Converts tensors between numpy, torch and processes. bf16, which numpy lacks, is ml_dtypes.bfloat16.

Between processes, tensors are in files: a list of names, dtypes and shapes in JSON, then the bytes. This takes a third
of the time of safetensors, whose files numpy.memmap reads. The files are not .npz: numpy reads .npz headers with
Python's parser, whose state threads share in Python 3.11. If another thread parses at the same time (torch's exporter
does), numpy raises a SystemError.
"""

from __future__ import annotations

import json
import math
import mmap
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from posexport.runtimes.base import Arrays

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp64": np.dtype(np.float64),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}
"""numpy's dtype of each dtype that posexport names."""

BF16 = NUMPY_DTYPES["bf16"]


def dtype_name(dtype: np.dtype[Any]) -> str:
    """posexport's name of a numpy dtype, or numpy's own if posexport has none."""
    return next((name for name, known in NUMPY_DTYPES.items() if known == dtype), str(dtype))


def to_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A torch tensor of the same dtype, on the CPU, that owns its memory."""
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_tensors(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """`to_torch` of each array, by name."""
    return {name: to_torch(array) for name, array in arrays.items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A numpy array of the same dtype; copies from the device."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BF16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


ALIGNMENT = 64
"""Each array in a file begins at a multiple of this many bytes."""


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write `arrays` to `path`.

    Raises TypeError for a name that is not text or a value that is not an array, ValueError for an unsupported dtype.
    """
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r} is {type(array).__name__}: tensors are numpy arrays by name")
        if array.dtype.kind not in "biuf" and array.dtype != BF16:
            raise ValueError(f"{name!r} is {array.dtype}: tensors are numbers or booleans")
    header = json.dumps([[name, array.dtype.name, array.shape] for name, array in arrays.items()]).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""The files that are mapped and not written to, of which pages can go."""


def load_arrays(path: Path, *, writable: bool = False) -> Arrays:
    """Read what `save_arrays` wrote, as views of the mapped file: they take memory only while they are used, and stay
    when the file is removed. Where they are `writable`, what is written to them changes no file."""
    access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=access)
    if not writable:
        _mapped.add(pages)
    mapped = np.frombuffer(pages, np.uint8)
    end = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    arrays = {}
    for name, dtype, shape in json.loads(mapped[8:end].tobytes()):
        start = end + -end % ALIGNMENT
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = mapped[start:end].view(dtype).reshape(shape)
    return arrays


def forget_pages() -> None:
    """Give back the memory that was taken by reading arrays of mapped files, which are read anew where they are needed
    again: all sets of inputs with all results may be several times as large as the weights."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for pages in list(_mapped):
            pages.madvise(mmap.MADV_DONTNEED)
