"""The operands and the result of a product of attention, as rows, heads, tokens and features."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from posexport.errors import shown
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.head_count import traced_heads
from posexport.graphs.attention.heads import Side, Source, side_of
from posexport.graphs.attention.layouts import Layout, Sizes
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import Product
from posexport.graphs.attention.scores import Declined
from posexport.graphs.symbolic_sizes import Size


def dims_of(probe: Probe, value: ir.Value, axes: str) -> dict[str, int]:
    """The sizes of an operand by letter. With three axes, batch and heads are one axis, `b`."""
    shape = probe.shape(value)
    letters = axes if len(shape) == len(axes) else axes.replace("h", "")
    if len(shape) != len(letters):
        raise Declined("rank", f"{shown(value.name or '')} has {len(shape)} axes, attention has 3 or 4")
    return dict(zip(letters, shape, strict=True))


def sizes_of(flow: Dataflow, probe: Probe, product: Product, batch: int) -> tuple[int, int, int, int, int]:
    """Rows, heads, queries, keys and head size. Rows are those of the inputs, or windows of an image."""
    dims = dims_of(probe, product.result, product.axes[2])
    rows, heads = dims["b"], dims.get("h")
    if heads is None:
        heads, left = divmod(rows, batch)
        if left or not heads:
            text = f"{shown(product.node.name or '')} has {rows} products for {batch} rows, which is not a multiple"
            raise Declined(
                "heads", f"{text}: if tokens come before rows in inputs, name their dimensions seq and batch"
            )
        told = traced_heads(flow, probe, product)
        heads = heads if told is None or heads % told else told
        rows //= heads
    elif heads == batch == 1 < rows and traced_heads(flow, probe, product) == rows:
        text = f"the rows of {shown(product.node.name or '')} are heads, which stand before its only row"
        raise Declined("heads", text)
    return rows, heads, dims["s"], dims["t"], dims_of(probe, product.left, product.axes[0])["d"]


def check_heads(probe: Probe, product: Product, heads: int, *, values: bool = False) -> None:
    """Raise Declined unless the number of heads and their size are the same on all inputs.

    The product is that of queries and keys; with `values`, that of weights and values.
    """
    shapes = probe.shapes
    operands = [(product.left, product.axes[0]), (product.right, product.axes[1])]
    for value, axes in operands[1:] if values else operands:
        sizes = dict(zip(_letters(probe, value, axes), shapes.of(value), strict=True))
        rows = shapes.symbols.quotient(sizes["b"], Size(heads))
        if not sizes["d"].is_fixed or not sizes.get("h", Size(heads)).is_fixed or ("h" not in sizes and rows is None):
            raise Declined(
                "heads", f"lengths or other inputs decide how many heads {shown(value.name or '')} has, or their size"
            )


def _letters(probe: Probe, value: ir.Value, axes: str) -> str:
    """The axes of an operand, with tokens as `s`. With three axes, rows and heads are one axis, `b`."""
    letters = axes.replace("t", "s")
    return letters if len(probe.shape(value)) == 4 else letters.replace("h", "")


def _layout(letters: str) -> Layout:
    return Layout(
        tuple(letters) if len(letters) == 4 else tuple("bh" if letter == "b" else letter for letter in letters)
    )


def operand_side(probe: Probe, operand: ir.Value, axes: str, sizes: Sizes) -> Side:
    """An operand as its product reads it."""
    letters = _letters(probe, operand, axes)
    layout = _layout(letters)
    heads = probe.shape(operand)[letters.index("h")] if "h" in letters else sizes[1]
    rows, _, tokens, features = sizes
    if [*probe.shape(operand)] != _merged(layout, (rows, heads, tokens, features)) or heads not in (1, sizes[1]):
        raise Declined("heads", f"{shown(operand.name or '')} is not laid out by rows and heads")
    return Side(source=Source(value=operand, layout=layout, heads=heads))


def _merged(layout: Layout, sizes: Sizes) -> list[int]:
    named = dict(zip("bhsd", sizes, strict=True))
    return [math.prod(named[letter] for letter in group) for group in layout.groups]


def side_behind(
    flow: Dataflow, probe: Probe, operand: ir.Value, axes: str, sizes: Sizes, *, rotated: bool, cached: bool = True
) -> Side:
    """An operand as it comes from its projection, with its cache if `cached`. Raises LookupError."""
    letters = _letters(probe, operand, axes)

    def canonical(value: torch.Tensor) -> torch.Tensor:
        if len(letters) == 4:
            heads = value.permute([letters.index(letter) for letter in "bhsd"])
            return heads.expand(sizes) if heads.shape[1] == 1 else heads  # one key head for all query heads
        return value.permute([letters.index(letter) for letter in "bsd"]).reshape(sizes)

    return side_of(flow, probe, operand, canonical, sizes, rotated=rotated, cached=cached)


def result_of(probe: Probe, product: Product, sizes: Sizes) -> Source:
    """The result of the product with values, [B, N, S, D] as the graph lays it out."""
    letters = _letters(probe, product.result, product.axes[2])
    layout = _layout(letters)
    if _merged(layout, sizes) != [*probe.shape(product.result)]:
        raise Declined("heads", "the result of attention is not laid out by heads")
    return Source(value=product.result, layout=layout, heads=sizes[1])
