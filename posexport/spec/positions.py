"""Positions of grids for `position_ids`, in the order x = column, y = row, t = frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posexport.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

MAX_TOKENS = 2**24
"""The largest number of tokens of a grid. Angles are exact up to this position."""


def grid_positions(
    rows: int, columns: int, frames: int | None = None, *, prefix_tokens: int = 0, batch: int = 1
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return int64 [batch, prefix_tokens + frames * rows * columns, axes], row by row and frame by frame.

    There are two axes (x, y) if `frames` is None, otherwise three (x, y, t). Prefix tokens (class and registers) have
    position 0, which `--prefix-tokens` ignores. Raises RequestError for sizes below 1 (prefix_tokens: below 0), and for
    more than 2^24 tokens.
    """
    import numpy as np

    sizes = {"rows": rows, "columns": columns, "frames": 1 if frames is None else frames, "batch": batch}
    for name, size in sizes.items():
        if size < 1:
            raise RequestError(f"{name} is {size}: it must be 1 or more.")
    if prefix_tokens < 0:
        raise RequestError(f"prefix_tokens is {prefix_tokens}: it must be 0 or more.")
    tokens = (sizes["frames"] * rows * columns + prefix_tokens) * batch
    if tokens > MAX_TOKENS:
        raise RequestError(f"the grid has {tokens} tokens: the limit is {MAX_TOKENS}, so make it smaller.")
    t, y, x = (axis.ravel() for axis in np.indices((sizes["frames"], rows, columns), dtype=np.int64))
    cells = np.stack((x, y) if frames is None else (x, y, t), -1)
    prefix = np.zeros((prefix_tokens, cells.shape[1]), np.int64)
    return np.repeat(np.concatenate((prefix, cells))[None], batch, 0)
