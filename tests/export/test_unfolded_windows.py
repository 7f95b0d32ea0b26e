"""Windows over tokens that `unfold` makes. A trace must not be bound to fewer tokens than a window has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from posexport.export.unfolded_windows import CopiesWindows

KERNEL, TRACED = 4, 3


class Convolution(nn.Module):
    """A causal convolution with weights for each token, as in Inkling 2."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x` [B, C, S] and `weights` [B, S, 1, KERNEL] give [B, S, C]."""
        context = nn.functional.pad(x, (KERNEL - 1, 0))
        windows = context.unfold(-1, KERNEL, 1).flip(-1).transpose(1, 2)
        return (windows * weights).sum(-1)


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, tokens), torch.randn(2, tokens, 1, KERNEL)


def traced(mode: AbstractContextManager[object]) -> nn.Module:
    tokens = torch.export.Dim.DYNAMIC
    with mode, torch.no_grad():
        program = torch.export.export(
            Convolution(),
            inputs(TRACED),
            dynamic_shapes=({2: tokens}, {1: tokens}),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    return program.module()


@pytest.mark.parametrize("tokens", [2, KERNEL, 9])
def test_a_trace_takes_any_number_of_tokens(tokens: int) -> None:
    given = inputs(tokens)
    assert torch.equal(traced(CopiesWindows())(*given), Convolution()(*given))


def test_a_view_would_bind_the_trace() -> None:
    """A planted fault: without the context, more tokens are refused."""
    with pytest.raises(Exception, match=r"(?i)guard|expect|range|constraint"):
        traced(nullcontext())(*inputs(9))
