"""Searches for attention in graphs with exponentially many paths take time proportional to the number of nodes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attention_graphs as graphs
import onnx_ir as ir
import pytest
from attention_graphs import Writer, attention
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.candidates import may_hold_attention
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.scores import reaches_product
from posexport.graphs.attention.softmaxes import softmax_of
from posexport.graphs.grouped import around_softmaxes
from posexport.graphs.nearest import nearest_first
from posexport.graphs.view import view_of


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def model_of(write: Callable[[Graph], str]) -> ir.Model:
    """A graph from `x` to the value that `write` returns."""
    g = Graph()
    g.op("Identity", write(g), name="y")
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b", 4, 4])] for name in ("x", "y")
    )
    graph = helper.make_graph(g.nodes, "graph", inputs, outputs, g.weights)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


def repeated(g: Graph, kind: str, value: str, steps: int, **attributes: Any) -> str:
    """A chain of operators; each reads the one before it 50 times."""
    for _ in range(steps):
        value = g.op(kind, *[value] * 50, **attributes)
    return value


@pytest.mark.parametrize("ends", ["Relu", "MatMul"])
def test_behind_a_softmax(ends: str) -> None:
    def write(g: Graph) -> str:
        value = repeated(g, "Sum", g.op("Softmax", "x"), 7)
        return g.op(ends, value, *["x"] * (ends == "MatMul"))

    with within(5):
        assert may_hold_attention(model_of(write)) == (ends == "MatMul")


def test_around_a_softmax() -> None:
    def write(g: Graph) -> str:
        scores = repeated(g, "Max", g.op("MatMul", "x", "x", name="before"), 10)
        weights = repeated(g, "Concat", g.op("Softmax", scores), 10, axis=0)
        return g.op("MatMul", weights, "x", name="behind")

    with within(5):
        ((_, before, behind),) = around_softmaxes(model_of(write).graph)
    assert [[node.outputs[0].name for node in nodes] for nodes in (before, behind)] == [["before"], ["behind"]]


@pytest.mark.parametrize("steps", [11, 12])
def test_above_scores(steps: int) -> None:
    """The search goes up to 24 operators upwards."""

    def write(g: Graph) -> str:
        value = g.op("MatMul", "x", "x")
        for _ in range(steps):
            value = g.op("Max", *[g.op("Identity", value) for _ in range(20)])
        return value

    model = model_of(write)
    with within(5):
        (value,) = (node.inputs[0] for node in model.graph if node.outputs[0].name == "y")
        assert value is not None
        assert reaches_product(Dataflow(model, set(), {"x"}), value) == (steps == 11)


def test_above_a_division_by_sums() -> None:
    def write(g: Graph) -> str:
        powers = g.op("Exp", "x")
        sums = g.op("ReduceSum", powers, g.constant([-1]))
        return g.op("Div", powers, repeated(g, "Max", sums, 5), name="weights")

    model = model_of(write)
    with within(5):
        found = [softmax_of(node) for node in model.graph if node.outputs[0].name == "weights"]
    assert [one is not None and one.doubt is not None for one in found] == [True]


def seen_by_many(g: Writer, scores: str) -> str:
    """A mask from a chain of nodes that each read the previous one twice."""
    seen = g.op("GreaterOrEqual", graphs.distances(g, scores), g.const(0))
    for _ in range(40):
        seen = g.op("And", seen, seen)
    number = g.op("Cast", seen, to=TensorProto.FLOAT)
    hidden = g.op("Mul", g.op("Sub", g.floats(1.0), number), g.floats(-1e9))
    return g.op("Add", g.op("Mul", scores, number), hidden)


def filled_by_many(g: Writer, scores: str) -> str:
    """A uniform fill from a chain of operators that read it many times."""
    fill = g.op("Expand", g.floats(-1e30), g.op("Shape", scores))
    for _ in range(6):
        fill = g.op("Max", *[fill] * 40)
    return g.op("Where", g.op("GreaterOrEqual", graphs.distances(g, scores), g.const(0)), scores, fill)


@pytest.mark.parametrize("add", [seen_by_many, filled_by_many])
def test_masks(add: graphs.Add) -> None:
    with within(20):
        (found,) = view_of(ir.from_proto(attention(add=[add]))).attentions
    assert isinstance(found, Attention)


def test_each_thing_is_reached_once_by_its_shortest_way() -> None:
    onward = {"a": "bc", "b": "dd", "c": "bde", "d": "a", "e": "f"}
    assert "".join(nearest_first("a", lambda one: onward.get(one, ""), 3)) == "abcde"
    assert "".join(nearest_first("a", lambda one: onward.get(one, ""), 1)) == "a"
