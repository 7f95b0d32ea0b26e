"""Positions of grids, as `position_ids` takes them: x = column first, then y = row, then t = frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posexport.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

MOST = 2**24
"""Tokens of a grid, at most: beyond, angles aren't exact, and no attention would end."""


def grid_positions(
    rows: int, columns: int, frames: int | None = None, *, prefix_tokens: int = 0, batch: int = 1
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """int64 [batch, prefix_tokens + frames * rows * columns, axes], row by row and frame by frame.

    Two axes (x, y) where `frames` is None, else three (x, y, t). The prefix tokens (class and registers) stand at 0,
    which `--prefix-tokens` leaves out of account. Raises RequestError for sizes below 1 (prefix_tokens: below 0), and
    for more than 2^24 tokens.
    """
    import numpy as np

    sizes = {"rows": rows, "columns": columns, "frames": 1 if frames is None else frames, "batch": batch}
    for name, size in sizes.items():
        if size < 1:
            raise RequestError(f"{name} is {size}: it must be 1 or more.")
    if prefix_tokens < 0:
        raise RequestError(f"prefix_tokens is {prefix_tokens}: it must be 0 or more.")
    tokens = sizes["frames"] * rows * columns + prefix_tokens
    if tokens * batch > MOST:
        raise RequestError(f"the grid has {tokens * batch} tokens: it may have {MOST} at most, so make it smaller.")
    t, y, x = (axis.ravel() for axis in np.indices((sizes["frames"], rows, columns), dtype=np.int64))
    cells = np.stack((x, y) if frames is None else (x, y, t), -1)
    first = np.zeros((prefix_tokens, cells.shape[1]), np.int64)
    return np.repeat(np.concatenate((first, cells))[None], batch, 0)
