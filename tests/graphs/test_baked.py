"""Sizes that a graph takes: one alone is fixed, several stay sizes that vary."""

from __future__ import annotations

from collections.abc import Callable

import baked_graphs as graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from posexport.graphs.baked import settled_roles
from posexport.graphs.draw import draw_inputs, probe_inputs
from posexport.graphs.roles import Role, roles_of
from posexport.graphs.view import view_of


def settled(model: onnx.ModelProto) -> Role:
    """The role of the only input."""
    graph = ir.from_proto(model)
    return settled_roles(graph, roles_of(graph), 0)["hidden"]


def test_a_graph_that_takes_one_size_alone_is_of_that_size() -> None:
    role = settled(graphs.traced(2, 8))
    assert role.shape == (2, 8, graphs.WIDTH) and role.taken == ()


@pytest.mark.parametrize("size", [8, 14])
def test_a_graph_that_takes_multiples_is_of_no_fixed_size(size: int) -> None:
    role = settled(graphs.blocks(size))
    assert role.shape == ("batch", "seq", graphs.WIDTH)
    sizes = dict(role.taken)["seq"]
    assert {size, 2 * size, 3 * size} <= set(sizes) and sizes[-1] >= 300
    assert not any(one % size for one in sizes)


def test_a_size_that_makes_other_outputs_isnt_drawn_but_nothing_is_fixed() -> None:
    role = settled(graphs.table(16))
    assert role.shape == ("batch", "seq", graphs.WIDTH) and dict(role.taken) == {"seq": (16,)}


def test_feature_maps_of_whole_windows_are_found() -> None:
    axes = dict(settled(graphs.windows(7)).taken)
    assert len(axes) == 2 and all(sizes[:2] == (7, 14) for sizes in axes.values())


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
