"""The number of heads of a row, if the product doesn't show it: rows, windows of an image and heads may be one axis.

The features of one token, before they are projected, give the queries of all heads of one row in one window. So the
features of one token are replaced by others, and the rows of the product whose queries change are counted.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.layouts import EXACT
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import Product, with_heads_first

_PRODUCTS = {"MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul", "Einsum", "Conv"}
"""Products that may multiply features by weights."""


def by_rows(probe: Probe, product: Product) -> Product:
    """The product with rows on the axis that may vary, if the axis of rows is fixed and that of heads is not.

    Heads may come before rows, [N, B, S, D].
    """
    shape, letters = probe.shapes.of(product.result), product.axes[2]
    if len(shape) != len(letters):
        return product
    sizes = dict(zip(letters, shape, strict=True))
    before_rows = "h" in sizes and sizes["b"].is_fixed and not sizes["h"].is_fixed
    return with_heads_first(product) if before_rows else product


def traced_heads(flow: Dataflow, probe: Probe, product: Product) -> int | None:
    """How many rows of the product of queries and keys come from one token of the model's features.

    None if that can't be told, for example for learned queries and caches.
    """
    for operand, axes in ((product.left, product.axes[0]), (product.right, product.axes[1])):
        begin = _projected(flow, probe, operand)
        if begin is None:
            continue
        value, features = begin
        drawn = probe.random(value)
        changed = drawn.clone()
        token = tuple(slice(None) if axis == features % drawn.dim() else 0 for axis in range(drawn.dim()))
        changed[token] = probe.random(value)[token]
        before, after = (probe.through(value, [operand], one)[0].double() for one in (drawn, changed))
        rows = _changed_rows(before, after, axes)
        if rows:
            return rows
    return None


def _changed_rows(before: torch.Tensor, after: torch.Tensor, axes: str) -> int:
    """The number of rows, and of heads of rows, in which anything differs."""
    letters = axes if before.dim() == len(axes) else axes.replace("h", "")
    differs = (before - after).abs() > EXACT * max(float(before.abs().max()), 1e-30)
    inner = [at for at, letter in enumerate(letters) if letter not in "bh"]
    return int(differs.movedim(inner, (-2, -1)).flatten(-2).any(-1).sum())


def _projected(flow: Dataflow, probe: Probe, operand: ir.Value) -> tuple[ir.Value, int] | None:
    """The value that the nearest product with weights above an operand projects, with its axis of features.

    The weights must be for all heads. Without such a product, it is the input or the table that the operand comes from;
    None if there is none.
    """
    for value in flow.dominators(operand):
        node = value.producer()
        content = [] if node is None else flow.content_inputs(node)
        if node is None or not content:
            return (value, -1) if value in flow.content else None
        if node.op_type in _PRODUCTS and len(content) == 1:
            axis = _features(probe, node, list(node.inputs).index(content[0]))
            if axis is not None:
                return (_before_heads(probe, content[0]) if axis == -1 else None) or (content[0], axis)
        elif node.op_type in (*_PRODUCTS, "Softmax"):
            return None
    return None


def _before_heads(probe: Probe, value: ir.Value) -> tuple[ir.Value, int] | None:
    """The value that weights shared by all heads project, before its features were split into heads.

    None if they were not split.
    """
    shape, node = list(probe.shape(value)), value.producer()
    if node is not None and node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", [])
        if not order or order[-1] != len(order) - 1 or node.inputs[0] is None:
            return None
        shape, node = list(probe.shape(node.inputs[0])), node.inputs[0].producer()
    source = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    whole = None if source is None else [*shape[:-2], math.prod(shape[-2:])]
    return None if source is None or len(shape) < 4 or list(probe.shape(source)) != whole else (source, -1)


def _features(probe: Probe, node: ir.Node, at: int) -> int | None:
    """The axis of operand number `at` that a product with weights sums over.

    None if heads have their own weights, or if the axis is not known.
    """
    if node.op_type == "Conv":
        return 1
    if node.op_type == "MatMulNBits":  # its weights are stored in blocks
        return -1 if at == 0 else None
    if at > 1 or any(node.attributes.get_int(f"{name}{'AB'[at]}", 0) for name in ("trans", "transBatch")):
        return None
    weights = node.inputs[1 - at]
    if node.op_type == "Einsum":
        if len(node.inputs) != 2:
            return None
        inputs, _, output = node.attributes["equation"].as_string().replace(" ", "").partition("->")
        part, other = (inputs.split(",")[place] for place in (at, 1 - at))
        summed = [letter for letter in part if letter.isalpha() and letter not in output]
        by_head = {*part} & {*other} & {*output}
        if len(summed) != 1 or by_head or "." in other + part[part.index(summed[0]) :]:
            return None
        return part.index(summed[0]) - len(part)
    if weights is not None and len([size for size in probe.shape(weights)[:-2] if size > 1]):
        return None
    return -1 if at == 0 else -2
