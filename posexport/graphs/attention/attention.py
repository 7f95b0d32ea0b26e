"""Attention as it was recognised in a graph: where it stands, and everything that its result depends on."""

from __future__ import annotations

import math

import attrs
import onnx_ir as ir

from posexport.errors import Reason
from posexport.graphs.attention.heads import Side, Source
from posexport.graphs.attention.score_axes import ScoreAxes, queries_of
from posexport.graphs.attention.scores import Term
from posexport.graphs.attention.turned_parts import Turn

RECOGNISED, UNKNOWN = "recognised", "unknown"


@attrs.frozen(kw_only=True)
class Attention:
    """One attention of a graph. `name` is that of its softmax or operator, `layer` its place among the others.

    `near` is the same attention between its two products alone, without what lies before them and behind. `logits` have
    the axes `logits_axes` (posexport.graphs.attention.score_axes). `output` is the result [B, N, S, D] as the graph
    lays it out. `square`: there are always as many keys as queries. `divides_zeros`: where a query sees no key, the
    graph divides zero by zero. `guard`: a query gets zeros where its masks and biases are no more than this for all
    keys; None where the graph gives no zeros.
    """

    name: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    factors: tuple[float, ...]
    softcap: float
    q: Side
    k: Side
    v: Side
    terms: tuple[Term, ...]
    head_scales: tuple[tuple[ir.Value, bool], ...]
    sinks: ir.Value | None
    output: Source
    square: bool
    softmax: ir.Node
    logits: ir.Value
    logits_axes: ScoreAxes
    softmax_dtype: str
    weights: ir.Value
    divides_zeros: bool = False
    guard: float | None = None
    near: Attention | None = None

    state = RECOGNISED

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Rotations above queries and keys that are written anew in their place."""
        return (*self.q.turns, *self.k.turns)

    def queries(self, logits: tuple[int, ...]) -> int:
        """The number of queries where logits have this shape."""
        return queries_of(logits, self.logits_axes, self.num_heads)

    def keys(self, logits: tuple[int, ...]) -> int:
        """The number of keys where logits have this shape."""
        return logits[self.logits_axes.index("t") if self.logits_axes else -1]

    @property
    def scale(self) -> float:
        """What the product of queries and keys is multiplied by."""
        return math.prod(self.factors)


@attrs.frozen(kw_only=True)
class UnknownAttention:
    """A softmax whose result weights values, but which was not understood, with the reason."""

    name: str
    layer: int
    reason: Reason

    state = UNKNOWN
