"""The positions of tokens in a block: positions that a caller gives, or consecutive ones by promise.

data         position_ids [B, S] are the queries' positions. Cached keys have the positions right before the first of
             them (custom_ops.key_positions)
consecutive  p_i = start + i for the new token i, and start - cached + j for key j of a row. This also holds for
             left-padded rows, so that the difference of two tokens is the difference of their places. `start` is
             position_ids [B, 1]. If only differences matter, `start` is not an input, and the number of cached tokens
             replaces it. In a window of a grid, token i is the cell at column i % columns of row i // columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posexport import custom_ops
from posexport.custom_ops.windows import cells_in_order
from posexport.spec.spec import Spec

Positions = tuple[Tensor | None, Tensor | None]
"""int64 [B, S] of queries (or [B, S, axes]) and [B, T] of keys. None for keys if they are the queries' own tokens."""


def token_positions(spec: Spec, inputs: Mapping[str, Tensor], tokens: Tensor, past: Tensor | None) -> Positions:
    """Return the positions of the queries and keys of a block. They are None if the block reads no positions.

    The queries belong to `tokens` [B, S, ...]. `past` [B, K, P, head_dim] contains cached keys.
    """
    if not spec.position_axes:
        return None, None
    encodings = [layer.encoding for layer in spec.distinct_layers()]
    of_keys = past is not None and any(each.axes and each.hook in ("bias", "score") for each in encodings)
    if spec.consecutive:
        return _consecutive(spec, inputs, tokens, past, of_keys)
    positions = inputs["position_ids"]
    if past is None or not of_keys:
        return positions, None
    return positions, custom_ops.key_positions(
        positions, past, inputs.get("write_indices"), inputs.get("attention_mask")
    )


def _consecutive(
    spec: Spec, inputs: Mapping[str, Tensor], tokens: Tensor, past: Tensor | None, of_keys: bool
) -> Positions:
    batch, seq = tokens.shape[:2]
    if spec.position_axes > 1:  # a window, which has no cache
        columns, _ = spec.position_limits() or (1, 1)
        return cells_in_order(seq, columns, tokens.device).expand(batch, seq, 2), None
    write_indices = inputs.get("write_indices")
    cached: int | Tensor = 0 if past is None else past.shape[2]
    if write_indices is not None:
        cached = write_indices.unsqueeze(1)
    start = inputs.get("position_ids", cached)
    positions = (start + torch.arange(seq, device=tokens.device)).expand(batch, seq)
    if past is None or not of_keys:
        return positions, None
    total = past.shape[2] + (seq if write_indices is None else 0)
    return positions, (start - cached + torch.arange(total, device=tokens.device)).expand(batch, total)
