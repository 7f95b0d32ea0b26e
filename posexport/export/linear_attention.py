"""Linear attention of transformers' models, traced as posexport's operator.

transformers computes it by loops over chunks of tokens, which torch can't export for every number of tokens. Each of
these functions has the same name in all models that have it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posexport.custom_ops import linear_attention

_EPSILON = 1e-6
"""What transformers adds to sums of squares of queries and keys."""


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, for queries and keys [B, S, key heads, size] and values [B, S, heads, size].

    `g` is a decay of each head, or of each feature of its keys.
    """
    heads = value.shape[2]
    q, k = (_repeated(x, heads).float() for x in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    state = _state(k, value) if initial_state is None else initial_state.float()
    read, present = linear_attention(
        q.flatten(2), k.flatten(2), value.float().flatten(2), state, g.float().flatten(2), beta.float()
    )
    return read.unflatten(2, (heads, -1)).to(query.dtype), present if output_final_state else None


def _state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Mamba-2, for hidden states [B, S, heads, size], steps [B, S, heads], and B and C [B, S, groups, state size]."""
    heads = hidden_states.shape[2]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    steps = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    if initial_states is not None and (dt_limit[0] > 0 or dt_limit[1] < float("inf")):
        # like Mamba's kernels, transformers applies no limits to a single token after others
        one_token = torch.arange(dt.shape[1], device=dt.device)[-1:, None] == 0
        steps = torch.where(one_token, dt, steps)
    steps = steps.float()
    values, keys, queries = hidden_states.float(), _repeated(B.float(), heads), _repeated(C.float(), heads)
    # in transformers, the features of keys are the last axis of a state
    state = _state(keys, values) if initial_states is None else initial_states.float().transpose(2, 3)
    read, present = linear_attention(
        queries.flatten(2), keys.flatten(2), (values * steps[..., None]).flatten(2), state, A.float() * steps
    )
    read = read.unflatten(2, (heads, -1))
    if D is not None:
        read = read + D[..., None] * values
    return (read, present.transpose(2, 3)) if return_final_states else read


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Mamba, for hidden states and steps [B, channels, S], A [channels, size], and B and C [B, size, S].

    Each channel is a head with values of one number. It begins with an empty state.
    """
    channels, size = A.shape
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = nn.functional.softplus(dt)
    steps, values = dt.float().transpose(1, 2), hidden_states.float().transpose(1, 2)
    keys, queries = (x.float().transpose(1, 2)[:, :, None].expand(-1, -1, channels, -1).flatten(2) for x in (B, C))
    state = values.new_zeros(values.shape[0], channels, size, 1)
    decay = (steps[..., None] * A.float()).flatten(2)
    read, present = linear_attention(queries, keys, values * steps, state, decay)
    read = read.transpose(1, 2).to(hidden_states.dtype)
    if D is not None:
        read = read + hidden_states * D[:, None]
    if z is not None:
        read = read * nn.functional.silu(z)
    return (read, present.squeeze(-1)) if return_last_state else read


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[B, S, heads, size] from fewer heads, each of which serves several."""
    groups = x.shape[2]
    return x if groups == heads else x[:, :, :, None].expand(-1, -1, -1, heads // groups, -1).flatten(2, 3)


def _state(keys: Tensor, values: Tensor) -> Tensor:
    """The state before the first token."""
    return keys.new_zeros(keys.shape[0], values.shape[2], keys.shape[3], values.shape[3])


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
}
"""The functions that replace transformers' functions, by their names."""


@contextmanager
def linear_attention_as_operator(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes linear attention by posexport's operator."""
    files = {id(file): vars(file) for file in (sys.modules[type(module).__module__] for module in model.modules())}
    before = [(names, name, names[name]) for names in files.values() for name in _FUNCTIONS if name in names]
    try:
        for names, name, _ in before:
            names[name] = _FUNCTIONS[name]
        yield
    finally:
        for names, name, function in before:
            names[name] = function
