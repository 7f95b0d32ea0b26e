"""The least work of any graph at given sizes: what it must compute and read (posexport.bench.work).

    MatMul, Gemm, Einsum   [rows, inner] [inner, columns], once or for each pair of factors
    Conv                   [places, channels*kernel] [channels*kernel, features] for each group of channels
    attention              as recognised, with as many keys as a query sees under a window, in chunks or in a buffer

Only products of features are counted. Products that compute an encoding are not counted, and neither is a Conv with one
channel in each group. The bytes are the weights of these products, and the parts of caches that are seen.

Sizes follow from the shapes of the graph's inputs (posexport.graphs.symbolic_shapes). The work is unknown if a size
doesn't follow, if attention is not recognised, or if an operator has products that are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.bench.work import Heads, Layer, Product, Seen, Work
from posexport.errors import RequestError, shown
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.attention.dataflow import bodies
from posexport.graphs.attention.describe import Describer
from posexport.graphs.attention.origins import values_product
from posexport.graphs.axes import ENCODER, PAST, SEQ, SLOTS
from posexport.graphs.branches import has_branches
from posexport.graphs.draw import draw_inputs
from posexport.graphs.equations import letters_of
from posexport.graphs.load import model_of
from posexport.graphs.roles import Role
from posexport.graphs.view import View, view_of
from posexport.runtimes.base import Arrays

_COUNTED = ("MatMul", "FusedMatMul", "Gemm", "Einsum", "Conv", "ConvTranspose")

_NOT_COUNTED = {
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DeformConv", "LinearAttention", "CausalConvWithState"), "recurrent"),
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention"), "attention"),
    **dict.fromkeys(("DecoderMaskedMultiHeadAttention", "PackedMultiHeadAttention", "SparseAttention"), "attention"),
    **dict.fromkeys(("MoE", "QMoE", "FusedConv", "NhwcFusedConv", "NhwcConv", "FusedGemm", "TransposeMatMul"), "other"),
    **dict.fromkeys(("DequantizeLinear", "DynamicQuantizeLinear", "MatMulNBits", "MatMulBnb4", "QAttention"), "whole"),
    **dict.fromkeys(("MatMulInteger", "MatMulIntegerToFloat", "ConvInteger", "QLinearMatMul", "QGemm"), "whole"),
    **dict.fromkeys(("QLinearConv", "DynamicQuantizeMatMul", "GatherBlockQuantized"), "whole"),
}
"""Operators with products or weights that are not counted here."""

_DOMAINS = ("", "com.microsoft")

_CACHES = ("past", "encoder_past")

_CACHED = (PAST, SLOTS, ENCODER)
"""The axes of a cache that count its tokens."""


def works_of(path: Path, roles: Sequence[Role], requests: Sequence[Mapping[str, int]], itemsize: int) -> list[Work]:
    """The work of the graph at each of these sizes by meaning. `itemsize` is the item size of its dtype.

    RequestError with the reason if the work is not known.
    """
    model = model_of(read_with_weights_on_disk(path))
    if has_branches(model):
        raise RequestError("the graph is a choice between two bodies, whose products aren't counted")
    view = view_of(model, {role.name: role.kind for role in roles})
    counter = _Counter(view, itemsize)
    known = {role.name: role for role in roles}
    return [counter.work(known, sizes) for sizes in requests]


class _Counter:
    """Counts the products of one graph at several sizes."""

    def __init__(self, view: View, itemsize: int) -> None:
        self._view, self._itemsize = view, itemsize
        self._check()
        describer = Describer(view)
        self._attentions: dict[ir.Node, tuple[Attention, dict[str, Any], ir.Node]] = {}
        for one in view.attentions:
            if isinstance(one, UnknownAttention):
                raise RequestError(f"attention {shown(one.name)} is not recognised: {one.reason.text}")
            values = values_product(one)
            if values is None:
                raise RequestError(f"the products of attention {shown(one.name)} are not known")
            self._attentions[values] = (one, describer.describe(one), one.scores.node)
        inner = {scores for _, _, scores in self._attentions.values()} | {*self._attentions}
        self._products = [
            node
            for node in view.model.graph
            if node.op_type in _COUNTED and node not in inner and node.outputs[0] in view.flow.content
        ]

    def _check(self) -> None:
        """RequestError for a graph with products that are not counted."""
        for node in self._view.model.graph:
            inner = [one for body in bodies(node) for one in body.all_nodes()]
            for one in (node, *inner):
                if one.domain not in _DOMAINS or one.op_type in _NOT_COUNTED or (inner and one.op_type in _COUNTED):
                    where = " in a body" if one in inner else ""
                    raise RequestError(f"the graph has the operator {one.op_type}{where}, whose work is not counted")

    def work(self, roles: Mapping[str, Role], sizes: Mapping[str, int]) -> Work:
        """The work at these sizes by meaning."""
        inputs = draw_inputs(roles, sizes, np.random.default_rng(0)).arrays
        scores = [scores for _, _, scores in self._attentions.values()]
        values = [value for node in self._products for value in _operands(node)]
        values += [value for node in (*scores, *self._attentions) for value in _operands(node, result=True)]
        shapes = self._view.shapes_on(dict.fromkeys(values), inputs)
        layers, products, read = list[Layer](), list[Product](), dict[ir.Value, int]()
        counted = {*self._products}
        for node in self._view.model.graph:
            if node in counted:
                products += _product_of(node, _known(node, shapes))
                for value in node.inputs[1:2]:
                    if value is not None and value in self._view.flow.constant:
                        read[value] = math.prod(shapes[value]) * self._itemsize
            elif node in self._attentions:
                layers.append(Layer(tuple(products), self._heads(node, shapes, sizes)))
                products.clear()
        if products:
            layers.append(Layer(tuple(products)))
        return Work(layers=tuple(layers), bytes=sum(read.values()) + self._cached(roles, inputs, sizes))

    def _heads(self, node: ir.Node, shapes: Mapping[ir.Value, tuple[int, ...]], sizes: Mapping[str, int]) -> Heads:
        one, data, scores = self._attentions[node]
        shape = _known(scores, shapes, result=True)[-1]
        output = _known(node, shapes, result=True)[-1]
        queries, keys = one.queries(shape), one.keys(shape)
        kv_heads = data["num_kv_heads"] or one.num_kv_heads
        rows = math.prod(shape) // (queries * keys * one.num_heads)
        seen = _seen(data).of_keys(keys, sizes.get(PAST, 0), sizes.get(SEQ, queries))
        width = math.prod(output) // (rows * one.num_heads * queries)
        return Heads(rows * kv_heads, one.num_heads // kv_heads * queries, one.head_dim, seen, width)

    def _cached(self, roles: Mapping[str, Role], inputs: Arrays, sizes: Mapping[str, int]) -> int:
        """The bytes of caches that new tokens see."""
        owners = {name: _seen(data) for _, data, _ in self._attentions.values() for name in _caches(data)}
        total = 0
        for name, role in roles.items():
            if role.kind not in _CACHES:
                continue
            array = inputs[name]
            tokens = math.prod(size for size, axis in zip(array.shape, role.axes, strict=True) if axis in _CACHED)
            past = min(tokens, sizes.get(PAST, tokens)) if SLOTS in role.axes else tokens
            seen = owners[name].of_cache(past) if name in owners else past
            total += array.nbytes * seen // tokens if tokens else 0
        return total


def _seen(data: Mapping[str, Any]) -> Seen:
    mask, cache = data["mask"], data["cache"]
    return Seen(
        window=mask["window"] if mask["kind"] in ("window", "local") else None,
        sides=2 if mask["kind"] == "local" else 1,
        chunk=mask["chunk"] if mask["kind"] == "chunk" else None,
        buffer=cache is not None and cache["kind"] == "shared",
    )


def _caches(data: Mapping[str, Any]) -> list[str]:
    """The inputs that contain the caches of an attention."""
    return [name for name in (data["cache"] or {"inputs": {}})["inputs"].values() if name]


def _operands(node: ir.Node, result: bool = False) -> list[ir.Value]:
    """The two factors of a product. Its result is added if `result`, or for Conv, whose factors don't give its size."""
    results = node.outputs if result or "Conv" in node.op_type else ()
    return [value for value in (*node.inputs[:2], *results) if value is not None]


def _known(node: ir.Node, shapes: Mapping[ir.Value, tuple[int, ...]], *, result: bool = False) -> list[tuple[int, ...]]:
    values = _operands(node, result)
    if not all(value in shapes for value in values):
        raise RequestError(
            f"the sizes of the {node.op_type} {shown(node.name or node.outputs[0].name)} don't follow from those of "
            "the inputs"
        )
    return [shapes[value] for value in values]


def _product_of(node: ir.Node, shapes: Sequence[tuple[int, ...]]) -> list[Product]:
    """The product that a node computes, from the shapes of its factors and, for Conv, of its result."""
    left, right, *results = shapes
    if 0 in (*left, *right):
        return []
    if results:
        return _convolved(node, left, right, results[0])
    if node.op_type == "Einsum":
        return [_einsum(node, left, right)]
    inner = left[-2] if node.attributes.get_int("transA", 0) and len(left) > 1 else left[-1]
    columns = right[-2] if node.attributes.get_int("transB", 0) else right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return [Product(1, math.prod(left) // inner, inner, columns)]
    rows = math.prod(left[-2:]) // inner
    return [Product(math.prod(np.broadcast_shapes(left[:-2], right[:-2])), rows, inner, columns)]


def _convolved(node: ir.Node, x: tuple[int, ...], kernel: tuple[int, ...], result: tuple[int, ...]) -> list[Product]:
    """The product of each group of channels. Empty if each group has one channel."""
    groups = node.attributes.get_int("group", 1)
    if groups > 1 and groups == x[1]:
        return []
    if node.op_type == "ConvTranspose":  # the kernel is [channels, features of a group, ...]
        return [Product(groups, x[0] * math.prod(x[2:]), kernel[0] // groups, math.prod(kernel[1:]))]
    return [Product(groups, x[0] * math.prod(result[2:]), math.prod(kernel[1:]), kernel[0] // groups)]


def _einsum(node: ir.Node, left: tuple[int, ...], right: tuple[int, ...]) -> Product:
    letters = letters_of(node, [len(left), len(right)]) if len(node.inputs) == 2 else None
    if letters is None:
        raise RequestError(f"the Einsum {shown(node.name or node.outputs[0].name)} is not known to be one product")
    (first, second), result = letters
    size = dict(zip(second, right, strict=True)) | dict(zip(first, left, strict=True))
    both, one, other = {*first} & {*second}, {*first} - {*second}, {*second} - {*first}
    parts = (both & {*result}, one & {*result}, both - {*result}, other & {*result})
    return Product(*(math.prod(size[letter] for letter in part) for part in parts))
