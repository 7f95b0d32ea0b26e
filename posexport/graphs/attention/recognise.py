"""All attention of a graph: each softmax between two products, understood by structure and by probing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import onnx_ir as ir

from posexport.errors import PosexportError, Reason, shown
from posexport.graphs.attention.absorbed import keeps_numbers, layout_nodes, lays_out, loses_digits
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.attention.candidates import leads_to_product, reason_to_leave
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.guards import can_act
from posexport.graphs.attention.head_count import by_rows
from posexport.graphs.attention.heads import Side, Source
from posexport.graphs.attention.hidden_keys import zeros_hide
from posexport.graphs.attention.key_axis import scores_by_key
from posexport.graphs.attention.layouts import Layout, Sizes, factor, layouts_of
from posexport.graphs.attention.operands import check_heads, dims_of, operand_side, result_of, side_behind, sizes_of
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import WEIGHTED, Product, product_of
from posexport.graphs.attention.score_axes import USUAL, ScoreAxes
from posexport.graphs.attention.scores import Declined, Scores, Term, reaches_product
from posexport.graphs.attention.sink_column import LARGEST_SINK
from posexport.graphs.attention.softmaxes import Softmax, softmax_of
from posexport.graphs.attention.turned_parts import turned_parts
from posexport.graphs.attention.uniform import number_of
from posexport.graphs.attention.unweighted import WEIGHT_OPS, mixed_scores, reason_without_product
from posexport.graphs.attention.weights import check_weights
from posexport.graphs.attention.written_out import check_written_out
from posexport.graphs.attention.zeroed import Zeroed

_OUTPUT_OPS = {"Transpose", "Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Flatten"}

Found = Attention | UnknownAttention

_UNSEEN = ("score-operator", "no-scores")
"""If attention is declined with these codes, its scores may be mixed with those of other heads."""


def recognise(flow: Dataflow, probe: Probe, batch: int, refused: Mapping[ir.Node, str] | None = None) -> list[Found]:
    """Every attention of the main graph, in order. `batch` is the number of rows of the probe's inputs.

    `refused` are operators that could not be expanded (posexport.graphs.expand), each with what prevents it.
    """
    found: list[Found] = []
    for node in flow.graph:
        try:
            found += _ended_by(flow, probe, node, batch, refused or {}, len(found))
        except MemoryError:
            raise
        except Exception as error:
            found.append(_failed(node.name or node.outputs[0].name or "", len(found), error))
    return _with_caches_of_their_own(found)


def _ended_by(
    flow: Dataflow, probe: Probe, node: ir.Node, batch: int, refused: Mapping[ir.Node, str], layer: int
) -> list[Found]:
    """The attentions whose softmax ends in a node, or that it computes as an operator. The first has this `layer`."""
    name = node.name or node.outputs[0].name or ""
    reason = reason_to_leave(node, refused, flow.functions)
    softmax = None if reason is not None else softmax_of(node)
    if softmax is not None:
        products = _weighted(flow, softmax)
        if softmax.doubt is not None:
            reason = softmax.doubt if _is_of_attention(flow, softmax, bool(products)) else None
            products = []
        elif not products:
            reason = reason_without_product(flow, probe, softmax, name)
        names = [name, *(product.node.name or product.result.name or "" for product, _ in products[1:])]
        attempts = enumerate(zip(products, names, strict=False), layer)
        if products:
            return [_attempted(flow, probe, softmax, each, batch, at, number) for number, (each, at) in attempts]
    return [] if reason is None else [UnknownAttention(name=name, layer=layer, reason=reason)]


def _attempted(
    flow: Dataflow,
    probe: Probe,
    softmax: Softmax,
    weighted: tuple[Product, list[ir.Node]],
    batch: int,
    name: str,
    layer: int,
) -> Found:
    """One attention, or why it is left as it is."""
    try:
        return _attention(flow, probe, softmax, weighted, batch, name, layer)
    except Declined as declined:
        mixed = mixed_scores(flow, probe, softmax, name) if declined.reason.code in _UNSEEN else None
        return UnknownAttention(name=name, layer=layer, reason=mixed or declined.reason)
    except PosexportError as error:
        return UnknownAttention(name=name, layer=layer, reason=Reason("not-evaluated", str(error).rstrip(".")))
    except MemoryError:
        raise
    except Exception as error:
        return _failed(name, layer, error)


def _failed(name: str, layer: int, error: Exception) -> UnknownAttention:
    """An attention in which an unexpected error was raised. The other attentions are still recognised."""
    reason = Reason("failed", f"{shown(name)} can't be read ({type(error).__name__})")
    return UnknownAttention(name=name, layer=layer, reason=reason)


def _with_caches_of_their_own(found: Sequence[Found]) -> list[Found]:
    """The attentions, with each cache given to only one of them.

    Others that read the same cache, such as layers that share it, read its keys and values like any other values.
    """
    taken: set[ir.Value] = set()
    settled: list[Found] = []
    for one in found:
        if isinstance(one, Attention) and one.k.cache is not None and one.v.cache is not None:
            presents = {one.k.cache.present, one.v.cache.present}
            if presents & taken or len(presents) < 2:
                one = _behind_caches(one)
            else:
                taken |= presents
        settled.append(one)
    return settled


def _behind_caches(one: Attention) -> Attention:
    """The attention with its whole caches as keys and values."""
    if one.k.source.factor != 1.0 or one.k.cache is None or one.v.cache is None:
        return one.near or one
    k, v = (
        Side(source=Source(value=cache.present, layout=Layout(tuple("bhsd")), heads=one.num_kv_heads))
        for cache in (one.k.cache, one.v.cache)
    )
    return attrs.evolve(one, k=k, v=v)


def _is_of_attention(flow: Dataflow, softmax: Softmax, has_products: bool) -> bool:
    """Whether a node that is not known to be a softmax is between the two products of attention."""
    weighs = has_products or leads_to_product(softmax.node.outputs[0])
    return weighs and reaches_product(flow, softmax.logits)


def _weighted(flow: Dataflow, softmax: Softmax) -> list[tuple[Product, list[ir.Node]]]:
    """The products of a softmax with values, each with the nodes before it; none if it is not an attention."""
    value, passed = softmax.node.outputs[0], list[ir.Node]()
    if softmax.product is not None:
        between = flow.between(value, softmax.product.left)
        return [(softmax.product, between)] if softmax.product.right in flow.content else []
    for _ in range(8):
        found, onward = list[tuple[Product, list[ir.Node]]](), list[ir.Node]()
        for node in dict.fromkeys(use.node for use in value.uses()):
            product = product_of(node, WEIGHTED, weights=value)
            if product is not None and product.right in flow.content:
                found.append((product, passed))
            elif node.op_type in WEIGHT_OPS and node.outputs[0] in flow.content:
                onward.append(node)
        if found or not onward:
            return found
        passed.append(onward[-1])
        value = onward[-1].outputs[0]
    return []


def _attention(
    flow: Dataflow,
    probe: Probe,
    softmax: Softmax,
    weighted: tuple[Product, list[ir.Node]],
    batch: int,
    name: str,
    layer: int,
) -> Attention:
    logits, (product, passed) = softmax.logits, weighted
    scores, axes = scores_by_key(flow, probe, softmax, weighted, name)
    product = by_rows(probe, product)
    sizes = sizes_of(flow, probe, scores.product, batch)
    rows, heads, queries, keys, head_dim = sizes
    value_dim = dims_of(probe, product.right, product.axes[1]).get("d", 0)
    if 0 in (*sizes, value_dim):
        raise Declined("empty", f"the queries, keys or values of {shown(name)} have no tokens or no features")
    check_heads(probe, scores.product, heads)
    check_heads(probe, product, heads, values=True)
    check_written_out(probe, softmax, scores, name)
    if softmax.zeroed is not None:
        scores = _with_zeros(softmax.zeroed, scores, axes.get(softmax.logits, USUAL), name)
    for node in layout_nodes(scores.nodes):
        if not lays_out(probe, node):
            name = shown(node.name or node.outputs[0].name or "")
            raise Declined("score-layout", f"lengths decide how {name} lays out the scores")
    if loses_digits(flow, scores.product.result, product.left):
        raise Declined("score-digits", f"scores or weights around {shown(name)} have fewer digits than both products")
    inner = _logits(probe, logits)
    weights = check_weights(flow, probe, softmax.node, product, passed, scores, axes.get(inner, USUAL))
    operands = (
        (scores.product.left, scores.product.axes[0], (rows, heads, queries, head_dim)),
        (scores.product.right, scores.product.axes[1], (rows, heads, keys, head_dim)),
        (product.right, product.axes[1], (rows, heads, keys, value_dim)),
    )
    q, k, v = (operand_side(probe, *operand) for operand in operands)
    near = Attention(
        name=name,
        layer=layer,
        num_heads=heads,
        num_kv_heads=k.source.heads,
        head_dim=head_dim,
        value_dim=value_dim,
        factors=scores.factors,
        softcap=scores.softcap,
        q=q,
        k=k,
        v=v,
        scores=scores.product,
        terms=tuple(attrs.evolve(term, axes=axes.get(term.level, USUAL)) for term in scores.terms),
        head_scales=_head_scales(flow, probe, scores, heads),
        sinks=_sinks(probe, scores.sinks, heads),
        output=result_of(probe, product, (rows, heads, queries, value_dim)),
        square=queries == keys,
        softmax=softmax.node,
        logits=inner,
        logits_axes=axes.get(inner, USUAL),
        softmax_dtype=logits.dtype.name if logits.dtype is not None else "UNDEFINED",
        weights=softmax.node.outputs[0],
        divides_zeros=softmax.zeroed is not None and softmax.beside is None,
        guard=weights.guard if can_act(probe, weights.guard, scores.terms) else None,
        weight_factors=weights.factors,
    )
    whole = _whole(flow, probe, near, operands)
    if whole is None and k.source.heads != v.source.heads:
        raise Declined("heads", f"{shown(name)} has {k.source.heads} key heads and {v.source.heads} of values")
    return _with_turns(flow, probe, near if whole is None else whole, (rows, queries, keys))


def _with_zeros(zeroed: Zeroed, scores: Scores, axes: ScoreAxes, name: str) -> Scores:
    """The scores with those keys hidden whose exponentials are set to zero."""
    if axes != USUAL:
        raise Declined(
            "softmax-form", f"{shown(name)} sets exponentials to zero along another axis than that of the keys"
        )
    hides = Term(value=zeroed.condition, level=zeroed.result, seen_if=zeroed.seen_if, fill=-math.inf)
    return attrs.evolve(scores, terms=(hides, *scores.terms))


def _with_turns(flow: Dataflow, probe: Probe, one: Attention, lengths: tuple[int, int, int]) -> Attention:
    """The attention with the rotations of parts of its queries and keys, if these are not rotated as a whole.

    `lengths` are the numbers of rows, queries and keys.
    """
    rows, *tokens = lengths
    sides = [
        side
        if side.rotary is not None
        else attrs.evolve(side, turns=tuple(turned_parts(flow, probe, side.source.value, rows, tokens)))
        for side in (one.q, one.k)
    ]
    if not any(side.turns for side in sides):
        return one
    return attrs.evolve(one, q=sides[0], k=sides[1])


def narrower(flow: Dataflow, probe: Probe, one: Attention) -> Attention | None:
    """The attention without the nodes before and after its products, or else without rotations of parts.

    None if it has neither.
    """
    if one.near is None:
        return attrs.evolve(one, q=_unturned(one.q), k=_unturned(one.k)) if one.turns else None
    near, rows = one.near, probe.shape(one.near.output.value)
    sizes = math.prod(rows) // (near.num_heads * near.value_dim)
    shape = probe.shape(near.logits)
    queries = near.queries(shape)
    return _with_turns(flow, probe, near, (sizes // queries, queries, near.keys(shape)))


def _unturned(side: Side) -> Side:
    return attrs.evolve(side, turns=())


def _whole(
    flow: Dataflow, probe: Probe, near: Attention, operands: Sequence[tuple[ir.Value, str, Sizes]]
) -> Attention | None:
    """The attention from its projections on, with layouts, repeated heads, rotations and caches.

    None if a source is not found, if keys and values have different numbers of heads, or if values are scaled.
    """
    (left, of_left, q_sizes), (right, of_right, k_sizes), (values, of_values, v_sizes) = operands
    try:
        q = side_behind(flow, probe, left, of_left, q_sizes, rotated=True)
        k = side_behind(flow, probe, right, of_right, k_sizes, rotated=True)
        v = side_behind(flow, probe, values, of_values, v_sizes, rotated=False)
        if (k.cache is None) != (v.cache is None):  # for example if keys are rotated after their cache
            k = side_behind(flow, probe, right, of_right, k_sizes, rotated=True, cached=False)
            v = side_behind(flow, probe, values, of_values, v_sizes, rotated=False, cached=False)
    except LookupError:
        return None
    if k.source.heads != v.source.heads or v.source.factor != 1.0:
        return None
    return attrs.evolve(
        near,
        num_kv_heads=k.source.heads,
        factors=(*near.factors, q.source.factor, k.source.factor),
        q=q,
        k=k,
        v=v,
        output=_output(flow, probe, near.output, (*q_sizes[:3], v_sizes[3])),
        near=near,
    )


def _logits(probe: Probe, value: ir.Value) -> ir.Value:
    """The input of a softmax with separate axes for queries and keys, before a Flatten."""
    while len(probe.shape(value)) < 3:
        node = value.producer()
        if node is None or node.inputs[0] is None:
            raise Declined("rank", "its scores have no separate axis for queries")
        value = node.inputs[0]
    return value


def _head_scales(flow: Dataflow, probe: Probe, scores: Scores, heads: int) -> tuple[tuple[ir.Value, bool], ...]:
    """The numbers that each head's scores are multiplied or divided by.

    Masks of zeros and ones are left out if the added masks hide the keys of their zeros anyway.
    """
    kept = []
    for value, divides in scores.head_scales:
        array = probe.get(value)
        zeros_or_ones = bool(((array == 0) | (array == 1)).all())
        if not divides and zeros_or_ones and zeros_hide(flow, probe, value, scores.terms) is not None:
            continue
        by_head = array.numel() == 1 or (array.numel() == heads and array.dim() > 2 and array.shape[-3] == heads)
        if not by_head or not all(size.is_fixed for size in probe.shapes.of(value)):
            raise Declined(
                "score-scale", f"{shown(value.name or '')} scales the scores, but is not one number per head"
            )
        kept.append((value, divides))
    return tuple(kept)


_SINKS_APART = (
    "its sinks, an additional column of the scores, are not one number per head, with rows as the first axis of scores"
)


def _sinks(probe: Probe, column: ir.Value | float | None, heads: int) -> ir.Value | float | None:
    """The sinks before they are laid out for all rows and queries, or their logit; None without sinks."""
    if not isinstance(column, ir.Value):
        return column
    logit = number_of(probe, column)
    if logit is not None and abs(logit) <= LARGEST_SINK and math.prod(probe.shape(column)) != heads:
        return logit
    value: ir.Value | None = column
    passed = set[ir.Node]()
    while value is not None and math.prod(probe.shape(value)) != heads:
        node = value.producer()
        if node is None or node.op_type not in ("Expand", "Reshape", "Unsqueeze", "Cast", "Identity", "Tile"):
            raise Declined("sinks", _SINKS_APART)
        passed.add(node)
        value = node.inputs[0]
    if value is None:
        return None
    random = probe.random_like(value)
    wide = probe.replaced({value: random}, [column], passed)[0]
    rows_of_heads = wide.reshape(-1, heads, wide.shape[-2])
    same = bool((rows_of_heads == random.reshape(heads, 1)).all())
    if not same or not all(size.is_fixed for size in probe.shapes.of(value)):
        raise Declined("sinks", _SINKS_APART)
    return value


def _output(flow: Dataflow, probe: Probe, result: Source, sizes: Sizes) -> Source:
    """The farthest value that is the result of attention in another layout."""
    replaced = probe.random_like(result.value)
    heads = result.layout.to_heads(replaced, sizes)
    value, best = result.value, result
    for _ in range(8):
        if len(value.uses()) != 1 or value.is_graph_output():
            break
        (use,) = value.uses()
        node = use.node
        if node.op_type not in _OUTPUT_OPS or node not in flow.order or not keeps_numbers(flow, probe, node):
            break
        value = node.outputs[0]
        if loses_digits(flow, result.value, value):
            continue
        after = probe.through(result.value, [value], replaced)[0]
        for layout in layouts_of(tuple(after.shape), sizes):
            if factor(layout.to_heads(after, sizes), heads) == 1.0:
                best = Source(value=value, layout=layout, heads=sizes[1])
                break
    return best
