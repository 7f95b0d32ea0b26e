"""Small graphs with one attention, for tests of the description of attention. This file does not import posexport.

Queries, keys and values are projections of `hidden_states` [batch, seq, HEADS * SIZE]. Frequencies and biases are
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE = 4, 16

Array = np.ndarray[Any, Any]


class Writer:
    """Builds a graph in float32 or in half precision."""

    def __init__(self, half: bool = False) -> None:
        self.dtype, self.type = (np.float16, TensorProto.FLOAT16) if half else (np.float32, TensorProto.FLOAT)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node."""
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """A constant."""
        name = f"const_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def floats(self, value: Any) -> str:
        """A constant of the graph's dtype."""
        return self.const(value, self.dtype)

    def input(self, name: str, kind: int, *shape: str | int) -> str:
        """An input of the graph."""
        if name not in {value.name for value in self.inputs}:
            self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def length(self, value: str, axis: int) -> str:
        """The length of an axis, a scalar."""
        return self.op("Squeeze", self.op("Shape", value, start=axis, end=axis + 1), self.const([0]))


Rotate = Callable[[Writer, str, bool], str]
"""(graph, heads [batch, HEADS, seq, SIZE], whether they are queries) to the rotated heads."""

Add = Callable[[Writer, str], str]
"""(graph, scores [batch, HEADS, seq, keys]) to scores with something added."""


def attention(
    *,
    rotate: Rotate | None = None,
    add: Sequence[Add] = (),
    cached: bool = False,
    norm: bool = False,
    softcap: float = 0.0,
    fixed: tuple[int, int] | None = None,
    key_heads: int = HEADS,
    half: bool = False,
) -> onnx.ModelProto:
    """The graph of one attention; `fixed` are the sizes of batch and seq if they are not dynamic."""
    g, rng = Writer(half), np.random.default_rng(0)
    batch, seq = fixed or ("batch", "seq")
    x = g.input("hidden_states", g.type, batch, seq, HEADS * SIZE)
    sides = []
    for number, heads in enumerate((HEADS, key_heads, key_heads)):
        weight = g.floats(rng.standard_normal((HEADS * SIZE, heads * SIZE)) / 8)
        split = g.op("Reshape", g.op("MatMul", x, weight), g.const([0, 0, heads, SIZE]))
        if norm and number < 2:
            mean = g.op("ReduceMean", g.op("Pow", split, g.floats(2.0)), g.const([-1]), keepdims=1)
            root = g.op("Sqrt", g.op("Add", mean, g.floats(1e-6)))
            split = g.op("Mul", g.op("Div", split, root), g.floats(rng.standard_normal(SIZE)))
        turned = g.op("Transpose", split, perm=[0, 2, 1, 3])
        sides.append(turned if rotate is None or number == 2 else rotate(g, turned, number == 0))
    q, k, v = sides
    if cached:
        k, v = (
            g.op("Concat", g.input(f"past_{name}", g.type, batch, key_heads, "past", SIZE), new, axis=2)
            for name, new in (("key", k), ("value", v))
        )
        for name, value in (("key", k), ("value", v)):
            g.nodes.append(helper.make_node("Identity", [value], [f"present_{name}"]))
            g.outputs.append(helper.make_tensor_value_info(f"present_{name}", g.type, (batch, key_heads, "keys", SIZE)))
    if key_heads != HEADS:
        k, v = (repeated(g, one, HEADS // key_heads) for one in (k, v))
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(SIZE**-0.5))
    if softcap:
        scores = g.op("Mul", g.op("Tanh", g.op("Div", scores, g.floats(softcap))), g.floats(softcap))
    for one in add:
        scores = one(g, scores)
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, HEADS * SIZE])], ["output"], name="node_output"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, (batch, seq, HEADS * SIZE)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def repeated(g: Writer, heads: str, times: int) -> str:
    """Repeats each head `times` times, one after the other."""
    batch, tokens = (g.op("Shape", heads, start=axis, end=axis + 1) for axis in (0, 2))
    shape = g.op("Concat", batch, g.const([HEADS // times, times]), tokens, g.const([SIZE]), axis=0)
    wide = g.op("Expand", g.op("Unsqueeze", heads, g.const([2])), shape)
    return g.op("Reshape", wide, g.op("Concat", batch, g.const([HEADS]), tokens, g.const([SIZE]), axis=0))


def rotation(
    frequencies: Array,
    *,
    interleaved: bool = False,
    amplitude: float = 1.0,
    keys: Array | None = None,
    table: int = 0,
    power: float = 1.0,
    places: bool = False,
) -> Rotate:
    """A rotation with frequencies [P] or [axes, P].

    The positions are an input. With `places`, the graph counts them instead. `keys` are the frequencies of the keys if
    they differ. With `table`, a table of so many rows holds the cosines and sines; row i is for position i ** `power`.
    """

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        own = frequencies if queries or keys is None else keys
        cos, sin = _cos_sin(g, heads, own, amplitude, np.arange(table) ** power, places)
        pairs = own.shape[-1]
        ends = g.const([0]), g.const([2 * pairs]), g.const([2 * SIZE]), g.const([-1])
        turned = g.op("Slice", heads, ends[0], ends[1], ends[3])
        rest = g.op("Slice", heads, ends[1], ends[2], ends[3])
        if interleaved:
            split = g.op("Reshape", turned, g.const([0, 0, 0, pairs, 2]))
            a, b = (g.op("Gather", split, g.const(index), axis=-1) for index in (0, 1))
        else:
            half = g.const([pairs])
            a = g.op("Slice", turned, ends[0], half, ends[3])
            b = g.op("Slice", turned, half, ends[1], ends[3])
        first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
        second = g.op("Add", g.op("Mul", a, sin), g.op("Mul", b, cos))
        if interleaved:
            last = g.const([-1])
            both = g.op("Concat", g.op("Unsqueeze", first, last), g.op("Unsqueeze", second, last), axis=-1)
            whole = g.op("Reshape", both, g.const([0, 0, 0, 2 * pairs]))
        else:
            whole = g.op("Concat", first, second, axis=-1)
        return whole if 2 * pairs == SIZE else g.op("Concat", whole, rest, axis=-1)

    return rotate


def _cos_sin(
    g: Writer, heads: str, frequencies: Array, amplitude: float, table: Array, places: bool
) -> tuple[str, str]:
    """Cosines and sines [batch or 1, 1, seq, P]."""
    axes = frequencies.shape[0] if frequencies.ndim == 2 else 0
    if places:
        counted = g.op("Range", g.const(0), g.length(heads, 2), g.const(1))
        positions = g.op("Unsqueeze", counted, g.const([0]))
    else:
        shape: tuple[str | int, ...] = ("batch", "seq", axes) if axes else ("batch", "seq")
        positions = g.input("position_ids", TensorProto.INT64, *shape)
    found = []
    for name, function in (("Cos", np.cos), ("Sin", np.sin)):
        if len(table):
            rows = function(table[:, None] * frequencies) * amplitude
            value = g.op("Gather", g.floats(rows), positions)
        else:
            wide = g.op("Unsqueeze", g.op("Cast", positions, to=TensorProto.FLOAT), g.const([-1]))
            angles = g.op("Mul", wide, g.floats(frequencies))
            if axes:
                angles = g.op("ReduceSum", angles, g.const([-2]), keepdims=0)
            value = g.op("Mul", g.op(name, angles), g.floats(amplitude))
        found.append(g.op("Unsqueeze", value, g.const([1])))
    return found[0], found[1]


def distances(g: Writer, scores: str) -> str:
    """Query index minus key index, [seq, keys]; the last query has the index of the last key."""
    seq, keys = g.length(scores, 2), g.length(scores, 3)
    first = g.op("Sub", keys, seq)
    q = g.op("Unsqueeze", g.op("Range", first, keys, g.const(1)), g.const([1]))
    k = g.op("Unsqueeze", g.op("Range", g.const(0), keys, g.const(1)), g.const([0]))
    return g.op("Sub", q, k)


def visible(*, behind: int | None = None, ahead: int | None = 0) -> Add:
    """A mask that hides keys `behind` or more positions before a query and keys more than `ahead` positions after it.

    None means no limit.
    """

    def add(g: Writer, scores: str) -> str:
        distance = distances(g, scores)
        seen = g.op("GreaterOrEqual", distance, g.const(-(10**6) if ahead is None else -ahead))
        if behind is not None:
            seen = g.op("And", seen, g.op("Less", distance, g.const(behind)))
        return g.op("Where", seen, scores, g.floats(-np.inf))

    return add


def chunks(size: int) -> Add:
    """A causal mask that also hides keys of other chunks; a chunk has `size` tokens."""

    def add(g: Writer, scores: str) -> str:
        distance, keys = distances(g, scores), g.length(scores, 3)
        place = g.op("Unsqueeze", g.op("Range", g.const(0), keys, g.const(1)), g.const([0]))
        chunk = g.op("Div", place, g.const(size))
        own = g.op("Div", g.op("Add", distance, place), g.const(size))
        seen = g.op("And", g.op("Equal", own, chunk), g.op("GreaterOrEqual", distance, g.const(0)))
        return g.op("Where", seen, scores, g.floats(-np.inf))

    return add


def padding(hidden: float = float(np.finfo(np.float32).min)) -> Add:
    """A mask that hides keys by an input `attention_mask` [batch, total]: adds `hidden` where it is 0."""

    def add(g: Writer, scores: str) -> str:
        mask = g.input("attention_mask", TensorProto.INT64, "batch", "total")
        wide = g.op("Unsqueeze", g.op("Cast", mask, to=g.type), g.const([1, 2]))
        return g.op("Add", scores, g.op("Mul", g.op("Sub", g.floats(1.0), wide), g.floats(hidden)))

    return add


def by_distance(table: Array, reach: int) -> Add:
    """A bias from a table [heads, 2 * reach + 1] by distance, from -reach (key ahead) to reach."""

    def add(g: Writer, scores: str) -> str:
        index = g.op("Add", distances(g, scores), g.const(reach))
        bias = g.op("Gather", g.floats(table.T), index)
        return g.op("Add", scores, g.op("Unsqueeze", g.op("Transpose", bias, perm=[2, 0, 1]), g.const([0])))

    return add


def constant_bias(bias: Array) -> Add:
    """A bias [heads, seq, seq]."""
    return lambda g, scores: g.op("Add", scores, g.op("Unsqueeze", g.floats(bias), g.const([0])))
