"""The user's own inputs for any ONNX file: which tokens count as padding follows from the masks among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posexport.graphs.axes import BATCH, SEQ, SLOTS, TOTAL
from posexport.graphs.roles import Role
from posexport.verify.graph.cases import GraphCase, given_case

Array = np.ndarray[Any, Any]

PATH = Path("own.npz")
STATES = Role(name="x", kind="features", shape=("b", "s", 4), dtype="fp32", axes=(BATCH, SEQ, 4))


def case_of(*inputs: tuple[Role, Array]) -> GraphCase:
    arrays = {role.name: array for role, array in inputs}
    values = {role.name: (role.shape, role.dtype) for role, _ in inputs}
    return given_case(PATH, arrays, values, {role.name: role for role, _ in inputs})


def states(batch: int, seq: int) -> tuple[Role, Array]:
    return STATES, np.ones((batch, seq, 4), np.float32)


def mask(kind: str, keys: Any, axes: tuple[str, ...] = (BATCH, TOTAL)) -> tuple[Role, Array]:
    role = Role(name=kind, kind=kind, shape=("?", "?"), dtype="int64", axes=axes)
    return role, np.array(keys, np.int64)


def buffer(batch: int, slots: int) -> tuple[Role, Array]:
    shape = ("?", 2, "?", 4)
    return Role(name="past", kind="past", shape=shape, dtype="fp32", axes=(BATCH, 2, SLOTS, 4)), np.zeros(
        (batch, 2, slots, 4), np.float32
    )


def number(kind: str, values: Any, *axes: str) -> tuple[Role, Array]:
    return Role(name=kind, kind=kind, shape=("?",), dtype="int64", axes=axes), np.array(values, np.int64)


def test_the_last_keys_of_a_mask_are_the_new_tokens() -> None:
    found = case_of(states(2, 2), mask("attention_mask", [[0, 1, 1, 1], [1, 1, 1, 0]]))
    assert found.visible[SEQ].tolist() == [[True, True], [True, False]]
    assert found.visible[TOTAL].tolist() == [[False, True, True, True], [True, True, True, False]]


def test_a_mask_that_is_true_where_keys_are_hidden() -> None:
    found = case_of(states(1, 3), mask("padding_mask", [[1, 0, 0]]))
    assert found.visible[SEQ].tolist() == [[False, True, True]]


def test_a_mask_of_queries_and_keys_says_nothing_about_padding() -> None:
    """As many rows as tokens: each query would be taken for a row."""
    causal = np.tril(np.ones((3, 3), np.int64))
    assert case_of(states(3, 3), mask("attention_mask", causal, (SEQ, TOTAL))).visible == {}


KEPT = [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("begins", "seen"),
    [
        (number("write_indices", [1, 3], BATCH), [[True, True], [True, True]]),
        (number("past_length", [2, 5], BATCH), [[True, False], [False, False]]),
        (number("cache_position", [3, 4], SEQ), [[False, False], [True, True]]),  # as many tokens as rows
    ],
)
def test_in_a_buffer_new_tokens_are_not_the_last_keys(begins: tuple[Role, Array], seen: Any) -> None:
    found = case_of(states(2, 2), mask("attention_mask", KEPT), buffer(2, 8), begins)
    assert found.visible[SEQ].tolist() == seen


def test_without_a_place_for_the_new_tokens_of_a_buffer_all_of_them_count() -> None:
    found = case_of(states(2, 2), mask("attention_mask", KEPT), buffer(2, 8))
    assert SEQ not in found.visible
    beyond = case_of(states(2, 2), mask("attention_mask", KEPT), buffer(2, 8), number("write_indices", [1, 7], BATCH))
    assert SEQ not in beyond.visible
    short = case_of(states(2, 2), mask("attention_mask", [row[:6] for row in KEPT]), buffer(2, 8))
    assert short.visible[SLOTS].shape == (2, 8)


def test_positions_say_how_far_the_inputs_reach() -> None:
    positions = Role(name="position_ids", kind="position_ids", shape=("?", "?"), dtype="int64", axes=(BATCH, SEQ))
    assert case_of(states(1, 2), (positions, np.array([[-9, 70_000]]))).farthest == 70_000
    assert case_of(states(1, 2)).farthest is None
