"""Roundings that are part of a model: float64 keeps them if only integers and constants are rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from posexport.graphs import runner
from posexport.runtimes import torch_module
from posexport.runtimes.base import Arrays

HEAD = '<ir_version: 10, opset_import: ["": 21]> g'
PLAIN = "p = Cast<to = 1>(ids)\n s = Mul(p, slope)\n r = Cast<to = 16>(s)\n t = Cast<to = 1>(r)\n"
IDS = np.arange(1, 600, 7, dtype=np.int64)
X = np.linspace(0.1, 3.0, len(IDS), dtype=np.float32)
SLOPE = np.float32(0.3)
ROUNDED = 2.0**-8
"""The largest relative error of a rounding to bfloat16."""


def evaluated(folder: Path, nodes: str, inputs: str, arrays: Arrays, weights: str = "float slope = {0.3}") -> Arrays:
    text = f"{HEAD} ({inputs}) => (float[n] y) <{weights}> {{ {nodes} }}"
    path = folder / "model.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return runner.load(path, {}).run(arrays)


def moved(value: np.ndarray, exact: np.ndarray) -> bool:
    """Whether the error of a value is that of a rounding to bfloat16; asserts that it is not larger."""
    off = np.abs(value - exact) / np.abs(exact)
    assert off.max() < 2.1 * ROUNDED  # Both a factor and the product may be rounded.
    return bool(off.max() > ROUNDED / 8)


def test_what_follows_from_positions_is_rounded(tmp_path: Path) -> None:
    made = evaluated(tmp_path, f"{PLAIN} y = Add(t, x)", "int64[n] ids, float[n] x", {"ids": IDS, "x": X})
    assert made["y"].dtype == np.float64
    assert moved(made["y"] - X.astype(np.float64), IDS * float(SLOPE))


def test_so_is_what_is_computed_in_such_a_dtype(tmp_path: Path) -> None:
    nodes = "a = Cast<to = 16>(ids)\n b = Cast<to = 16>(slope)\n s = Mul(a, b)\n t = Cast<to = 1>(s)\n y = Add(t, x)"
    made = evaluated(tmp_path, nodes, "int64[n] ids, float[n] x", {"ids": IDS, "x": X})
    expected = torch.from_numpy(IDS).bfloat16() * torch.tensor(SLOPE).bfloat16()
    np.testing.assert_allclose(made["y"] - X.astype(np.float64), expected.double().numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("nodes", "inputs", "weights"),
    [
        ("r = Cast<to = 16>(x)\n t = Cast<to = 1>(r)\n y = Mul(t, slope)", "float[n] x", "float slope = {0.3}"),
        (
            "a = Gather<axis = 0>(w, zero)\n r = Cast<to = 16>(a)\n t = Cast<to = 1>(r)\n y = Mul(x, t)",
            "float[n] x",
            "float[2, 2] w = {0.3, 0.3, 0.3, 0.3}, int64 zero = {0}",
        ),
    ],
)
def test_what_follows_from_inputs_or_matrices_is_not(nodes: str, inputs: str, weights: str, tmp_path: Path) -> None:
    x = X[:2]
    made = evaluated(tmp_path, nodes, inputs, {"x": x}, weights)
    np.testing.assert_allclose(made["y"], x.astype(np.float64) * float(SLOPE), rtol=1e-12)


def test_in_a_file_of_bfloat16_it_is_how_numbers_are_kept(tmp_path: Path) -> None:
    weights = "float slope = {0.3}, bfloat16[2, 2] w = {1, 1, 1, 1}"
    made = evaluated(tmp_path, f"{PLAIN} y = Add(t, x)", "int64[n] ids, float[n] x", {"ids": IDS, "x": X}, weights)
    np.testing.assert_allclose(made["y"], IDS * float(SLOPE) + X.astype(np.float64), rtol=1e-12)


MODULE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 0.3))

    def forward(self, ids, x):
        slope = torch.full((), 0.3)
        rounded = {rounded}
        return rounded.to(x.dtype) + x
"""


@pytest.mark.parametrize(
    ("rounded", "kept"),
    [
        ("(slope * ids).bfloat16()", True),
        ("slope.bfloat16() * ids", True),
        ("(self.w[0] * ids).bfloat16()", False),
        ("(slope * ids).add_(0 * x).bfloat16()", False),
    ],
)
def test_a_module_rounds_the_same(rounded: str, kept: bool, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE.format(rounded=rounded))
    text = f"{HEAD} (int64[n] ids, float[n] x) => (float[n] y) {{ y = Identity(x) }}"
    path = tmp_path / "graph.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    torch_module._kept.clear()
    made = torch_module.load(path, {"module": f"{tmp_path / 'model.py'}:Model"}).run({"ids": IDS, "x": X})
    assert moved(made["y"] - X.astype(np.float64), IDS * float(SLOPE)) == kept
