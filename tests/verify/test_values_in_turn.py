"""Every seed has each kind of values, negative positions and rows without a key also in large batches and long rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from draws import draw_once
from helpers import small_spec
from mutants import Mutate
from mutation.corners.bands import Condition, input_off, output_off
from mutation.corners.family import Apply
from mutation.corners.together import sized, without_keys
from mutation.surgery import Nodes
from verify_helpers import plant, write

from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.cases import Case
from posexport.verify.draft import Draft
from posexport.verify.drafts import corners
from posexport.verify.few_tokens import MAGNITUDES
from posexport.verify.in_turn import LONG, LONG_VALUES, NEGATIVE, long_values, with_negative
from posexport.verify.reach import default_reach
from posexport.verify.result import FAILED, PASSED

DECODER = {"causal": True, "kv_cache": "concat"}


def _drafts(spec: Spec, seed: int) -> list[Draft]:
    return list(corners(spec, np.random.default_rng(seed), default_reach(spec)))


def _made(spec: Spec, seed: int = 0) -> list[Case]:
    return draw_once(spec, seed, bounds_of(graph_inputs(spec), {}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("more", [{}, DECODER, {"cross": True}])
def test_each_kind_of_values_meets_one_row_a_large_batch_and_long_rows(more: dict[str, object], seed: int) -> None:
    drafts = _drafts(small_spec("none" if "cross" in more else "rope", **more), seed)
    for values in MAGNITUDES:
        rows = {draft.batch for draft in drafts if draft.values == values}
        assert 1 in rows, values
        assert any(17 <= batch <= 40 for batch in rows), values
    for values in LONG_VALUES:
        assert any(draft.seq >= LONG for draft in drafts if draft.values == values), values
    if more:
        keys = [(draft.values, max(draft.past, draft.encoder * ("cross" in more))) for draft in drafts]
        for values in ("loud", "outlier", "quiet", "shifted", "a twentieth"):
            assert any(kind == values and count >= 150 for kind, count in keys), values


def test_the_longest_row_and_every_second_after_it_keep_normal_values() -> None:
    drafts = [Draft("one", 1, seq, 0, 0, 1, "near") for seq in (1, LONG - 1, LONG, 300, 400, 500)]
    made = long_values(np.random.default_rng(0), drafts)
    assert [draft.values == "normal" for draft in made] == [True, True, False, True, False, True]


@pytest.mark.parametrize(("encoding", "count"), [("rope", 2), ("learned", 0)])
def test_positions_near_zero_are_negative_in_turn_if_that_has_a_meaning(encoding: str, count: int) -> None:
    drafts = [Draft("one", 1, 1, 0, 0, 1, kind) for kind in ("near", "far", *["near"] * NEGATIVE)]
    made = list(with_negative(small_spec(encoding), iter(drafts)))
    assert [draft.positions for draft in made].count("negative") == count
    assert [draft.positions for draft in made].count("far") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_negative_positions_meet_batches_and_lengths_of_any_size(seed: int) -> None:
    sizes = [
        (each.sizes["batch"], each.sizes["seq"], each.keys - each.sizes["seq"])
        for each in _made(small_spec("rope", padding_mask=True, **DECODER), seed)
        if each.arrays["position_ids"].min() < 0
    ]
    assert any(batch > 16 for batch, _, _ in sizes)
    assert any(batch == 1 and seq > 128 for batch, seq, _ in sizes)
    assert any(past > 200 for _, _, past in sizes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_long_rows_have_rows_without_a_key_beside_others(seed: int) -> None:
    masks = [np.asarray(each.arrays["attention_mask"]).any(1) for each in _long(seed)]
    assert any(len(shown) > 1 and not shown.all() and shown.any() for shown in masks)


def _long(seed: int) -> list[Case]:
    return [each for each in _made(small_spec("rope", padding_mask=True), seed) if each.sizes["seq"] > 250]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_tokens_of_one_number_are_in_prompts_and_in_single_tokens(dtype: str) -> None:
    found = set()
    for each in _made(small_spec("rope", dtype=dtype)):
        states = np.asarray(each.arrays["hidden_states"], np.float64)
        even = (np.ptp(states, axis=2) == 0) & (states[..., 0] != 0)
        if even.any():
            assert (np.log2(np.abs(states[even][:, 0])) % 1 == 0).all()
            found |= {(each.sizes["seq"] == 1, bool(row.all())) for row in even if row.any()}
    assert found == {(True, True), (False, True), (False, False)}


def _applied(apply: Apply) -> Mutate:
    def mutate(model: onnx.ModelProto) -> None:
        assert apply(model)

    return mutate


def _from(axis: int, size: int, also: Condition | None = None) -> Condition:
    """Whether there are so many rows (axis 0) or tokens (axis 1), and whether another condition holds."""

    def condition(nodes: Nodes) -> str:
        many = nodes.op("GreaterOrEqual", nodes.size("hidden_states", axis), nodes.const(size))
        return many if also is None else nodes.all_of(many, also(nodes))

    return condition


def _not_negative(nodes: Nodes, value: str) -> str:
    return nodes.op("Max", value, nodes.const(0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_faults_of_a_kind_of_values_in_large_batches_and_long_rows_are_caught(tmp_path: Path, seed: int) -> None:
    small, loud = sized("hidden_states", 0.01, 0.2), sized("hidden_states", 4.0, np.inf)
    faults: dict[str, tuple[Spec, Apply]] = {
        "between, rows": (small_spec("rope"), output_off(_from(0, 16, small))),
        "between, tokens": (small_spec("rope"), output_off(_from(1, 200, small))),
        "loud, rows": (small_spec("t5"), output_off(_from(0, 16, loud))),
        "negative, rows": (small_spec("rope"), input_off("position_ids", _from(0, 9), _not_negative)),
        "negative, tokens": (small_spec("rope", **DECODER), input_off("position_ids", _from(1, 150), _not_negative)),
        "keyless, tokens": (small_spec("rope", padding_mask=True), without_keys(_from(1, 250))),
    }
    for name, (spec, apply) in faults.items():
        plant(tmp_path, name, spec, _applied(apply))
    write(tmp_path, "sound", small_spec("rope", padding_mask=True, **DECODER))
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, seed=seed)
    states = {Path(verdict.artifact).stem: verdict.state for verdict in report.verdicts}
    assert states == {"sound": PASSED, **dict.fromkeys(faults, FAILED)}
