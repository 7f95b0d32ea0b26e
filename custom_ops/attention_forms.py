"""Attention of all three kinds (plain, cached, shared) as attention operators: the forms `native` and `contrib`.

native    ONNX Attention-23, TensorScatter-24
contrib   com.microsoft MultiHeadAttention and GroupQueryAttention

If an operator has no input for something, it becomes part of the mask that is added to the logits: biases, windows,
causality over a cache, padding, and sinks. A sink is one more key of zeros whose logit is the sink.

Runtimes differ in two cases, which are avoided. If there are more keys than queries, runtimes align causal masks
differently, so causality is passed as a mask. For a row without any key, they return NaN, a mean or the unmasked
result. Such rows see every key here, and their result is multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posexport.custom_ops import ir
from posexport.custom_ops.cache import Write, grown_onnx, tensor_scattered_onnx, write_of, written_onnx
from posexport.custom_ops.heads import CappedHeads, heads_onnx, repeated_onnx
from posexport.custom_ops.operator import MICROSOFT, Operator, Ops, cast, constant, dtype_of, shape_of, size_of
from posexport.custom_ops.unsupported import GROUPED_WIDTH, AttentionCall, unsupported_reason
from posexport.custom_ops.visibility import Lengths, hidden_onnx, keyed_onnx, lengths_onnx, sink_onnx, visible_onnx
from posexport.errors import RequestError

LOWEST = {"DOUBLE": -3.0e38, "FLOAT": -3.0e38, "FLOAT16": -65504.0, "BFLOAT16": -3.0e38}
"""What a mask adds to the logit of a hidden key. It is finite, so that no difference of infinities becomes NaN."""

_HALF = {"FLOAT16", "BFLOAT16"}
"""Dtypes whose softmax is computed in fp32."""

Results = tuple["ir.Value", ...]
"""What a body returns: the result of attention, and with a cache the present keys and values."""


@dataclass(frozen=True)
class Call:
    """One call: q [B, S, N*head_dim], the new k and v [B, S or T, K*head_dim], and the optional inputs."""

    op: Ops
    heads: CappedHeads
    q: ir.Value
    k: ir.Value
    v: ir.Value
    bias: ir.Value | None
    mask: ir.Value | None
    sinks: ir.Value | None
    past_key: ir.Value | None = None
    past_value: ir.Value | None = None
    write_indices: ir.Value | None = None

    @property
    def past(self) -> tuple[ir.Value, ...]:
        """The cached keys and values. Empty without a cache."""
        return tuple(past for past in (self.past_key, self.past_value) if past is not None)

    @property
    def dtype(self) -> ir.DataType:
        """The dtype of the graph."""
        return dtype_of(self.q)

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return size_of(self.q, -1) // self.heads.num_heads

    @property
    def value_dim(self) -> int:
        """The width of a head of values."""
        return size_of(self.v, -1) // self.heads.num_kv_heads

    @property
    def one_size(self) -> bool:
        """Whether the heads of values are as wide as those of keys."""
        return self.value_dim == self.head_dim

    @property
    def even(self) -> bool:
        """Whether there are always as many new keys as queries."""
        return bool(shape_of(self.q)[1] == shape_of(self.k)[1])

    @property
    def square(self) -> bool:
        """Whether there are always as many keys as queries, and no key is cached."""
        return not self.past and self.even

    def lengths(self) -> Lengths:
        """Return the numbers of queries and keys, as scalars."""
        if not self.past:
            return lengths_onnx(self.op, self.q, self.k)
        seq, length = lengths_onnx(self.op, self.q, self.past[0])
        return seq, length if self.write_indices is not None else self.op.Add(length, seq)

    def flat(self, t: ir.Value) -> ir.Value:
        """Reshape [B, heads, S, head_dim] to [B, S, heads*head_dim]."""
        return self.op.Reshape(self.op.Transpose(t, perm=[0, 2, 1, 3]), [0, 0, -1])

    def present(self, write: Write = written_onnx) -> list[ir.Value]:
        """Return the caches with the new keys and values: appended, or put into buffers by `write`. Empty without a
        cache."""
        op, num_kv_heads, pairs = self.op, self.heads.num_kv_heads, zip(self.past, (self.k, self.v), strict=False)
        if self.write_indices is None:
            return [grown_onnx(op, past, new, num_kv_heads) for past, new in pairs]
        # as in `cached_keys`, so that its nodes and these become one
        lengths = lengths_onnx(op, self.k, self.past[0])
        return [write(op, past, new, self.write_indices, lengths, num_kv_heads) for past, new in pairs]


@dataclass(frozen=True)
class Mask:
    """A mask that is `added` to the logits, [B or 1, N or 1, S, T] in the graph's dtype, or None.

    `rows` [B or 1, 1, S, 1] is 0 for a query that sees no key. None if it is not needed.
    """

    added: ir.Value | None = None
    rows: ir.Value | None = None


def _mask(call: Call, *, covered: bool = False, sinks: bool = True) -> Mask:
    """Return the mask for everything that the operator cannot do, or must not do because runtimes differ.

    `covered`: the operator itself handles causality, window and buffer. With padding, the mask contains them too, to
    find the rows without a key. `sinks`: sinks are the first column. The mask is added, not boolean. This takes half
    the memory on ONNX Runtime and half the kernels in TensorRT.
    """
    op, dtype, heads = call.op, call.dtype, call.heads
    seq, total = call.lengths()
    sink = call.sinks if sinks else None
    seen = rows = None
    if not covered or call.mask is not None:
        seen = visible_onnx(op, heads, (seq, total), call.mask, call.write_indices, sink is not None)
    if seen is not None and call.mask is None and call.write_indices is None:
        seen = op.Unsqueeze(seen, [0, 1])
    if seen is not None and call.mask is not None and call.sinks is None:
        keyed = keyed_onnx(op, seen, dtype)
        seen = op.Or(seen, op.Equal(keyed, constant(op, 0.0, dtype_of(keyed))))
        rows = cast(op, keyed, dtype)
    if seen is None and sink is not None:
        seen = op.Unsqueeze(op.GreaterOrEqual(op.Range(0, op.Add(total, 1), 1), 0), [0, 1, 2])
    if seen is not None and not heads.causal and not heads.local:  # one row for each query
        seen = op.And(seen, op.GreaterOrEqual(op.Unsqueeze(op.Range(0, seq, 1), [1]), 0))
    added = call.bias
    if added is not None:
        if dtype == ir.DataType.FLOAT16:
            # half of the lowest value, so that the logit of a distant key is above that of a hidden key
            added = op.Max(added, constant(op, LOWEST[dtype.name] / 2))
        added = cast(op, added, dtype)
        added = added if sink is None else op.Pad(added, [0, 0, 0, 1, 0, 0, 0, 0])
    if seen is not None:
        lowest = LOWEST[dtype.name]
        if added is None:
            added = op.Where(seen, constant(op, 0.0, dtype), constant(op, lowest, dtype))
        else:
            added = hidden_onnx(op, seen, added, lowest, dtype)
    if sink is not None and added is not None:
        added = sink_onnx(op, added, sink, total)
    return Mask(added, rows)


def _without_keyless(call: Call, out: ir.Value, mask: Mask) -> ir.Value:
    """Set the results of queries that see no key to zero, in [B, S, N*head_dim]."""
    if mask.rows is None:
        return out
    return call.op.Mul(out, call.op.Squeeze(mask.rows, [1]))


def _with_sink_key(call: Call, t: ir.Value, axis: int, rank: int) -> ir.Value:
    """Return `t` with a first key of zeros if there are sinks."""
    if call.sinks is None:
        return t
    pads = [0] * (2 * rank)
    pads[axis] = 1
    return call.op.Pad(t, pads)


def _native(call: Call, ort: bool) -> Results:
    """The ONNX operator Attention.

    `ort`: for ONNX Runtime. Its Attention takes the cache as an input, and the precision of softmax.
    """
    op, heads = call.op, call.heads
    attributes: dict[str, Any] = {"scale": heads.scale}
    if ort and call.dtype.name in _HALF:  # TensorRT does not take this attribute; its kernels sum in fp32
        attributes["softmax_precision"] = int(ir.DataType.FLOAT)
    if heads.softcap:
        attributes["softcap"] = heads.softcap
    causal = heads.causal and not heads.local and call.bias is None and call.mask is None and call.sinks is None
    if call.past and call.write_indices is None and call.sinks is None and ort:
        # with past as an input, is_causal is aligned to the last key
        causal = heads.causal and not heads.local and call.mask is None
        mask = _mask(call, covered=causal)
        attributes |= {"q_num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads, "is_causal": int(causal)}
        outputs: Any = op.Attention(call.q, call.k, call.v, mask.added, *call.past, **attributes, _outputs=3)
        out, *grown = outputs
        return _without_keyless(call, out, mask), *grown
    causal = causal and call.square
    mask = _mask(call, covered=causal)
    if call.write_indices is None:
        # [B, T, K*head_dim]: TensorRT-RTX 1.7 fails to build rotated queries with cached keys that are split by heads
        present = call.present()
        k, v = (_with_sink_key(call, t, 1, 3) for t in (map(call.flat, present) if present else (call.k, call.v)))
        attributes |= {"q_num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads, "is_causal": int(causal)}
        out = op.Attention(call.q, k, v, mask.added, **attributes)
    else:
        # TensorRT supports TensorScatter only for a fixed buffer length
        scatters = ort or isinstance(shape_of(call.past[0])[2], int)
        present = call.present(tensor_scattered_onnx if scatters else written_onnx)
        k, v = (_with_sink_key(call, t, 2, 4) for t in present)
        out = call.flat(op.Attention(heads_onnx(op, call.q, heads.num_heads), k, v, mask.added, **attributes))
    return _without_keyless(call, out, mask), *present


def _multi_head(call: Call, ort: bool) -> Results:
    """MultiHeadAttention, which needs as many key heads as query heads.

    `ort`: cached keys are [B, N, T, head_dim], which ONNX Runtime accepts and TensorRT does not, instead of [B, T,
    N*head_dim].
    """
    op, heads = call.op, call.heads
    plain = call.bias is None and call.mask is None and call.sinks is None and not heads.local
    causal = heads.causal and plain and call.square  # runtimes agree only in this case
    mask = _mask(call, covered=causal)
    present = call.present(write_of(ort))
    if present and ort and call.one_size:
        k, v = (repeated_onnx(op, t, heads, call.head_dim) for t in present)
        axis = 2
    else:
        whole = [call.flat(t) for t in present] or [call.k, call.v]
        (k, v), axis = whole, 1
        if heads.group > 1:
            split = (op.Reshape(t, [0, 0, heads.num_kv_heads, 1, -1]) for t in whole)
            k, v = (op.Reshape(op.Expand(t, [1, 1, 1, heads.group, 1]), [0, 0, -1]) for t in split)
    k, v = (_with_sink_key(call, t, axis, axis + 2) for t in (k, v))
    attributes = {"num_heads": heads.num_heads, "scale": heads.scale, **({"unidirectional": 1} if causal else {})}
    out = op.MultiHeadAttention(call.q, k, v, None, None, mask.added, **attributes, **MICROSOFT)
    return _without_keyless(call, out, mask), *present


@dataclass(frozen=True)
class _Again:
    """Cached keys and values, of which the first `count` [1] are passed again as new ones. `count` is all or 0."""

    call: Call
    count: ir.Value

    def cached(self, past: ir.Value) -> ir.Value:
        """Return the cached keys or values [B, K, P, head_dim] that are left."""
        return self.call.op.Slice(past, self.count, [2**31 - 1], [2])

    def new(self, new: ir.Value, past: ir.Value) -> ir.Value:
        """Return the new keys or values [B, S, K*head_dim], after those that are passed again."""
        op, width = self.call.op, self.call.heads.num_kv_heads * size_of(past, -1)
        given = op.Transpose(op.Slice(past, [0], self.count, [2]), perm=[0, 2, 1, 3])
        return op.Concat(op.Reshape(given, [0, 0, width]), new, axis=1)  # there may be none, so no -1

    def padded(self, value: ir.Value, axis: int, rank: int) -> ir.Value:
        """Pad a value with zeros in front of its queries, one for each key that is passed again."""
        op = self.call.op
        before, after = [0] * axis, [0] * (2 * rank - axis - 1)
        return op.Pad(value, op.Concat(*([before] if before else []), self.count, after, axis=0))


def _again(call: Call) -> _Again:
    """Return how GroupQueryAttention can take any number of tokens with a grown cache.

    The operator takes several tokens in several rows only if no key is cached. In this case all keys are passed as new
    ones. Queries of zeros come first, and nothing reads their results.
    """
    op = call.op
    batch, seq = (op.Shape(call.q, start=axis, end=axis + 1) for axis in (0, 1))
    several = op.Cast(op.And(op.Greater(batch, [1]), op.Greater(seq, [1])), to=ir.DataType.INT64)
    return _Again(call, op.Mul(several, op.Shape(call.past[0], start=2, end=3)))


def _grouped(call: Call) -> Results:
    """GroupQueryAttention, always with all three outputs.

    Without them, ONNX Runtime uses another kernel. With a past, that kernel gives wrong results without an error.
    """
    op, heads = call.op, call.heads
    window = heads.window if heads.causal else 0
    mask = _mask(call, covered=not heads.chunk and (heads.causal or not heads.window), sinks=False)
    seq, int32 = op.Shape(call.q, start=1, end=2), ir.DataType.INT32
    q, k, v, past, added = call.q, call.k, call.v, call.past, mask.added
    again = None
    if call.write_indices is None:
        batch = op.Shape(q, start=0, end=1)
        total = op.Add(op.Shape(past[0], start=2, end=3), seq) if past else seq
        lengths = op.Expand(op.Cast(op.Sub(total, 1), to=int32), batch)
        if past:
            again = _again(call)
            q, k, v = again.padded(q, 1, 3), again.new(k, past[0]), again.new(v, past[1])
            past, added = tuple(map(again.cached, past)), None if added is None else again.padded(added, 2, 4)
    else:
        lengths = op.Cast(op.Add(call.write_indices, op.Sub(seq, 1)), to=int32)
        total = op.Add(op.ReduceMax(call.write_indices, [0]), seq)
        if added is not None:  # only the keys so far, not the whole buffer
            added = op.Slice(added, [0], total, [3])
    # The Reshape changes no value. After a bare MatMul, ONNX Runtime's GroupQueryAttentionFusion for CUDA moves
    # rotations into the operator and loses their positions and the mask, or fails (its issue 29524).
    v = op.Reshape(v, [0, 0, heads.num_kv_heads * call.head_dim])
    inputs = (q, k, v, *(past or (None, None)), lengths, op.Cast(op.Squeeze(total), to=int32))
    attributes: dict[str, Any] = {"num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads}
    attributes["scale"] = heads.scale
    attributes |= {"local_window_size": window} if window else {}
    attributes |= {"softcap": heads.softcap} if heads.softcap else {}
    attributes |= {} if heads.causal else {"causal": 0}
    out, *present = op.GroupQueryAttention(
        *inputs, None, None, None, added, call.sinks, **attributes, _outputs=3, **MICROSOFT
    )
    if again is not None:
        out = op.Slice(out, again.count, [2**31 - 1], [1])
    out = _without_keyless(call, out, mask)
    return (out, *present) if call.past else (out,)


def _contrib(call: Call, ort: bool) -> Results:
    capped = call.heads.softcap > 0 and call.even
    grouped = call.write_indices is not None or capped or (call.square and call.heads.causal)
    grouped = grouped and call.one_size and call.head_dim % GROUPED_WIDTH == 0
    return _grouped(call) if ort and grouped else _multi_head(call, ort)


def call_of(operator: Operator[..., Any], op: Ops, args: Sequence[Any]) -> Call:
    """Return the call of an attention operator from the arguments of its body."""
    return Call(op, CappedHeads(*args[len(operator.inputs) :]), **dict(zip(operator.inputs, args, strict=False)))


def add_bodies(operator: Operator[..., Any], decomposed: Callable[[Call], Results]) -> None:
    """Give an attention operator its bodies in all forms. `decomposed` is the body in standard operators."""
    cache = "shared" if "write_indices" in operator.inputs else "concat" if "past_key" in operator.inputs else None

    def body(attend: Callable[[Call], Results], form: str = "decomposed", target: str = "") -> Callable[..., Results]:
        def make(op: Ops, *args: Any) -> Results:
            call = call_of(operator, op, args)
            features = AttentionCall(cache, call.heads.softcap > 0, call.head_dim, call.even)
            reason = unsupported_reason(form, target, features)
            if reason is not None:
                raise RequestError(f"{reason}.")
            return attend(call)

        return make

    operator.onnx(body(decomposed))
    for form, attention in (("native", _native), ("contrib", _contrib)):
        operator.form(form)(body(partial(attention, ort=False), form, "portable"))
        operator.form(f"{form}:ort")(body(partial(attention, ort=True), form, "ort"))
