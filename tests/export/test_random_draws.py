"""Modules that draw random numbers, or change their buffers, in eval mode: no file computes the same as they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from posexport.errors import RequestError
from posexport.export import export_module, exporter
from posexport.export.model_errors import check_draws_nothing
from posexport.export.random_draws import draw_of


class Computes(nn.Module):
    """A module whose forward is a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = forward
        self.drop = nn.Dropout(0.5)
        self.average = nn.BatchNorm1d(4)
        self.rows = nn.BatchNorm1d(4, track_running_stats=False)
        self.units = nn.GRU(4, 4, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _attended(x: Tensor, share: float) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=share)


DRAWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "aten.dropout": lambda _, x: functional.dropout(x),
    "aten.feature_dropout": lambda _, x: functional.dropout1d(x, training=True),
    "aten.alpha_dropout": lambda _, x: functional.alpha_dropout(x, training=True),
    "aten.scaled_dot_product_attention": lambda _, x: _attended(x, 0.25),
    "aten.randn_like": lambda _, x: x + torch.randn_like(x),
    "aten.randperm": lambda _, x: x[..., torch.randperm(4)],
    "aten.normal_": lambda _, x: x + torch.empty(4).normal_(),
    "aten.multinomial": lambda _, x: torch.multinomial(x.softmax(-1)[0], 2),
}
DRAWS_NOTHING: dict[str, Callable[[Any, Tensor], Any]] = {
    "dropout in eval mode": lambda self, x: self.drop(x),
    "dropout of nothing": lambda _, x: functional.dropout(x, 0.0),
    "attention": lambda _, x: _attended(x, 0.0),
    "a network with dropout": lambda self, x: self.units(x)[0],
    "numbers that nothing reads": lambda _, x: (torch.rand(4), x + 1)[1],
    "the mean of the rows": lambda self, x: self.rows(x[0]),
}
X = torch.linspace(-1, 1, 24).view(2, 3, 4)


@pytest.mark.parametrize("operator", DRAWS)
def test_a_module_that_draws_random_numbers_in_eval_mode_is_refused(operator: str) -> None:
    """Such files were written, and attention without its dropout."""
    where = rf"Computes draws random numbers also in eval mode \({operator}, at line \d+ of test_random_draws.py\)"
    with pytest.raises(RequestError, match=where):
        export_module(Computes(DRAWS[operator]), X)


@pytest.mark.parametrize("name", DRAWS_NOTHING)
def test_a_module_without_random_numbers_is_not(name: str) -> None:
    with exporter.quiet():
        program = torch.export.export(Computes(DRAWS_NOTHING[name]).eval(), (X,), strict=False)
    assert draw_of(program) is None


def test_a_branch_that_draws_is_seen() -> None:
    def drawn(_: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x - 1, (x,))

    assert "rand_like" in str(draw_of(torch.export.export(Computes(drawn).eval(), (X,), strict=False)))


def test_a_model_of_transformers_that_draws_is_refused() -> None:
    """ViTMAE was refused with the advice to remove a node."""
    program = torch.export.export(Computes(DRAWS["aten.dropout"]).eval(), (X,), strict=False)
    with pytest.raises(RequestError, match=r"ViTMAEModel draws random numbers \(aten.dropout, .*\), so transformers"):
        check_draws_nothing(program, "ViTMAEModel")


def test_averages_that_a_batch_norm_changes_are_seen() -> None:
    """torch gives them no new version; the file had the old averages in place of those of the batch."""

    def normed(self: Any, x: Tensor) -> Tensor:
        norm = self.average
        return functional.batch_norm(x[0], norm.running_mean, norm.running_var, training=True)

    with pytest.raises(RequestError, match=r"forward changes 'average.running_mean' in place"):
        export_module(Computes(normed), X)
