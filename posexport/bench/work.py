"""The least work of one run: matrix products, layer by layer, and bytes to read.

    X [rows, hidden] W_q, W_k, W_v;  C [rows, num_heads*head_dim] W_o;  those of the MLP, in a transformer block
    Q K^T and P V for each key head: [group*seq, head_dim] [head_dim, keys] and [group*seq, keys] [keys, head_dim]

Scores are whole rectangles. With a window or chunks, they have as many keys as a query sees. The bytes are the weights
and the cache in the graph's dtype, each read once. For a layer with a window or chunks, only the part of the cache that
is seen counts. What an encoding computes is not counted. The work of graphs of other tools is in
posexport.bench.graph_work.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice

import attrs
import torch

from posexport.models.weights import TORCH_DTYPES
from posexport.runtimes.base import Arrays
from posexport.spec.contract import graph_inputs, sizes_of
from posexport.spec.spec import Spec


@attrs.frozen
class Product:
    """`count` products [rows, inner] [inner, columns]."""

    count: int
    rows: int
    inner: int
    columns: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.count * self.rows * self.inner * self.columns


@attrs.frozen
class Heads:
    """The two products of attention for each key head.

    They are [rows, head_dim] [head_dim, keys] and [rows, keys] [keys, value_dim].
    """

    heads: int
    rows: int
    head_dim: int
    keys: int
    value_dim: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.heads * self.rows * self.keys * (self.head_dim + self.value_dim)


@attrs.frozen(kw_only=True)
class Seen:
    """The keys that the queries of an attention see.

    They are within `window` on one or two `sides`, in chunks, or in a buffer that is filled up to the new tokens.
    """

    window: int | None = None
    sides: int = 1
    chunk: int | None = None
    buffer: bool = False

    def of_cache(self, past: int) -> int:
        """The number of cached tokens that new tokens see."""
        seen = past if self.window is None else min(past, self.window - 1)
        return seen if self.chunk is None else min(seen, past % self.chunk)

    def of_keys(self, keys: int, past: int, seq: int) -> int:
        """The most keys that a query sees, out of `keys`."""
        bounds = [keys] if self.window is None else [keys, self.sides * (self.window - 1) + 1]
        if self.window is not None or self.chunk is not None or self.buffer:
            bounds.append(self.of_cache(past) + seq)
        return min(bounds if self.chunk is None else [*bounds, self.chunk])


@attrs.frozen
class Layer:
    """The products of one layer, and its attention if it has one."""

    products: tuple[Product, ...]
    attention: Heads | None = None


@attrs.frozen(kw_only=True)
class Work:
    """The products of one run in their order. `bytes` is what must be read."""

    layers: tuple[Layer, ...]
    bytes: int

    @property
    def attentions(self) -> list[Heads]:
        """The attention of each layer that has one."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        products = sum(product.operations for layer in self.layers for product in layer.products)
        return products + sum(one.operations for one in self.attentions)


def work(spec: Spec, sizes: Mapping[str, int]) -> Work:
    """What a block of `spec` must compute and read for inputs of `sizes`."""
    batch, seq, past = sizes["batch"], sizes["seq"], sizes.get("past_seq", 0)
    keys = sizes["encoder_seq"] if spec.cross else past + seq
    rows, key_rows = batch * seq, batch * sizes.get("encoder_seq", seq)
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = [(rows, spec.hidden_size, wide), *[(key_rows, spec.hidden_size, narrow)] * 2]
    projections.append((rows, wide, spec.hidden_size))
    if spec.mlp is not None:
        inner = spec.intermediate_size or 4 * spec.hidden_size
        up = len([name for name in spec.projections() if name.startswith("mlp.")]) - 1
        projections += [*[(rows, spec.hidden_size, inner)] * up, (rows, inner, spec.hidden_size)]
    weights = sum(inner * columns for _, inner, columns in projections)
    layers = list(islice(cycle(spec.distinct_layers()), spec.layers))
    heads, group = batch * spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    cached = 2 * heads * spec.head_dim * sum(_seen(layer).of_cache(past) for layer in layers)
    products = tuple(Product(1, *projection) for projection in projections)
    attentions = (
        Heads(heads, group * seq, spec.head_dim, _seen(layer).of_keys(keys, past, seq), spec.head_dim)
        for layer in layers
    )
    return Work(
        layers=tuple(Layer(products, attention) for attention in attentions),
        bytes=getattr(torch, TORCH_DTYPES[spec.dtype]).itemsize * (spec.layers * weights + cached),
    )


def work_on(spec: Spec, inputs: Arrays) -> Work:
    """`work` for these inputs. Of a shared cache, only what is in it before the run counts."""
    sizes = sizes_of(graph_inputs(spec), inputs)
    if spec.kv_cache == "shared":
        sizes = {**sizes, "past_seq": int(inputs["write_indices"].max())}
    return work(spec, sizes)


def _seen(layer: Spec) -> Seen:
    if layer.cross:
        return Seen()
    return Seen(window=layer.window, sides=1 if layer.causal else 2, chunk=layer.attention_chunk_size)
