"""Finds the axis of tokens in features or ids by the products of attention, if names of dimensions don't tell.

The last two axes of attention scores are queries and keys, and values are summed over keys; rows are among the axes
before them. So a dimension of an input that decides the number of queries or keys is one of tokens. A dimension that
decides the number of products is one of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import SCORES, Product, product_of
from posexport.graphs.grouped import around_softmaxes
from posexport.graphs.roles import Role, untold
from posexport.graphs.symbolic_sizes import Size


def token_first(model: ir.Model, probe: Probe, roles: Mapping[str, Role]) -> list[str]:
    """The `untold` inputs whose first axis is that of queries or keys in attention.

    Their second axis is fixed, or is an axis of rows, which come before the last two axes.
    """
    values = {value.name or "": value for value in model.graph.inputs}
    symbols, tokens, rows = probe.shapes.symbols, set[int](), set[int]()
    for _, before, _ in around_softmaxes(model.graph):
        for node in before:
            product = product_of(node, SCORES)
            shape = () if product is None else _shape(probe, product)
            for axis, size in enumerate(shape):
                (tokens if axis >= len(shape) - 2 else rows).update(symbols.parts_of(size))
    found = []
    for name in untold(roles):
        first, second = ({*size.symbols} for size in probe.shapes.of(values[name])[:2])
        if first & tokens and not first & rows and (not second or (second & rows and not second & tokens)):
            found.append(name)
    return found


def _shape(probe: Probe, product: Product) -> tuple[Size, ...]:
    """The lengths of scores whose last axes are queries and keys; empty if they have other axes."""
    shape = probe.shapes.of(product.result)
    return shape if len(shape) in (3, 4) and product.axes[2][-2:] in ("st", "ts") else ()
