"""Linear attention and the convolution before it, with their states from earlier tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels.registry import MICROSOFT, Call, kernel


@kernel("LinearAttention")
@kernel("LinearAttention", domain=MICROSOFT)
def linear_attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[batch, tokens, heads*size] by the update rule, one token after the other, and the state after the last token.

    Query heads share keys and states, or value heads share queries and keys.
    """
    _check_window(call)
    rule = call.get("update_rule", "gated_delta")
    query_heads, heads = call.get("q_num_heads"), call.get("kv_num_heads")
    size = query.shape[2] // query_heads
    scale = call.get("scale", 0.0) or size**-0.5
    queries, keys = (x.unflatten(2, (-1, size)) for x in (query, key))
    keys = keys.repeat_interleave(heads // keys.shape[2], 2)
    values = value.unflatten(2, (heads, -1))
    state = query.new_zeros(len(query), heads, size, values.shape[-1]) if past is None else past.to(query.dtype)
    shared = max(query_heads // heads, 1)
    queries = queries.repeat_interleave(max(heads // query_heads, 1), 2)
    read = []
    for token in range(query.shape[1]):
        added, own_key = values[:, token].unsqueeze(-2), keys[:, token].unsqueeze(-1)
        if decay is not None and rule.startswith("gated"):
            state = state * decay[:, token].exp().unflatten(1, (heads, -1)).unsqueeze(-1)
        if beta is not None and rule.endswith("delta"):
            added = (added - (state * own_key).sum(-2, keepdim=True)) * beta[:, token, :, None, None]
        state = state + own_key * added
        seen = state.repeat_interleave(shared, 1)
        read.append((seen * queries[:, token].unsqueeze(-1)).sum(-2).flatten(1) * scale)
    width = queries.shape[2] * values.shape[-1]
    return torch.stack(read, 1) if read else query.new_zeros(len(query), 0, width), state


@kernel("CausalConvWithState")
@kernel("CausalConvWithState", domain=MICROSOFT)
def causal_conv_with_state(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A convolution of each channel of x [batch, channels, tokens] over the tokens and earlier ones.

    Also gives the last tokens, which the convolution of the next token needs.
    """
    _check_window(call)
    if call.get("ndim", 1) != 1 or call.get("channels_last", 0):
        raise ValueError("several dimensions, or channels that are last, can't be evaluated")
    dilation = call.get("dilation", 1)
    kept = (weight.shape[-1] - 1) * dilation
    before = x.new_zeros(*x.shape[:2], kept) if past is None else past.to(x.dtype)
    whole = torch.cat((before, x), 2)
    y = F.conv1d(whole, weight, bias, dilation=dilation, groups=x.shape[1])
    return (y if call.get("activation", "none") == "none" else F.silu(y)), whole[:, :, whole.shape[2] - kept :]


def _check_window(call: Call) -> None:
    if call.get("state_window", 0):
        raise ValueError("states of several tokens (state_window) can't be evaluated")
