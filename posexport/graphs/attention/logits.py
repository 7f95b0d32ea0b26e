"""What is added to the scores of an attention, measured: which keys each query sees, and the bias of these keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.layouts import has_groups
from posexport.graphs.attention.measure import Measure, Positions
from posexport.graphs.attention.score_axes import by_query
from posexport.graphs.attention.scores import Term
from posexport.graphs.axes import ENCODER, PAST, SEQ, SLOTS
from posexport.graphs.draw import DrawnInputs

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

HIDDEN = -9e3
"""Logits of at most this hide a key. Biases of far keys lie above it; the weakest masks of models, -10,000, below."""


@attrs.frozen(kw_only=True)
class Logits:
    """`seen` bool and `bias` are [rows, N or 1, S or 1, T]. The bias of a hidden key is 0. Queries begin at `past`.

    `keys` bool [batch, T] are the keys that the drawn masks let queries see; None if no input has T keys.
    """

    seen: Array
    bias: Array
    past: int
    keys: Array | None
    inputs: DrawnInputs

    @property
    def queries(self) -> int:
        """The number of queries; 1 if the terms are the same for all."""
        return int(self.seen.shape[2])

    def distances(self) -> Array:
        """Query position minus key position [S, T], by places."""
        return self.past + np.arange(self.queries)[:, None] - np.arange(self.seen.shape[3])


class AddedToScores:
    """The terms of one attention, measured on chosen inputs."""

    def __init__(self, measure: Measure, attention: Attention, levels: Mapping[str, Sequence[int]]) -> None:
        """`levels`: by name, the shapes on the probe's inputs of the values that terms are broadcast to."""
        self._measure, self._attention, self._levels = measure, attention, levels
        self.terms = attention.terms
        self.values = [term.value for term in attention.terms]

    def at(
        self,
        *,
        seq: int,
        past: int = 0,
        batch: int = 1,
        padding: str = "none",
        positions: Positions | None = None,
        seed: int = 0,
        marks: bool = False,
    ) -> Logits:
        """The sum of all terms on inputs of these sizes, as near as the graph allows.

        Raises RequestError if the graph takes no such inputs.
        """
        values, drawn = self._measure.run(
            self.values, seq=seq, past=past, batch=batch, padding=padding, positions=positions, seed=seed, marks=marks
        )
        total: torch.Tensor = torch.zeros((1, 1, 1, 1), dtype=torch.float64)
        for term, value in zip(self.terms, values, strict=True):
            total = _sum(total, self._four_axes(term, self._added(term, value)))
        if not total.numel():  # a part of a table that is shorter than the rows
            raise RequestError("what is added to the scores has no numbers.")
        seen = total > HIDDEN
        keys = self._keys(total.shape[-1], drawn)
        bias = torch.where(seen, total, 0.0)
        if not torch.isfinite(bias).all():
            raise RequestError("what is added to the scores is not finite.")
        return Logits(
            seen=seen.numpy(),
            bias=bias.numpy(),
            past=0 if keys is drawn.encoder_keys else drawn.sizes[PAST],
            keys=keys,
            inputs=drawn,
        )

    @staticmethod
    def _added(term: Term, value: torch.Tensor) -> torch.Tensor:
        if term.seen_if is not None:
            hidden = torch.tensor(-torch.inf, dtype=torch.float64)
            return torch.where(value.bool() == term.seen_if, torch.zeros_like(hidden), hidden)
        return value.double() * term.factor

    def _four_axes(self, term: Term, value: torch.Tensor) -> torch.Tensor:
        """A term as [rows, N or 1, S or 1, T].

        Scores of three axes have rows and heads on one axis. Scores of five axes have two axes of rows, such as
        windows, or two axes of heads, such as groups that share keys.
        """
        if term.axes:
            return by_query(value, term.axes, self._attention.num_heads)
        level = self._levels[term.level.name or ""]
        if len(level) == 3 and value.dim() == 3 and value.shape[0] != 1:
            return value.reshape(-1, self._attention.num_heads, *value.shape[1:])
        if has_groups(level, self._attention.num_heads) and value.dim() > 2:
            value = value[(None,) * (5 - value.dim())]
            return value[:, 0] if value.shape[1:3] == (1, 1) else value.expand(-1, *level[1:3], -1, -1).flatten(1, 2)
        while value.dim() < 4:
            value = value.unsqueeze(0)
        return value.flatten(0, value.dim() - 4)  # windows of an image are rows

    @staticmethod
    def _keys(width: int, drawn: DrawnInputs) -> Array | None:
        total = drawn.sizes[PAST] + drawn.sizes[SEQ]
        if width == total:
            return drawn.keys
        if width == drawn.sizes[ENCODER]:
            return drawn.encoder_keys
        if width == drawn.sizes.get(SLOTS):
            return np.pad(drawn.keys, ((0, 0), (0, width - total)))
        return None


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two terms. Raises RequestError if their shapes don't match."""
    try:
        return one + other
    except RuntimeError:
        shapes = f"{list(one.shape)} and {list(other.shape)}"
        raise RequestError(f"what is added to the scores has the shapes {shapes}, which don't fit.") from None
