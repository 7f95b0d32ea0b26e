"""Writes one attention: nodes that compute the same as the graph's own, with posexport's operators at the core.

    q, k  laid out as [B, S, heads*D], rotated by RotaryPosition if a rotation was recognised
    bias  the sum of masks and biases, still computed by the nodes of the graph, in fp32, or in fp64 like the queries
    out   PositionalAttention, CachedAttention or SharedCacheAttention (posexport.custom_ops.attention)

All values are looked up by name in the graph that is written to, which may be a copy of the recognised one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import onnx_ir as ir

from posexport.custom_ops import attend, attend_cached, attend_shared
from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.layouts import snapped
from posexport.graphs.axes import PAST, SEQ, TOTAL
from posexport.graphs.nodes import from_tokens, to_tokens
from posexport.graphs.symbolic_sizes import ONE, Size
from posexport.graphs.view import View
from posexport.rewrite.added import Added, BiasWriter
from posexport.rewrite.broadcasts import Broadcasts, Extent, LengthsApart
from posexport.rewrite.number_types import logit_types, operands, widest
from posexport.rewrite.rotated import RotationWriter
from posexport.rewrite.writing import Beside, Shaped, Writing, is_exact, number_constant, times


@attrs.frozen(kw_only=True)
class SharedCache:
    """Where new keys go in buffers of a fixed length: `write_indices` [B], and the length of the buffers [1]."""

    write_indices: ir.Value
    length: ir.Value


@attrs.frozen(kw_only=True)
class Site:
    """The new values of one attention, by the names of those that they replace; `keys` [B, S, K*D] are the new keys.

    `sizes` knows which lengths are equal.
    """

    replaced: Mapping[str, ir.Value]
    keys: ir.Value
    sizes: Broadcasts


class SiteWriter:
    """Writes attention of a `view` into a graph. `writing` has the dtype of each value that is read or replaced."""

    def __init__(self, writing: Writing, view: View) -> None:
        self._nodes, self._functions, self._dtypes = writing.nodes, writing.functions, writing.dtypes
        self._writing = writing
        self._view, self._shapes = view, view.probe.shapes
        self._totals, self._pasts = (_lengths_of(view, axis) for axis in (TOTAL, PAST))

    def write(self, attention: Attention, shared: SharedCache | None = None) -> Site:
        """Write the nodes of one attention; raises RequestError if the form can't express it."""
        sizes = Broadcasts(self._shapes, attention, self._totals, self._pasts)
        rotations = RotationWriter(writing=self._writing, sizes=sizes)
        q, k, v = self._operands(attention, rotations)
        scale, q = self._scaled(attention, q)
        wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in (q.dtype, k.dtype) else ir.DataType.FLOAT
        biases = BiasWriter(writing=self._writing, sizes=sizes, wide=wide)
        added, sees = biases.total(attention, q), biases.sees_key(attention, q)
        (q, of_q), k, v = self._together(attention, sizes, (q, k, v), added)
        bias = None
        if added is not None:
            keys = self._keys(attention, sizes, added, k) if shared is None else None
            bias = biases.fitted(added, q, of_q, keys)
            bias = bias if shared is None else self._to_the_end(bias, shared)
        square = sizes.same(of_q.tokens, sizes.k.tokens) and (attention.square or attention.k.cache is not None)
        out, *presents = self._attended(attention, (q, k, v, bias), scale, square, shared)
        out = out if sees is None else self._guarded(out, sees, attention.num_heads, attention.value_dim)
        out = self._weighted(out, attention)
        out = from_tokens(self._nodes, out, attention.output.layout, attention.num_heads, attention.value_dim)
        replaced = {attention.output.value.name or "": out, **self._turned(attention, rotations)}
        for side, present in zip((attention.k, attention.v), presents, strict=False):
            assert side.cache is not None
            replaced[side.cache.present.name or ""] = present
        return Site(
            replaced={name: self._in(new, self._dtypes.get(name)) for name, new in replaced.items()},
            keys=k,
            sizes=sizes,
        )

    def _operands(self, attention: Attention, rotations: RotationWriter) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values [B, S, heads*size], in one dtype that is wide enough for what is added to scores.

        RequestError if the caches, or the operators of the form, don't have this dtype.
        """
        dim = attention.head_dim
        q, k, v = (
            self._in(self._side(side, size, rotations), self._dtypes.get(operand.name or ""))
            for side, size, operand in zip(
                (attention.q, attention.k, attention.v),
                (dim, dim, attention.value_dim),
                operands(attention),
                strict=True,
            )
        )
        kinds = {q.dtype, k.dtype, v.dtype}
        if self._functions.form in ("native", "contrib"):  # operators of these forms add in the dtype of their queries
            kinds |= logit_types(self._view, attention, self._dtypes)
        if len(kinds) > 1:
            most = ir.DataType.DOUBLE if ir.DataType.DOUBLE in kinds else ir.DataType.FLOAT
            q, k, v = (self._in(one, most) for one in (q, k, v))
        self._check_caches(attention, q, v)
        if self._functions.form != "native" and ir.DataType.DOUBLE in (q.dtype, k.dtype, v.dtype):
            raise RequestError("the graph computes in fp64, and the form computes scores in fp32: choose native.")
        return q, k, v

    def _scaled(self, attention: Attention, q: ir.Value) -> tuple[float, ir.Value]:
        """The attribute `scale` of the operator, and the queries times the factors that it leaves out."""
        scale, factors = split_scale(attention.factors, q)
        if self._functions.form in _SCALED_IN_DTYPE and not is_exact(scale, q.dtype or ir.DataType.FLOAT):
            scale, factors = 1.0, [*factors, scale]
        for number in factors:
            q = self._times(q, number)
        return scale, self._by_heads(q, attention)

    def _attended(
        self,
        attention: Attention,
        operands: tuple[ir.Value, ir.Value, ir.Value, ir.Value | None],
        scale: float,
        square: bool,
        shared: SharedCache | None,
    ) -> list[ir.Value]:
        """The result [B, S, heads*size] of the operator for queries, keys, values and bias; then the caches it returns.

        `square`: whether there are as many new keys as queries.
        """
        (q, k, v, bias), sinks = operands, self._sinks(attention)
        if sinks is not None and self._functions.form in ("native", "contrib"):
            sinks = self._in(sinks, q.dtype)
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        dim, value_dim = attention.head_dim, attention.value_dim
        if self._needs_one_size(attention):
            size = max(dim, value_dim)
            q, k = self._padded(q, heads, dim, size), self._padded(k, kv_heads, dim, size)
            v, dim, value_dim = self._padded(v, kv_heads, value_dim, size), size, size
        lengths = ("batch", "seq" if square else "keys")
        inputs: list[Shaped] = [
            (q, ("batch", "seq", heads * dim)),
            (k, (*lengths, kv_heads * dim)),
            (v, (*lengths, kv_heads * value_dim)),
            (bias, ("bias_batch", "bias_heads", "seq", "total")),
            (None, ()),
            (sinks, (heads,)),
        ]
        operator: Any = attend
        if attention.k.cache is not None and attention.v.cache is not None:
            operator = attend_cached if shared is None else attend_shared
            pasts = [self._writing.read(one.cache.past) for one in (attention.k, attention.v) if one.cache is not None]
            dims: list[tuple[int | str, ...]] = [("batch", kv_heads, "past", size) for size in (dim, value_dim)]
            inputs[3:3] = zip(pasts, dims, strict=True)
            inputs[5:5] = [] if shared is None else [(shared.write_indices, ("batch",))]
        attributes = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "scale": scale,
            "causal": False,
            "window": 0,
            "chunk": 0,
            "softcap": attention.softcap,
        }
        out, *presents = self._writing.call(operator, inputs, attributes)
        return [self._cut(out, heads, value_dim, attention.value_dim), *presents]

    def _turned(self, attention: Attention, rotations: RotationWriter) -> dict[str, ir.Value]:
        """The rotated values of `attention.turns`, by the names of those that they replace."""
        replaced = dict[str, ir.Value]()
        for turn in attention.turns:
            rotary = turn.rotary
            tokens = to_tokens(self._nodes, self._writing.read(rotary.source), rotary.layout, turn.heads, turn.dim)
            tokens = self._in(tokens, widest(self._view.flow, rotary, self._dtypes))
            extent = rotations.sizes.of_rotated(rotary, turn.heads)
            turned, _ = rotations.rotated(rotary, tokens, extent, turn.heads, turn.dim)
            replaced[rotary.target.name or ""] = from_tokens(self._nodes, turned, turn.layout, turn.heads, turn.dim)
        return replaced

    def _sinks(self, attention: Attention) -> ir.Value | None:
        """The sinks [N] of an attention; None without sinks."""
        if isinstance(attention.sinks, ir.Value):
            return self._nodes.shaped(self._writing.read(attention.sinks), -1)
        if attention.sinks is None:
            return None
        logit = number_constant(self._nodes, attention.sinks, ir.DataType.FLOAT)
        return self._nodes.one("Expand", logit, self._nodes.constant([attention.num_heads]))

    def _in(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """The value in a dtype, that of the value that it replaces."""
        if dtype is None or value.dtype in (None, dtype):
            return value
        return self._nodes.one("Cast", value, to=dtype.value, dtype=dtype)

    def _needs_one_size(self, attention: Attention) -> bool:
        """Whether operators need values of the size of keys, and these have another size.

        RequestError with caches, which can't be changed.
        """
        if attention.value_dim == attention.head_dim or self._functions.form not in ("native", "contrib"):
            return False
        if self._functions.target == "ort":
            return False
        if attention.k.cache is not None:
            raise RequestError("TensorRT takes caches of one size of heads only: choose the target ort, or decomposed.")
        return True

    def _padded(self, value: ir.Value, heads: int, size: int, to: int) -> ir.Value:
        """Heads [B, S, heads*size] with zeros after their features: scores stay the same."""
        if size == to:
            return value
        split = self._nodes.shaped(value, 0, 0, heads, size)
        wide = self._nodes.one("Pad", split, self._nodes.constant([0] * 7 + [to - size]))
        return self._nodes.shaped(wide, 0, 0, heads * to)

    def _cut(self, value: ir.Value, heads: int, size: int, to: int) -> ir.Value:
        """The first features of each head [B, S, heads*size]."""
        if size == to:
            return value
        ends = (self._nodes.constant([end]) for end in (0, to, 3))
        cut = self._nodes.one("Slice", self._nodes.shaped(value, 0, 0, heads, size), *ends)
        return self._nodes.shaped(cut, 0, 0, heads * to)

    def _guarded(self, out: ir.Value, sees: tuple[ir.Value, bool], heads: int, size: int) -> ir.Value:
        """A result [B, S, heads*size] with zeros for queries that see no key."""
        nodes, (sees_key, by_head) = self._nodes, sees
        zero = nodes.constant(0.0, out.dtype or ir.DataType.FLOAT)
        if not by_head:
            return nodes.one("Where", sees_key, out, zero)
        split = nodes.shaped(out, 0, 0, heads, size)
        return nodes.shaped(nodes.one("Where", sees_key, split, zero), 0, 0, heads * size)

    def _weighted(self, out: ir.Value, attention: Attention) -> ir.Value:
        """A result [B, S, heads*size] times the numbers that the graph multiplies the weights of its heads by."""
        factors = attention.weight_factors
        if len(factors) < 2:
            return self._times(out, factors[0]) if factors else out
        split = self._nodes.shaped(out, 0, 0, attention.num_heads, attention.value_dim)
        dtype = out.dtype or ir.DataType.FLOAT
        divides = not all(is_exact(factor, dtype) for factor in factors)
        numbers = [[1.0 / factor if divides else factor] for factor in factors]
        scaled = self._nodes.one("Div" if divides else "Mul", split, self._nodes.constant(numbers, dtype))
        return self._nodes.shaped(scaled, 0, 0, attention.num_heads * attention.value_dim)

    def _check_caches(self, attention: Attention, q: ir.Value, v: ir.Value) -> None:
        """RequestError if caches have another dtype than the products compute in."""
        for side, value in ((attention.k, q), (attention.v, v)):
            past = None if side.cache is None else self._writing.read(side.cache.past)
            if past is not None and past.dtype != value.dtype:
                raise RequestError("its caches have another dtype than its products, which its operators don't take.")

    def _side(self, side: Side, dim: int, rotations: RotationWriter) -> ir.Value:
        """Queries, keys or values [B, S, heads*dim]."""
        source, rotary = side.source, side.rotary
        value, width = self._writing.read(source.value), source.heads * dim
        tokens = to_tokens(self._nodes, value, source.layout, source.heads, dim)
        if tokens is value:
            tokens = self._of_width(value, width, fixed=self._shapes.of(source.value)[-1].is_fixed)
        if rotary is None:
            return tokens
        tokens = self._in(tokens, widest(self._view.flow, rotary, self._dtypes))
        return rotations.rotated(rotary, tokens, rotations.sizes.of_source(side), source.heads, dim)[0]

    def _of_width(self, value: ir.Value, width: int, *, fixed: bool) -> ir.Value:
        """A value [B, S, width] with its width in its declared shape: ONNX Runtime requires that for Attention."""
        stated = None if value.shape is None else [*value.shape]
        if stated is not None and isinstance(stated[-1], int):
            return value
        if fixed:
            value.shape = ir.Shape([*(stated or [None] * 3)[:-1], width])
            return value
        return self._nodes.shaped(value, 0, 0, width) if self._functions.form == "native" else value

    def _together(
        self,
        attention: Attention,
        sizes: Broadcasts,
        operands: tuple[ir.Value, ir.Value, ir.Value],
        added: Added | None,
    ) -> tuple[tuple[ir.Value, Extent], ir.Value, ir.Value]:
        """Queries with their lengths, keys and values, expanded to the same number of rows if it may differ."""
        q, k, v = operands
        dim, kv_heads = attention.head_dim, attention.num_kv_heads
        beside = [Beside(value=one, extent=own, tokens=None) for one, own in ((k, sizes.k), (v, sizes.v))]
        if added is not None:
            own = Extent(rows=added[1].rows, tokens=added[1].tokens)
            beside.insert(0, Beside(value=added[0], extent=own, tokens=2))
        q, of_q = self._writing.widened(q, sizes.q, beside, sizes, attention.num_heads * dim)
        others = [Beside(value=q, extent=of_q, tokens=None)]
        wide_k, _ = self._writing.widened(k, sizes.k, others, sizes, kv_heads * dim)
        wide_v, _ = self._writing.widened(v, sizes.v, others, sizes, kv_heads * attention.value_dim)
        if attention.k.cache is not None and (wide_k is not k or wide_v is not v):
            raise LengthsApart(
                "by the names of the inputs' dimensions its queries, keys and mask may have other numbers of rows, "
                "which operators with a cache don't take."
            )
        return (q, of_q), wide_k, wide_v

    def _keys(self, attention: Attention, sizes: Broadcasts, added: Added, k: ir.Value) -> ir.Value | None:
        """The number of keys [1] if the bias may have another number of them; None if it has the same."""
        keys = added[1].keys
        if sizes.same(keys, sizes.keys()):
            return None
        if not sizes.same(sizes.k.tokens, sizes.v.tokens) and keys != ONE:
            raise LengthsApart("by the names of the inputs' dimensions its mask may give it more keys than it has.")
        length, cache = self._nodes.length(k, 1), attention.k.cache
        if cache is None:
            return self._of_input(sizes) or length
        return self._nodes.one("Add", self._nodes.length(self._writing.read(cache.past), 2), length)

    def _of_input(self, sizes: Broadcasts) -> ir.Value | None:
        """The number of keys [1] from an input of the graph that has it: the same node for all attentions."""
        for value in self._view.model.graph.inputs:
            shape = self._shapes.of(value) if self._shapes.knows(value) else ()
            if sizes.keys() in shape:
                return self._nodes.length(self._writing.read(value), shape.index(sizes.keys()))
        return None

    def _to_the_end(self, bias: ir.Value, shared: SharedCache) -> ir.Value:
        """A bias up to the end of the buffer; no query sees the other places of the buffer."""
        more = self._nodes.one("Sub", shared.length, self._nodes.length(bias, 3))
        pads = self._nodes.one("Concat", self._nodes.constant([0] * 7), more, axis=0)
        return self._nodes.one("Pad", bias, pads)

    def _times(self, value: ir.Value, number: float) -> ir.Value:
        return times(self._nodes, value, number)

    def _by_heads(self, q: ir.Value, attention: Attention) -> ir.Value:
        """Queries times the scale of each head, if there is one."""
        for scale, divides in attention.head_scales:
            heads, width = attention.num_heads, attention.num_heads * attention.head_dim
            per_head = self._nodes.shaped(self._writing.read(scale), -1, 1)  # or one number for all
            split = self._nodes.shaped(q, 0, 0, heads, attention.head_dim)
            scaled = self._nodes.one(
                "Div" if divides else "Mul", split, self._nodes.cast(per_head, q.dtype or ir.DataType.FLOAT)
            )
            q = self._nodes.shaped(scaled, 0, 0, width)
        return q


def _lengths_of(view: View, axis: str) -> list[Size]:
    """The lengths of an axis of the inputs that have it. A mask that also has queries may be broadcast to all keys."""
    shapes, inputs = view.probe.shapes, {value.name: value for value in view.model.graph.inputs}
    found = [(inputs[name], role.axes) for name, role in view.roles.items() if axis in role.axes and name in inputs]
    found = [(value, axes) for value, axes in found if axis != TOTAL or SEQ not in axes]
    return [shapes.of(value)[axes.index(axis)] for value, axes in found if shapes.knows(value)]


_SCALED_IN_DTYPE = ("decomposed", "function")
"""The forms whose operators multiply by the scale in the dtype of the queries; the others do so in float32."""


def split_scale(factors: Sequence[float], q: ir.Value) -> tuple[float, list[float]]:
    """The factor for the operator's attribute, a float32, and the factors that queries are multiplied by.

    A product of float32 numbers need not be a float32 number; the function must stay the same to the last digit of
    float64.
    """
    dtype = q.dtype or ir.DataType.FLOAT
    whole, left = 1.0, list[float]()
    # numbers that the graph's dtype can't hold go into the attribute first
    numbers = _without_roots(factors)
    for number in sorted(numbers, key=lambda one: is_exact(one, dtype) or is_exact(1.0 / one, dtype)):
        if is_exact(whole * number, ir.DataType.FLOAT):
            whole *= number
        else:
            left.append(number)
    return (whole, left) if whole > 0 else (-whole, [*left, -1.0])  # ONNX Runtime refuses a negative one


def _without_roots(factors: Sequence[float]) -> list[float]:
    """The factors, with two equal roots of a float32 number replaced by this number: queries and keys may have one
    each."""
    left = list[float]()
    for number in factors:
        is_float = is_exact(number, ir.DataType.FLOAT) or is_exact(1.0 / number, ir.DataType.FLOAT)
        whole = None if is_float else snapped(number * number)
        if number in left and whole is not None:
            left[left.index(number)] = whole
        else:
            left.append(number)
    return left
