"""Exact angles in graphs whose angles depend on lengths: a length may decide their number, but not their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import length_graphs as graphs
import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
from exact_graphs import changed, table
from onnx import numpy_helper

Array = np.ndarray[Any, Any]

Made = Callable[[], onnx.ModelProto]


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


def angles(path: Path, out: Path) -> tuple[str, str | None]:
    """The state of the angles after a rewrite, and the code of the reason."""
    found: dict[str, Any] = helpers.rewritten(path, out, form="native", angles="exact").attentions[0]["angles"]
    return found["state"], found["reason"] and found["reason"]["code"]


def is_same(path: Path, out: Path, tokens: int, rows: int = 2) -> bool:
    """Whether both files give the same results for rows of `tokens` tokens."""
    feeds = helpers.feeds(rows, tokens, 0)
    have, want = helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0]
    assert have.shape == want.shape and np.isfinite(want).all()
    return bool(np.abs(have - want).max() <= 1e-3 * np.abs(want).max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("made", "code"),
    [
        (graphs.chosen_frequencies, "angles-by-length"),
        (graphs.scaled_cosines, "angles-by-length"),
        (graphs.taken_variant, "angles-by-length"),
        (graphs.interpolated, "angles-by-length"),
        (graphs.divided_by_a_shape, "angles-by-length"),
        (partial(graphs.divided_by_a_sum, "Einsum"), "angles-by-length"),
        (partial(graphs.divided_by_a_sum, "MatMul"), "angles-by-length"),
    ],
)
def test_angles_that_lengths_decide_stay(tmp_path: Path, made: Made, code: str) -> None:
    path, out = helpers.saved(tmp_path, made()), tmp_path / "out.onnx"
    assert angles(path, out) == ("parity", code)
    assert is_same(path, out, 6) and is_same(path, out, graphs.LONG + 9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "made",
    [
        graphs.faster_rows,
        graphs.faster_tokens,
        *(partial(graphs.counted_below, op) for op in ("ReduceSum", "CumSum", "MatMul")),
    ],
)
def test_angles_that_know_more_than_the_position_of_their_token_stay(tmp_path: Path, made: Made) -> None:
    path, out = helpers.saved(tmp_path, made()), tmp_path / "out.onnx"
    assert angles(path, out) == ("parity", "angles-positions")
    assert is_same(path, out, 6) and is_same(path, out, graphs.LONG + 9) and is_same(path, out, 5, 9)


@pytest.mark.slow
def test_tokens_in_another_order_keep_their_angles(tmp_path: Path) -> None:
    """Short rows are in order. The exact angles take the reordered positions."""
    path, out = helpers.saved(tmp_path, graphs.turned_round()), tmp_path / "out.onnx"
    assert angles(path, out)[0] == "exact"
    assert is_same(path, out, 6) and is_same(path, out, graphs.LONG + 9)


@pytest.mark.slow
def test_positions_that_lengths_decide_are_positions(tmp_path: Path) -> None:
    path, out = helpers.saved(tmp_path, graphs.doubled_positions()), tmp_path / "out.onnx"
    assert angles(path, out) == ("exact", None)
    assert is_same(path, out, 6) and is_same(path, out, graphs.LONG + 9)


@pytest.mark.slow
def test_a_table_is_compared_row_by_row(tmp_path: Path) -> None:
    """One row of the table is changed, at a position that is not drawn."""
    model = table(3000)
    array = next(numpy_helper.to_array(one).copy() for one in model.graph.initializer if one.name == "Cos_table")
    array[1777] += 0.01
    path, out = helpers.saved(tmp_path, changed("Cos_table", array, model)), tmp_path / "out.onnx"
    assert angles(path, out) == ("parity", "angles-differ")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("edited", "expected"), [(None, ("exact", None)), (450, ("parity", "angles-differ"))])
@pytest.mark.parametrize("made", [partial(graphs.cut_table, 600), graphs.made_table])
def test_a_table_is_compared_behind_its_cut_too(
    tmp_path: Path, made: Callable[[int | None], onnx.ModelProto], edited: int | None, expected: Any
) -> None:
    path, out = helpers.saved(tmp_path, made(edited)), tmp_path / "out.onnx"
    assert angles(path, out) == expected
    assert is_same(path, out, 500)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
def test_one_row_of_positions_for_all_rows(tmp_path: Path, spread: bool) -> None:
    path, out, again = (
        helpers.saved(tmp_path, graphs.counted(spread=spread)),
        *map(tmp_path.joinpath, ("a.onnx", "b.onnx")),
    )
    assert angles(path, out) == ("exact", None)
    assert angles(out, again) == ("exact", None) and again.read_bytes() == out.read_bytes()
    feeds = {name: array for name, array in helpers.feeds(3, 7, 0).items() if name in ("input_ids", "attention_mask")}
    np.testing.assert_allclose(helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0], atol=1e-5)


def test_angles_that_were_written_for_each_row_become_exact(tmp_path: Path) -> None:
    """The form native repeats the cosines and sines for each row."""
    path, native, out = (
        helpers.saved(tmp_path, graphs.counted(spread=False)),
        *map(tmp_path.joinpath, ("a.onnx", "b.onnx")),
    )
    helpers.rewritten(path, native, form="native")
    assert angles(native, out) == ("exact", None)
