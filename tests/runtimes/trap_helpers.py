"""Shared parts of the tests of traps: graphs in ONNX's text syntax, and attention in numpy float64."""

from __future__ import annotations

import numpy as np
import oracles
from trt_import_helpers import Array

Given = dict[str, Array]
SIZES = {"b": 2, "s": 3, "t": 7, "p": 4, "m": 9}
"""Batch, queries, keys, cached keys, and slots of a buffer."""

FLAT = "float[b,s,32] q, float[b,t,32] k, float[b,t,32] v"
SAME = "float[b,s,32] q, float[b,s,32] k, float[b,s,32] v"
PAST = "float[b,4,p,8] pk, float[b,4,p,8] pv"
BUFFER = "float[b,4,m,8] pk, float[b,4,m,8] pv"
OUT, PRESENT = "=> (float[i,j,l] y)", "=> (float[i,j,l] y, float[c,d,e,f] x, float[c,d,e,f] z)"
HEADS = "q_num_heads = 4, kv_num_heads = 4"
MULTI, GROUP = "com.microsoft.MultiHeadAttention<num_heads = 4", "com.microsoft.GroupQueryAttention<num_heads = 4"
GROUP += ", kv_num_heads = 4"
LENGTHS = "int32[b] n, int32 a"


def split(t: Array) -> Array:
    """Reshape [B, S, 4*width] to [B, 4, S, width]. 4-D tensors stay as they are."""
    return t if t.ndim == 4 else t.reshape(*t.shape[:2], 4, -1).transpose(0, 2, 1, 3)


def softmax(logits: Array, seen: Array) -> Array:
    """Softmax over the last axis in float64. Rows without a seen key are zeros."""
    logits = np.where(np.broadcast_to(seen, logits.shape), logits.astype(np.float64), -np.inf)
    rows = [oracles.weigh(row, None) for row in logits.reshape(-1, logits.shape[-1])]
    return np.stack(rows).reshape(logits.shape)


def formula(q: Array, k: Array, v: Array, seen: Array, scale: float | None = None) -> Array:
    """softmax(scale q k^T, over seen keys) v in float64, with heads concatenated."""
    q, k, v = (split(t).astype(np.float64) for t in (q, k, v))
    logits = np.einsum("bnih,bnjh->bnij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    out = softmax(logits, seen) @ v
    made: Array = out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)
    return made


def corner(seq: int, total: int) -> Array:
    """A causal mask in which the last query is at the last key."""
    return np.asarray(np.arange(total) <= np.arange(seq)[:, None] + total - seq)


def both(i: Given) -> tuple[Array, Array]:
    """Cached and new keys and values."""
    return np.concatenate([i["pk"], split(i["k"])], 2), np.concatenate([i["pv"], split(i["v"])], 2)
