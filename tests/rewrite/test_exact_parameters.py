"""Exact angles of recognised parameters, and which angle each feature of a value has."""

from __future__ import annotations

from typing import Any

import exact_oracle
import numpy as np
import pytest

from posexport.errors import Reason
from posexport.rewrite.angles.columns import columns_of
from posexport.rewrite.angles.parameters import ExactAngles, exact_of


@pytest.mark.parametrize(
    ("encoding", "code"),
    [
        ({"name": "rope", "layout": "half", "frequencies": [1.0, 0.3]}, "angles-unknown"),
        ({"name": "rotary", "layout": "half", "reason": {"code": "x", "text": "nobody knows"}}, "angles-unknown"),
        (
            {
                "name": "rope",
                "layout": "half",
                "theta": 1e4,
                "scaling": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            },
            "angles-by-length",
        ),
        ({"name": "xpos", "layout": "half", "theta": 1e4}, "angles-of-kind"),
        ({"name": "rope", "layout": "half", "theta": 0.5}, "angles-fast"),
    ],
)
def test_what_has_no_exact_angles(encoding: dict[str, Any], code: str) -> None:
    found = exact_of(encoding, 4)
    assert isinstance(found, Reason) and found.code == code and found.text


@pytest.mark.parametrize(
    "encoding",
    [
        {"theta": 10_000.0},
        {"theta": 500_000.0, "scaling": "linear", "factor": 4.0},
        {
            "theta": 1e6,
            "attention_factor": 1.25,
            "scaling": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_parameters_give_the_angles_of_their_formula(encoding: dict[str, Any]) -> None:
    found = exact_of({"name": "rope", "layout": "half", **encoding}, 4)
    assert isinstance(found, ExactAngles)
    cos, sin = found.cos_sin(np.array([0, 3, 70_000]))
    divided = encoding["factor"] if encoding.get("scaling") == "linear" else 1.0
    for at_row, position in enumerate((0, 3, 70_000)):
        for pair in range(4 if "yarn" not in encoding.values() else 1):  # YaRN keeps the first pair
            expected = exact_oracle.turn(position, pair, encoding["theta"])
            if divided != 1.0:
                angle = position * encoding["theta"] ** (-pair / 4) / divided
                expected = (np.cos(angle), np.sin(angle))
            scale = encoding.get("attention_factor", 1.0)
            np.testing.assert_allclose((cos[at_row, pair], sin[at_row, pair]), np.array(expected) * scale, atol=1e-10)


def test_columns_are_found_and_no_others() -> None:
    exact = ExactAngles(frequencies=0.1 ** np.arange(4.0), slack=1e-6 * 0.1 ** np.arange(4.0), scale=1.0)
    positions = np.array([0, 1, 5, 900, 70_000, 2**23])
    cos, sin = exact.cos_sin(positions)
    mixed = np.concatenate((cos, -sin, sin[:, ::-1]), 1)
    found = columns_of([mixed], exact, positions)
    assert not isinstance(found, float)
    np.testing.assert_array_equal(found[0].of(cos, sin), mixed)
    assert found[0].pairs == (0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0)
    wrong = mixed.copy()
    wrong[:, 2] = np.cos(positions * exact.frequencies[2] * 1.0001)
    assert isinstance(columns_of([wrong], exact, positions), float)
