"""Operators that torch's exporter doesn't translate, or translates to others, in files held to torch."""

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


def three(x: Tensor) -> tuple[Tensor, Tensor]:
    """Three numbers for each row, and the one of them that each number belongs to."""
    return x[:, :1].repeat(1, 3), x.abs().long() % 3


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        before, places = three(x)
        return before.scatter_reduce(1, places, x, "mean", include_self=False)


class MeanWithSelf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        before, places = three(x)
        whole = before.long().scatter_reduce(dim=1, index=places, src=x.long(), reduce="mean")
        before.scatter_reduce_(1, places, x, "mean")
        return whole + before


class Most(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        before, places = three(x)
        return before.scatter_reduce(1, places, x, "amax", include_self=False)


class Sparse(nn.Module):
    """As Gemma 3n's activations, of which a constant share is zero."""

    def forward(self, x: Tensor) -> Tensor:
        share = torch.tensor(0.9, dtype=torch.float32)
        return torch.relu(x - torch.distributions.normal.Normal(0, 1).icdf(share))


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] + torch.erfinv(torch.tensor([[-0.5, 0.25, 0.75]]) / 2)


class Changed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        half = torch.tensor([0.25])
        half.mul_(2)
        return x + torch.erfinv(half)


class OfInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(x)


def traced(module: nn.Module) -> torch.export.ExportedProgram:
    moving = dict.fromkeys(range(2), torch.export.Dim.AUTO)
    return torch.export.export(module, (torch.zeros(2, 6),), dynamic_shapes={"x": moving}, strict=False)


@pytest.mark.parametrize("kind", [Marked, Largest, Smallest, Mean, MeanWithSelf, Most, Sparse, Table])
def test_the_numbers_are_those_of_torch(kind: type[nn.Module], tmp_path: Path) -> None:
    module, path = kind(), tmp_path / "model.onnx"
    with exporter.quiet():
        model = exporter.capture(translatable(traced(module)), Functions(23, "native", "portable"))
    ir.save(model, path)
    run = session(path)
    for seed, shape in enumerate(((2, 6), (3, 1), (1, 17))):
        given = np.random.default_rng(seed).integers(-2, 13, shape).astype(np.float32)
        (made,) = run.run(None, {run.get_inputs()[0].name: given})
        np.testing.assert_allclose(made, module(torch.from_numpy(given)).numpy(), rtol=1e-6)


def test_places_of_extremes_are_left() -> None:
    program = translatable(traced(Places()))
    assert any(node.target is torch.ops.aten.cummax.default for node in program.graph.nodes)


@pytest.mark.parametrize("kind", [OfInput, Changed])
def test_functions_of_what_varies_are_left(kind: type[nn.Module]) -> None:
    program = translatable(traced(kind()))
    assert any(node.target is torch.ops.aten.erfinv.default for node in program.graph.nodes)
