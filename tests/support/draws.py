"""Draws verify's inputs once for artifacts of the same spec, while a test module runs. Equal specs get equal inputs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from posexport.spec.contract import Bounds
from posexport.spec.spec import Spec
from posexport.verify import submission
from posexport.verify.cases import Case, make_cases

MOST, BYTES = 3, 2**28
"""The number of lists of cases to keep, and the largest size of a list in bytes."""
CASES: OrderedDict[tuple[object, ...], list[Case]] = OrderedDict()


def draw_once(spec: Spec, seed: int, bounds: Bounds, *form: str, **options: Any) -> list[Case]:
    named = {**options, "directions": repr(options.get("directions"))}
    key = (spec, seed, *bounds.items(), form, *sorted(named.items()))
    if key in CASES:
        return list(CASES[key])
    cases = make_cases(spec, seed, bounds, *form, **options)
    if sum(array.nbytes for case in cases for array in case.arrays.values()) <= BYTES:
        CASES[key] = list(cases)
        if len(CASES) > MOST:
            CASES.popitem(last=False)
    return cases


def install() -> None:
    """Draw inputs only once from now on."""
    vars(submission)["make_cases"] = draw_once
