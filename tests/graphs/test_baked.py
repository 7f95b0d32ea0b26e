"""Sizes that a graph accepts: a single size is fixed, and several sizes stay variable."""

from __future__ import annotations

from collections.abc import Callable

import baked_graphs as graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.graphs.draw import PROBED, draw_inputs, probe_inputs
from posexport.graphs.roles import Role, roles_of
from posexport.graphs.settled import settled_roles
from posexport.graphs.view import view_of


def settled(model: onnx.ModelProto) -> Role:
    """The role of the only input."""
    graph = ir.from_proto(model)
    return settled_roles(graph, roles_of(graph), 0)["hidden"]


@pytest.mark.parametrize(("batch", "seq"), [(2, 8), (PROBED["batch"], PROBED["seq"]), (2, PROBED["seq"])])
def test_a_graph_that_takes_one_size_alone_is_of_that_size(batch: int, seq: int) -> None:
    """Even if it is the size with which every graph is probed first."""
    role = settled(graphs.traced(batch, seq))
    assert role.shape == (batch, seq, graphs.WIDTH) and role.taken == ()


@pytest.mark.parametrize("size", [PROBED["seq"], 8, 14])
def test_a_graph_that_takes_multiples_is_of_no_fixed_size(size: int) -> None:
    role = settled(graphs.blocks(size))
    assert role.shape == ("batch", "seq", graphs.WIDTH)
    sizes = dict(role.taken)["seq"]
    assert {size, 2 * size, 3 * size} <= set(sizes) and sizes[-1] >= 300
    assert not any(one % size for one in sizes)


def test_a_size_that_makes_other_outputs_isnt_drawn_but_nothing_is_fixed() -> None:
    role = settled(graphs.table(16))
    assert role.shape == ("batch", "seq", graphs.WIDTH) and dict(role.taken) == {"seq": (16,)}


@pytest.mark.slow
def test_feature_maps_of_whole_windows_are_found() -> None:
    axes = dict(settled(graphs.windows(7)).taken)
    assert len(axes) == 2 and all(sizes[:2] == (7, 14) for sizes in axes.values())


def test_a_feature_map_of_two_different_sides_is_found() -> None:
    assert settled(graphs.traced_map(4, 5)).shape == ("batch", 4, 5, graphs.WIDTH)


@pytest.mark.parametrize(("asked", "drawn"), [(1, 8), (8, 8), (9, 16), (20, 24), (25, 304), (1000, 304)])
def test_sizes_that_were_taken_are_drawn(asked: int, drawn: int) -> None:
    roles = {"hidden": settled(graphs.blocks(8))}
    assert draw_inputs(roles, {"seq": asked}, np.random.default_rng(0)).arrays["hidden"].shape[1] == drawn


@pytest.mark.parametrize(("made", "tokens"), [(graphs.blocks, 16), (graphs.table, 16), (graphs.traced, 8)])
def test_a_graph_is_probed_on_several_blocks(made: Callable[[], onnx.ModelProto], tokens: int) -> None:
    assert probe_inputs({"hidden": settled(made())}, 0).arrays["hidden"].shape[1] == tokens


def test_the_length_of_rows_isnt_that_of_a_block() -> None:
    view = view_of(ir.from_proto(graphs.blocks(8)))
    value = next(one for one in view.model.graph.inputs if one.name == "hidden")
    assert not view.probe.shapes.of(value)[1].is_fixed


def dimensions(model: onnx.ModelProto) -> list[bool]:
    """Whether each dimension of the only input has the same size for all inputs."""
    view = view_of(ir.from_proto(model))
    return [size.is_fixed for size in view.probe.shapes.of(view.model.graph.inputs[0])]


def test_a_size_is_fixed_only_if_the_graph_says_so() -> None:
    """Squares of 5 x 5 tokens: of the sizes that are tried, only 25 works, but 100 tokens would work too."""
    assert settled(graphs.squares(5)).shape == ("batch", 25, graphs.WIDTH)
    assert dimensions(graphs.squares(5)) == [False, False, True]


@pytest.mark.parametrize("says", ["Reshape", "MatMul", "Add", "a part of a Reshape"])
def test_what_says_that_a_size_is_fixed(says: str) -> None:
    """The number of rows varies, and the graph accepts only 8 tokens."""
    g = Graph()
    shape: list[int | str] = ["batch", "seq", graphs.WIDTH]
    x, result = "hidden", shape
    g.constant([8])  # The tried sizes are those in the graph.
    if says == "Reshape":  # only the first row
        g.op("Reshape", g.op("Slice", x, *map(g.constant, ([0], [1], [0]))), g.constant([8, graphs.WIDTH]), name="y")
        result = [8, graphs.WIDTH]
    elif says == "MatMul":
        g.op("MatMul", g.random("mix", 3, 8), x, name="y")
        result = ["batch", 3, graphs.WIDTH]
    elif says == "Add":  # Without the Concat, one token would be broadcast.
        wide = g.op("Concat", x, x, axis=1)
        g.op("Add", wide, g.random("table", 1, 16, graphs.WIDTH), name="y")
        result = ["batch", 16, graphs.WIDTH]
    else:  # Each of the 32 parts is a quarter of a token.
        parts = g.op("Reshape", x, g.op("Concat", g.length(x, 0), g.constant([32, -1]), axis=0))
        g.op("MatMul", parts, g.random("mix", 4, 3), name="y")
        result = ["batch", 32, 3]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("hidden", shape), ("y", result))]
    graph = helper.make_graph(g.nodes, "main_graph", values[:1], values[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert dimensions(model) == [False, True, True]


def test_outputs_say_which_sizes_are_fixed() -> None:
    """A Reshape to 2 x 8 tokens also accepts 1 x 16, unless inputs and outputs have the same dimension names."""
    assert dimensions(graphs.traced(2, 8)) == [True, True, True]
    model = graphs.traced(2, 8)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "tokens"
    assert dimensions(model) == [False, False, True]
