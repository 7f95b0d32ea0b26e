"""Every seed has inputs as models are served: steps over an encoder, texts with positions on several axes, loud keys in
any layer, the oldest keys of a window, and long caches of an encoding whose keys grow. Also their memory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import small_spec
from mutants import Mutate
from mutation.corners.band import next_key_in_the_last_block
from mutation.corners.batch import rows_turned_around
from mutation.corners.family import Apply
from mutation.corners.magnitude import masked_with
from mutation.corners.position import length_of
from mutation.corners.served import logits_clipped, text_ends
from mutation.surgery import Nodes, change_input
from verify_helpers import plant, write

from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import submission, verify
from posexport.verify.cases import Case, make_cases
from posexport.verify.drafts import corners
from posexport.verify.judge import ArtifactJob
from posexport.verify.over_keys import ALL_CACHED, BANDS_CACHED
from posexport.verify.reach import default_reach
from posexport.verify.result import FAILED, PASSED

PRENORM = {"block": "transformer", "norm_type": "rmsnorm", "mlp": "swiglu", "intermediate_size": 48}
DECODER = {"causal": True, "kv_cache": "concat"}


def _made(spec: Spec, seed: int = 0) -> list[Case]:
    return make_cases(spec, seed, bounds_of(graph_inputs(spec), {}))


def test_steps_and_chunks_of_any_rows_meet_encoders_of_each_length() -> None:
    """Sizes are drawn, so that one seed in twenty misses one of these boxes: at most one of the seeds here may."""
    spec = small_spec("none", cross=True, padding_mask=True)
    boxes = [
        (rows, tokens, keys)
        for rows in ((1, 1), (2, 4), (6, 9))
        for tokens in ((1, 1), (2, 7))
        for keys in ((8, 32), (33, 127), (129, 511))
    ]
    missed: Counter[object] = Counter()
    for seed in range(5):
        sizes = {(each.sizes["batch"], each.sizes["seq"], each.sizes["encoder_seq"]) for each in _made(spec, seed)}
        for box in boxes:
            within = (all(low <= size <= high for size, (low, high) in zip(one, box, strict=True)) for one in sizes)
            missed[box] += not any(within)
        assert {1, 4} <= {batch for batch, seq, keys in sizes if seq == 1 and keys > 1200}
    assert max(missed.values()) <= 1, missed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", [None, "concat"])
def test_texts_stand_as_far_along_every_axis(cache: str | None) -> None:
    cases = _made(small_spec("mrope", head_dim=16, causal=True, kv_cache=cache))
    rows = [
        (each.sizes["batch"], row, each.keys > each.sizes["seq"])
        for each in cases
        for row in each.arrays["position_ids"]
        if (row == row[:, :1]).all()
    ]
    alone = [row for batch, row, _ in rows if batch == 1]
    assert len(alone) > 10
    assert any(len(row) > 20 and row.max() > 2**17 for row in alone)  # far
    assert any(len(row) > 20 and (np.diff(row[:, 0]) == 1).all() for row in alone)  # a prompt
    assert cache is None or sum(step and len(row) == 1 for _, row, step in rows) > 5
    several = [row for each in cases for row in each.arrays["position_ids"] if len(row) > 6]
    text = [(row == row[:, :1]).all(1) for row in several]
    assert any(row[0] and row[-1] and not row.all() for row in text)  # a picture inside a text
    assert any(not row[1:].any() for row in text)


def test_grids_with_a_size_hold_no_text() -> None:
    spec = small_spec("rope-dinov3", grid=(6, 9))
    assert all(each.arrays["position_ids"].max(initial=0) < 9 for each in _made(spec))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 1, 6])
def test_keys_behind_a_norm_are_loud_in_any_layer_of_a_stack(layers: int) -> None:
    """In a deep stack only one layer at a time has loud keys, because rounding errors of sharp layers multiply."""
    spec = small_spec("rope", layers=layers, **PRENORM, **DECODER)
    loud = []
    for each in _made(spec):
        caches = [values for name, values in each.arrays.items() if name.startswith("past_key") and values.size > 400]
        loud.append([number for number, values in enumerate(caches) if values.std() > 20])
    assert {number for numbers in loud for number in numbers} == {*range(layers)}
    assert max(map(len, loud)) == (layers if layers <= 3 else 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", ["concat", "shared"])
def test_the_oldest_keys_of_a_window_have_large_values(cache: str) -> None:
    spec = small_spec("rope", window=1500, causal=True, kv_cache=cache)
    (each,) = (each for each in _made(spec) if each.name.startswith("past 1500 keys"))
    values = np.abs(each.arrays["past_value"]).mean((0, 1, 3))
    assert (values[:4] > 30).all()
    assert values[4:].max() < 3
    first = each.keys - each.sizes["seq"]
    assert first < 1500 <= each.keys - 1  # queries on both sides of it


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_keys_that_grow_are_cached_as_far_as_others(dtype: str) -> None:
    """In half precision, long caches stay at positions where the keys are not yet large."""
    cases = _made(small_spec("xpos", dtype=dtype, **DECODER))
    assert 2200 <= max(each.keys for each in cases) < 2400
    assert max(each.farthest for each in cases) == 3071
    long = [each.farthest for each in cases if each.keys > 1100]
    assert dtype == "fp32" or max(long) < 1100


def test_caches_of_a_wide_stack_stay_small_together() -> None:
    spec = small_spec("rope", hidden_size=1024, num_heads=16, layers=8, **DECODER)
    drafts = list(corners(spec, np.random.default_rng(0), default_reach(spec)))
    latest = max(drafts, key=lambda draft: draft.past)
    assert latest.name == "late step"
    numbers = sum(2 * 8 * 1024 * draft.batch * draft.past for draft in drafts if draft is not latest)
    assert (ALL_CACHED + BANDS_CACHED) / 2 < numbers < 1.35 * (ALL_CACHED + BANDS_CACHED)
    small = small_spec("rope", **DECODER)
    assert max(draft.past for draft in corners(small, np.random.default_rng(0), default_reach(small))) == 2199


def test_an_artifact_that_was_judged_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is freed without waiting for the garbage collector: inputs and outputs may take a gigabyte."""
    write(tmp_path, "one", small_spec("rope"))
    jobs: list[weakref.ref[ArtifactJob]] = []
    submit = submission.submit

    def watched(job: ArtifactJob, *options: object) -> None:
        jobs.append(weakref.ref(job))
        submit(job, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(submission, "submit", watched)
    gc.disable()
    try:
        report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 20})
        assert [job() for job in jobs] == [None]
    finally:
        gc.enable()
    assert [verdict.state for verdict in report.verdicts] == [PASSED]


def _applied(apply: Apply) -> Mutate:
    def mutate(model: onnx.ModelProto) -> None:
        assert apply(model)

    return mutate


def _encoder_cut_in_steps(model: onnx.ModelProto) -> None:
    def change(nodes: Nodes, value: str) -> str:
        step = nodes.op("LessOrEqual", nodes.size("hidden_states", 1), nodes.const(4))
        first = nodes.op("Less", nodes.column(nodes.size(value, 1), 2, 1), nodes.const(512))
        shown = nodes.op("Or", first, nodes.op("Not", step))
        return nodes.op("Where", shown, value, nodes.const(0))

    change_input(model, "attention_mask", change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "mutate", "reach"),
    [
        (small_spec("cope", **PRENORM, **DECODER), _applied(logits_clipped(30.0, 0.5)), 200),
        (small_spec("rope", layers=5, **PRENORM, **DECODER), _applied(logits_clipped(30.0, 0.5)), 200),
        (small_spec("mrope", head_dim=16, **DECODER), _applied(text_ends(4095)), 300),
        (small_spec("none", cross=True, padding_mask=True), _encoder_cut_in_steps, 1200),
    ],
    ids=["cope", "logits", "text", "encoder"],
)
def test_faults_that_only_such_inputs_show_are_caught(spec: Spec, mutate: Mutate, reach: int, tmp_path: Path) -> None:
    wrong = plant(tmp_path, "wrong", spec, mutate)
    report = verify([wrong], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": reach})
    assert [verdict.state for verdict in report.verdicts] == [FAILED]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_next_key_of_a_long_sharp_prompt_is_caught(tmp_path: Path, seed: int) -> None:
    """In half precision after a norm, no token is louder than others, and one key among a thousand rarely matters."""
    spec = small_spec("t5", scale=1.0, head_dim=64, num_heads=2, num_kv_heads=2, causal=True, dtype="fp16", **PRENORM)
    plant(tmp_path, "block", spec, _applied(next_key_in_the_last_block(512, 1000)))
    write(tmp_path, "sound", spec)
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, seed=seed)
    assert [verdict.state for verdict in report.verdicts] == [FAILED, PASSED]


def test_prompts_are_alike_but_for_what_masks_hide() -> None:
    spec = small_spec("rope", causal=True, padding_mask=True)
    hiding = [each for each in _made(spec) if each.name.startswith("hiding")]
    assert [len(each.arrays["attention_mask"]) == 1 for each in hiding] == [True] * 4 + [False]
    assert sorted(len(f"{each.sizes['seq']:b}") for each in hiding[:4])[-1] == 11
    for each in hiding:
        seen = each.arrays["attention_mask"] == 1
        seen[:, -16:] = False
        for row, shown in zip(each.arrays["hidden_states"], seen, strict=True):
            assert shown.sum() < 2 or row[shown].std(0).max() < 0.2
            assert 0.8 < row[~shown].std(0).mean() < 1.2
    wide = small_spec("rope", causal=True, hidden_size=1024, num_heads=16)
    (one,) = (draft for draft in corners(wide, np.random.default_rng(0), default_reach(wide)) if draft.name == "hiding")
    assert 130 <= one.seq <= 1000
    free = small_spec("rope")
    assert not [each for each in _made(free) if each.name.startswith("hiding")]


LONGROPE = {
    **{"scaling": "longrope", "factor": 4.0, "original_max_position_embeddings": 256, "head_dim": 16},
    **{"short_factor": (1.0,) * 8, "long_factor": (2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)},
}


@pytest.mark.slow
def test_a_trained_length_that_some_tokens_decide_is_caught(tmp_path: Path) -> None:
    rope, cached = small_spec("rope", causal=True, **LONGROPE), small_spec("rope", **LONGROPE, **DECODER)
    parts = [("first token", cached, 1, 0), ("last token", rope, 1, -1), ("last token over keys", cached, 1, -1)]
    parts += [("first row", cached, 0, 0), ("last row", rope, 0, -1)]
    parts += [(f"axis {at}", small_spec("mrope", **LONGROPE), 2, at) for at in range(3)]
    for name, spec, axis, at in parts:
        plant(tmp_path, name, spec, _applied(length_of(axis, at)))
    write(tmp_path, "sound", small_spec("mrope", **LONGROPE, **DECODER))
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 40})
    states = {Path(verdict.artifact).stem: verdict.state for verdict in report.verdicts}
    assert states == {"sound": PASSED, **dict.fromkeys((name for name, *_ in parts), FAILED)}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_mask_that_large_logits_pass_is_caught(tmp_path: Path, seed: int) -> None:
    """GPT-2 masked with -10,000. One feature of 400 makes logits of larger magnitude."""
    plant(tmp_path, "causal", small_spec("rope", hidden_size=64, causal=True), _applied(masked_with(-1e4)))
    plant(tmp_path, "chunk", small_spec("rope", attention_chunk_size=9, padding_mask=True), _applied(masked_with(-1e4)))
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, seed=seed, reach={"seq": 60})
    assert [verdict.state for verdict in report.verdicts] == [FAILED] * 2


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_mask_that_a_key_alone_passes_is_caught(tmp_path: Path, seed: int) -> None:
    """In half precision, a mask of -100 shows if a query sees only its own key and that logit is far below -100."""
    causal = small_spec("rope", hidden_size=64, dtype="fp16", **DECODER)
    padded = small_spec("t5", hidden_size=64, dtype="fp16", padding_mask=True)
    for name, spec in (("causal", causal), ("padded", padded)):
        plant(tmp_path, name, spec, _applied(masked_with(-100.0)))
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, seed=seed, reach={"seq": 60})
    assert [verdict.state for verdict in report.verdicts] == [FAILED] * 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"scale": 20.0}, {"scale": 50.0, "sinks": True, "kv_cache": "concat"}])
def test_large_logits_in_half_precision_are_no_fault(tmp_path: Path, more: dict[str, object]) -> None:
    """With large logits, the last bit may decide which of two keys wins, so inputs leave room for the scale."""
    spec = small_spec("rope", causal=True, dtype="fp16", hidden_size=32, num_heads=4, num_kv_heads=4, **more)
    report = verify([write(tmp_path, "sound", spec)], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 600})
    assert [verdict.state for verdict in report.verdicts] == [PASSED]


@pytest.mark.slow
def test_hidden_states_are_unit_normal_but_for_large_scales_in_half_precision() -> None:
    for more, size in (
        ({}, 1.0),
        ({"scale": 50.0}, 1.0),
        ({"dtype": "fp16"}, 1.0),
        ({"dtype": "fp16", "scale": 50.0}, 0.4),
    ):
        spec = small_spec("rope", **more, **DECODER)
        plain = [each.arrays for each in _made(spec) if each.name.startswith("scattered")]
        for name, expected in (("hidden_states", size), ("past_key", size), ("past_value", 1.0)):
            values = np.concatenate([arrays[name].astype(np.float64).ravel() for arrays in plain])
            assert expected * 0.8 < values.std() < expected * 1.2, (name, more)


@pytest.mark.slow
def test_half_precision_has_room_for_a_feature_of_a_block_with_few() -> None:
    """Otherwise products in narrow blocks would exceed 65,504."""
    largest = {}
    for hidden_size in (2, 64):
        spec = small_spec("rope", hidden_size=hidden_size, num_heads=1, num_kv_heads=1, dtype="fp16", **DECODER)
        largest[hidden_size] = max(float(np.abs(each.arrays["hidden_states"]).max()) for each in _made(spec))
    assert 40 < largest[2] < 0.4 * largest[64]


def test_in_half_precision_a_query_far_from_others_sees_itself() -> None:
    """Biases of far keys overflow fp16. A query whose own key is padding would see only such keys."""
    texts = [each for each in _made(small_spec("alibi2d", padding_mask=True, dtype="fp16")) if each.name[:4] == "text"]
    assert texts
    assert all((each.arrays["attention_mask"] == 1).all() for each in texts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("encoding", "slope"), [("alibi", 2.0), ("alibi2d", 2.0), ("alibi", None), ("alibi2d", None), ("kerple", 1.0)]
)
def test_in_half_precision_padding_leaves_no_query_with_far_keys_of_a_steep_bias(
    encoding: str, slope: float | None
) -> None:
    more = {"slopes": (1.0, 0.5, 0.1, slope)} if slope == 2.0 else {}
    spec = small_spec(encoding, **more, padding_mask=True, num_heads=4, num_kv_heads=4, dtype="fp16")
    hidden = 0
    for each in _made(spec):
        mask, positions = each.arrays["attention_mask"] == 1, each.arrays["position_ids"].astype(np.float64)
        for row, places in zip(mask, positions.reshape(*mask.shape, -1), strict=True):
            if not row.all() and row.any():
                hidden += 1
                far = np.abs(places[~row][:, None] - places[row]).max(-1).min(1).max()
                assert (slope or 0.25) * far < 110, each.name
    assert hidden > 20


@pytest.mark.slow
def test_rows_in_another_order_are_caught_in_batches_of_any_size(tmp_path: Path) -> None:
    cross = small_spec("none", cross=True, padding_mask=True)
    for name, spec, low, high, steps in (
        ("dozen", small_spec("rope", **DECODER, padding_mask=True), 10, 16, False),
        ("steps", small_spec("rope", causal=True, kv_cache="shared"), 16, 16, True),
        ("encoder", cross, 32, 32, True),
        ("prompt", small_spec("t5"), 10, 16, True),
    ):
        plant(tmp_path, name, spec, _applied(rows_turned_around("hidden_states", low, high, steps)))
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 60})
    assert [verdict.state for verdict in report.verdicts] == [FAILED] * 4


def test_one_large_feature_leaves_room_for_queries_that_grow() -> None:
    """In half precision, the product of such a query and a key would otherwise exceed 65,504."""
    large = {}
    for floor_scale in (15, 8192):
        spec = small_spec("temperature", floor_scale=floor_scale, attn_scale=0.3, dtype="fp16")
        peaks = np.array([float(np.abs(each.arrays["hidden_states"]).max()) for each in _made(spec)])
        large[floor_scale] = peaks[peaks > 40].mean()
    assert 100 < large[15] < 0.8 * large[8192]
