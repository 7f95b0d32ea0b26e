"""The output shapes of operators of attention, of quantised weights, of embeddings and of recurrent networks.

Lengths are polynomials of the dimensions of the graph's inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from posexport.graphs.symbolic_sizes import Shape, Size

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes


def attended(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """ONNX Attention, queries [B, N, S, D] or [B, S, N*D]; com.microsoft Attention of features [B, S, width]."""
    q, v = shapes.of_input(node, 0), shapes.of_input(node, 2)
    if node.domain == "com.microsoft":
        return _packed(shapes, node)
    if not q or not v or len(q) != len(v):
        return None
    if len(q) == 4:
        return (*q[:3], v[3])
    heads, kv_heads = (node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    size = shapes.symbols.quotient(v[2], Size(kv_heads))
    return None if size is None or not heads else (*q[:2], size * Size(heads))


def _packed(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    x, weights, sizes = shapes.of_input(node, 0), shapes.of_input(node, 1), node.attributes.get("qkv_hidden_sizes")
    if not x or not weights:
        return None
    width = shapes.symbols.quotient(weights[-1], Size(3)) if sizes is None else Size(sizes.as_ints()[2])
    return None if width is None else (*x[:2], width)


def attended_by_heads(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """com.microsoft MultiHeadAttention: queries [B, S, N*D], values [B, T, N*D] or [B, N, T, D]."""
    q, v, heads = shapes.of_input(node, 0), shapes.of_input(node, 2), node.attributes.get_int("num_heads", 0)
    if not q or not v or len(q) != 3:
        return None
    return (*q[:2], v[2] if len(v) == 3 else v[-1] * Size(heads))


def attended_by_groups(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """com.microsoft GroupQueryAttention: queries [B, S, N*D], or with keys and values [B, S, (N + 2 K)*D]."""
    q, k = shapes.of_input(node, 0), shapes.of_input(node, 1)
    if not q or len(q) != 3 or k is not None:
        return q
    heads, kv_heads = (node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads"))
    size = shapes.symbols.quotient(q[2], Size(heads + 2 * kv_heads))
    return None if size is None else (*q[:2], size * Size(heads))


def attended_linearly(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """LinearAttention: queries [B, S, N*D], values [B, S, K*V], the output [B, S, max(N, K)*V]."""
    v = shapes.of_input(node, 2)
    heads, kv_heads = (node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    size = shapes.symbols.quotient(v[2], Size(kv_heads)) if v and len(v) == 3 and kv_heads else None
    return None if size is None or not v else (*v[:2], size * Size(max(heads, kv_heads)))


def multiplied_by_bits(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """com.microsoft MatMulNBits: [..., K] times weights of a few bits [N, blocks, bytes]."""
    x = shapes.of_input(node, 0)
    return None if not x else (*x[:-1], Size(node.attributes.get_int("N", 0)))


def multiplied_by_scales(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """QLinearMatMul: [..., M, K] times weights [K, N], which come after the first scale and zero point."""
    x, weights = shapes.of_input(node, 0), shapes.of_input(node, 3)
    return None if not x or not weights or len(weights) != 2 else (*x[:-1], weights[-1])


def embedded(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """com.microsoft EmbedLayerNormalization: ids [B, S] and a table [rows, width]."""
    ids, table = shapes.of_input(node, 0), shapes.of_input(node, 2)
    return None if ids is None or not table else (*ids, table[-1])


def gathered_by_blocks(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """com.microsoft GatherBlockQuantized: slices of weights, of which one uint8 may hold several."""
    data, indices, source = shapes.of_input(node, 0), shapes.of_input(node, 1), node.inputs[0]
    if not data or indices is None or source is None:
        return None
    axis, held = node.attributes.get_int("gather_axis", 0) % len(data), 1
    if source.dtype == ir.DataType.UINT8:
        held = 8 // node.attributes.get_int("bits", 4)
    packed = (*data[:-1], data[-1] * Size(held))
    return (*packed[:axis], *indices, *packed[axis + 1 :])


def recurrent(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """RNN, GRU and LSTM of x [S, B, width] and weights [directions, ..., H]; the output is [S, directions, B, H]."""
    x, weights = shapes.of_input(node, 0), shapes.of_input(node, 2)
    if not x or not weights or node.attributes.get_int("layout", 0) != 0:
        return None
    return (x[0], weights[0], x[1], weights[2])


RULES: dict[str, Callable[[SymbolicShapes, ir.Node], Shape | None]] = {
    "Attention": attended,
    "EmbedLayerNormalization": embedded,
    "GRU": recurrent,
    "GatherBlockQuantized": gathered_by_blocks,
    "GroupQueryAttention": attended_by_groups,
    "LSTM": recurrent,
    "LinearAttention": attended_linearly,
    "MatMulNBits": multiplied_by_bits,
    "MultiHeadAttention": attended_by_heads,
    "QAttention": _packed,
    "QLinearMatMul": multiplied_by_scales,
    "RNN": recurrent,
}
"""The shape of an operator's first output."""
