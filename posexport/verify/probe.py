"""One encoding asked through its own hooks, as a block asks it: tables, biases, logits and wavelengths, as numbers.

Queries and keys are ones, and the input is zeros where the encoding acts there, so that what comes out is the
encoding's. Trained weights are random ones from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import numpy as np
import torch
from torch import Tensor

from posexport.custom_ops.heads import Heads
from posexport.custom_ops.visibility import visible
from posexport.errors import RequestError
from posexport.models.attention import EncodingState
from posexport.models.axes import AXES
from posexport.models.weights import seeded_weights
from posexport.runtimes import Runtime
from posexport.spec.encoding import AttentionContext, Encoding
from posexport.spec.positions import grid_positions
from posexport.spec.spec import Spec
from posexport.verify.angles import Angles
from posexport.verify.cases import Array

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

    `given` are its parameters as text; `seq` is the number of tokens (of a grid, along each side; None for a default);
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
        inner = {
            name.removeprefix("encoding."): value for name, value in weights.items() if name.startswith("encoding.")
        }
        self._state.load_state_dict(inner, strict=True, assign=True)
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

    def logits(self, rows: slice = slice(None)) -> tuple[Array, Array]:
        """Logits [heads, rows, T] of the queries `rows`, and the part of them that is added to the product; NaN where
        a key isn't seen.

        Where the encoding acts at the input, one head stands for the mean of all.
        """
        if self.encoding.hook == "embed":
            table = self.embedding()
            content = (table[rows] @ table.T * (self.spec.scale / self.spec.num_heads))[None]
            added = torch.zeros_like(content)
        else:
            check_size(self.spec.num_heads * self.tokens * len(range(self.tokens)[rows]))
            content, added = self._product(rows)
        hidden = ~seen(self.spec, self.tokens, rows)
        both = ((content + added).masked_fill(hidden, math.nan), added.masked_fill(hidden, math.nan))
        return both[0].numpy(), both[1].numpy()

    def _product(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The scaled product of queries and keys, and what bias and score add to it, [heads, rows, T] each."""
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
        return content, sum((term[0] for term in (bias, mixed) if term is not None), torch.zeros_like(content))


def decay(target: ProbeTarget) -> tuple[Array, Array]:
    """Distances [T] of keys behind one query, and their logits less that at distance 0, [heads, axes or 1, T]."""
    axes, side = target.encoding.axes, target.side(512, 25, 13)
    at = side - 1 if axes < 2 and target.spec.causal else side // 2
    steps = side ** np.arange(max(axes, 1))  # how far apart neighbours along each axis stand
    query = int(at * steps.sum())
    logits = Probe(target, cells(side, axes)).logits(slice(query, query + 1))[0][:, 0]
    along = query + (np.arange(side) - at) * steps[:, None]
    return at - np.arange(side), (logits - logits[:, [query]])[:, along]


def wavelengths(spec: Spec, length: int = 2) -> dict[str, Array]:
    """2 pi over the angle of one step along each axis, for every pair; infinite where it doesn't turn by that axis.

    The angle is that of the encoding's own cosine and sine, in float64, at a sequence's length.
    """
    axes = spec.encoding.axes
    module = Angles(spec, torch.float64)
    lengths = {}
    for axis in range(axes):
        places = torch.zeros(1, 2, axes, dtype=torch.int64)
        places[0, 0, axis], places[0, 1] = 1, length - 1
        cos, sin = (t[0, 0].numpy() for t in module(places if axes > 1 else places[..., 0]))
        with np.errstate(divide="ignore"):
            lengths[AXES[axis] if axes > 1 else ""] = 2 * math.pi / np.arctan2(sin, cos)
    return lengths
