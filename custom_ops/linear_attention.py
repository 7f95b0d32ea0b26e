"""Linear attention: a state of fixed size replaces the cache. Each token decays the state and adds to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import CallError
from posexport.custom_ops.operator import MICROSOFT, Ops, dtype_of, operator, size_of


def _fake(call: object) -> tuple[Tensor, Tensor]:
    q, v, state = (getattr(call, name) for name in ("q", "v", "state"))
    return q.new_empty((*q.shape[:2], v.shape[2])), torch.empty_like(state)


@operator("StateAttention", "attended", "present", fake=_fake)
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention without softmax over a state that the tokens update one after the other. The state decays by
    exp(decay). Then the outer product of key and value is added, and the query reads the state. With `beta`, the value
    is replaced by its difference to what the key reads, times beta (the delta rule). Gated delta rule: Yang et al.
    2024, arXiv:2412.06464. State space duality of Mamba-2: Dao & Gu 2024, arXiv:2405.21060. A decay of each feature:
    Kimi Linear, arXiv:2510.26692.

    Args:
        q, k: float32 [B, S, heads*head_dim]; queries must already be scaled.
        v: float32 [B, S, heads*value_dim].
        state: float32 [B, heads, head_dim, value_dim], the state after the previous tokens; zeros at the start.
        decay: float32 [B, S, rates], logarithms, for each head or for each feature of its keys; None for no decay.
        beta: float32 [B, S, heads], from 0 to 1.

    Returns:
        What the queries read, [B, S, heads*value_dim], and the state after the last token, like `state`.

    Example:
        >>> one, state = torch.ones(1, 2, 1), torch.zeros(1, 1, 1, 1)
        >>> linear_attention(one, one, one, state)[0].flatten()
        tensor([1., 2.])
    """
    batch, heads, head_dim = state.shape[:3]
    if decay is not None and decay.shape[2] not in (heads, heads * head_dim):
        raise CallError(
            f"linear_attention: decay has {decay.shape[2]} rates: give one for each of {heads} heads, or of "
            f"{heads * head_dim} features of keys."
        )
    queries, keys, values = (x.unflatten(2, (heads, -1)).to(state.dtype) for x in (q, k, v))
    kept = None if decay is None else decay.to(state.dtype).exp().unflatten(2, (heads, -1)).unsqueeze(-1)
    attended = []
    for token in range(q.shape[1]):
        key, value = keys[:, token].unsqueeze(-1), values[:, token].unsqueeze(-2)
        if kept is not None:
            state = state * kept[:, token]
        if beta is not None:
            value = (value - (state * key).sum(-2, keepdim=True)) * beta[:, token, :, None, None]
        state = state + key * value
        attended.append((state * queries[:, token].unsqueeze(-1)).sum(-2))
    read = torch.stack(attended, 1) if attended else values.new_empty(batch, 0, *values.shape[2:])
    return read.flatten(2), state.clone()


@linear_attention.onnx
def _linear_attention_onnx(
    op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, state: ir.Value, decay: ir.Value | None, beta: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    """A Scan over the tokens. The numbers of one token are rows or columns that are multiplied with the state."""
    heads = size_of(state, 1)

    def by_token(x: ir.Value, rows: bool) -> ir.Value:
        """Return [S, B, heads, 1, ...] or [S, B, heads, ..., 1]."""
        shape = [0, 0, heads, 1, -1] if rows else [0, 0, heads, -1, 1]
        return op.Transpose(op.Reshape(x, shape), perm=[1, 0, 2, 3, 4])

    parts = {"key": by_token(k, False), "value": by_token(v, True), "query": by_token(q, True)}
    if decay is not None:
        parts["kept"] = by_token(op.Exp(decay), False)
    if beta is not None:
        parts["beta"] = by_token(beta, True)

    def one(inner: Ops, before: ir.Value, *values: ir.Value) -> tuple[ir.Value, ir.Value]:
        token = dict(zip(parts, values, strict=True))
        value, kept = token["value"], before
        if "kept" in token:
            kept = inner.Mul(before, token["kept"])
        if "beta" in token:
            read = inner.MatMul(inner.Transpose(token["key"], perm=[0, 1, 3, 2]), kept)
            value = inner.Mul(inner.Sub(value, read), token["beta"])
        after = inner.Add(kept, inner.Mul(token["key"], value))
        return after, inner.MatMul(token["query"], after)

    dtype = dtype_of(state)
    inputs = [ir.Value(name=f"{name}_of_token", type=ir.TensorType(dtype)) for name in ("state", *parts)]
    outputs = [ir.Value(name="state_after"), ir.Value(name="read_by_token")]
    body = op.builder.subgraph(one, inputs, outputs, name="token")
    made: Any = op.Scan(state, *parts.values(), body=body, num_scan_inputs=len(parts), _outputs=2)
    present, read = made
    return op.Reshape(op.Transpose(read, perm=[1, 0, 2, 3, 4]), [0, 0, -1]), present


@linear_attention.form("contrib")
def _linear_attention_contrib(
    op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, state: ir.Value, decay: ir.Value | None, beta: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    rule = ("gated_" if decay is not None else "") + ("delta" if beta is not None else "")
    heads = size_of(state, 1)
    made: Any = op.LinearAttention(
        q,
        k,
        v,
        state,
        decay,
        beta,
        q_num_heads=heads,
        kv_num_heads=heads,
        scale=1.0,
        update_rule=rule.rstrip("_") or "linear",
        _outputs=2,
        **MICROSOFT,
    )
    attended, present = made
    return attended, present
