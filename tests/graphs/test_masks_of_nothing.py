"""Masks that hide all keys from some queries are described without an error."""

from __future__ import annotations

import numpy as np
import pytest
from absorbed_graphs import many, model_of
from descriptions import described
from small_graphs import Graph


@pytest.mark.parametrize(("upper", "diagonal"), [(0, -1), (0, 0), (1, 2), (1, 0)])
def test_triangles(upper: int, diagonal: int) -> None:
    """Hidden are the keys of this triangle, whose logits are -1e9: (0, 0) hides all keys from the last query."""

    def hide(g: Graph, scores: str) -> str:
        square = g.op("Concat", many(g), many(g), axis=0)
        low = g.op("Expand", g.constant([[-1e9]], np.float32), square)
        return g.op("Add", scores, g.op("Trilu", low, g.constant(diagonal), upper=upper))

    found = described(model_of(scores=hide))
    assert found["mask"]["kind"] == "other" and "reason" not in found["mask"]
    assert found["encoding"] == {"name": "none"}
