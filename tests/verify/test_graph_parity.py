"""Outputs of a file compared with its float64 evaluation: each way to fail, and differences that must pass."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from posexport.verify.graph.cases import GraphCase
from posexport.verify.graph.outputs import selected, token_axes
from posexport.verify.graph.parity import Expected, coarser, compare, own_error_share, tolerance_of
from posexport.verify.result import Comparison

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
EXACT = RNG.standard_normal((2, 3, 4))
NOISE = RNG.uniform(-1e-7, 1e-7, EXACT.shape)


def expected(exact: Array = EXACT, **more: Any) -> Expected:
    own = (exact + NOISE).astype(np.float32) if exact.shape == NOISE.shape else exact.astype(np.float32)
    fields = {"own": [own], "select": None, "dtype": "fp32", "tolerance": tolerance_of("fp32", "fp32")}
    return Expected(name="y", exact=exact, **(fields | more))


def compared(output: Array, what: Expected | None = None) -> Comparison:
    found, _ = compare("case", [what or expected()], {"y": output})
    assert len(found) == 1
    return found[0]


def test_what_is_near_passes_and_states_its_numbers() -> None:
    found = compared((EXACT - NOISE).astype(np.float32))
    assert found.state == "passed"
    assert found.max_error is not None
    assert found.limit is not None
    assert found.torch_error is not None
    assert 0 < found.max_error < found.limit < 1e-5
    assert 5e-8 < found.torch_error < 2e-7


FAULTS: dict[str, tuple[Array, str]] = {
    "an element is off": (
        np.where(np.arange(24).reshape(2, 3, 4) == 7, EXACT + 1e-4, EXACT),
        r"off by 0.0001 at \[0, 1, 3\]",
    ),
    "another shape": (EXACT[:, :2], r"has shape \[2, 2, 4\], it must be \[2, 3, 4\]"),
    "a row that would broadcast": (EXACT[:1], "has shape"),
    "no number": (np.where(np.arange(24).reshape(2, 3, 4) == 1, np.nan, EXACT), "has nan at"),
    "infinite": (np.where(np.arange(24).reshape(2, 3, 4) == 1, np.inf, EXACT), "has inf at"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fails(name: str) -> None:
    output, reason = FAULTS[name]
    found = compared(output.astype(np.float32))
    assert found.state == "failed"
    assert __import__("re").search(reason, found.reason or ""), found.reason


def test_a_missing_an_unknown_and_a_converted_output_fail() -> None:
    found, _ = compare("case", [expected()], {"z": EXACT.astype(np.float32)})
    assert [each.reason_code for each in found] == ["missing-output", "unknown-output"]
    assert compared(EXACT.astype(np.float16)).reason_code == "dtype"


def test_a_wrong_evaluation_excuses_no_more_than_the_ceiling() -> None:
    far = expected(own=[(EXACT + 1).astype(np.float32)])
    assert compared((EXACT + 0.5).astype(np.float32), far).state == "failed"


def test_padding_is_left_out_and_nothing_else() -> None:
    select = np.ones(EXACT.shape, bool)
    select[1, 0] = False
    output = EXACT.astype(np.float32)
    output[1, 0] = np.nan
    assert compared(output, expected(select=select)).state == "passed"
    output[1, 1] += 1
    assert compared(output, expected(select=select)).state == "failed"


def test_whole_numbers_are_equal_but_where_float64_decides_otherwise() -> None:
    exact = np.arange(12)
    own = exact.copy()
    own[3] += 1
    ints = expected(exact, own=[own], dtype="int64")
    output = exact.copy()
    output[3] += 1
    found, left = compare("case", [ints], {"y": output})
    assert found[0].state == "passed"
    assert left == ["float64 and the file's own dtypes give different whole numbers for 1 of 12 of 'y' on case"]
    output[4] += 1
    assert compared(output, ints).reason == "output 'y' is 5 at [4], it must be 4"
    truth = expected(np.array([True, False]), own=[np.array([True, False])], dtype="bool")
    assert compared(np.array([True, True]), truth).state == "failed"


def test_where_most_whole_numbers_are_undecided_nothing_is_compared() -> None:
    found, left = compare(
        "case", [expected(np.arange(4), own=[np.arange(4) + 1], dtype="int64")], {"y": np.arange(4) + 9}
    )
    assert found[0].max_error is None
    assert left


def test_infinite_and_huge_values_must_be_so_and_have_no_part_in_the_scale() -> None:
    exact = EXACT.copy()
    exact[0, 0, 0], exact[0, 0, 1] = -np.inf, -3.4e38
    what = expected(exact, own=[exact.astype(np.float32)])
    sound = exact.astype(np.float32)
    sound[0, 0, 1] = -np.inf  # as when two such numbers are added in fp32
    found = compared(sound, what)
    assert found.state == "passed"
    assert found.reference_rms is not None
    assert found.reference_rms < 10
    sound[0, 0, 0] = 0
    assert compared(sound, what).reason_code == "not-finite"


def test_what_the_own_dtypes_cannot_compute_is_left_open() -> None:
    own = EXACT.astype(np.float32)
    own[0, 0, 0] = np.inf
    output = own.copy()
    found, left = compare("case", [expected(own=[own])], {"y": output})
    assert found[0].state == "passed"
    assert left == ["1 of 24 values can't be computed in the file's own dtypes of 'y' on case"]


def test_a_sigmoid_is_exact_to_digits_of_one() -> None:
    exact = np.full((2, 3, 4), 1e-11)
    output = np.full((2, 3, 4), 2e-10, np.float32)
    assert compared(output, expected(exact, own=[exact])).state == "failed"
    assert compared(output, expected(exact, own=[exact], least_scale=1.0)).state == "passed"


@pytest.mark.parametrize(
    ("dtype", "main", "like"), [("fp32", "fp32", "fp32"), ("fp32", "fp16", "fp16"), ("bf16", "fp32", "bf16")]
)
def test_the_tolerance_is_that_of_the_coarser_dtype(dtype: str, main: str, like: str) -> None:
    assert tolerance_of(dtype, main) == tolerance_of(like, like)
    assert coarser(dtype, main) == like
    assert tolerance_of("fp64", "fp64").floor < tolerance_of("fp32", "fp32").floor


def test_bfloat16_is_compared() -> None:
    output = EXACT.astype(ml_dtypes.bfloat16)
    what = expected(own=[output], dtype="bf16", tolerance=tolerance_of("bf16", "bf16"))
    assert compared(output, what).state == "passed"
    assert compared((EXACT * 1.3).astype(ml_dtypes.bfloat16), what).state == "failed"


def test_the_own_error_is_a_part_of_the_scale() -> None:
    exact = np.full((2, 3, 4), 2.0)
    assert own_error_share(expected(exact, own=[exact + 0.5])) == pytest.approx(0.25)
    assert own_error_share(expected(np.arange(3), own=[np.arange(3) + 1])) == 0


def cases() -> list[GraphCase]:
    made = []
    for batch, seq, past in ((1, 4, 0), (2, 3, 5), (3, 1, 7)):
        keys = np.ones((batch, past + seq), bool)
        keys[-1, 0] = False
        visible = {"seq": keys[:, past:], "total": keys}
        sizes = {"batch": batch, "seq": seq, "past": past, "total": past + seq}
        made.append(GraphCase(name=f"{batch}", arrays={}, sizes=sizes, visible=visible))
    return made


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("logits", lambda s: (s["batch"], s["seq"], 8), (0, 1, "seq")),
        ("time first", lambda s: (s["seq"], s["batch"], 8), (1, 0, "seq")),
        ("present.0.key", lambda s: (s["batch"], 2, s["total"], 4), (0, 2, "total")),
        ("pooled", lambda s: (s["batch"], 8), None),
        ("one", lambda s: (), None),
        ("present.0.recurrent_state", lambda s: (s["batch"], 2, s["total"], 4), None),  # features, as many by chance
        ("present_conv.0", lambda s: (s["batch"], s["total"], s["seq"]), None),
    ],
)
def test_the_axes_of_tokens_are_told_by_their_sizes(name: str, shape: Any, axes: object) -> None:
    assert token_axes(name, cases(), [shape(case.sizes) for case in cases()]) == axes


def test_values_of_padding_are_not_selected() -> None:
    first, second, third = cases()
    select = selected(first, (0, 1, "seq"), (1, 4, 2))
    assert select is not None
    assert select.any(-1).tolist() == [[False, True, True, True]]
    assert selected(second, (0, 1, "seq"), (2, 3, 8)) is None  # the new tokens are all seen
    cached = selected(second, (0, 2, "total"), (2, 2, 8, 4))
    assert cached is not None
    assert not cached[1, :, 0].any()
    assert cached[1, :, 1:].all()
    assert selected(third, None, (3, 8)) is None
