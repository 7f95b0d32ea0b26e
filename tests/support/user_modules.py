"""Torch modules as users write them, with and without posexport's operators. Tests also run this module as a file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posexport import custom_ops


class Plain(nn.Module):
    """Causal attention with RoPE and two heads of 8, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(4.0) / 4))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        angles = position_ids[:, None, :, None].float() * self.frequencies
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))

        def turned(t: Tensor) -> Tensor:
            return t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin

        out = nn.functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 5, 16), torch.arange(5).expand(2, 5)


class Own(Plain):
    """The same block with posexport's operators."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        cos, sin = custom_ops.sinusoids(position_ids, self.frequencies)
        q, k = (custom_ops.rotate(t, cos, sin, head_dim=8) for t in (q, k))
        result: Tensor = self.out(custom_ops.attend(q, k, v, num_heads=2, causal=True))
        return result


class Cached(nn.Module):
    """Inputs and outputs inside lists and dictionaries, and one optional input."""

    def forward(self, x: Tensor, past: Any, mask: Tensor | None = None, *, scale: Tensor) -> dict[str, Any]:
        grown = [{name: torch.cat((t, x), 1) for name, t in layer.items()} for layer in past]
        return {"y": x * scale, "present": grown, "loss": None}

    def example_inputs(self) -> dict[str, Any]:
        past = [{"key": torch.randn(2, 3, 8), "value": torch.randn(2, 3, 8)} for _ in range(2)]
        return {"x": torch.randn(2, 5, 8), "past": past, "scale": torch.randn(8)}

    def dynamic_shapes(self) -> dict[str, Any]:
        past = {"key": {0: "batch", 1: "past"}, "value": {0: "batch", 1: "past"}}
        return {"x": {0: "batch", 1: "seq"}, "past": [past, past]}


def make_plain() -> nn.Module:
    """A function that makes a module."""
    return Plain()


made = Own()
