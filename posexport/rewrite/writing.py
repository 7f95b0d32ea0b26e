"""Tools for writing the parts of a site: values of the graph by name, calls of operators, and expanded operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx_ir as ir

from posexport.graphs.attention.layouts import ROUNDING
from posexport.graphs.function_bodies import DOMAIN, Functions
from posexport.graphs.nodes import Nodes
from posexport.rewrite.broadcasts import Broadcasts, Extent

Shaped = tuple["ir.Value | None", "tuple[int | str, ...]"]
"""An input of an operator with its shape; None for an absent input."""


@attrs.frozen(kw_only=True)
class Beside:
    """Another operand of the same operator, with its lengths and its axes of rows and tokens.

    `tokens` is None if its tokens are not the same axis.
    """

    value: ir.Value
    extent: Extent
    rows: int = 0
    tokens: int | None = 1


@attrs.frozen(kw_only=True)
class Writing:
    """New `nodes` with `functions` of the form, in the graph that has these `values` by name, of these `dtypes`."""

    nodes: Nodes
    functions: Functions
    values: Mapping[str, ir.Value]
    dtypes: Mapping[str, ir.DataType]

    def read(self, value: ir.Value) -> ir.Value:
        """The value with this name in the graph that is written to, with its dtype."""
        name = value.name or ""
        own = self.values[name]
        if own.dtype is None and name in self.dtypes:
            own.type = ir.TensorType(self.dtypes[name])
        return own

    def call(self, operator: Any, inputs: Sequence[Shaped], attributes: dict[str, Any]) -> tuple[ir.Value, ...]:
        """A node for one of posexport's operators, whose inputs have these shapes."""
        described = tuple(
            None if value is None else ir.Value(name=value.name, type=value.type, shape=ir.Shape(shape))
            for value, shape in inputs
        )
        function = self.functions.function(operator, described, attributes)
        given = [value for value, _ in inputs if value is not None]
        dtype = given[0].dtype
        return self.nodes.op(function.name, given, outputs=len(operator.outputs), domain=DOMAIN, dtype=dtype)

    def widened(
        self, x: ir.Value, extent: Extent, others: Iterable[Beside], sizes: Broadcasts, width: int
    ) -> tuple[ir.Value, Extent]:
        """A value [B, S, width], expanded if others may have more rows or tokens, and its lengths then."""
        one = self.nodes.constant([1])
        for other in others:
            rows = sizes.joint(extent.rows, other.extent.rows)
            tokens = extent.tokens if other.tokens is None else sizes.joint(extent.tokens, other.extent.tokens)
            more_rows, more_tokens = (not sizes.same(*pair) for pair in ((rows, extent.rows), (tokens, extent.tokens)))
            if not more_rows and not more_tokens:
                continue
            lengths = [self.nodes.length(other.value, other.rows)] if more_rows else [one]
            if more_tokens and other.tokens is not None:
                lengths += [self.nodes.length(other.value, other.tokens), one]
            else:
                lengths = [*lengths, self.nodes.constant([1, 1])]
            x = self.nodes.one("Expand", x, self.nodes.one("Concat", *lengths, axis=0))
            x.shape = ir.Shape([None, None, width])
            extent = Extent(rows=rows, tokens=tokens)
        return x, extent


def times(nodes: Nodes, value: ir.Value, number: float) -> ir.Value:
    """A value times a number, exact if possible.

    It is exact if its dtype, or fp32, can hold the number or its reciprocal, or if one of these is the second or fourth
    root of a number in fp32, or if the number is the logarithm of one in fp32: a scale may be computed from the size of
    heads while the graph runs, and powers may have another base.
    """
    assert value.dtype is not None
    if number == -1.0:
        return nodes.one("Neg", value)
    if is_exact(number, value.dtype):
        return nodes.one("Mul", value, nodes.constant(number, value.dtype))
    if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) and not is_exact(1.0 / number, value.dtype):
        return nodes.cast(times(nodes, nodes.cast(value, ir.DataType.FLOAT), number), value.dtype)
    if _as_weight(number) is not None:
        return nodes.one("Mul", value, number_constant(nodes, number, value.dtype))
    kind, root = _as_root(number) or ("Div", (1.0 / number, 0))
    other = nodes.constant(root[0], value.dtype)
    for _ in range(root[1]):
        other = nodes.one("Sqrt", other, dtype=value.dtype)
    return nodes.one(kind, value, other)


def number_constant(nodes: Nodes, number: float, dtype: ir.DataType) -> ir.Value:
    """A number, exact in float64 if it is a number of this dtype or the logarithm of one."""
    weight = None if is_exact(number, dtype) else _as_weight(number)
    return nodes.constant(number, dtype) if weight is None else nodes.one("Log", nodes.constant(weight, dtype))


def _as_weight(number: float) -> float | None:
    """The float32 number whose logarithm a number is, if it is one and no root; None otherwise."""
    if not math.log(1e-30) < number < math.log(1e30) or _as_root(number) is not None:
        return None
    weight = float(np.float32(math.exp(number)))
    return weight if abs(math.log(weight) - number) <= ROUNDING * abs(number) else None


def _as_root(number: float) -> tuple[str, tuple[float, int]] | None:
    """The operator that replaces a product with `number`, its float32 operand, and how many square roots this needs."""
    for roots in range(3 if 1e-9 < number < 1e9 else 0):  # fp32 can hold the fourth powers of these
        for kind, whole in (("Div", number ** -(2**roots)), ("Mul", number ** (2**roots))):
            rounded = float(np.float32(whole))
            if abs(rounded - whole) <= ROUNDING * whole:
                return kind, (rounded, roots)
    return None


def is_exact(number: float, dtype: ir.DataType) -> bool:
    """Whether a dtype can hold a number exactly."""
    with np.errstate(over="ignore"):  # infinity is another number
        return float(np.asarray(number).astype(dtype.numpy())) == number
