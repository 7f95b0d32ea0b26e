"""Inputs of a single row: without a key, at positions of one octave, nearly all padding, or with its keys outside a
window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import small_spec
from mutation.surgery import Nodes, change_value
from verify_helpers import plant

from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.cases import Case, make_cases
from posexport.verify.draft import Draft
from posexport.verify.drafts import corners
from posexport.verify.over_keys import PADDING_PATTERN, PATTERN
from posexport.verify.reach import default_reach
from posexport.verify.result import FAILED, PASSED

DECODER = {"causal": True, "kv_cache": "concat", "padding_mask": True}
SEEDS = range(2)
WINDOW = 1000

Corner = Callable[[Case], bool]


def spec_of(**fields: object) -> Spec:
    return small_spec("rope", **{**DECODER, **fields})


def cases_of(spec: Spec, seed: int = 0) -> list[Case]:
    return make_cases(spec, seed, bounds_of(graph_inputs(spec), {}))


def drafts_of(spec: Spec, seed: int) -> list[Draft]:
    return list(corners(spec, np.random.default_rng(seed), default_reach(spec)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cache", [None, "concat", "shared"])
def test_one_row_has_no_key_in_steps_chunks_and_prompts(cache: str | None, seed: int) -> None:
    cases = [each for each in cases_of(spec_of(kv_cache=cache), seed) if each.sizes["batch"] == 1]
    blind = [each for each in cases if not each.arrays["attention_mask"][:, : each.keys].any()]
    assert any(each.sizes["seq"] >= 8 for each in blind)
    if cache:
        cached = [each.sizes["seq"] for each in blind if each.keys > each.sizes["seq"]]
        assert 1 in cached and max(cached) > 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("positions", ["data", "consecutive"])
def test_all_tokens_of_one_row_lie_in_each_octave_far_out(positions: str, seed: int) -> None:
    rows = [each for each in cases_of(spec_of(positions=positions), seed) if each.sizes["batch"] == 1]
    for octave in range(11, 20):
        low, high = 2**octave, 2 ** (octave + 1)
        places = [each.positions for each in rows if each.positions is not None]
        inside = [each.shape[1] for each in places if low <= each.min() and each.max() < high]
        assert 1 in inside, f"no step lies from {low} to {high}"
        assert max(inside) > 1, f"no chunk and no prompt lies from {low} to {high}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cache", [None, "concat", "shared"])
def test_long_rows_have_little_but_padding_on_either_side(cache: str | None, seed: int) -> None:
    sides = set()
    for each in cases_of(spec_of(kv_cache=cache), seed):
        before = each.arrays.get("write_indices", np.full(each.sizes["batch"], each.sizes.get("past_seq", 0)))
        for mask, end in zip(each.arrays["attention_mask"], (before + each.sizes["seq"]).tolist(), strict=True):
            seen = np.flatnonzero(mask[:end])
            if end >= 256 and 1 < len(seen) <= end // 12 and np.ptp(seen) == len(seen) - 1:
                sides |= {side for side, key in (("first", 0), ("last", end - 1)) if key in seen}
    assert sides == {"first", "last"}


def test_kinds_of_steps_take_turns_that_never_repeat_soon() -> None:
    assert np.gcd(len(PATTERN), len(PADDING_PATTERN)) == np.gcd(5, len(PADDING_PATTERN)) == 1
    pairs = [
        {(each.positions, each.padding) for each in drafts_of(spec_of(), seed) if each.name == "step of one"}
        for seed in range(4)
    ]
    assert len({frozenset(each) for each in pairs}) == len(pairs)


@pytest.mark.parametrize("cache", [None, "concat", "shared"])
def test_padding_is_longer_than_a_window(cache: str | None) -> None:
    cases = cases_of(spec_of(kv_cache=cache, window=WINDOW))
    past = [each for each in cases if each.name.startswith(f"padding past {WINDOW}")]
    assert len(past) == (2 if cache else 1)
    for each in past:
        seen = np.flatnonzero(each.arrays["attention_mask"][0, : each.keys])
        assert len(seen) > 0 and each.keys - 1 - seen.max() >= WINDOW


def _one_row(nodes: Nodes) -> str:
    return nodes.op("Equal", nodes.size("hidden_states", 0), nodes.const(1))


def _blind_step(nodes: Nodes) -> str:
    """Whether a call is a step of one row over a cache with every key masked."""
    seen = nodes.op("ReduceMax", "attention_mask", keepdims=0)
    step = nodes.op("Equal", nodes.size("hidden_states", 1), nodes.const(1))
    cached = nodes.op("Greater", nodes.size("attention_mask", 1), nodes.const(1))
    return nodes.all_of(_one_row(nodes), step, cached, nodes.op("Equal", seen, nodes.const(0)))


def _far_chunk(nodes: Nodes) -> str:
    first, last = (nodes.op(kind, "position_ids", keepdims=0) for kind in ("ReduceMin", "ReduceMax"))
    far, near = nodes.op("GreaterOrEqual", first, nodes.const(4096)), nodes.op("Less", last, nodes.const(16384))
    return nodes.all_of(_one_row(nodes), nodes.op("Greater", nodes.size("hidden_states", 1), nodes.const(1)), far, near)


def _short_text(nodes: Nodes) -> str:
    """Whether rows [batch, 1, 1] have at least 1,000 keys, of which at most a sixteenth but at least one is seen."""
    seen, keys = nodes.op("ReduceSum", "attention_mask", nodes.const([1])), nodes.size("attention_mask", 1)
    few = nodes.op("LessOrEqual", nodes.op("Mul", seen, nodes.const(16)), keys)
    some, long = nodes.op("Greater", seen, nodes.const(0)), nodes.op("GreaterOrEqual", keys, nodes.const(1000))
    return nodes.op("Unsqueeze", nodes.all_of(some, few, long), nodes.const([2]))


def _behind_a_window(nodes: Nodes) -> str:
    """Whether tokens [batch, seq, 1] see no key of their window although there are older keys."""
    count = nodes.op("CumSum", "attention_mask", nodes.const(1))
    keys = nodes.size("attention_mask", 1)
    before = nodes.op("Max", nodes.op("Sub", nodes.steps(keys), nodes.const(WINDOW)), nodes.const(0))
    older = nodes.op("Gather", count, before, axis=1)
    empty = nodes.op("And", nodes.op("Equal", count, older), nodes.op("Greater", older, nodes.const(0)))
    new = nodes.op("Unsqueeze", nodes.op("Sub", keys, nodes.size("hidden_states", 1)), nodes.const([0]))
    tokens = nodes.op(
        "Slice", nodes.op("Cast", empty, to=onnx.TensorProto.INT64), new, nodes.const([2**31]), nodes.const([1])
    )
    return nodes.op("Cast", nodes.op("Unsqueeze", tokens, nodes.const([2])), to=onnx.TensorProto.BOOL)


FAULTS: dict[str, tuple[dict[str, object], Callable[[Nodes], str]]] = {
    "a step of one row without a key": ({}, _blind_step),
    "a chunk between two far positions": ({"padding_mask": False}, _far_chunk),
    "long rows with a short text": ({"kv_cache": None}, _short_text),
    "tokens behind a window of padding": ({"window": WINDOW, "kv_cache": None}, _behind_a_window),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails(name: str, tmp_path: Path) -> None:
    fields, where = FAULTS[name]

    def mutate(model: onnx.ModelProto) -> None:
        def change(nodes: Nodes, value: str) -> str:
            return nodes.op("Where", where(nodes), nodes.op("Add", value, nodes.like(value, 0.1)), value)

        change_value(model.graph, "output", change)

    made = [
        plant(tmp_path, "sound", spec_of(**fields), lambda model: None),
        plant(tmp_path, "wrong", spec_of(**fields), mutate),
    ]
    report = verify(made, runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 1200})
    assert [each.state for each in report.verdicts] == [PASSED, FAILED]
