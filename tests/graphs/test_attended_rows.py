"""Attention with many scores is computed row by row, with the same result as for all rows at once."""

from __future__ import annotations

import pytest
import torch

from posexport.graphs.kernels import contrib_attention
from posexport.graphs.kernels.contrib_attention import attend, attended


@pytest.mark.parametrize("bias", [(), (1, 1, 5, 7), (3, 1, 5, 7), (3, 4, 1, 7), (5, 7)])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_one_by_one(bias: tuple[int, ...], sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 4, length, 6, generator=made, dtype=torch.float64) for length in (5, 7, 7))
    added = torch.randn(bias, generator=made, dtype=torch.float64)
    column = torch.randn(4, generator=made, dtype=torch.float64) if sinks else None
    whole = attend(q, k, v, 0.4, added, 3.0, column)[0]
    monkeypatch.setattr(contrib_attention, "_MANY", 3 * 4 * 5 * 7)
    assert attended(q, k, v, 0.4, added, 3.0, column) == pytest.approx(whole, abs=1e-12)
    calls = []
    monkeypatch.setattr(contrib_attention, "attend", lambda *given: calls.append(given[0].shape[0]) or attend(*given))
    attended(q, k, v, 0.4, added, 3.0, column)
    assert calls == [1, 1, 1]
