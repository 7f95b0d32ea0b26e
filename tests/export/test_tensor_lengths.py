"""`len` of a tensor in a traced module is a size that varies."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from posexport.export.tensor_lengths import traced_lengths


class Rows(nn.Module):
    """Repeats a vector for each row; it counts the rows by `len` and also uses lengths of lists."""

    def forward(self, x: Tensor) -> Tensor:
        rows, sizes = len(x), [1, 2, 3]
        return x + torch.arange(3).expand(rows, len(sizes))


def exported_rows() -> object:
    shapes = {"x": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(Rows(), (torch.ones(2, 3),), dynamic_shapes=shapes)
    return next(node for node in program.graph.nodes if node.op == "placeholder").meta["val"].shape[0]


def test_the_number_of_rows_varies() -> None:
    with traced_lengths(nn.Sequential(Rows())):
        assert isinstance(exported_rows(), torch.SymInt)
    assert "len" not in vars(sys.modules[__name__])


def test_without_it_the_number_of_rows_is_that_of_the_trace() -> None:
    assert exported_rows() == 2
