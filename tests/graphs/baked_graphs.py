"""Graphs that do not accept all sizes that their inputs declare. This file does not import posexport."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper
from small_graphs import Graph

WIDTH, HEADS, SIZE = 16, 2, 8

_Shape = tuple[int | str, ...]


def _attention(g: Graph, x: str, *shape: int, out: str = "attended") -> str:
    """Attention over x [..., WIDTH], which is reshaped to [rows, tokens, HEADS, SIZE] with `shape` = (rows, tokens).

    The result is [rows, tokens, WIDTH].
    """

    def heads(name: str) -> str:
        split = g.op("Reshape", g.op("MatMul", x, g.random(name, WIDTH, WIDTH)), g.constant([*shape, HEADS, SIZE]))
        return g.op("Transpose", split, perm=[0, 2, 1, 3])

    q, k, v = map(heads, ("q", "k", "v"))
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(0.35, "float32"))
    merged = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    return g.op("Reshape", merged, g.constant([0, 0, WIDTH]), name=out)


def _model(g: Graph, result: str, shape: _Shape = ("batch", "seq", WIDTH)) -> onnx.ModelProto:
    g.op("MatMul", result, g.random("head", WIDTH, WIDTH), name="logits")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("hidden", "logits")]
    graph = helper.make_graph(g.nodes, "main_graph", values[:1], values[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def blocks(size: int = 8) -> onnx.ModelProto:
    """Attention within blocks of tokens. The graph accepts any number of blocks."""
    g = Graph()
    return _model(g, g.op("Reshape", _attention(g, "hidden", -1, size), g.op("Shape", "hidden")))


def traced(batch: int = 2, seq: int = 8) -> onnx.ModelProto:
    """Full attention with the sizes of an example. The graph accepts no others."""
    g = Graph()
    return _model(g, _attention(g, "hidden", batch, seq))


def table(rows: int = 16) -> onnx.ModelProto:
    """Attention with a table of `rows` positions that is added to the tokens.

    The graph accepts `rows` tokens, or one token, which is broadcast to all positions. Keys are multiplied by the
    number of tokens.
    """
    g = Graph()
    x = g.op("Add", "hidden", g.random("positions", 1, rows, WIDTH))
    length = g.op("Cast", g.length("hidden", 1), to=TensorProto.FLOAT)

    def heads(name: str) -> str:
        split = g.op("Reshape", g.op("MatMul", x, g.random(name, WIDTH, WIDTH)), g.constant([0, 0, HEADS, SIZE]))
        return g.op("Transpose", split, perm=[0, 2, 1, 3])

    q, k, v = heads("q"), g.op("Mul", heads("k"), length), heads("v")
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(0.05, "float32"))
    merged = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    return _model(g, g.op("Reshape", merged, g.constant([0, 0, WIDTH])))


def windows(side: int = 4) -> onnx.ModelProto:
    """Attention within windows of feature maps [batch, height, width, features]. It accepts any number of windows."""
    g = Graph()
    rows, height, width = (g.length("hidden", axis) for axis in range(3))
    high, wide = (g.op("Div", size, g.constant([side])) for size in (height, width))
    one = g.constant([side])
    parts = g.op("Concat", rows, high, one, wide, one, g.constant([WIDTH]), axis=0)
    x = g.op("Transpose", g.op("Reshape", "hidden", parts), perm=[0, 1, 3, 2, 4, 5])
    x = _attention(g, g.op("Reshape", x, g.constant([-1, side * side, WIDTH])), -1, side * side)
    x = g.op("Reshape", x, g.op("Concat", rows, high, wide, one, one, g.constant([WIDTH]), axis=0))
    x = g.op("Reshape", g.op("Transpose", x, perm=[0, 1, 3, 2, 4, 5]), g.op("Shape", "hidden"))
    return _model(g, x, ("batch", "height", "width", WIDTH))


def traced_map(height: int = 4, width: int = 5) -> onnx.ModelProto:
    """Attention between all places of a feature map, with the sides of an example. The graph accepts no others."""
    g = Graph()
    x = g.op("Reshape", "hidden", g.constant([-1, height, width, WIDTH]))  # Other sides yield another map, or an error.
    x = _attention(g, g.op("Reshape", x, g.constant([0, height * width, WIDTH])), -1, height * width)
    x = g.op("Add", g.op("Reshape", x, g.constant([-1, height, width, WIDTH])), "hidden")
    return _model(g, x, ("batch", "height", "width", WIDTH))


def squares(side: int = 5) -> onnx.ModelProto:
    """Attention within windows of a square map, whose tokens are an axis. It accepts any number of windows per side."""
    g = Graph()
    rows, length = (g.length("hidden", axis) for axis in range(2))
    root = g.op("Sqrt", g.op("Cast", length, to=TensorProto.FLOAT))
    count, one = g.op("Div", g.op("Cast", root, to=TensorProto.INT64), g.constant([side])), g.constant([side])
    parts = g.op("Concat", rows, count, one, count, one, g.constant([WIDTH]), axis=0)
    x = g.op("Transpose", g.op("Reshape", "hidden", parts), perm=[0, 1, 3, 2, 4, 5])
    x = _attention(g, g.op("Reshape", x, g.constant([-1, side * side, WIDTH])), -1, side * side)
    x = g.op("Reshape", x, g.op("Concat", rows, count, count, one, one, g.constant([WIDTH]), axis=0))
    x = g.op("Transpose", x, perm=[0, 1, 3, 2, 4, 5])
    return _model(g, g.op("Reshape", x, g.op("Shape", "hidden")))
