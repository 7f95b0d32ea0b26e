"""Descriptions of keys that are rotated after the cache, of rotated parts of heads, and of double rotations."""

from __future__ import annotations

from typing import Any

import attention_graphs as graphs
import pytest
from descriptions import described
from late_rotation_graphs import AGAIN, FREQUENCIES, PART, in_series, keys_turn_late, latent

ROPE = {"name": "rope", "layout": "half", "theta": 10_000.0}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("repeated_first", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, graphs.HEADS])
def test_keys_that_turn_behind_their_cache(key_heads: int, repeated_first: bool) -> None:
    found = described(keys_turn_late(key_heads, repeated_first=repeated_first))
    assert (found["num_heads"], found["num_kv_heads"], found["head_dim"]) == (graphs.HEADS, key_heads, graphs.SIZE)
    assert found["encoding"] == ROPE and found["query_factor"] is None
    sides = ("key", "value")
    assert found["cache"] == {
        "kind": "grown",
        "inputs": {side: f"past_{side}" for side in sides},
        "outputs": {side: f"present_{side}" for side in sides},
    }


def test_queries_may_turn_by_positions_that_are_given() -> None:
    found = described(keys_turn_late(2, given=True))
    assert (found["num_kv_heads"], found["encoding"], found["query_factor"]) == (2, ROPE, None)


@pytest.mark.parametrize("repeated_first", [False, True])
def test_heads_may_be_repeated_before_they_turn(repeated_first: bool) -> None:
    found = described(keys_turn_late(2, repeated_first=repeated_first, cached=False))
    assert (found["num_kv_heads"], found["encoding"], found["cache"]) == (2, ROPE, None)


@pytest.mark.parametrize(
    "options",
    [{}, {"cached": True}, {"expand": "Tile"}, {"part_first": True}, {"interleaved": True}, {"plain": 24}],
    ids=str,
)
def test_parts_that_turn(options: dict[str, Any]) -> None:
    """Heads have plain and rotated features. All heads share the rotated features of the keys."""
    found = described(latent(**options))
    layout = "interleaved" if options.get("interleaved") else "half"
    start = {} if options.get("part_first") else {"rotary_start": options.get("plain", 8)}
    assert found["encoding"] == {**ROPE, "layout": layout, "rotary_dim": 2 * len(PART), **start}
    assert found["query_factor"] is None and found["head_dim"] == options.get("plain", 8) + 8


def test_parts_that_turn_in_other_places() -> None:
    """Rotated features of queries meet plain ones of keys, so scores do not depend only on distances."""
    found = described(latent(keys_part_first=True))
    assert (found["encoding"]["name"], found["encoding"]["reason"]["code"]) == ("rotary", "rotations-differ")


def late_scale(g: graphs.Writer, heads: str, queries: bool) -> str:
    """Each token is multiplied by a number by position, which is not a rotation."""
    positions = g.input("position_ids", 7, "batch", "seq")
    scale = g.op("Add", g.op("Cast", positions, to=1), g.floats(1.0))
    return g.op("Mul", heads, g.op("Unsqueeze", scale, g.const([1, 3])))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AGAIN)
def test_what_turns_twice(name: str) -> None:
    found = described(graphs.attention(rotate=AGAIN[name]))["encoding"]
    assert (found["name"], found["reason"]["code"]) == ("rotary", "rotated-again")
    which = "keys" if name == "keys alone" else "queries"
    assert found["reason"]["text"].startswith(f"its {which} are also rotated by other angles")


def test_what_is_scaled_before_it_turns() -> None:
    found = described(graphs.attention(rotate=in_series(late_scale, graphs.rotation(FREQUENCIES))))
    assert found["encoding"] == ROPE and found["query_factor"]["name"] == "unknown"
