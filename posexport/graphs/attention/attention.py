"""An attention as it was recognised in a graph: where it is, and everything that its result depends on."""

from __future__ import annotations

import math

import attrs
import onnx_ir as ir

from posexport.errors import Reason
from posexport.graphs.attention.heads import Side, Source
from posexport.graphs.attention.products import Product
from posexport.graphs.attention.score_axes import ScoreAxes, queries_of
from posexport.graphs.attention.scores import Term
from posexport.graphs.attention.turned_parts import Turn

RECOGNISED, UNKNOWN = "recognised", "unknown"


@attrs.frozen(kw_only=True)
class Attention:
    """One attention of a graph.

    `name` is the name of its softmax or operator, `layer` its place among the attentions of the graph. `near` is the
    same attention without the nodes before and after its two products. `scores` is the product of queries (`left`) and
    keys (`right`). `logits` have the axes `logits_axes` (posexport.graphs.attention.score_axes). `sinks` are values, or
    one logit for all heads. `output` is the result [B, N, S, D] as the graph lays it out. `square`: whether there are
    as many keys as queries. `divides_zeros`: whether the graph divides zero by zero for a query that sees no key.
    `guard`: a query gets zeros if its masks and biases are at most this for all keys; None if the graph never gives
    zeros. `weight_factors` multiply the weights of each head, or of all heads if there is only one.
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
    scores: Product
    terms: tuple[Term, ...]
    head_scales: tuple[tuple[ir.Value, bool], ...]
    sinks: ir.Value | float | None
    output: Source
    square: bool
    softmax: ir.Node
    logits: ir.Value
    logits_axes: ScoreAxes
    softmax_dtype: str
    weights: ir.Value
    divides_zeros: bool = False
    guard: float | None = None
    weight_factors: tuple[float, ...] = ()
    near: Attention | None = None

    state = RECOGNISED

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Rotations of parts of queries and keys, which are rewritten where they are."""
        return (*self.q.turns, *self.k.turns)

    def queries(self, logits: tuple[int, ...]) -> int:
        """The number of queries in logits of this shape."""
        return queries_of(logits, self.logits_axes, self.num_heads)

    def keys(self, logits: tuple[int, ...]) -> int:
        """The number of keys in logits of this shape."""
        return logits[self.logits_axes.index("t") if self.logits_axes else -1]

    @property
    def scale(self) -> float:
        """The factor of the product of queries and keys."""
        return math.prod(self.factors)


@attrs.frozen(kw_only=True)
class UnknownAttention:
    """A softmax or operator that may be attention but was not understood, with the reason."""

    name: str
    layer: int
    reason: Reason

    state = UNKNOWN
