"""Graphs that accept only some sizes: their rewritten files give the same results for each of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import baked_graphs as graphs
import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("made", "shapes"),
    [
        (partial(graphs.blocks, 8), [(2, 8), (2, 16), (1, 64)]),
        (partial(graphs.blocks, 16), [(2, 16), (3, 48)]),
        (partial(graphs.traced, 2, 8), [(2, 8)]),
        (partial(graphs.table, 16), [(2, 16), (2, 1)]),
        (partial(graphs.squares, 5), [(1, 25), (2, 100), (1, 225)]),
        (partial(graphs.windows, 4), [(1, 4, 4), (2, 8, 8), (1, 20, 24)]),
    ],
)
@pytest.mark.parametrize("form", ["native", "contrib"])
def test_new_files_give_the_same_on_all_sizes(
    tmp_path: Path, made: Callable[[], onnx.ModelProto], shapes: list[tuple[int, ...]], form: str
) -> None:
    path, out = helpers.saved(tmp_path, made()), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form)
    assert [one["state"] for one in result.attentions] == ["rewritten"]
    for shape in shapes:
        feeds = {"hidden": np.random.default_rng(1).standard_normal((*shape, graphs.WIDTH)).astype(np.float32)}
        have, want = helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0]
        assert have.shape == want.shape and np.isfinite(want).all()
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
