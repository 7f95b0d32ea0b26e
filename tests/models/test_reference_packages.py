"""Encodings that transformers does not have, against x-transformers and rotary-embedding-torch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers import small_spec
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

from posexport.models.attention import EncodingState
from posexport.models.weights import seeded_weights
from posexport.spec.encoding import AttentionContext, Encoding
from posexport.spec.positions import grid_positions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It uses torch.jit.script, which is deprecated.
    from x_transformers import x_transformers as xt

B, S, N, H = 2, 11, 4, 8
AT = torch.arange(S).expand(B, S)


def state_of(encoding: str, **over: Any) -> tuple[EncodingState, Encoding]:
    """The state of an encoding with seeded weights in fp32, and the encoding."""
    spec = small_spec(encoding, **over)
    state = EncodingState(spec, torch.float32)
    weights = {name.removeprefix("encoding."): value for name, value in seeded_weights(spec, 0).items()}
    own = {name: value for name, value in weights.items() if name in dict(state.named_parameters())}
    state.load_state_dict(own, strict=True, assign=True)
    return state.requires_grad_(False), state.encoding


def heads(seed: int, n: int = N) -> torch.Tensor:
    return torch.randn(B, n, S, H, generator=torch.Generator().manual_seed(seed))


def flat(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).flatten(2)


NO_KEYS = torch.empty(0)


def context(k: torch.Tensor = NO_KEYS) -> AttentionContext:
    return AttentionContext(k=k, q_positions=AT, k_positions=AT, mask=None, sinks=None, write_indices=None)


def close(made: torch.Tensor, wanted: torch.Tensor, bound: float = 2e-6) -> None:
    wanted = wanted.detach()
    assert made.shape == wanted.shape
    assert float((made - wanted).abs().max()) < bound * max(1.0, float(wanted.abs().max()))


def test_cope() -> None:
    state, encoding = state_of("cope", causal=True, npos_max=6)
    q, k = heads(1), heads(2)
    theirs = xt.CoPE(dim=H, heads=N, max_pos=6)
    theirs.pos_emb.data = state["pos_emb"].T.contiguous()
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    logits = (q @ k.mT * H**-0.5).masked_fill(future, -torch.finfo(torch.float32).max)
    _, made = encoding.score(state, flat(q), context(flat(k)))
    assert made is not None
    close(made.masked_fill(future, 0), theirs(q, logits).masked_fill(future, 0))
    theirs.pos_emb.data *= 1.001
    assert float((made - theirs(q, logits).detach()).masked_fill(future, 0).abs().max()) > 1e-4


@pytest.mark.parametrize("scale_base", [512, 40])
def test_xpos_scores(scale_base: int) -> None:
    state, encoding = state_of("xpos", causal=True, scale_base=scale_base)
    q, k = heads(1), heads(2)
    freqs, scale = xt.RotaryEmbedding(H, use_xpos=True, scale_base=scale_base).forward_from_seq_len(S)
    theirs = xt.apply_rotary_pos_emb(q, freqs, scale) @ xt.apply_rotary_pos_emb(k, freqs, scale**-1).mT
    turned = encoding.rotate(state, flat(q), flat(k), AT)
    made = [t.unflatten(-1, (N, H)).transpose(1, 2) for t in turned]
    close(made[0] @ made[1].mT, theirs)
    wrong, _ = state_of("xpos", causal=True, scale_base=2 * scale_base)
    other = [t.unflatten(-1, (N, H)).transpose(1, 2) for t in wrong.encoding.rotate(wrong, flat(q), flat(k), AT)]
    assert float((other[0] @ other[1].mT - theirs).abs().max()) > 1e-3


def test_alibi() -> None:
    state, encoding = state_of("alibi")
    made = encoding.bias(state, AT, AT)
    assert made is not None
    close(made[0], xt.AlibiPositionalBias(heads=N)(S, S))


@pytest.mark.parametrize("causal", [False, True])
def test_t5(causal: bool) -> None:
    state, encoding = state_of("t5", causal=causal, num_buckets=8, max_distance=10)
    theirs = xt.RelativePositionBias(scale=1.0, causal=causal, num_buckets=8, max_distance=10, heads=N)
    theirs.relative_attention_bias.weight.data = state["relative_attention_bias.weight"]
    made = encoding.bias(state, AT, AT)
    assert made is not None
    future = torch.ones(S, S, dtype=torch.bool).triu(1) & causal  # The packages do not define these.
    close(made[0].masked_fill(future, 0), theirs(S, S).masked_fill(future, 0))


@pytest.mark.parametrize("kind", ["interpolation", "ntk"])
def test_scaled_rope(kind: str) -> None:
    ours = {"interpolation": "linear", "ntk": "ntk"}[kind]
    state, encoding = state_of("rope", scaling=ours, factor=4)
    name = {"interpolation": "interpolate_factor", "ntk": "theta_rescale_factor"}[kind]
    theirs: Any = RotaryEmbedding(dim=H, **{name: 4.0})
    q = heads(1)
    made, _ = encoding.rotate(state, flat(q), flat(q), AT)
    close(made.unflatten(-1, (N, H)).transpose(1, 2), theirs.rotate_queries_or_keys(q), 1e-5)


@pytest.mark.parametrize("frames", [None, 2])
def test_axial_rope(frames: int | None) -> None:
    """The axes are rows and columns, or frames, rows and columns."""
    axes, rows, columns = (2, 3, 4) if frames is None else (3, 2, 3)
    name, order = ("rope2d", "yx") if frames is None else ("rope3d", "tyx")
    width = 4 * axes
    state, encoding = state_of(name, order=order, theta=10_000.0, head_dim=width)
    shape = (rows, columns) if frames is None else (frames, rows, columns)
    freqs = RotaryEmbedding(dim=width // axes, freqs_for="lang", theta=10_000).get_axial_freqs(*shape)
    x = torch.randn(1, N, *shape, width, generator=torch.Generator().manual_seed(3))
    theirs = apply_rotary_emb(freqs, x).flatten(2, -2)
    tokens = flat(x.flatten(2, -2))
    positions = torch.from_numpy(grid_positions(rows, columns, frames))
    made, _ = encoding.rotate(state, tokens, tokens, positions)
    close(made.unflatten(-1, (N, width)).transpose(1, 2), theirs)
    turned, _ = encoding.rotate(state, tokens, tokens, positions.flip(-1))
    assert float((turned - made).abs().max()) > 1e-2
