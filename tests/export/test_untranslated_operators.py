"""Operators that torch's exporter doesn't translate, in files held to torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from tiny_models import session
from torch import Tensor, nn

from posexport.export import exporter
from posexport.export.traced import translatable
from posexport.graphs.function_bodies import Functions


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marks", torch.tensor([[3, 5], [7, 11]]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.isin(x.long(), self.marks) | ~torch.isin(x.long(), self.marks, invert=True)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cummax(x, dim=1)[0]


class Smallest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cummin(x.long(), dim=0)[0]


class Places(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cummax(x, dim=1)[1]


def traced(module: nn.Module) -> torch.export.ExportedProgram:
    moving = dict.fromkeys(range(2), torch.export.Dim.AUTO)
    return torch.export.export(module, (torch.zeros(2, 6),), dynamic_shapes={"x": moving}, strict=False)


@pytest.mark.parametrize("kind", [Marked, Largest, Smallest])
def test_the_numbers_are_those_of_torch(kind: type[nn.Module], tmp_path: Path) -> None:
    module, path = kind(), tmp_path / "model.onnx"
    with exporter.quiet():
        model = exporter.capture(translatable(traced(module)), Functions(23, "native", "portable"))
    ir.save(model, path)
    run = session(path)
    for seed, shape in enumerate(((2, 6), (3, 1), (1, 17))):
        given = np.random.default_rng(seed).integers(-2, 13, shape).astype(np.float32)
        (made,) = run.run(None, {run.get_inputs()[0].name: given})
        assert np.array_equal(made, module(torch.from_numpy(given)).numpy())


def test_places_of_extremes_are_left() -> None:
    program = translatable(traced(Places()))
    assert any(node.target is torch.ops.aten.cummax.default for node in program.graph.nodes)
