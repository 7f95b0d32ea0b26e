"""One encoding asked through its own hooks, as a block asks it: tables, biases and logits at given positions.

Queries and keys are ones, and the input is zeros where the encoding acts there, so that what comes out is the
encoding's. Trained weights are random ones from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from posexport.custom_ops.heads import Heads
from posexport.custom_ops.visibility import visible
from posexport.errors import RequestError
from posexport.models.attention import EncodingState
from posexport.models.weights import seeded_weights
from posexport.runtimes import Runtime
from posexport.spec.encoding import AttentionContext, Encoding
from posexport.spec.positions import grid_positions
from posexport.spec.spec import Spec

Array = np.ndarray[Any, Any]

MOST = 16_384
"""Tokens of one panel."""

MOST_NUMBERS = 2**28
"""Numbers that are held at a time for one panel: a gigabyte in fp32."""


def check_size(numbers: int) -> None:
    """RequestError where a panel would take more than MOST_NUMBERS."""
    if numbers > MOST_NUMBERS:
        raise RequestError(
            f"the picture takes {numbers:.1e} numbers at a time, at most {MOST_NUMBERS:.1e} are held: give fewer "
            "tokens (seq), heads or features."
        )


@attrs.frozen(kw_only=True)
class ProbeTarget:
    """One encoding to draw.

    `given` is shown beside its name; `seq` is the number of tokens (of a grid, along each side; None for a default);
    `seed` is that of its weights. Errors are measured on `runtimes`, and `advance` hears of each.
    """

    spec: Spec
    given: str = ""
    seq: int | None = None
    seed: int = 0
    runtimes: Mapping[str, Runtime] = attrs.field(factory=dict)
    advance: Callable[[str], object] = lambda _: None

    @property
    def encoding(self) -> Encoding:
        """The spec's encoding."""
        return self.spec.encoding

    def side(self, *by_axes: int) -> int:
        """`seq`, or what suits one, two and three axes, within what the encoding knows; RequestError for too many."""
        axes, limit = max(self.encoding.axes, 1), self.encoding.position_limit()
        if self.seq is None:
            suits = by_axes[axes - 1]
            return suits if limit is None else min(suits, limit)
        if limit is not None and self.seq > limit:
            raise RequestError(f"seq is {self.seq}: {self.encoding.name} has {limit} positions, so give at most that.")
        if self.seq**axes > MOST:
            raise RequestError(f"seq is {self.seq} along {axes} axes: at most {MOST} tokens are drawn, so give fewer.")
        return self.seq

    def titles(self, shows: str, weighed: bool = True) -> dict[str, Any]:
        """Title and note of a panel; with a word on weights where they are random ones, and in what is shown."""
        random = " (random weights)" if weighed and self.encoding.weights(self.spec) else ""
        return {"title": self.encoding.name, "note": "\n".join(filter(None, (self.given, shows + random)))}


def cells(side: int, axes: int) -> Array:
    """int64 positions: [side] for one axis or none, else [side^axes, axes] of a grid, x fastest."""
    if axes < 2:
        return np.arange(side)
    positions: Array = grid_positions(side, side, None if axes == 2 else side)[0]
    return positions


def seen(spec: Spec, tokens: int, rows: slice = slice(None)) -> Tensor:
    """bool [rows, tokens]: which keys the queries `rows` of a sequence see, none of it padding."""
    heads = Heads(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        scale=spec.scale,
        causal=spec.causal,
        window=spec.window or 0,
        chunk=spec.attention_chunk_size or 0,
    )
    mask = visible(heads, tokens, tokens, None)
    return (torch.ones(tokens, tokens, dtype=torch.bool) if mask is None else mask)[rows]


class Probe:
    """The hooks of one encoding at positions [T] or [T, axes]; everything in fp32, as in an artifact."""

    def __init__(self, target: ProbeTarget, positions: Array) -> None:
        self.spec, self.encoding, self.tokens = target.spec, target.encoding, len(positions)
        check_size(self.tokens * max(self.spec.hidden_size, self.spec.num_heads * self.spec.head_dim))
        self._state = EncodingState(self.spec, torch.float32)
        weights = seeded_weights(self.spec, target.seed) if self.encoding.weights(self.spec) else {}
        its_weights = {
            name.removeprefix("encoding."): value for name, value in weights.items() if name.startswith("encoding.")
        }
        self._state.load_state_dict(its_weights, strict=True, assign=True)
        self._state.requires_grad_(False)
        self._places = torch.from_numpy(positions)[None]

    def embedding(self) -> Tensor:
        """What is added to the input, [T, hidden_size]."""
        return self.encoding.embed(self._state, torch.zeros(1, self.tokens, self.spec.hidden_size), self._places)[0]

    def rotated(self) -> tuple[Tensor, Tensor]:
        """A query and a key of ones, [T, num_heads, head_dim] each, as they enter the product."""
        ones = torch.ones(1, self.tokens, self.spec.num_heads * self.spec.head_dim)
        q, k = self.encoding.rotate(self._state, ones, ones, self._places)
        return q[0].unflatten(-1, (self.spec.num_heads, -1)), k[0].unflatten(-1, (self.spec.num_heads, -1))

    def logits(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Logits [heads, rows, T] of the queries `rows`, and the part of them that is added to the product.

        Where the encoding acts at the input, one head stands for the mean of all.
        """
        if self.encoding.hook == "embed":
            table = self.embedding()
            content = (table[rows] @ table.T * (self.spec.scale / self.spec.num_heads))[None]
            return content, torch.zeros_like(content)
        check_size(self.spec.num_heads * self.tokens * len(range(self.tokens)[rows]))
        q, k = (t.flatten(1)[None] for t in self.rotated())
        known = self.encoding.axes > 0
        context = AttentionContext(
            k=k,
            q_positions=self._places[:, rows] if known else None,
            k_positions=self._places if known else None,
            mask=None,
            sinks=None,
            write_indices=None,
        )
        bias = self.encoding.bias(self._state, *context.positions()) if known else None
        q, mixed = self.encoding.score(self._state, q[:, rows], context)
        split = (t[0].unflatten(-1, (self.spec.num_heads, -1)) for t in (q, k))
        content = torch.einsum("ihd,jhd->hij", *split) * self.spec.scale
        added = sum((each[0] for each in (bias, mixed) if each is not None), torch.zeros_like(content))
        return content + added, added
