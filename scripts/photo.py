"""A real photograph as the input of a ViT-B/16 block: its 14x14 patches of 16x16 pixels, 768 numbers each.

ViT-B/16 projects these 768 numbers to hidden size 768; the block takes them as they are, normalised per channel with
the mean and deviation of ImageNet (Dosovitskiy et al. 2021, arXiv:2010.11929).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIDE, PATCH = 224, 16
_MEAN, _DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def photograph() -> np.ndarray[Any, Any]:
    """The portrait of Grace Hopper that matplotlib ships (public domain, US Navy), cut and scaled to 224x224x3."""
    from matplotlib import cbook
    from PIL import Image

    with Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as image:
        side = min(image.size)
        left = (image.width - side) // 2
        square = image.convert("RGB").crop((left, 0, left + side, side))
        return np.asarray(square.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64) / 255


def patches(pixels: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """hidden_states [1, 196, 768] fp16 and position_ids [1, 196, 2] (x = column first, then y = row)."""
    grid = SIDE // PATCH
    normal = (pixels - _MEAN) / _DEVIATION
    tokens = normal.reshape(grid, PATCH, grid, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(1, grid * grid, -1)
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    return {
        "hidden_states": tokens.astype(np.float16),
        "position_ids": np.stack([columns, rows], -1)[None].astype(np.int64),
    }


def write(path: Path) -> None:
    """The inputs as an .npz that `posexport verify --inputs` takes."""
    np.savez(path, **patches(photograph()))
