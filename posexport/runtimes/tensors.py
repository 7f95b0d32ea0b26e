"""Tensors on their way between numpy, torch and processes: bf16, which numpy lacks, travels as ml_dtypes.bfloat16.

Between processes they travel in safetensors, not .npz: numpy reads the headers of an .npz with Python's parser, whose
state Python 3.11 shares between threads: while another thread parses (torch's exporter does), a SystemError is raised.
"""

from __future__ import annotations

import json
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
    """posexport's name of a numpy dtype, or numpy's own where posexport has none."""
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


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write `arrays` to `path`.

    Raises TypeError for what is no array or has no text as its name, ValueError for a dtype that doesn't travel.
    """
    from safetensors.numpy import save

    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r} is {type(array).__name__}: tensors are numpy arrays by name")
        if array.dtype.kind not in "biuf" and array.dtype != BF16:
            raise ValueError(f"{name!r} is {array.dtype}: tensors are numbers or booleans")
    entries = {
        f"a{index}": array.view(np.uint16) if array.dtype == BF16 else array
        for index, array in enumerate(np.ascontiguousarray(array).reshape(array.shape) for array in arrays.values())
    }
    names = [[name, array.dtype.name] for name, array in arrays.items()]
    path.write_bytes(save(entries, {"names": json.dumps(names)}))


def load_arrays(path: Path) -> Arrays:
    """Read what `save_arrays` wrote, as views of the mapped file: they take memory only while they are used, and stay
    when the file is removed. What is written to them changes no file."""
    mapped = np.asarray(np.memmap(path, np.uint8, mode="c"))
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    arrays = {}
    for index, (name, dtype) in enumerate(json.loads(header["__metadata__"]["names"])):
        first, last = (start + offset for offset in header[f"a{index}"]["data_offsets"])
        arrays[name] = mapped[first:last].view(dtype).reshape(header[f"a{index}"]["shape"])
    return arrays
