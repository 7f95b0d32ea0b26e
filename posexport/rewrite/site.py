"""One attention written anew: the nodes that compute what it computes, with posexport's operators in their middle.

    q, k  laid out as [B, S, heads*D], rotated by RotaryPosition where a rotation was recognised
    bias  the sum of masks and biases, still computed by the nodes of the graph, in fp32
    out   PositionalAttention, CachedAttention or SharedCacheAttention (posexport.custom_ops.attention)

Everything is looked up by name in the graph that is written to, which may be a copy of the one that was recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import onnx_ir as ir

from posexport.custom_ops import attend, attend_cached, attend_shared, rotate
from posexport.custom_ops.rotary import Layout, has_operator
from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.layouts import has_groups
from posexport.graphs.attention.pairings import Pairs
from posexport.graphs.attention.rotary import AngleSource, Rotary
from posexport.graphs.function_bodies import DOMAIN, Functions
from posexport.graphs.nodes import Nodes, from_tokens, to_tokens

Shaped = tuple["ir.Value | None", "tuple[int | str, ...]"]
"""An input of an operator with its shape; None for one that is absent."""

LOWEST = -3.0e38
"""The least bias: finite, so that a row whose keys are all hidden doesn't become NaN."""


@attrs.frozen(kw_only=True)
class SharedCache:
    """Where new keys go in buffers of a fixed length: `write_indices` [B], and the length of the buffers [1]."""

    write_indices: ir.Value
    length: ir.Value


@attrs.frozen(kw_only=True)
class Site:
    """The new values of one attention, by the names of those that they replace; `keys` [B, S, K*D] are the new ones."""

    replaced: Mapping[str, ir.Value]
    keys: ir.Value


class SiteWriter:
    """Writes attention into a graph. `dtypes` has the dtype of each value that is read or replaced, `shapes` the probed
    shape of what is read."""

    def __init__(
        self,
        nodes: Nodes,
        functions: Functions,
        values: Mapping[str, ir.Value],
        dtypes: Mapping[str, ir.DataType],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._nodes, self._functions, self._values = nodes, functions, values
        self._dtypes, self._shapes = dtypes, shapes

    def write(self, attention: Attention, shared: SharedCache | None = None) -> Site:
        """The nodes of one attention; raises RequestError where the form can't express it."""
        nodes, heads, dim = self._nodes, attention.num_heads, attention.head_dim
        q = self._side(attention.q, dim)
        k = self._side(attention.k, dim)
        v = self._side(attention.v, attention.value_dim)
        if attention.k.cache is None and len({q.dtype, k.dtype, v.dtype}) > 1:  # products of their own dtypes
            q, k, v = (self._in(one, ir.DataType.FLOAT) for one in (q, k, v))
        if self._functions.form == "contrib" and ir.DataType.DOUBLE in (q.dtype, k.dtype, v.dtype):
            raise RequestError("operators of com.microsoft take no fp64: choose another form.")
        attribute, factors = split_scale(attention.factors, q)
        if self._functions.form in _SCALED_IN_DTYPE and not _is_exact(attribute, q.dtype or ir.DataType.FLOAT):
            attribute, factors = 1.0, [*factors, attribute]
        for number in factors:
            q = self._times(q, number)
        q = self._by_heads(q, attention)
        bias = self._bias(attention, q, shared)
        sinks = None if attention.sinks is None else nodes.shaped(self._read(attention.sinks), -1)
        attributes = {
            "num_heads": heads,
            "num_kv_heads": attention.num_kv_heads,
            "scale": attribute,
            "causal": False,
            "window": 0,
            "chunk": 0,
            "softcap": attention.softcap,
        }
        lengths = ("batch", "seq") if attention.square or attention.k.cache is not None else ("batch", "keys")
        width, value_width = attention.num_kv_heads * dim, attention.num_kv_heads * attention.value_dim
        shaped: list[Shaped] = [
            (q, ("batch", "seq", heads * dim)),
            (k, (*lengths, width)),
            (v, (*lengths, value_width)),
            (bias, ("bias_batch", "bias_heads", "seq", "total")),
            (None, ()),
            (sinks, (heads,)),
        ]
        operator: Any = attend
        if attention.k.cache is not None and attention.v.cache is not None:
            operator = attend_cached if shared is None else attend_shared
            past = [self._read(side.cache.past) for side in (attention.k, attention.v) if side.cache is not None]
            dims: list[tuple[int | str, ...]] = [
                ("batch", attention.num_kv_heads, "past", size) for size in (dim, attention.value_dim)
            ]
            extra: list[tuple[ir.Value | None, tuple[int | str, ...]]] = [*zip(past, dims, strict=True)]
            extra += [] if shared is None else [(shared.write_indices, ("batch",))]
            shaped[3:3] = extra
        results = self._call(operator, shaped, attributes)
        out = from_tokens(nodes, results[0], attention.output.layout, heads, attention.value_dim)
        replaced = {attention.output.value.name or "": out}
        for turn in attention.turns:
            rotary = turn.rotary
            tokens = to_tokens(nodes, self._read(rotary.source), rotary.layout, turn.heads, turn.dim)
            turned = self._rotated(rotary, tokens, turn.heads, turn.dim)
            replaced[rotary.target.name or ""] = from_tokens(nodes, turned, turn.layout, turn.heads, turn.dim)
        for side, present in zip((attention.k, attention.v), results[1:], strict=False):
            assert side.cache is not None
            replaced[side.cache.present.name or ""] = present
        return Site(replaced={name: self._in(new, self._dtypes.get(name)) for name, new in replaced.items()}, keys=k)

    def _in(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """The value in a dtype, that of what it stands for."""
        if dtype is None or value.dtype in (None, dtype):
            return value
        return self._nodes.one("Cast", value, to=dtype.value, dtype=dtype)

    def _read(self, value: ir.Value) -> ir.Value:
        """The value of this name in the graph that is written to, with its dtype."""
        name = value.name or ""
        own = self._values[name]
        if own.dtype is None and name in self._dtypes:
            own.type = ir.TensorType(self._dtypes[name])
        return own

    def _side(self, side: Side, dim: int) -> ir.Value:
        source, rotary = side.source, side.rotary
        tokens = to_tokens(self._nodes, self._read(source.value), source.layout, source.heads, dim)
        return tokens if rotary is None else self._rotated(rotary, tokens, source.heads, dim)

    def _rotated(self, rotary: Rotary, x: ir.Value, heads: int, dim: int) -> ir.Value:
        """Queries or keys [B, S, heads*dim], turned by one operator, or run by run where they have no operator."""
        pairs = rotary.pairs
        cos, sin = (self._angles(one, x, fill) for one, fill in ((rotary.cos, 1.0), (rotary.sin, 0.0)))
        whole = Layout(dim, pairs.interleaved, pairs.runs)
        all_sorted = not pairs.sorted or 2 * pairs.count == dim
        if (
            not pairs.start
            and all_sorted
            and (has_operator(3, whole) or self._functions.form in ("decomposed", "function"))
        ):
            return self._turned(x, (cos, sin), heads, dim, pairs)
        nodes = self._nodes
        runs = [Pairs(interleaved=pairs.interleaved, runs=(run,), sorted=pairs.sorted) for run in pairs.runs]
        ends = [0, pairs.start, *(pairs.start + 2 * sum(pairs.runs[: at + 1]) for at in range(len(runs))), dim]
        split = nodes.shaped(x, 0, 0, heads, dim)
        parts, angle = list[ir.Value](), 0
        for run, (first, last) in zip((None, *runs, None), pairwise(ends), strict=True):
            if first == last:
                continue
            part = self._slice(split, 3, first, last)
            if run is not None:
                turns = tuple(self._slice(one, 2, angle, angle + run.count) for one in (cos, sin))
                flat = nodes.shaped(part, 0, 0, heads * (last - first))
                turned = self._turned(flat, (turns[0], turns[1]), heads, last - first, run)
                part, angle = nodes.shaped(turned, 0, 0, heads, last - first), angle + run.count
            parts.append(part)
        return nodes.shaped(nodes.one("Concat", *parts, axis=-1), 0, 0, heads * dim)

    def _turned(self, x: ir.Value, angles: tuple[ir.Value, ir.Value], heads: int, dim: int, pairs: Pairs) -> ir.Value:
        if pairs.sorted:
            split = self._nodes.shaped(x, 0, 0, heads, pairs.count, 2)
            halves = self._nodes.one("Transpose", split, perm=[0, 1, 2, 4, 3])
            x = self._nodes.shaped(halves, 0, 0, heads * dim)
        shape = ("batch", "seq", pairs.count)
        attributes = {"head_dim": dim, "interleaved": pairs.interleaved, "runs": pairs.runs}
        shaped: list[Shaped] = [(x, ("batch", "seq", heads * dim)), *((one, shape) for one in angles)]
        return self._call(rotate, shaped, attributes)[0]

    def _slice(self, value: ir.Value, axis: int, first: int, last: int) -> ir.Value:
        """The places `first` to `last` of an axis."""
        return self._nodes.one("Slice", value, *(self._nodes.constant([end]) for end in (first, last, axis)))

    def _angles(self, source: AngleSource, x: ir.Value, fill: float) -> ir.Value:
        """Cosines or sines [B, S, P]."""
        parts = [self._angles_of(part, x, fill) for part in source.parts]
        return parts[0] if len(parts) == 1 else self._nodes.one("Concat", *parts, axis=-1)

    def _angles_of(self, source: AngleSource, x: ir.Value, fill: float) -> ir.Value:
        """The same, of those that one value holds."""
        nodes, value = self._nodes, self._read(source.value)
        rank = len(self._shapes[value.name or ""])
        for place in reversed(source.corner):
            rank -= 1
            value = nodes.one("Gather", value, nodes.constant(place), axis=rank)
        kept = source.axes
        dropped = [axis for axis in range(rank) if axis not in kept]
        if dropped:
            value = nodes.one("Squeeze", value, nodes.constant(dropped))
        order = [sorted(kept).index(axis) for axis in kept]
        if order != sorted(order):
            value = nodes.one("Transpose", value, perm=order)
        first, step = source.indices[0], source.indices[1] - source.indices[0] if len(source.indices) > 1 else 1
        last = len(kept) - 1
        if source.indices == tuple(range(first, first + step * len(source.indices), step)) and step > 0:
            width = self._shapes[source.value.name or ""][source.features]
            if (first, step, len(source.indices)) != (0, 1, width):
                ends = (first, source.indices[-1] + 1, last, step)
                value = nodes.one("Slice", value, *(nodes.constant([end]) for end in ends))
        else:
            value = nodes.one("Gather", value, nodes.constant(list(source.indices)), axis=last)
        if source.sign < 0:
            value = nodes.one("Neg", value)
        if source.batch is None:
            value = nodes.one("Unsqueeze", value, nodes.constant([0]))
        if source.prefix:
            pads = nodes.constant([0, source.prefix, 0, 0, 0, 0])
            assert value.dtype is not None
            value = nodes.one("Pad", value, pads, nodes.constant(fill, value.dtype))
        if source.batch is None:
            batch = nodes.one("Shape", x, dtype=ir.DataType.INT64, start=0, end=1)
            value = nodes.one("Expand", value, nodes.one("Concat", batch, nodes.constant([1, 1]), axis=0))
        return value

    def _times(self, value: ir.Value, number: float) -> ir.Value:
        assert value.dtype is not None
        if _is_exact(number, value.dtype):
            return self._nodes.one("Mul", value, self._nodes.constant(number, value.dtype))
        if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) and not _is_exact(1.0 / number, value.dtype):
            wide = self._nodes.cast(value, ir.DataType.FLOAT)
            return self._nodes.cast(self._times(wide, number), value.dtype)
        return self._nodes.one("Div", value, self._nodes.constant(1.0 / number, value.dtype))

    def _by_heads(self, q: ir.Value, attention: Attention) -> ir.Value:
        """Queries times the scale of each head, where there is one."""
        for scale, divides in attention.head_scales:
            heads, width = attention.num_heads, attention.num_heads * attention.head_dim
            per_head = self._nodes.shaped(self._read(scale), -1, 1)  # or one number for all
            split = self._nodes.shaped(q, 0, 0, heads, attention.head_dim)
            scaled = self._nodes.one(
                "Div" if divides else "Mul", split, self._nodes.cast(per_head, q.dtype or ir.DataType.FLOAT)
            )
            q = self._nodes.shaped(scaled, 0, 0, width)
        return q

    def _bias(self, attention: Attention, q: ir.Value, shared: SharedCache | None) -> ir.Value | None:
        """The sum of all terms [B or 1, N or 1, S, T] in fp32."""
        nodes, total = self._nodes, None
        single = True
        for term in attention.terms:
            value, shape = self._read(term.value), self._shapes[term.value.name or ""]
            if term.seen_if is not None:
                choices = [nodes.constant(0.0, ir.DataType.FLOAT), nodes.constant(LOWEST, ir.DataType.FLOAT)]
                value = nodes.one(
                    "Where", value, *(choices if term.seen_if else choices[::-1]), dtype=ir.DataType.FLOAT
                )
            else:
                value = nodes.cast(value, ir.DataType.FLOAT)
                if term.factor != 1.0:
                    value = self._times(value, term.factor)
            value = self._four_axes(value, shape, self._shapes[term.level.name or ""], attention.num_heads, q)
            single &= len(shape) < 2 or shape[-2] == 1
            total = value if total is None else nodes.one("Add", total, value)
        if total is None:
            return None
        total = nodes.one("Max", total, nodes.constant(LOWEST, ir.DataType.FLOAT))
        if single:  # one row for each query
            seq = nodes.one("Shape", q, dtype=ir.DataType.INT64, start=1, end=2)
            one = nodes.constant([1])
            total = nodes.one("Expand", total, nodes.one("Concat", one, one, seq, one, axis=0))
        if shared is not None:  # to the end of the buffer, whose other places no query sees
            keys = nodes.one("Shape", total, dtype=ir.DataType.INT64, start=3, end=4)
            more = nodes.one("Sub", shared.length, keys)
            pads = nodes.one("Concat", nodes.constant([0] * 7), more, axis=0)
            total = nodes.one("Pad", total, pads)
        return total

    def _four_axes(
        self, value: ir.Value, shape: Sequence[int], level: Sequence[int], heads: int, q: ir.Value
    ) -> ir.Value:
        """A term of this `shape`, added to scores of the shape `level`, with the axes of [B or 1, N or 1, S, T]."""
        nodes = self._nodes
        if len(level) == 3 and len(shape) == 3:  # rows and heads are one axis
            value = nodes.one("Unsqueeze", value, nodes.constant([1]))
            return value if shape[0] == 1 else nodes.shaped(value, -1, heads, 0, 0)
        grouped = has_groups(level, heads)
        rank = 5 if len(level) == 5 and not (grouped and len(shape) < 3) else 4
        missing = rank - len(shape)
        if missing:
            value = nodes.one("Unsqueeze", value, nodes.constant(list(range(missing))))
        if rank == 5 and grouped:  # heads are two axes, those of keys and groups
            if [*[1] * missing, *shape][1:3] == [1, 1]:
                return nodes.one("Squeeze", value, nodes.constant([1]))
            value = nodes.one("Expand", value, nodes.constant([1, *level[1:3], 1, 1]))
            rows = nodes.one("Shape", value, dtype=ir.DataType.INT64, start=0, end=1)
            last = nodes.one("Shape", value, dtype=ir.DataType.INT64, start=3, end=5)
            return nodes.one("Reshape", value, nodes.one("Concat", rows, nodes.constant([heads]), last, axis=0))
        if rank == 5:  # rows are two axes, such as images and windows
            rows = nodes.one("Shape", q, dtype=ir.DataType.INT64, start=0, end=1)
            images = nodes.one("Div", rows, nodes.constant([level[1]]))
            target = nodes.one("Concat", images, nodes.constant([level[1], 1, 1, 1]), axis=0)
            last = nodes.one("Shape", value, dtype=ir.DataType.INT64, start=2, end=5)
            merged = nodes.one("Concat", nodes.constant([-1]), last, axis=0)
            return nodes.one("Reshape", nodes.one("Expand", value, target), merged)
        return value

    def _call(
        self, operator: Any, inputs: Sequence[tuple[ir.Value | None, tuple[int | str, ...]]], attributes: dict[str, Any]
    ) -> tuple[ir.Value, ...]:
        """A node of one of posexport's operators, whose inputs have these shapes."""
        described = tuple(
            None if value is None else ir.Value(name=value.name, type=value.type, shape=ir.Shape(shape))
            for value, shape in inputs
        )
        function = self._functions.function(operator, described, attributes)
        given = [value for value, _ in inputs if value is not None]
        dtype = given[0].dtype
        return self._nodes.op(function.name, given, outputs=len(operator.outputs), domain=DOMAIN, dtype=dtype)


_SCALED_IN_DTYPE = ("decomposed", "function")
"""Forms whose operators multiply by the scale in the dtype of the queries, others do so in float32."""


def _is_exact(number: float, dtype: ir.DataType) -> bool:
    """Whether a dtype holds a number as it is."""
    return float(np.asarray(number).astype(dtype.numpy())) == number


def split_scale(factors: Sequence[float], q: ir.Value) -> tuple[float, list[float]]:
    """The factor that goes into the operator's attribute, a float32, and those that queries are multiplied by.

    A product of float32 numbers need not be one; the function must stay the same to the last digit of float64.
    """
    dtype = q.dtype or ir.DataType.FLOAT
    whole, left = 1.0, list[float]()
    # what the graph's dtype can't hold goes into the attribute first
    for number in sorted(factors, key=lambda one: _is_exact(one, dtype) or _is_exact(1.0 / one, dtype)):
        if _is_exact(whole * number, ir.DataType.FLOAT):
            whole *= number
        else:
            left.append(number)
    return whole, left
