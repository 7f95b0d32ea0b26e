"""The position-dependent factor of queries, besides a rotation: `temperature` (posexport.models.absolute).

1 + attn_scale log(1 + floor((p + 1) / floor_scale)), which is 1 up to far positions
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from posexport.errors import RequestError
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.measure import Measure
from posexport.graphs.fits.progressions import EXACT, shortest
from posexport.graphs.places import FAR


def factors_of(flow: Dataflow, fixed: Collection[ir.Value], nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """The floating-point values that features are computed with in these nodes and that differ between inputs.

    Features themselves are left out. Values in `fixed` are the same on all inputs.
    """
    return [
        value
        for node in nodes
        if node.op_type in ("Mul", "Div", "Add", "Sub", "MatMul", "Where", "Pow")
        for value in node.inputs
        if value is not None
        and value not in flow.content
        and value not in fixed
        and (value.dtype is None or value.dtype.is_floating_point())
    ]


def temperature(measure: Measure, factors: list[ir.Value]) -> dict[str, Any] | None:
    """The parameters of the temperature that the only factor is; None for another factor, or several."""
    if len(factors) != 1 or measure.axes_of(factors) != 1:
        return None

    def at(positions: list[int]) -> np.ndarray[Any, Any] | None:
        (value,), _ = measure.run(factors, seq=len(positions), positions=[[position] for position in positions])
        return value.numpy().ravel() if value.numel() == len(positions) else None

    try:
        ends = at([0, FAR - 1])
        if ends is None or ends[0] != 1.0 or ends[1] <= 1.0:
            return None
        below, above = 0, FAR - 1  # positions with the factor 1, and with a larger one
        while above - below > 1:
            middle = (below + above) // 2
            found = at([0, middle])
            below, above = (middle, above) if found is not None and found[1] == 1.0 else (below, middle)
        positions = [0, below, above, 2 * above + 1, FAR - 1]
        values = at(positions)
    except RequestError:
        return None
    if values is None:
        return None
    floor_scale = above + 1
    attn_scale = shortest(float(values[2] - 1) / math.log(2), 1e-5)
    made = 1 + attn_scale * np.log1p(np.floor((np.array(positions) + 1) / floor_scale))
    if np.abs(made - values).max() > 10 * EXACT:
        return None
    return {"name": "temperature", "attn_scale": attn_scale, "floor_scale": floor_scale}
