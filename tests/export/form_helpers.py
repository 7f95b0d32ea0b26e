"""Exported blocks by form and target: rows of options, and comparisons of ONNX Runtime with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import oracles
from helpers import Array, as_float64, open_ort, small_spec, weights_for
from pairs import Row, all_pairs

from posexport.errors import RequestError
from posexport.export import export
from posexport.export.support import unsupported_reason
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases

Run = Callable[[dict[str, Array]], dict[str, Array]]

BOUNDS = {"fp32": 5e-5, "fp16": 1.2e-2}
"""Allowed errors relative to the largest value, for angles up to 200 and sums of 32 products.

A wrong option causes more than twice this error.
"""
SMALL = ("offset", "scattered", "loud", "prefill", "step")
"""Cases of verify with few tokens, at positions where fp32 represents the angles well."""


HOWS = [
    *(("decomposed", "portable"), ("function", "portable"), ("native", "portable"), ("native", "ort")),
    *(("contrib", "portable"), ("contrib", "ort")),
]
OPTIONS: dict[str, list[Any]] = {
    "encoding": ["none", "rope-half-partial", "rope2d-half", "alibi", "t5", "relative"],
    "how": HOWS,
    "kv_cache": [None, "concat", "shared"],
    "padding_mask": [False, True],
    "causal": [False, True],
    "window": [None, 3],
    "num_kv_heads": [4, 2],
    "qk_norm": [False, True],
    "softcap": [None, 1.5],
    "sinks": [False, True],
    "cross": [False, True],
    "head_dim": [8, 12],
    "dtype": ["fp32", "fp16"],
}
ENCODINGS: dict[str, dict[str, Any]] = {
    "rope-half-partial": {"encoding": "rope", "layout": "half", "rotary_dim": 6},
    "rope2d-half": {"encoding": "rope2d", "layout": "half"},
    "t5": {"encoding": "t5", "num_buckets": 8, "max_distance": 20},
}


def spec_of(row: Row) -> Spec:
    """The spec of a row. Raises RequestError if the options do not fit together."""
    over = {key: value for key, value in row.items() if key != "how"}
    return small_spec(**{**over, **ENCODINGS.get(row["encoding"], {})})


def carried(row: Row) -> bool:
    """Whether a row is a valid spec that its form and target support."""
    try:
        return unsupported_reason(spec_of(row), *row["how"]) is None
    except RequestError:  # not a valid spec, for example cross-attention with a cache
        return False


ROWS = all_pairs(OPTIONS, carried)
"""Rows that contain all pairs of options."""


def small_cases(spec: Spec, form: str, names: Collection[str] = SMALL, **fixed: int) -> list[Case]:
    """The cases of verify with these names that a spec has; `fixed` gives sizes of dimensions."""
    bounds = {**bounds_of(graph_inputs(spec), {}), **{name: (size, size) for name, size in fixed.items()}}
    made = make_cases(spec, 0, bounds, form)
    return [each for each in made if each.name.split(" [")[0] in names]


def errors(spec: Spec, run: Run, cases: list[Case]) -> dict[str, float]:
    """The largest error of each case over all outputs; inf if a value is not finite.

    The error is relative to the oracle's largest value, or to 1 if that is smaller.
    """
    found: dict[str, float] = {}
    for each in cases:
        wanted = oracles.outputs(spec, as_float64(weights_for(spec)), each.arrays)
        made = run(each.arrays)
        assert list(made) == list(wanted)
        worst = 0.0
        for name, array in wanted.items():
            assert made[name].shape == array.shape, (each.name, name)
            off = np.abs(made[name].astype(np.float64) - array).max() / max(1.0, np.abs(array).max())
            worst = max(worst, float(off) if np.isfinite(off) else np.inf)
        found[each.name] = worst
    return found


def check_form(
    spec: Spec, form: str, target: str, names: Collection[str] = SMALL, bound: float | None = None, **how: Any
) -> None:
    """Asserts that an export agrees with the oracle on ONNX Runtime."""
    run = open_ort(export(spec, weights_for(spec), form=form, target=target, **how))
    found = errors(spec, run, small_cases(spec, form, names))
    assert len(found) >= min(3, len(names))
    limit = BOUNDS[spec.dtype] if bound is None else bound
    assert {name: off for name, off in found.items() if off > limit} == {}
