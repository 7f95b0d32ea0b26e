"""Hidden states that lie along the weights of a block, as those of trained models do.

Tokens in random directions give logits of a few units, and no large activation of an MLP. exp overflows at 88.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from posexport.spec.arrays import Array
from posexport.spec.spec import Spec

MOST = {"fp32": 300.0, "fp16": 20.0, "bf16": 8.0}
"""The largest logits of tokens along one direction, by dtype. Half precision has too few digits for larger ones."""

PART = 0.97
"""The largest part of a token that lies along a direction; the rest of the token is random."""

HEADS, LAYERS = 64, 4
"""The most heads, of all layers together, and the most layers that directions are taken from."""

PER_HEAD = 6
"""The tokens of a row for each head whose directions the row has."""

SPANNED = 1e-12
"""The smallest squared length of a direction that counts as spanned by rows, as a part of the largest one."""

KINDS, WEIGHTS = ("query", "key", "opposed", "alone", "mlp"), (0.3, 0.25, 0.15, 0.15, 0.15)
"""What a token lies along, and how often.

The kinds are: what the queries of a head look for most ("query"), what its keys are found by ("key"), the opposite of a
key ("opposed"), the largest or lowest logit of a token with itself ("alone"), and a row of the MLP ("mlp").
"""


@attrs.frozen(kw_only=True)
class Head:
    """Directions [hidden_size] of length 1 for one head.

    `strength` is the logit of `query` with `key` for hidden states with a root mean square of 1. `lowest` and `highest`
    are the directions in which a token has its lowest and highest logit with itself.
    """

    query: Array
    key: Array
    lowest: Array
    highest: Array
    strength: float


@attrs.frozen(kw_only=True)
class Directions:
    """The heads of the first layer of a block, the rows of its MLP [rows, hidden_size] of length 1, and the dtype."""

    heads: Sequence[Head]
    rows: Array
    dtype: str

    def drawn(self, rng: np.random.Generator, values: Array, turns: Iterator[int], keys_alone: bool = False) -> Array:
        """Tokens like `values` [batch, tokens, hidden_size] (unit normal), moved along directions of heads.

        Each row has the directions of one head, or of several if it has many tokens; heads take `turns`. The first
        token of a row has a low or a high logit with itself. `keys_alone`: the tokens are those of an encoder, which
        are only keys.
        """
        made = np.array(values, np.float32)
        norm = float(np.sqrt(values.shape[-1]))
        for row, tokens in enumerate(made):
            several = [self.heads[next(turns) % len(self.heads)] for _ in range(max(1, len(tokens) // PER_HEAD))]
            kinds = rng.choice(KINDS, len(tokens), p=WEIGHTS)
            kinds[:1] = "key" if keys_alone else "alone"
            for token, (kind, which) in enumerate(zip(kinds, rng.integers(0, len(several), len(tokens)), strict=True)):
                head = several[which]
                part = min(PART, (MOST[self.dtype] / max(head.strength, 1e-6)) ** 0.5)
                if keys_alone:
                    kind = "opposed" if kind == "opposed" else "key"
                direction = self._direction(head, kind, (row + token) % 2 == 0, rng)
                tokens[token] = part * norm * direction + (1 - part**2) ** 0.5 * tokens[token]
        return made

    def _direction(self, head: Head, kind: str, low: bool, rng: np.random.Generator) -> Array:
        if kind == "alone":
            return head.lowest if low else head.highest
        if kind == "mlp" and len(self.rows):
            row: Array = self.rows[int(rng.integers(len(self.rows)))]
            return row if low else -row
        return {"query": head.query, "opposed": -head.key}.get(kind, head.key)


def directions_of(spec: Spec, weight: Callable[[str], Array | None]) -> Directions | None:
    """The directions of a block, computed from its weights by public name.

    None if the block has no hidden states as an input, or if a weight is missing or not finite. In a stack with norms
    first, all layers see what the first layer sees: LAYERS of them are used. Otherwise only the first layer is used.
    """
    if spec.vocab_size is not None:
        return None
    heads, rows = list[Head](), list[Array]()
    layers = _spread(spec.layers, LAYERS if spec.norm == "pre" else 1)
    for index in layers:
        found = _of_layer(spec, index, weight, HEADS // len(layers))
        if found is None:
            return None
        heads += found[0]
        rows.append(found[1])
    return Directions(heads=heads, rows=np.concatenate(rows), dtype=spec.dtype)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, evenly spread from 0 on."""
    return sorted({*np.linspace(0, count - 1, min(most, count)).astype(int).tolist()})


def _of_layer(
    spec: Spec, index: int, weight: Callable[[str], Array | None], most: int
) -> tuple[list[Head], Array] | None:
    """At most `most` heads of a layer, and the rows of its MLP."""
    prefix = f"layers.{index}." if spec.layers > 1 else ""
    layer = spec.distinct_layers()[index % len(spec.distinct_layers())]

    def matrix(name: str, norm: str) -> Array:
        """The rows of a matrix as they meet normed hidden states."""
        found, factors = weight(f"{prefix}{name}.weight"), None
        if spec.norm == "pre" and norm:
            factors = weight(f"{prefix}{norm}.weight")
        made = np.full((1, 1), np.nan) if found is None else found.astype(np.float32)
        made = made if factors is None else made * factors.astype(np.float32)
        return made - made.mean(1, keepdims=True) if spec.norm_type == "layernorm" else made

    queries, keys = matrix("q_proj", "input_layernorm"), matrix("k_proj", "" if spec.cross else "input_layernorm")
    rows = np.zeros((0, spec.hidden_size), np.float32)
    if spec.mlp is not None:
        rows = matrix(spec.projections()[4], "post_attention_layernorm")
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    if not all(np.isfinite(each).all() for each in (queries, keys, rows)):
        return None
    group = spec.num_heads // spec.num_kv_heads
    by_head, by_kv_head = (each.reshape(-1, spec.head_dim, spec.hidden_size) for each in (queries, keys))
    chosen = _spread(spec.num_heads, most)
    return [_head(by_head[head], by_kv_head[head // group], layer.scale, spec.cross) for head in chosen], rows


def _head(queries: Array, keys: Array, scale: float, cross: bool) -> Head:
    """The directions of one head, computed from its projections [head_dim, hidden_size].

    Only products of rows are decomposed, which are no larger than the dimensions of the head. That is far cheaper than
    a decomposition of the projections themselves.
    """
    rows = np.concatenate((queries, keys)).astype(np.float64)
    products, size = rows @ rows.T, len(queries)
    root_q, basis_q = _roots(products[:size, :size])
    root_k, basis_k = _roots(products[size:, size:])
    left, values, right = np.linalg.svd(root_q.T @ root_k)
    query, key = _unit(rows[:size].T @ (basis_q @ left[:, 0])), _unit(rows[size:].T @ (basis_k @ right[0]))
    lowest, highest = -query, query
    if not cross:  # for x^T Q^T K x, in the few dimensions where it is not 0
        root, basis = _roots(products)
        _, vectors = np.linalg.eigh(root[:size].T @ root[size:] + root[size:].T @ root[:size])
        lowest, highest = _unit(rows.T @ (basis @ vectors[:, 0])), _unit(rows.T @ (basis @ vectors[:, -1]))
    strength = abs(float(values[0])) * queries.shape[1] * scale
    return Head(query=query, key=key, lowest=lowest, highest=highest, strength=strength)


def _roots(products: Array) -> tuple[Array, Array]:
    """A matrix S with S S^T = R R^T, computed from the products R R^T of some rows R, and a matrix B.

    R^T B has orthogonal columns of length 1, or 0 if the rows span fewer dimensions, and R = S (R^T B)^T.
    """
    values, vectors = np.linalg.eigh(products)
    kept = values > SPANNED * max(values[-1], 0.0)
    roots = np.sqrt(np.where(kept, values, 0.0))
    return vectors * roots, vectors * np.divide(1.0, roots, out=np.zeros_like(roots), where=kept)


def _unit(vector: Array) -> Array:
    return vector / max(float(np.linalg.norm(vector)), 1e-30)
