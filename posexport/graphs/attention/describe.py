"""One attention of a graph as data: its place, sizes, mask, encoding and cache, and the operator that computes it.

The keys are those of `attentions` in docs/reference/attentions.md. Masks, biases and rotations are measured on chosen
inputs, so the data hold for these inputs. Layers that share a mask or an angle share the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import attrs
import onnx_ir as ir

from posexport.artifact.graph_file import dtype_name
from posexport.errors import PosexportError, Reason, RequestError
from posexport.graphs.attention.attention import UNKNOWN, Attention, UnknownAttention
from posexport.graphs.attention.biases import bias_of
from posexport.graphs.attention.caches import cache_of, written_keys
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.embedded import embedded
from posexport.graphs.attention.factors import factors_of, temperature
from posexport.graphs.attention.further_angles import UNKNOWN_ANGLES, further_angles, further_text, one_side_text
from posexport.graphs.attention.head_count import traced_heads
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.logits import AddedToScores
from posexport.graphs.attention.masks import mask_of
from posexport.graphs.attention.measure import Measure
from posexport.graphs.attention.order import acts_in_order
from posexport.graphs.attention.origins import CallSites, Origins
from posexport.graphs.attention.projection import keeps_order, norm_of, projection_of
from posexport.graphs.attention.rotary import BARRIERS, Rotary
from posexport.graphs.attention.rotation import layout_of, rotary_encoding, unknown
from posexport.graphs.attention.support import Carried, kernels_of, ort_takes, tensorrt_takes
from posexport.graphs.attention.tiled_heads import heads_before_tiles
from posexport.graphs.attention.turned_parts import in_all_heads, place_of
from posexport.graphs.view import View

Data = dict[str, Any]

T = TypeVar("T")

FEATURES, SIDE, ROTATION, POSITIONS = "scores-of-features", "one-side-rotates", "rotation-unknown", "positions-unknown"
FURTHER, UNTRIED = "rotated-again", "order-not-tried"
NOT_MEASURED, FAILED = "not-evaluated", "failed"
"""Codes of the reasons why an encoding, a bias or a mask is not known."""

KEYS = (
    *("name", "layer", "state", "reason", "num_heads", "num_kv_heads", "head_dim", "value_dim", "scale", "softcap"),
    *(
        "sinks",
        "head_scales",
        "weight_factors",
        "qk_norm",
        "mask",
        "encoding",
        "query_factor",
        "bias",
        "input_encoding",
        "prefix_tokens",
        "cache",
    ),
    *("dtype", "softmax_dtype", "operator", "nodes", "runtimes"),
)
"""The keys of an attention, in order. The value of what is not known is null."""


def describe(attention: Attention | UnknownAttention, view: View) -> Data:
    """An attention of a view as data, with the keys KEYS."""
    global _last
    if _last is None or _last.view is not view:
        _last = Describer(view)
    return _last.describe(attention)


def undescribed(attention: Attention | UnknownAttention, reason: Reason) -> Data:
    """The data of an attention of which only the name is known, with the reason."""
    data: Data = dict.fromkeys(KEYS)
    data |= {"name": attention.name, "layer": attention.layer, "state": UNKNOWN}
    return data | {"reason": {"code": reason.code, "text": reason.text}}


class Describer:
    """Describes the attentions of one view. `sites` are the calls of functions that the model had before inlining."""

    def __init__(self, view: View, sites: CallSites | None = None) -> None:
        self.view = view
        self._measure = Measure(view)
        self._origins = Origins(view, sites)
        self._known: dict[Hashable, Any] = {}
        self._results = {one.output.value: one.output for one in view.attentions if isinstance(one, Attention)}
        self._outputs = {*self._results}

    def describe(self, attention: Attention | UnknownAttention) -> Data:
        """An attention as data, with the keys KEYS."""
        if isinstance(attention, UnknownAttention):
            return self.missing(attention, attention.reason)
        data: Data = dict.fromkeys(KEYS)
        numbers, told = self._scales_of_all_heads(attention), self._tells_heads(attention)
        data |= {
            "name": attention.name,
            "layer": attention.layer,
            "state": attention.state,
            "num_heads": attention.num_heads if told else None,
            "num_kv_heads": self._key_heads(attention) if told else None,
            "head_dim": attention.head_dim,
            "value_dim": attention.value_dim,
            "scale": attention.scale * math.prod(numbers),
            "softcap": attention.softcap or None,
            "sinks": attention.sinks is not None,
            "head_scales": len(numbers) < len(attention.head_scales),
            "weight_factors": [*attention.weight_factors],
            "qk_norm": self._norms(attention),
            "cache": cache_of(self.view, attention, self._outputs),
            **self._measured(attention),
            **self._carrier(attention),
        }
        return data

    def _key_heads(self, attention: Attention) -> int:
        """The number of key heads before they were repeated in any order, if it is the same for keys and values."""
        found = {
            heads_before_tiles(self.view, side.source, self._sizes(attention, side, dim))
            for _, side, dim in _sides(attention)[1:]
        }
        return found.pop() if len(found) == 1 else attention.num_kv_heads

    def _tells_heads(self, attention: Attention) -> bool:
        """Whether the number of heads is known: heads have an axis, or are traced from the features of one token."""
        probe = self.view.probe
        if len(probe.shape(attention.scores.result)) != 3:
            return True
        return traced_heads(self.view.flow, probe, attention.scores) is not None

    def _scales_of_all_heads(self, attention: Attention) -> list[float]:
        """The numbers that all scores are multiplied by on all inputs, such as the root of a fixed length."""
        probe = self.view.probe
        found = [(probe.get(value), divides) for value, divides in attention.head_scales if value in probe.fixed]
        return [1.0 / float(one) if divides else float(one) for one, divides in found if one.numel() == 1]

    def missing(self, attention: Attention | UnknownAttention, reason: Reason) -> Data:
        """What is known of an attention that was not understood: its place, its operator, and the reason."""
        data = undescribed(attention, reason)
        node = next((node for node in self.view.model.graph.all_nodes() if node.name == attention.name), None)
        if node is not None:
            origin = self._origins.of(node)
            data |= {"operator": origin.operator, "nodes": {"softmax": origin.name}}
        return data

    def _measured(self, attention: Attention) -> Data:
        """The mask and how positions act, or why they are not known."""
        try:
            return self._positions(attention)
        except PosexportError as error:
            reason = Reason(NOT_MEASURED, str(error).rstrip("."))
        except Exception as error:  # an unusual graph may raise anything in torch or numpy
            reason = Reason(FAILED, f"it can't be measured ({type(error).__name__})")
        data: Data = dict.fromkeys(("bias", "query_factor", "input_encoding", "prefix_tokens"))
        return {**data, "mask": _no_mask(reason), "encoding": unknown("unknown", reason)}

    def _positions(self, attention: Attention) -> Data:
        """The mask and how positions act."""
        mask, bias = self._mask_and_bias(attention)
        if bias is not None and bias["name"] == "swin" and _is_cosine(self._norms(attention)):
            bias = {**bias, "name": "swinv2"}
        rotation, prefix = self._rotation(attention)
        factor = self._query_factor(attention)
        added = self._shared(("embedded", attention.q.source.value), partial(self._embedded, attention))
        return {
            "mask": mask,
            "encoding": rotation or factor or bias or added or self._order(attention),
            "bias": bias,
            "query_factor": factor,
            "input_encoding": added,
            "prefix_tokens": prefix,
        }

    def _carrier(self, attention: Attention) -> Data:
        """The operator and nodes that compute an attention, its dtypes, and the runtimes where it is one kernel."""
        origin, dtype = self._origins.of(attention.softmax), self._dtype(attention)
        operator = self.view.operator_of(attention.softmax.name or "")
        carried = Carried(
            operator=origin.operator,
            dtype=dtype,
            head_dim=attention.head_dim,
            value_dim=attention.value_dim,
            softcap=bool(attention.softcap),
            sinks=attention.sinks is not None,
            ort_takes=operator is None or ort_takes(operator),
            tensorrt_takes=operator is None or tensorrt_takes(operator),
        )
        return {
            "dtype": dtype,
            "softmax_dtype": self._softmax_dtype(attention),
            "operator": origin.operator,
            "nodes": self._origins.core(attention),
            "runtimes": kernels_of(carried),
        }

    def _shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """A result that several layers share, made once."""
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    def _mask_and_bias(self, attention: Attention) -> tuple[Data, Data | None]:
        terms = tuple((term.value, term.factor, term.seen_if, term.fill) for term in attention.terms)
        levels = tuple(tuple(self.view.probe.shape(term.level)) for term in attention.terms)
        axes = tuple(term.axes for term in attention.terms)
        key = ("terms", terms, levels, axes, attention.num_heads, attention.sinks is not None)
        return self._shared(key, lambda: self._measured_terms(attention, levels))

    def _measured_terms(self, attention: Attention, shapes: tuple[tuple[int, ...], ...]) -> tuple[Data, Data | None]:
        if any(term.value in self.view.flow.content for term in attention.terms):
            reason = Reason(FEATURES, "the term added to its scores is computed from features")
            return _no_mask(reason), unknown("unknown", reason)
        levels = {term.level.name or "": shape for term, shape in zip(attention.terms, shapes, strict=True)}
        added = AddedToScores(self._measure, attention, levels)
        try:
            mask = mask_of(added, self._measure, self.view.roles)
            return mask, bias_of(added, self._measure, attention.sinks is not None)
        except PosexportError as error:
            reason = Reason(NOT_MEASURED, str(error).rstrip("."))
            return _no_mask(reason), unknown("unknown", reason)

    def _rotation(self, attention: Attention) -> tuple[Data | None, int]:
        """The rotation of queries and keys, or another way in which positions act on them; None if there is none.

        Also the number of tokens at the beginning that are not rotated.
        """
        q, k = (self._turned(attention, side) for side in (attention.q, attention.k))
        if q is not None and k is None and attention.k.cache is None:
            written = written_keys(self.view, attention, self._outputs)
            k = None if written is None else written.rotary
        for name, rotary, side in (("queries", q, attention.q), ("keys", k, attention.k)):
            if rotary is not None and further_angles(self.view.flow, self.view.probe, side):
                reason = Reason(FURTHER, further_text(name))
                return unknown("rotary", reason, layout=layout_of(rotary.pairs)), 0
        for side, one in [(side, side.source) for side in (attention.q, attention.k) if len(side.turns) == 1]:
            place = (one.value, one.layout, self._sizes(attention, side, attention.head_dim))
            if not in_all_heads(self.view.flow, self.view.probe, side.turns[0], *place):
                return unknown("rotary", Reason(ROTATION, "only some of its heads are rotated")), 0
        if q is not None and k is not None:
            key = ("rotary", _key(q), _key(k), attention.head_dim)
            return self._shared(key, lambda: rotary_encoding(self._measure, q, k, attention.head_dim))
        if q is not None or k is not None:
            return unknown("rotary", Reason(SIDE, one_side_text("queries" if q is not None else "keys"))), 0
        if attention.turns or attention.q.rotates or attention.k.rotates:
            return unknown("unknown", Reason(ROTATION, UNKNOWN_ANGLES)), 0
        for name, side, dim in _sides(attention):
            projection = projection_of(self.view.flow, side.source.value)
            if projection is None:
                continue
            try:
                order = keeps_order(self.view.probe, projection, side.source, self._sizes(attention, side, dim))
            except RequestError:
                order = None
            if order is False:
                how = "in another way than by rotating pairs by the same angles in all heads"
                reason = Reason(POSITIONS, f"positions act on its {name} {how}")
                return unknown("unknown", reason), 0
        return None, 0

    def _order(self, attention: Attention) -> Data:
        """The encoding `none` if reordered tokens give queries, keys and values in the new order, else `unknown`."""
        results = {value: one for value, one in self._results.items() if value is not attention.output.value}
        for name, side, dim in _sides(attention):
            sizes = self._sizes(attention, side, dim)
            key = ("order", side.source, sizes)
            try_order = partial(acts_in_order, self.view.flow, self.view.probe, side.source, sizes, results)
            kept = self._shared(key, try_order)
            if kept is None:
                text = f"whether its {name} depend on the order of tokens can't be tested"
                return unknown("unknown", Reason(UNTRIED, text))
            if not kept:
                text = f"its {name} depend on the order of tokens, for a reason that was not recognised"
                return unknown("unknown", Reason(POSITIONS, text))
        return {"name": "none"}

    def _turned(self, attention: Attention, side: Side) -> Rotary | None:
        """The rotation of queries or keys, of whole heads or of a part of them; None if there is none, or several.

        Its pairs are numbered as features of whole heads.
        """
        if side.rotary is not None or len(side.turns) != 1:
            return side.rotary
        (turn,), source = side.turns, side.source
        sizes = self._sizes(attention, side, attention.head_dim)
        place = place_of(self.view.flow, self.view.probe, turn, source.value, source.layout, sizes)
        pairs = turn.rotary.pairs
        return attrs.evolve(turn.rotary, pairs=attrs.evolve(pairs, start=pairs.start + (place or 0)))

    def _query_factor(self, attention: Attention) -> Data | None:
        """The factor of queries or keys that depends on their positions, besides a rotation; None if there is none."""
        product = attention.scores
        for name, side, operand in (("queries", attention.q, product.left), ("keys", attention.k, product.right)):
            start = side.source.value if side.rotary is None else side.rotary.target
            if side.cache is not None or side.rotates != (side.rotary is not None):
                continue
            flow = self.view.flow
            above = flow.between(_beginning(flow, side.source.value), side.source.value)
            turned = {node for one in side.turns for node in flow.between(one.rotary.source, one.rotary.target)}
            nodes = [node for node in (*above, *flow.between(start, operand)) if node not in turned]
            factors = factors_of(flow, self.view.probe.fixed, nodes)
            if factors:
                key = ("factor", tuple(factors))
                found = self._shared(key, partial(temperature, self._measure, factors))
                reason = Reason(POSITIONS, f"its {name} are computed with more than features and weights")
                return found if found is not None and name == "queries" else unknown("unknown", reason)
        return None

    def _sizes(self, attention: Attention, side: Side, dim: int) -> tuple[int, int, int, int]:
        """Rows, heads, tokens and features of one side."""
        rows = self._rows(attention)
        tokens = math.prod(self.view.probe.shape(side.source.value)) // (rows * side.source.heads * dim)
        return rows, side.source.heads, tokens, dim

    def _rows(self, attention: Attention) -> int:
        """The number of rows that attend: rows of the batch, or windows of an image."""
        shape = self.view.probe.shape(attention.output.value)
        queries = attention.queries(self.view.probe.shape(attention.logits))
        return math.prod(shape) // (attention.num_heads * attention.value_dim * queries)

    def _norms(self, attention: Attention) -> Data | None:
        found: Data = {}
        for name, side, dim in _sides(attention)[:2]:
            projection = projection_of(self.view.flow, side.source.value)
            found[name] = None if projection is None else norm_of(self.view.probe, projection, dim)
        return found if any(found.values()) else None

    def _embedded(self, attention: Attention) -> Data | None:
        stops = self._outputs - {attention.output.value}
        return embedded(self.view, self._measure, attention.q.source.value, stops)

    def _dtype(self, attention: Attention) -> str:
        """The dtype of the products."""
        value = attention.q.source.value
        return _name(self.view.dtypes([value]).get(value.name or ""))

    def _softmax_dtype(self, attention: Attention) -> str:
        value = attention.logits
        return _name(value.dtype) if value.dtype is not None else self._dtype(attention)


def _name(dtype: Any) -> str:
    return "unknown" if dtype is None else dtype_name(dtype).lower()


def _key(rotary: Rotary) -> Hashable:
    return rotary.pairs, rotary.cos, rotary.sin


def _sides(attention: Attention) -> tuple[tuple[str, Side, int], ...]:
    return (
        ("queries", attention.q, attention.head_dim),
        ("keys", attention.k, attention.head_dim),
        ("values", attention.v, attention.value_dim),
    )


def _no_mask(reason: Reason) -> Data:
    """A mask of which nothing is known, with the reason."""
    mask: Data = {"kind": "other", "window": None, "chunk": None, "padding": [], "tested": 0}
    return {**mask, "reason": {"code": reason.code, "text": reason.text}}


def _is_cosine(norms: Data | None) -> bool:
    """Whether scores are cosines of queries and keys."""
    return norms is not None and all(norm is not None and norm["kind"] == "l2" for norm in norms.values())


_last: Describer | None = None


def _beginning(flow: Dataflow, value: ir.Value) -> ir.Value:
    """The nearest value, from `value` up, that comes from a product, a norm, a table or an input."""
    above = value
    for above in flow.dominators(value):
        node = above.producer()
        if node is None or node.op_type in BARRIERS:
            break
    return above
