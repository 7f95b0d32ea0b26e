"""The default blocks in plain torch, as a textbook writes them: the peers that posexport's exports are held against.

One layer of bidirectional multi-head attention without masks. Each class takes (hidden_states, position_ids) and holds
its weights under posexport's public names, so that one set of weights fits both. Nothing here imports posexport.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Attention without positions; subclasses override the hook where their encoding acts."""

    def __init__(self, hidden: int, heads: int, **parameters: object) -> None:
        super().__init__()
        self.hidden, self.heads, self.head_dim = hidden, heads, hidden // heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        self.encoding = nn.Module()
        self.prepare(**parameters)

    def prepare(self) -> None:
        pass

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def bias(self, positions: Tensor) -> Tensor | None:
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        q, k = self.rotate(q, k, positions)
        return nn.functional.scaled_dot_product_attention(q, k, v, self.bias(positions))

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(hidden_states, position_ids)
        batch, seq = x.shape[:2]
        q, k, v = (
            project(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.attend(q, k, v, position_ids)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, self.hidden))  # type: ignore[no-any-return]


class PlainLearned(PlainAttention):
    """A table of positions, as in BERT."""

    def prepare(self, max_positions: int = 512) -> None:
        self.encoding = nn.Embedding(max_positions, self.hidden)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.encoding(positions)  # type: ignore[no-any-return]


class PlainSinusoidal(PlainAttention):
    """A table of sines and cosines, as in the Transformer."""

    def prepare(self, max_positions: int = 4096) -> None:
        position = torch.arange(max_positions).unsqueeze(1)
        rate = torch.exp(torch.arange(0, self.hidden, 2) * (-math.log(10000.0) / self.hidden))
        table = torch.zeros(max_positions, self.hidden)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("table", table, persistent=False)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.get_buffer("table")[positions]


class PlainAlibi(PlainAttention):
    """Attention with linear biases."""

    def prepare(self) -> None:
        power = 2 ** math.floor(math.log2(self.heads))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        slopes += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: self.heads - power]
        self.register_buffer("slopes", torch.tensor(slopes).view(-1, 1, 1), persistent=False)

    def bias(self, positions: Tensor) -> Tensor:
        distance = (positions[:, :, None] - positions[:, None, :]).abs()
        return -self.get_buffer("slopes") * distance[:, None]


class PlainT5(PlainAttention):
    """T5's buckets with the logarithm, as in Hugging Face's transformers."""

    def prepare(self, num_buckets: int = 32, max_distance: int = 128) -> None:
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.encoding.relative_attention_bias = nn.Embedding(num_buckets, self.heads)

    def bias(self, positions: Tensor) -> Tensor:
        relative = positions[:, None, :] - positions[:, :, None]
        side = self.num_buckets // 2
        exact = side // 2
        distance = relative.abs()
        far = torch.log(distance.float() / exact) / math.log(self.max_distance / exact) * (side - exact)
        far = torch.min(exact + far.long(), torch.full_like(distance, side - 1))
        bucket = (relative > 0).long() * side + torch.where(distance < exact, distance, far)
        table: nn.Embedding = self.encoding.relative_attention_bias  # type: ignore[assignment]
        return table(bucket).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class PlainRope(PlainAttention):
    """Rotary encoding: `layout` half as in Llama (rotate_half), interleaved as in GPT-J (strided reads and a stack)."""

    def prepare(self, layout: str = "interleaved", theta: float = 10000.0) -> None:
        self.layout = layout
        self.register_buffer(
            "rates", 1.0 / theta ** (torch.arange(0, self.head_dim, 2) / self.head_dim), persistent=False
        )

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None].float() * self.get_buffer("rates")
        return self.turn(q, angles), self.turn(k, angles)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.layout == "half":
            angles = torch.cat((angles, angles), -1)
            a, b = x.chunk(2, -1)
            return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()
        cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


class PlainRope2d(PlainRope):
    """Axial rotary encoding: one half of each head turns by the column, the other by the row."""

    def prepare(self, layout: str = "interleaved", theta: float = 100.0) -> None:
        super().prepare(layout)
        half = self.head_dim // 2
        self.register_buffer("rates", 1.0 / theta ** (torch.arange(0, half, 2) / half), persistent=False)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = [positions[:, None, :, axis, None].float() * self.get_buffer("rates") for axis in (0, 1)]
        q, k = (
            torch.cat([self.turn(half, angle) for half, angle in zip(x.chunk(2, -1), angles, strict=True)], -1)
            for x in (q, k)
        )
        return q, k


class PlainRelative(PlainAttention):
    """Transformer-XL's four terms with the relative shift; it takes positions to be consecutive, as the trick does."""

    def prepare(self) -> None:
        self.encoding.r_proj = nn.Linear(self.hidden, self.hidden, bias=False)
        self.encoding.content_bias = nn.Parameter(torch.zeros(self.heads, self.head_dim))
        self.encoding.position_bias = nn.Parameter(torch.zeros(self.heads, self.head_dim))
        self.register_buffer(
            "rates", 1.0 / 10000.0 ** (torch.arange(0, self.hidden, 2) / self.hidden), persistent=False
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        batch, heads, seq, _ = q.shape
        distances = torch.arange(seq - 1, -seq, -1, device=q.device).float()
        angles = distances[:, None] * self.get_buffer("rates")
        r_proj: nn.Linear = self.encoding.r_proj  # type: ignore[assignment]
        r = r_proj(torch.cat((angles.sin(), angles.cos()), -1)).view(2 * seq - 1, heads, self.head_dim)
        content = (q + self.encoding.content_bias[:, None]) @ k.transpose(-1, -2)  # type: ignore[index]
        position = (q + self.encoding.position_bias[:, None]) @ r.permute(1, 2, 0)  # type: ignore[index]
        padded = nn.functional.pad(position, (1, 0)).view(batch, heads, 2 * seq, seq)
        shifted = padded[:, :, 1:].reshape(batch, heads, seq, 2 * seq - 1)[..., :seq]
        return ((content + shifted) / math.sqrt(self.head_dim)).softmax(-1) @ v


PLAIN: Mapping[str, type[PlainAttention]] = {
    "none": PlainAttention,
    "learned": PlainLearned,
    "sinusoidal": PlainSinusoidal,
    "relative": PlainRelative,
    "t5": PlainT5,
    "rope": PlainRope,
    "rope2d": PlainRope2d,
    "alibi": PlainAlibi,
}
"""A class per encoding of posexport, each with the encoding's defaults."""


def plain_block(
    encoding: str, hidden: int, heads: int, weights: Mapping[str, Tensor], **parameters: object
) -> PlainAttention:
    """The plain block with `weights` by posexport's public names, in eval mode."""
    block = PLAIN[encoding](hidden, heads, **parameters)
    block.load_state_dict(dict(weights), strict=True)
    return block.requires_grad_(False).eval()
