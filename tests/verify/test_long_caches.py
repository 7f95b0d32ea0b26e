"""Faults of long caches (in wide blocks, at powers of two, before the end of a band, in rows that start anew), and
faults of batches as servers have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import verify_helpers as plant
from helpers import small_spec
from mutation.surgery import Nodes, change_input, change_value, change_visibility

from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.cases import Case
from posexport.verify.coverage import too_costly
from posexport.verify.draft import Draft
from posexport.verify.drafts import corners
from posexport.verify.over_keys import PATTERN, POWERS
from posexport.verify.positions import TEXT, TEXTS, At, position_ids
from posexport.verify.reach import default_reach
from posexport.verify.result import FAILED, Verdict

Mutate = Callable[[onnx.ModelProto], Any]

Condition = Callable[[Nodes], str]
"""Adds nodes to the main graph that compute a scalar: whether a fault shows in a call."""

WIDE = {"hidden_size": 32, "num_heads": 32, "head_dim": 64, "causal": True, "kv_cache": "concat"}
"""A block with 4,096 cached numbers per token, as many as with a hidden size of 2,048."""

USUAL = {"causal": True, "kv_cache": "concat"}


def verdict_of(folder: Path, spec: Spec, mutate: Mutate) -> Verdict:
    path = plant.plant(folder, "planted", spec, mutate)
    (verdict,) = verify([path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}).verdicts
    return verdict


def within(nodes: Nodes, value: str, low: int, high: int) -> str:
    return nodes.all_of(
        nodes.op("GreaterOrEqual", value, nodes.const(low)), nodes.op("LessOrEqual", value, nodes.const(high))
    )


def steps(past: tuple[int, int], rows: tuple[int, int]) -> Condition:
    """Steps of one token, with `rows` rows and `past` cached tokens (ranges)."""

    def condition(nodes: Nodes) -> str:
        return nodes.all_of(
            within(nodes, nodes.size("hidden_states", 0), *rows),
            within(nodes, nodes.size("hidden_states", 1), 1, 1),
            within(nodes, nodes.size("past_key", 2), *past),
        )

    return condition


def off(condition: Condition) -> Mutate:
    """The output is a tenth too large if a condition holds."""

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Where", condition(nodes), nodes.op("Mul", value, nodes.like(value, 1.1)), value)

    return lambda model: change_value(model.graph, "output", change)


def hidden_from(key: int, rows: int) -> Mutate:
    """In steps of one token with at least `rows` rows, keys from number `key` on are hidden, except the token's own."""

    def chosen(at: Any) -> str:
        nodes = at.nodes
        few = nodes.all_of(
            nodes.op("GreaterOrEqual", at.batch, nodes.const(rows)), nodes.op("Equal", at.seq, nodes.const(1))
        )
        middle = nodes.op("And", nodes.op("GreaterOrEqual", at.key(), nodes.const(key)), few)
        return nodes.op("And", middle, nodes.op("Greater", at.distance(), nodes.const(0)))

    return lambda model: change_visibility(model, True, chosen)


ANY = (1, 2**20)

SHARED = {"causal": True, "kv_cache": "shared", "padding_mask": True}

STEEP = {"hidden_size": 96, "num_heads": 12, "padding_mask": True, "dtype": "fp16"}


HALF = {"causal": True, "padding_mask": True, "dtype": "fp16"}


def first_512(model: onnx.ModelProto) -> None:
    """Tokens after the first 512 are dropped, as if the length was fixed by tracing."""
    change_input(
        model, "hidden_states", lambda nodes, value: nodes.op("Slice", value, *map(nodes.const, ([0], [512], [1])))
    )


def padded_at_one_slot(nodes: Nodes) -> str:
    """At least four rows write to the same slot, which is not the first, and one row begins with padding."""
    first, last = (nodes.op(kind, "write_indices", keepdims=0) for kind in ("ReduceMin", "ReduceMax"))
    begins = nodes.op("ReduceMin", nodes.op("Gather", "attention_mask", nodes.const(0), axis=1), keepdims=0)
    return nodes.all_of(
        within(nodes, nodes.size("hidden_states", 0), 4, 2**20),
        nodes.op("Greater", first, nodes.const(0)),
        nodes.op("Equal", first, last),
        nodes.op("Equal", begins, nodes.const(0)),
    )


def all_go_on(nodes: Nodes) -> str:
    """At least four rows write to slots that are not all the same, none of which is the first."""
    first, last = (nodes.op(kind, "write_indices", keepdims=0) for kind in ("ReduceMin", "ReduceMax"))
    return nodes.all_of(
        within(nodes, nodes.size("hidden_states", 0), 4, 2**20),
        nodes.op("Greater", first, nodes.const(0)),
        nodes.op("Less", first, last),
    )


def wide_batch(nodes: Nodes) -> str:
    """At least 24 rows of at least 64 tokens."""
    return of_tokens((24, 2**20), (64, 2**20))(nodes)


def of_tokens(rows: tuple[int, int], tokens: tuple[int, int]) -> Condition:
    """Calls with `rows` rows and `tokens` tokens (ranges)."""

    def condition(nodes: Nodes) -> str:
        sizes = [nodes.size("hidden_states", axis) for axis in (0, 1)]
        return nodes.all_of(within(nodes, sizes[0], *rows), within(nodes, sizes[1], *tokens))

    return condition


def fourth_rows_are_the_first(counted: str, output: str, least: int) -> Mutate:
    """In batches of at least 4 rows, if the input `counted` has at least `least` tokens, the fourth row of an output
    equals the first."""

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.size(counted, 0)
        many = nodes.all_of(within(nodes, rows, 4, 2**20), within(nodes, nodes.size(counted, 1), least, 2**20))
        index = nodes.op("Range", nodes.const(0), rows, nodes.const(1))
        wrong = nodes.op("And", nodes.op("Equal", index, nodes.const(3)), many)
        return nodes.op("Gather", value, nodes.op("Where", wrong, nodes.const(0), index), axis=0)

    return lambda model: change_value(model.graph, output, change)


def seen_in_long_prompts(model: onnx.ModelProto) -> None:
    """Padding is not hidden in prompts of more than 450 tokens."""

    def change(nodes: Nodes, mask: str) -> str:
        long = nodes.op("Greater", nodes.size("hidden_states", 1), nodes.const(450))
        return nodes.op("Where", long, nodes.const(1), mask)

    change_input(model, "attention_mask", change)


def clipped_in_batches(bound: str, most: int) -> Mutate:
    """In 6 or more rows of 61 or more tokens, positions are at most ("Min") or at least ("Max") a number."""

    def change(nodes: Nodes, value: str) -> str:
        many = of_tokens((6, 2**20), (61, 2**20))(nodes)
        return nodes.op("Where", many, nodes.op(bound, value, nodes.const(most)), value)

    return lambda model: change_input(model, "position_ids", change)


def long_row_clipped(model: onnx.ModelProto) -> None:
    """The first position of a row of more than 900 tokens is at most 65,536."""

    def change(nodes: Nodes, value: str) -> str:
        long = nodes.op("Greater", nodes.size("hidden_states", 1), nodes.const(900))
        return nodes.op("Where", long, nodes.op("Min", value, nodes.const(65_536)), value)

    change_input(model, "position_ids", change)


def all_full(nodes: Nodes) -> str:
    """Several rows fill their buffers, which hold tokens already, to the last slot."""
    first = nodes.op("ReduceMin", "write_indices", keepdims=0)
    end = nodes.op("Add", first, nodes.size("hidden_states", 1))
    return nodes.all_of(
        within(nodes, nodes.size("hidden_states", 0), 2, 2**20),
        nodes.op("Greater", first, nodes.const(0)),
        nodes.op("Equal", end, nodes.size("past_key", 2)),
    )


WIDE_BLOCK = small_spec("rope", causal=True, hidden_size=768, num_heads=12)
WIDE_CROSS = small_spec("none", cross=True, hidden_size=768, num_heads=12)

FAULTS: dict[str, tuple[Spec, Mutate]] = {
    "a band of a wide block": (small_spec("rope", **WIDE), off(steps((900, 1700), (1, 1)))),
    "keys of a wide block in two rows": (small_spec("rope", **WIDE), hidden_from(1000, 2)),
    "2048 keys of a wide block": (small_spec("rope", **WIDE), off(steps((2047, 2047), ANY))),
    "2048 keys": (small_spec("rope", **USUAL), off(steps((2047, 2047), ANY))),
    "1025 keys": (small_spec("rope", **USUAL), off(steps((1024, 1024), ANY))),
    "127 keys": (small_spec("rope", **USUAL), off(steps((126, 126), ANY))),
    "steps before the end": (small_spec("rope", **USUAL), off(steps((2075, 2180), (1, 1)))),
    "rows before the end": (small_spec("rope", **USUAL), off(steps((2075, 2180), (2, 40)))),
    "ten rows over many keys": (small_spec("rope", **USUAL), off(steps((1190, 2**20), (10, 2**20)))),
    "a length of 512": (small_spec("none"), first_512),
    "padded rows at one slot": (small_spec("rope", **SHARED), off(padded_at_one_slot)),
    "rows that all go on": (small_spec("rope", **SHARED), off(all_go_on)),
    "fourth rows of many tokens": (WIDE_BLOCK, fourth_rows_are_the_first("hidden_states", "output", 705)),
    "fourth rows of an encoder": (WIDE_CROSS, fourth_rows_are_the_first("encoder_hidden_states", "output", 705)),
    "1024 tokens of one row": (WIDE_BLOCK, off(of_tokens((1, 1), (1024, 1024)))),
    "many rows of many tokens": (WIDE_BLOCK, off(wide_batch)),
    "padding of long prompts in half precision": (small_spec("alibi", **STEEP), seen_in_long_prompts),
    "far rows in half precision": (small_spec("rope", **HALF), clipped_in_batches("Min", 2**15)),
    "rows below zero in half precision": (small_spec("rope", **HALF), clipped_in_batches("Max", 0)),
    "a long row far out": (
        small_spec("rope", causal=True, kv_cache="concat", positions="consecutive"),
        long_row_clipped,
    ),
    "rows of full buffers": (small_spec("rope", **SHARED), off(all_full)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_long_caches_or_of_batches_fails(tmp_path: Path, name: str) -> None:
    spec, mutate = FAULTS[name]
    assert verdict_of(tmp_path, spec, mutate).state == FAILED


def anew(nodes: Nodes) -> str:
    """Two rows: the cache of one is empty, and the other has more than 60 cached tokens."""
    index = "write_indices"
    return nodes.all_of(
        within(nodes, nodes.size("hidden_states", 0), 2, 2),
        nodes.op("Equal", nodes.op("ReduceMin", index, keepdims=0), nodes.const(0)),
        nodes.op("Greater", nodes.op("ReduceMax", index, keepdims=0), nodes.const(60)),
    )


@pytest.mark.slow
def test_two_rows_of_which_one_begins_in_an_empty_cache_fail(tmp_path: Path) -> None:
    spec = small_spec("rope", causal=True, kv_cache="shared")
    assert verdict_of(tmp_path, spec, off(anew)).state == FAILED


def drafts_of(spec: Spec, seed: int = 0) -> list[Draft]:
    return list(corners(spec, np.random.default_rng(seed), default_reach(spec)))


def wide(heads: int, **more: Any) -> Spec:
    return small_spec("rope", **{**WIDE, "num_heads": heads, "head_dim": 128, **more})


@pytest.mark.parametrize("heads", [6, 16, 32])
@pytest.mark.parametrize("cache", ["concat", "shared"])
def test_wide_blocks_keep_their_late_steps_and_powers_of_two(heads: int, cache: str) -> None:
    drafts = drafts_of(wide(heads, kv_cache=cache))
    keys = {(each.batch > 1, each.past + 1) for each in drafts if each.seq == 1}
    assert {each for _, each in keys} >= {128, 256, 512, 1024, 2048, 2200}
    assert any(several and 2048 <= each <= 2200 for several, each in keys)
    assert any(not several and 2080 <= each <= 2180 for several, each in keys)


@pytest.mark.parametrize("seed", range(5))
def test_small_blocks_have_each_power_of_two_and_one_on_each_side(seed: int) -> None:
    keys = {each.past + 1 for each in drafts_of(small_spec("rope", **USUAL), seed) if each.seq == 1}
    assert {power + more for power in POWERS for more in (-1, 0, 1)} <= keys


@pytest.mark.parametrize(
    ("heads", "layers", "said"),
    [
        (32, 1, []),
        (64, 1, ["cache of several rows"]),
        (32, 32, ["cache", "cache of several rows", "cache under several tokens"]),
    ],
)
def test_caches_that_had_to_be_cut_are_said(heads: int, layers: int, said: list[str]) -> None:
    spec = wide(heads, layers=layers)
    cases = [
        Case(name=each.name, arrays={}, sizes={"batch": each.batch, "seq": each.seq, "past_seq": each.past})
        for each in drafts_of(spec)
    ]
    bounds = bounds_of(graph_inputs(spec), {})
    found = [clause for clause in too_costly(spec, cases, 2_200, bounds) if clause.startswith("no cache")]
    assert [clause.removeprefix("no ").split(" was longer")[0] for clause in found] == said
    fixed = {**bounds, "batch": (1, 1), "past_seq": (12, 12)}
    assert not any(clause.startswith("no cache") for clause in too_costly(spec, cases, 2_200, fixed))


def test_texts_have_every_kind_of_positions() -> None:
    drafts = drafts_of(small_spec("rope2d"))
    assert {TEXT + kind for kind in TEXTS} <= {each.positions for each in drafts if isinstance(each.positions, str)}


def test_steps_of_one_row_have_every_kind_of_positions() -> None:
    drafts = drafts_of(small_spec("rope", **USUAL))
    assert {*PATTERN} <= {each.positions for each in drafts if each.name == "step of one"}


def test_given_positions_stay_within_a_table() -> None:
    spec = small_spec("learned", max_positions=20)
    given = At(np.array([[[3], [19], [40]]]))
    found = position_ids(given, np.random.default_rng(0), np.arange(3)[None], spec)
    assert found.tolist() == [[3, 19, 19]]


@pytest.mark.parametrize("cache", ["concat", None])
def test_half_precision_sees_the_oldest_key_of_a_window(cache: str | None) -> None:
    spec = small_spec("rope", dtype="fp16", causal=True, window=1100, kv_cache=cache)
    oldest = [each for each in drafts_of(spec) if each.values == "oldest"]
    if cache:
        assert {each.past for each in oldest if each.seq == 1} == {1099, 1100}
    else:
        assert all(each.seq > 1100 for each in oldest)
        assert oldest
