"""Calculations in lockstep: each weight is made once for all of them, results are the same as alone, and an error ends
all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from posexport.graphs import runner
from posexport.runtimes import lockstep
from posexport.runtimes.base import Arrays, GroupRunner
from posexport.runtimes.lockstep import GetWeight, in_lockstep, make_each


class Weights:
    """Weights by number. `made` lists the weights in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def make(self, key: int) -> Callable[[], torch.Tensor]:
        def make() -> torch.Tensor:
            self.made.append(key)
            return torch.full((1,), float(key))

        return make

    def sum_of(self, keys: list[int]) -> Callable[[GetWeight], float]:
        """A calculation that needs these weights one after the other."""
        return lambda get_weight: sum(float(get_weight(key, self.make(key))) * (at + 1) for at, key in enumerate(keys))


def test_each_weight_is_made_once_for_all() -> None:
    weights = Weights()
    results = dict(in_lockstep([weights.sum_of([3, 1, 2, 3]) for _ in range(5)]))
    assert results == dict.fromkeys(range(5), 3 + 2 * 1 + 3 * 2 + 4 * 3)
    assert weights.made == [3, 1, 2, 3]


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=6))
def test_results_are_those_of_each_alone(orders: list[list[int]]) -> None:
    """Each calculation may need any weights in any order and any number of times."""
    weights = Weights()
    alone = {number: weights.sum_of(keys)(make_each) for number, keys in enumerate(orders)}
    before = len(weights.made)
    assert dict(in_lockstep([weights.sum_of(keys) for keys in orders])) == alone
    assert len(weights.made) - before <= before


def test_one_calculates_at_a_time() -> None:
    running, most = [0], [0]

    def calculate(get_weight: GetWeight) -> None:
        for key in range(20):
            running[0] += 1
            most[0] = max(most[0], running[0])
            running[0] -= 1
            get_weight(key, lambda: torch.zeros(1))

    list(in_lockstep([calculate] * 8))
    assert most == [1]


def test_the_first_error_is_raised_and_ends_all() -> None:
    def fail(get_weight: GetWeight) -> float:
        get_weight(1, lambda: torch.zeros(1))
        raise ValueError("no such weight")

    weights, before = Weights(), threading.active_count()
    with pytest.raises(ValueError, match="no such weight"):
        list(in_lockstep([weights.sum_of([1, 2]), fail, weights.sum_of([1, 2])]))
    assert threading.active_count() == before
    assert 2 not in weights.made


def test_whoever_stops_reading_ends_all() -> None:
    weights, before = Weights(), threading.active_count()
    results = in_lockstep([weights.sum_of([]), weights.sum_of([1, 2])])
    assert next(results) == (0, 0)
    results.close()
    assert (threading.active_count(), weights.made) == (before, [])


def test_freed_memory_goes_back_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back, weight = list[int](), torch.zeros(25)
    monkeypatch.setattr(lockstep, "ROOM", 250)
    monkeypatch.setattr(lockstep, "give_freed_memory_back", lambda: given_back.append(1))
    monkeypatch.setattr(lockstep._Room, "made", 0)
    for _ in range(9):
        make_each(0, lambda: weight)
    assert len(given_back) == 3  # after every three weights of 100 bytes
    list(in_lockstep([lambda get_weight: [get_weight(key, lambda: weight) for key in range(9)]] * 4))
    assert len(given_back) == 7  # three times for the shared weights, and once at the end


WIDTH = 96
"""Features. A weight of 96 x 96 numbers is too large for the evaluator to keep."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A graph with three products. The first and the last use the same large weight."""
    rng = np.random.default_rng(0)
    large = {name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in ("first", "second")}
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second"], ["c"]),
        helper.make_node("MatMul", ["c", "first"], ["y"]),
    ]
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", floats, ["rows", WIDTH])],
        [helper.make_tensor_value_info("y", floats, ["rows", WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in large.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("options", [{}, {"wide": False}, {"last_bits": 1, "wide": False}, {"decisions": True}])
def test_graphs_of_several_inputs(model: Path, options: dict[str, bool | int], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    inputs: list[Arrays] = [{"x": rng.standard_normal((rows, WIDTH)).astype(np.float32)} for rows in (1, 7, 3, 2)]
    graph = runner.load(model, options)
    assert isinstance(graph, GroupRunner)
    alone = [graph.run(arrays)["y"] for arrays in inputs]
    for number, outputs in graph.run_all(inputs):
        assert np.array_equal(outputs["y"], alone[number]), number


def test_graphs_convert_a_large_weight_once_for_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posexport.graphs.kernels import dtypes

    copied, read = dtypes.to_torch, list[str]()

    def counted(stored: onnx.TensorProto, wide: bool, rows: torch.Tensor | None = None) -> torch.Tensor:
        read.append(str(stored.name))
        return copied(stored, wide, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(dtypes, "to_torch", counted)
    inputs: list[Arrays] = [{"x": np.ones((rows, WIDTH), np.float32)} for rows in range(1, 6)]
    graph = runner.load(model, {})
    assert isinstance(graph, GroupRunner)
    assert len([*graph.run_all(inputs)]) == len(inputs)
    assert read == ["first", "second", "first"]


def test_a_wrong_set_of_inputs_is_an_error_of_all(model: Path) -> None:
    graph = runner.load(model, {})
    assert isinstance(graph, GroupRunner)
    with pytest.raises(Exception, match="has shape"):
        list(graph.run_all([{"x": np.ones((2, WIDTH), np.float32)}, {"x": np.ones((2, WIDTH + 1), np.float32)}]))
