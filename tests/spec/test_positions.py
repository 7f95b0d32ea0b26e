"""Positions of grids, and the command that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import cli, refused, small_spec
from hypothesis import given
from hypothesis import strategies as st

from posexport.errors import RequestError
from posexport.spec.contract import graph_inputs
from posexport.spec.positions import grid_positions
from posexport.spec.spec import Spec


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), frames=st.none() | st.integers(1, 4), prefix=st.integers(0, 3)
)
def test_every_cell_once_in_order(rows: int, columns: int, frames: int | None, prefix: int) -> None:
    made = grid_positions(rows, columns, frames, prefix_tokens=prefix, batch=2)
    wanted = [(0,) * (2 if frames is None else 3)] * prefix
    for t in range(frames or 1):
        wanted += [(x, y) if frames is None else (x, y, t) for y in range(rows) for x in range(columns)]  # type: ignore[misc]
    assert made.dtype == np.int64
    assert [tuple(row) for row in made[0]] == wanted
    assert (made[0] == made[1]).all()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"frames": 0}, "frames is 0"),
        ({"prefix_tokens": -1}, "prefix_tokens is -1"),
        ({"rows": 10**5, "columns": 10**5}, "limit is 16777216"),
    ],
)
def test_sizes_that_are_none(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        grid_positions(**{"rows": 2, "columns": 2, **sizes})


def test_the_file_fits_the_graph(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    result = cli("positions", "--grid", "3x5", "--frames", "2", "--prefix-tokens", "1", "-o", path, "--json")
    assert json.loads(result.stdout) == {"file": str(path), "position_ids": {"shape": [1, 31, 3], "dtype": "int64"}}
    with np.load(path) as file:
        made = file["position_ids"]
    assert (made == grid_positions(3, 5, 2, prefix_tokens=1)).all()
    spec: Spec = small_spec("rope3d", prefix_tokens=1)
    assert graph_inputs(spec)["position_ids"] == (("batch", "seq", 3), "int64")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--grid", "3"], "ROWSxCOLUMNS"),
        (["--grid", "3x-1"], "ROWSxCOLUMNS"),
        (["--grid", "0x4"], "rows is 0"),
        (["--grid", "3x4", "--frames", "0"], "frames is '0'"),
        (["--grid", "3x4", "-o", "p.txt"], "must end in .npz"),
        (["--grid", "3x4", "-o", "missing/p.npz"], "missing"),
    ],
)
def test_bad_requests(options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(cli("positions", *options), said)
    assert not list(tmp_path.iterdir())
