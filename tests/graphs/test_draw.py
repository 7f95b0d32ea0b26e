"""Drawn inputs agree with each other, with sizes that the graph fixes and with its tables; cases cover every corner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_signatures import Signature, graph_of
from onnx import helper, numpy_helper

from posexport.errors import RequestError
from posexport.graphs.cases import LEAST, cases_of, without_keys
from posexport.graphs.draw import Kinds, draw_inputs
from posexport.graphs.roles import Role, roles_of
from posexport.graphs.tables import patches_of

DECODER: Signature = {
    "input_ids": (["b", "s"], "int64"),
    "attention_mask": (["b", "t"], "int64"),
    "position_ids": (["b", "s"], "int64"),
    "past_key_values.0.key": (["b", 2, "p", 4], "fp32"),
}


def roles(folder: Path, signature: Signature, **named: Any) -> dict[str, Role]:
    return roles_of(graph_of(folder, signature, **named))


def drawn(
    roles: dict[str, Role], sizes: dict[str, int], seed: int = 0, **kinds: Any
) -> dict[str, np.ndarray[Any, Any]]:
    return draw_inputs(roles, sizes, np.random.default_rng(seed), Kinds(**kinds)).arrays


def test_lengths_and_positions_follow_from_each_other(tmp_path: Path) -> None:
    arrays = drawn(roles(tmp_path, DECODER), {"batch": 3, "seq": 4, "past": 5}, padding="left")
    mask = arrays["attention_mask"]
    assert {name: array.shape for name, array in arrays.items()} == {
        "input_ids": (3, 4),
        "attention_mask": (3, 9),
        "position_ids": (3, 4),
        "past_key_values.0.key": (3, 2, 5, 4),
    }
    assert (np.diff(mask, axis=1) >= 0).all()
    for row in range(3):  # counted one by one, as pipelines do
        seen = -1
        for place in range(9):
            seen += int(mask[row, place])
            if place >= 5:
                assert arrays["position_ids"][row, place - 5] == max(seen, 0)


@pytest.mark.parametrize("padding", ["left", "right", "holes", "mixed"])
def test_any_row_of_a_batch_is_padded_or_not_and_all_may_be_padded_alike(padding: str, tmp_path: Path) -> None:
    found, sizes = roles(tmp_path, DECODER), {"batch": 3, "seq": 4, "past": 9}
    masks = [drawn(found, sizes, seed, padding=padding)["attention_mask"] for seed in range(60)]
    whole = {tuple(mask.all(1).tolist()) for mask in masks}
    assert {(True, False, False), (False, True, False), (False, False, True), (False, False, False)} <= whole
    assert any((mask == mask[0]).all() and not mask.all() for mask in masks)


def test_the_first_row_has_no_padding_where_all_rows_share_what_is_drawn_for_it(tmp_path: Path) -> None:
    found = roles(tmp_path, {**DECODER, "position_ids": (["s"], "int64")})
    sizes = {"batch": 3, "seq": 4, "past": 9}
    assert all(drawn(found, sizes, seed, padding="left")["attention_mask"][0].all() for seed in range(20))


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes", "mixed"])
def test_every_row_sees_one_of_its_new_tokens(padding: str, tmp_path: Path) -> None:
    for seed in range(20):
        sizes = {"batch": 4, "seq": 1 + seed % 3, "past": seed}
        mask = drawn(roles(tmp_path, DECODER), sizes, seed, padding=padding)["attention_mask"]
        assert mask[:, seed:].any(1).all()


def test_what_the_graph_fixes_stays(tmp_path: Path) -> None:
    fixed: Signature = {
        "input_ids": ([2, 1], "int64"),
        "attention_mask": ([2, 8], "int64"),
        "past_key_values.0.key": ([2, 2, 7, 4], "fp32"),
    }
    arrays = drawn(roles(tmp_path, fixed), {"batch": 5, "seq": 6, "past": 3})
    assert [array.shape for array in arrays.values()] == [(2, 1), (2, 8), (2, 2, 7, 4)]
    assert arrays["attention_mask"].all()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (["b", 0, 8], r"\[1, 0, 8\] is fixed to no rows or no tokens"),
        ([0, "s", 8], "is fixed to no rows or no tokens"),
        (["b", 2**62, 8], "GB of memory are free"),
        (["b", "s", 2**62], "GB of memory are free"),
    ],
)
def test_sizes_that_nobody_can_give_are_refused(shape: list[str | int], said: str, tmp_path: Path) -> None:
    known = roles(tmp_path, {"hidden_states": (shape, "fp32")})
    with pytest.raises(RequestError, match=said):
        cases_of(known, 0)


def test_numbers_stay_below_their_tables(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["words", "input_ids read"], ["rows"]),
        helper.make_node("Add", ["position_ids read", "two"], ["moved"]),
        helper.make_node("Gather", ["places", "moved"], ["placed"]),
    ]
    weights = {"words": np.zeros((7, 3), np.float32), "places": np.zeros((14, 3), np.float32), "two": np.array(2)}
    made = roles(tmp_path, DECODER, nodes=nodes, weights=weights)
    assert {name: role.rows for name, role in made.items() if role.rows} == {"input_ids": 7, "position_ids": 12}
    for kind in ("consecutive", "offset", "scattered", "shuffled", "far"):
        arrays = drawn(made, {"batch": 3, "seq": 40, "past": 40}, positions=kind)
        assert {*np.unique(arrays["input_ids"])} <= {*range(7)}
        assert 0 <= arrays["position_ids"].min() <= arrays["position_ids"].max() < 12
        assert arrays["attention_mask"].shape[1] <= 12
    assert {0, 6} <= {*np.unique(arrays["input_ids"])}


def test_a_table_that_is_spread_over_rows_is_found(tmp_path: Path) -> None:
    """GatherElements of an expanded constant, as in GPT-J."""
    table = helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(np.zeros((1, 33, 4), np.float32)))
    nodes = [
        table,
        helper.make_node("Expand", ["table", "shape"], ["wide"]),
        helper.make_node("Unsqueeze", ["position_ids read", "last"], ["column"]),
        helper.make_node("GatherElements", ["wide", "column"], ["rows"], axis=1),
    ]
    weights = {"shape": np.array([3, 1, 1]), "last": np.array([2])}
    assert roles(tmp_path, DECODER, nodes=nodes, weights=weights)["position_ids"].rows == 33


def test_an_added_mask_lets_each_token_see_itself_and_what_is_before(tmp_path: Path) -> None:
    signature: Signature = {**DECODER, "attention_mask": (["b", 1, "s", "t"], "fp32")}
    mask = drawn(roles(tmp_path, signature), {"batch": 2, "seq": 3, "past": 2}, padding="holes")["attention_mask"]
    assert mask.shape == (2, 1, 3, 5)
    assert set(np.unique(mask)) == {0.0, float(np.finfo(np.float32).min)}
    for token in range(3):
        assert (mask[:, 0, token, token + 2] == 0).all()
        assert (mask[:, 0, token, token + 3 :] < 0).all()


def test_a_cache_that_is_written_into_has_free_places(tmp_path: Path) -> None:
    signature: Signature = {
        "hidden_states": (["b", "s", 8], "fp16"),
        "write_indices": (["b"], "int64"),
        "past_key": (["b", 2, "m", 4], "fp16"),
    }
    arrays = drawn(roles(tmp_path, signature), {"batch": 2, "seq": 3, "past": 4})
    assert (arrays["write_indices"] == 4).all()
    cache = arrays["past_key"]
    assert cache.shape[2] > 7
    assert cache.dtype == np.float16


def test_lengths_of_other_builders(tmp_path: Path) -> None:
    signature: Signature = {
        "input_ids": (["b", "s"], "int32"),
        "seqlens_k": (["b"], "int32"),
        "total_sequence_length": ([], "int32"),
        "past_seen_tokens": ([], "int64"),
        "use_cache_branch": ([1], "bool"),
        "cache_position": (["s"], "int64"),
        "past_key.0": (["b", 1, "p", 4], "fp32"),
    }
    arrays = drawn(roles(tmp_path, signature), {"batch": 2, "seq": 3, "past": 4})
    assert arrays["seqlens_k"].tolist() == [6, 6]
    assert arrays["total_sequence_length"].tolist() == 7
    assert arrays["past_seen_tokens"].tolist() == 4
    assert arrays["use_cache_branch"].tolist() == [True]
    assert arrays["cache_position"].tolist() == [4, 5, 6]
    assert not drawn(roles(tmp_path, signature), {"past": 0})["use_cache_branch"].any()


def test_pictures_have_whole_patches(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["pixel_values read", "kernel"], ["patches"], strides=[8, 8], kernel_shape=[8, 8]),
        helper.make_node("Add", ["patches", "positions"], ["placed"]),
    ]
    weights = {"kernel": np.zeros((4, 3, 8, 8), np.float32), "positions": np.zeros((1, 26, 4), np.float32)}
    graph = graph_of(tmp_path, {"pixel_values": (["b", 3, "h", "w"], "fp32")}, nodes=nodes, weights=weights)
    made = roles_of(graph)
    assert (made["pixel_values"].strides, made["pixel_values"].patches) == ((8, 8), 5)
    sizes = [case.arrays["pixel_values"].shape for case in cases_of(made, 0)]
    assert sizes[0] == (1, 3, 40, 40)
    assert len(set(sizes)) > 3
    assert all(size % 8 == 0 for shape in sizes for size in shape[2:])


def test_cases_have_every_corner_and_are_the_same_for_a_seed(tmp_path: Path) -> None:
    made = roles(tmp_path, DECODER)
    cases = cases_of(made, 3)
    labels = [case.label for case in cases]
    assert len(labels) == len(set(labels)) <= 24
    for corner in (
        "prompt",
        "several",
        "one token",
        "left",
        "right",
        "holes",
        "large",
        "small",
        "far",
        "step",
        "chunk",
    ):
        assert any(corner in label for label in labels), corner
    sizes = [(case.sizes["batch"], case.sizes["seq"], case.sizes["past"]) for case in cases]
    assert any(past and seq > 1 and batch > 1 for batch, seq, past in sizes)
    assert (1, 1, 0) in sizes
    again = cases_of(made, 3)
    assert all(
        (case.arrays[name] == other.arrays[name]).all()
        for case, other in zip(cases, again, strict=True)
        for name in case.arrays
    )
    assert any(
        (case.arrays["input_ids"] != other.arrays["input_ids"]).any()
        for case, other in zip(cases, cases_of(made, 4), strict=True)
    )


def test_a_graph_of_fixed_sizes_gets_a_few_cases_that_differ(tmp_path: Path) -> None:
    made = roles(tmp_path, {"input_ids": ([1, 6], "int64"), "attention_mask": ([1, 6], "int64")})
    cases = cases_of(made, 0)
    assert len(cases) >= LEAST
    assert len({case.arrays["input_ids"].tobytes() for case in cases}) == len(cases)


def test_grouped_query_attention_gets_what_it_takes(tmp_path: Path) -> None:
    node = helper.make_node("GroupQueryAttention", ["input_ids read"], ["x"], domain="com.microsoft")
    for case in cases_of(roles(tmp_path, DECODER, nodes=[node]), 0):
        mask = case.arrays["attention_mask"]
        assert (np.diff(mask, axis=1) <= 0).all(), case.label
        if case.sizes["past"] and case.sizes["seq"] > 1:
            assert case.sizes["batch"] == 1


def test_reach_and_further_cases(tmp_path: Path) -> None:
    made = roles(tmp_path, DECODER)
    usual = len(cases_of(made, 0))
    cases = cases_of(made, 0, reach={"seq": 300, "batch": 20}, more=5)
    assert len(cases) == usual + 3 + 5
    assert max(case.sizes["past"] + case.sizes["seq"] for case in cases) == 300
    assert max(case.sizes["batch"] for case in cases) == 20


def test_no_table_of_patches_where_none_is_added(tmp_path: Path) -> None:
    import onnx_ir as ir

    assert patches_of(ir.from_proto(graph_of(tmp_path, DECODER).model)) is None


def test_cases_take_turns_in_the_tokens_of_a_vocabulary(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["words", "input_ids read"], ["rows"])]
    made = roles(tmp_path, DECODER, nodes=nodes, weights={"words": np.zeros((400, 3), np.float32)})
    read = np.concatenate([case.arrays["input_ids"].ravel() for case in cases_of(made, 0)])
    assert len(np.unique(read)) > 0.95 * 400


def test_masks_that_are_added_hold_biases_and_minus_infinity_in_some_cases(tmp_path: Path) -> None:
    """If a file clips or halves its mask, this shows only if the mask contains numbers other than 0."""
    signature: Signature = {"x": (["b", "s", 8], "fp32"), "attn_mask": (["b", 1, "s", "s"], "fp32")}
    found = roles(tmp_path, signature)
    sizes, lowest = {"batch": 2, "seq": 6}, float(np.finfo(np.float32).min)
    biased = drawn(found, sizes, scores="biased")["attn_mask"]
    plain = drawn(found, sizes, scores="plain")["attn_mask"]
    infinite = drawn(found, sizes, scores="infinite", padding="left")["attn_mask"]
    finite = biased[biased > lowest]
    assert finite.min() < -0.5 < 0.5 < finite.max() < 20
    assert set(np.unique(plain)) <= {0.0, lowest}
    assert set(np.unique(infinite)) == {0.0, -np.inf}
    assert np.isfinite(infinite).any(-1).all(), "a row sees no key"
    kinds = [case.kinds.scores for case in cases_of(found, seed=0)]
    assert {"plain", "biased", "infinite"} == set(kinds)
    ones = roles(tmp_path, {**signature, "attn_mask": (["b", "s"], "fp32")})
    assert {case.kinds.scores for case in cases_of(ones, seed=0)} == {"plain"}


def test_a_mask_of_tokens_and_keys_pads_no_row(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "x"], ["product"]), helper.make_node("Add", ["product", "mask"], ["y"])]
    found = roles(tmp_path, {"x": (["b", "s", "s"], "fp32"), "mask": (["s", "s"], "fp32")}, nodes=nodes)
    assert found["mask"].axes == ("seq", "seq")
    assert all(case.tokens.all() for case in cases_of(found, seed=0))


def test_biases_are_numbers_without_a_key_that_is_hidden(tmp_path: Path) -> None:
    signature: Signature = {"x": (["b", "s", 8], "fp32"), "position_bias": ([1, 4, "s", "s"], "fp32")}
    found = roles(tmp_path, signature)
    assert (found["position_bias"].kind, found["position_bias"].axes) == ("bias", ("batch", 4, "seq", "seq"))
    assert all(np.abs(case.arrays["position_bias"]).max() < 20 for case in cases_of(found, seed=0))


BUFFER: Signature = {
    "hidden_states": (["b", "s", 8], "fp32"),
    "position_ids": (["b", "s"], "int64"),
    "attention_mask": (["b", "m"], "int64"),
    "write_indices": (["b"], "int64"),
    "past_key": (["b", 2, "m", 4], "fp32"),
}


def test_rows_of_a_buffer_hold_more_tokens_or_fewer(tmp_path: Path) -> None:
    made = draw_inputs(
        roles(tmp_path, BUFFER), {"batch": 5, "seq": 3, "past": 9}, np.random.default_rng(1), Kinds(apart=True)
    )
    begins = made.arrays["write_indices"]
    assert begins[0] == 9
    assert begins[-1] == 0
    assert len({*begins.tolist()}) > 2
    assert made.tokens.shape == (5, 3)
    assert made.tokens.all()
    for row, begin in enumerate(begins):
        np.testing.assert_array_equal(made.arrays["position_ids"][row], begin + np.arange(3))
        assert made.arrays["attention_mask"][row].sum() == begin + 3
    together = drawn(roles(tmp_path, BUFFER), {"batch": 5, "seq": 3, "past": 9})
    assert (together["write_indices"] == 9).all()


@pytest.mark.parametrize(("values", "empty"), [("normal", False), ("loud", False), ("zeros", True)])
def test_free_places_of_a_buffer_hold_numbers(values: str, empty: bool, tmp_path: Path) -> None:
    cache = drawn(roles(tmp_path, BUFFER), {"batch": 2, "seq": 3, "past": 9}, values=values)["past_key"]
    assert (not cache[:, :, 9:].any()) == empty


def test_numbers_of_kept_tokens_beams_and_pictures_vary(tmp_path: Path) -> None:
    signature: Signature = {
        "input_ids": (["b", "s"], "int64"),
        "logits_to_keep": ([], "int64"),
        "beam_idx": (["b"], "int64"),
        "pixel_values": (["b", 3, 32, 32], "fp32"),
        "pixel_mask": (["b", 32, 32], "int64"),
    }
    many = [drawn(roles(tmp_path, signature), {"batch": 3, "seq": 6}, seed) for seed in range(30)]
    kept = {int(arrays["logits_to_keep"]) for arrays in many}
    assert {1, 6} < kept <= {*range(1, 7)}
    assert {int(row) for arrays in many for row in arrays["beam_idx"]} == {0, 1, 2}
    masks = np.array([arrays["pixel_mask"] for arrays in many])
    assert masks[:, 0].all()
    assert masks[:, :, 0, 0].all()
    assert 0.5 < masks[:, 1:].mean() < 0.8


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_caches_of_bytes_hold_any_of_them(dtype: str, tmp_path: Path) -> None:
    cache: tuple[list[int | str], str] = (["b", 2, "p", 4], dtype)
    names = {"past_key_values.0.key": "past", "past_key_values.0.encoder.key": "encoder_past"}
    signature: Signature = {"input_ids": (["b", "s"], "int64"), **dict.fromkeys(names, cache)}
    found = roles(tmp_path, {**signature, "attention_mask": (["b", "t"], dtype)})
    assert {name: found[name].kind for name in names} == names and found["attention_mask"].kind == "attention_mask"
    arrays = drawn(found, {"batch": 8, "seq": 2, "past": 64, "encoder": 64})
    limits = np.iinfo(dtype)
    for name in names:
        assert arrays[name].dtype == dtype
        assert (arrays[name].min(), arrays[name].max()) == (limits.min, limits.max)
    with pytest.raises(RequestError, match=r"by its shape and type: .*\bpast\b"):
        roles(tmp_path, {"foo": cache})


def test_one_more_case_hides_all_tokens_of_an_encoder(tmp_path: Path) -> None:
    signature: Signature = {
        "input_ids": (["b", "s"], "int64"),
        "encoder_hidden_states": (["b", "e", 8], "fp32"),
        "encoder_attention_mask": (["b", "e"], "int64"),
    }
    found = roles(tmp_path, signature)
    usual, more = cases_of(found, seed=0), cases_of(found, seed=0, own=without_keys(found))
    hidden = [not case.arrays["encoder_attention_mask"].any(1).all() for case in more]
    assert hidden == [False] * len(usual) + [True] and more[-1].tokens.all()
    assert without_keys(roles(tmp_path, DECODER)) == ()


def test_positions_of_all_rows_are_those_of_the_first(tmp_path: Path) -> None:
    signature: Signature = {"hidden_states": (["batch", "image", 8], "fp32"), "img_ids": ([1, "image", 3], "fp32")}
    ids = drawn(roles(tmp_path, signature), {"batch": 3, "seq": 5})["img_ids"]
    assert ids.shape == (1, 5, 3)
    np.testing.assert_array_equal(ids[0, :, 0], np.arange(5))
