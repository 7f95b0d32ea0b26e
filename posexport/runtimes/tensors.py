"""Tensors on their way between numpy and torch: bf16, which numpy lacks, travels as ml_dtypes.bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

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


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A numpy array of the same dtype; copies from the device."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BF16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
