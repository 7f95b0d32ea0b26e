"""Outputs with many columns. With many tokens only some columns are compared, and with few tokens all. Faults must
fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from helpers import cli
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from posexport.runtimes import RUNTIMES
from posexport.runtimes.pool import Pool
from posexport.runtimes.tensors import load_arrays
from posexport.runtimes.wide_outputs import COLUMNS, MOST, WIDE, kept_columns, widths, with_few_columns
from posexport.verify.graph.parity import FP64, Expected, compare
from posexport.verify.prepared.check import check_file
from posexport.verify.prepared.data import ARRAYS
from posexport.verify.prepared.make import prepare_file

VOCABULARY, HIDDEN = 9000, 8
SOUND: tuple[str, ...] = ()
"""No faults."""


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(WIDE, 200_000))
def test_kept_columns_are_in_order_and_none_is_there_twice(rows: list[int], width: int) -> None:
    columns = kept_columns(tuple(rows), width)
    assert (columns is None) == (np.prod(rows) * width <= MOST)
    if columns is not None:
        assert len(columns) == COLUMNS
        assert (columns[0], columns[-1]) == (0, width - 1)
        assert (np.diff(columns) > 0).all()
        again = kept_columns(tuple(rows), width)
        assert again is not None
        assert (columns == again).all()


def test_other_rows_keep_other_columns() -> None:
    first, second = kept_columns((1, 300), VOCABULARY), kept_columns((1, 301), VOCABULARY)
    assert first is not None
    assert second is not None
    assert len({*first.tolist()} & {*second.tolist()}) < COLUMNS / 2


def test_only_the_width_that_is_declared_is_cut() -> None:
    assert widths({"logits": (("b", "s", 9000), "fp32"), "x": ((9000,), "fp32"), "y": (("b", "d"), "fp32")}) == {
        "logits": 9000
    }
    arrays = {"logits": np.zeros((300, 9000), np.float32), "other": np.zeros((300, 9001), np.float32)}
    kept = with_few_columns(arrays, {"logits": 9000, "other": 9000})
    assert (kept["logits"].shape, kept["other"].shape) == ((300, COLUMNS), (300, 9001))


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_a_place_is_that_of_the_whole_output(dtype: Any) -> None:
    columns = kept_columns((300,), VOCABULARY)
    assert columns is not None
    exact = np.ones((300, COLUMNS), dtype)
    wrong = exact.copy()
    wrong[7, 500] = 3
    expected = Expected(name="y", exact=exact, own=[exact], select=None, dtype="", tolerance=FP64, columns=columns)
    [found], _ = compare("case", [expected], {"y": wrong})
    assert found.state == "failed"
    assert found.index == (7, int(columns[500]))
    assert f"[7, {columns[500]}]" in str(found.reason)


def head(path: Path, *faults: str) -> Path:
    """A file that computes logits [batch, seq, VOCABULARY]. Faults are in a column or in tokens from 300 on."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((HIDDEN, VOCABULARY)).astype(np.float32)
    if "column" in faults:
        weight[:, 4321] *= 1.1
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["logits"])]
    constants = [numpy_helper.from_array(weight, "weight")]
    if "far tokens" in faults:
        values = {"zero": 0, "one": 1, "edge": 300, "places": [1]}
        constants += [numpy_helper.from_array(np.asarray(value, np.int64), name) for name, value in values.items()]
        constants += [numpy_helper.from_array(np.float32(value), name) for name, value in (("k", 1.1), ("same", 1))]
        nodes[0].output[0] = "right"
        nodes += [
            helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
            helper.make_node("Squeeze", ["length"], ["count"]),
            helper.make_node("Range", ["zero", "count", "one"], ["at"]),
            helper.make_node("Greater", ["at", "edge"], ["is_far"]),
            helper.make_node("Unsqueeze", ["is_far", "places"], ["column"]),
            helper.make_node("Where", ["column", "k", "same"], ["factor"]),
            helper.make_node("Mul", ["right", "factor"], ["logits"]),
        ]
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", HIDDEN])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "seq", VOCABULARY])],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [pytest.param(SOUND, marks=pytest.mark.slow), ("column",), pytest.param(("far tokens",), marks=pytest.mark.slow)],
)
def test_faults_of_a_column_and_of_far_tokens_fail(faults: tuple[str, ...], tmp_path: Path) -> None:
    path, other = head(tmp_path / "head.onnx", *faults), head(tmp_path / "other.onnx")
    done = cli("verify", path, "--against", other, "--runtime", "ort-cpu", "--json")
    [verdict] = json.loads(done.stdout)["verdicts"]
    assert (done.exit_code, verdict["state"]) == ((1, "failed") if faults else (0, "passed")), verdict
    assert any("1,024 of 9,000 columns of 'logits' were compared on" in note for note in verdict["notes"])
    place = verdict["worst"]["index"]
    if "column" in faults:
        assert place[-1] == 4321
    if "far tokens" in faults:
        assert place[-2] > 300


@pytest.mark.slow
def test_a_prepared_file_has_the_same_columns(tmp_path: Path) -> None:
    """A prepared reference has only some columns too, and the check asks the runtime for the same columns."""
    path, missing = head(tmp_path / "head.onnx"), {"ort-cpu": None}
    runtimes = {"ort-cpu": RUNTIMES["ort-cpu"]}
    with Pool(60) as pool:
        prepared = prepare_file(path, pool, most_bytes=2**24)
        arrays = load_arrays(tmp_path / ARRAYS)
        columns = {array.shape[-1] for name, array in arrays.items() if "/exact/" in name}
        assert columns == {COLUMNS, VOCABULARY}
        [verdict] = check_file(prepared, tmp_path, pool, runtimes, missing)
        assert verdict.state == "passed", verdict.reason
        [verdict] = check_file(attrs.evolve(prepared, wide={}), tmp_path, pool, runtimes, missing)
        assert verdict.state == "failed", "the columns are not looked at"
