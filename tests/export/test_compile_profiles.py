"""Shape profiles: requests by dimension and by input, defaults, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click import Option
from helpers import small_spec
from hypothesis import given
from hypothesis import strategies as st

from posexport.artifact.profiles import check_shapes, describe, profiles_of, ranges_of
from posexport.errors import RequestError
from posexport.spec.contract import graph_inputs

SHAPES: dict[str, tuple[str | int, ...]] = {"hidden_states": ("batch", "seq", 64), "position_ids": ("batch", "seq", 2)}


FIXED = {"min": [1, 196, 64], "opt": [1, 196, 64], "max": [1, 196, 64]}


def test_defaults_span_batch_and_sequence() -> None:
    assert profiles_of(SHAPES) == {
        "hidden_states": {"min": [1, 1, 64], "opt": [1, 1024, 64], "max": [8, 4096, 64]},
        "position_ids": {"min": [1, 1, 2], "opt": [1, 1024, 2], "max": [8, 4096, 2]},
    }


def test_a_trained_table_caps_the_default_sequence_and_no_request() -> None:
    assert profiles_of(SHAPES, seq_limit=512)["hidden_states"]["max"] == [8, 512, 64]
    assert profiles_of(SHAPES, seq_limit=512)["hidden_states"]["opt"] == [1, 512, 64]
    assert profiles_of(SHAPES, ["seq=1:7:2048"], seq_limit=512)["hidden_states"]["max"] == [8, 2048, 64]


def test_a_profile_has_no_more_tokens_than_there_are_consecutive_positions() -> None:
    assert profiles_of(SHAPES, ["seq=1:7:512"], 512, consecutive=True)["hidden_states"]["max"][1] == 512
    for request in ("seq=1:7:513", "position_ids=1x1,1x7,8x513"):
        with pytest.raises(RequestError, match="reaches 513, and the file has 512 consecutive positions: give less"):
            profiles_of(SHAPES, [request], 512, consecutive=True)
    assert profiles_of(SHAPES, ["seq=1:7:513"], consecutive=True)["hidden_states"]["max"][1] == 513


@pytest.mark.parametrize(
    "requests",
    [
        ["seq=2:7:9", "batch=1:2:3"],
        ["position_ids=1x2,2x7,3x9"],
        ["position_ids=1x2x2,2x7x2,3x9x2"],
        ["hidden_states=1x2x64, 2x7x64, 3x9x64", "seq = 2:7:9"],
        ["position_ids=1x2,2x7,3x9", "hidden_states=1x2,2x7,3x9"],
    ],
)
def test_dimensions_and_inputs_say_the_same(requests: list[str]) -> None:
    assert profiles_of(SHAPES, requests) == {
        "hidden_states": {"min": [1, 2, 64], "opt": [2, 7, 64], "max": [3, 9, 64]},
        "position_ids": {"min": [1, 2, 2], "opt": [2, 7, 2], "max": [3, 9, 2]},
    }


def test_one_size_stands_for_all_three() -> None:
    assert profiles_of(SHAPES, ["seq=196", "batch=1"])["hidden_states"] == FIXED


def test_a_static_graph_needs_no_request() -> None:
    shapes: dict[str, tuple[str | int, ...]] = {"hidden_states": (1, 196, 64)}
    assert profiles_of(shapes)["hidden_states"] == FIXED
    assert profiles_of(shapes, ["hidden_states=1x196x64"]) == profiles_of(shapes)
    with pytest.raises(RequestError, match="fixed size 196"):
        profiles_of(shapes, ["hidden_states=1x197x64"])
    with pytest.raises(RequestError, match="unknown input or dimension"):
        profiles_of(shapes, ["seq=1:2:3"])


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        (["seq"], "is not NAME=SIZES"),
        (["=1:2:3"], "is not NAME=SIZES"),
        (["seq="], "is not NAME=SIZES"),
        (["seq=1:2"], "has 2 sizes"),
        (["seq=1:2:3:4"], "has 4 sizes"),
        (["seq=0:2:3"], "no size from 1"),
        (["seq=1:2:3e3"], "no size from 1"),
        (["seq=1x9:2:4"], "'1x9' is no size from 1"),
        (["seq=1_0"], "no size from 1"),
        (["seq=-1:2:3"], "no size from 1"),
        (["seq=1:2:99999999999"], "no size from 1"),
        (["seq=4:2:8"], "not ordered"),
        (["seq=1:9:8"], "not ordered"),
        (["sequ=1:2:3"], "did you mean 'seq'"),
        (["position_id=1x1,1x2,1x3"], "did you mean 'position_ids'"),
        (["position_ids=1x1,1x2"], "has 2 shapes"),
        (["position_ids=1,2,3"], "a shape of 1 dimensions"),
        (["position_ids=1x1,1x2x2,1x3"], "a shape of 3 dimensions"),
        (["position_ids=1x1x2x2,1x2x2x2,1x3x2x2"], "a shape of 4 dimensions"),
        (["position_ids=1x1x3,1x2x3,1x3x3"], "fixed size 2"),
        (["position_ids=2x1,1x2,3x3"], "not ordered"),
        (["seq=1:2:3", "seq=1:2:4"], "keep one of them"),
        (["seq=1:2:3", "position_ids=1x1,1x2,1x4"], "keep one of them"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(requests: list[str], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        profiles_of(SHAPES, requests)
    assert says in str(caught.value)
    assert requests[-1] in str(caught.value) or "unknown" in str(caught.value)


def test_a_size_of_thousands_of_digits_is_none() -> None:
    for request in ("seq=1:2:%s", "seq=%s", "position_ids=1x%s"):
        with pytest.raises(RequestError, match="is no size from 1"):
            profiles_of(SHAPES, [request % ("9" * 5000)])


def test_a_dimension_without_default_must_be_given() -> None:
    shapes: dict[str, tuple[str | int, ...]] = {"image": ("batch", 3, "height", 64)}
    with pytest.raises(RequestError, match="height=MIN:OPT:MAX"):
        profiles_of(shapes)
    assert profiles_of(shapes, ["height=1:8:16"])["image"]["max"] == [8, 3, 16, 64]


def cached(kind: str, **over: Any) -> dict[str, tuple[str | int, ...]]:
    """Shapes of the inputs of a block with a cache and a mask, and 4 heads of size 8."""
    spec = small_spec("rope", kv_cache=kind, padding_mask=True, **over)
    return {name: shape for name, (shape, _) in graph_inputs(spec).items()}


@pytest.mark.parametrize("kind", [None, "concat", "shared"])
def test_help_states_the_default_profile(kind: str | None) -> None:
    """A request that copies the text of the help gives the same profile as no request."""
    from posexport.cli.compile_command import compile as command

    (option,) = (parameter for parameter in command.params if parameter.name == "profile")
    assert isinstance(option, Option)
    assert option.help is not None
    default = option.help.partition("[default: ")[2].rstrip("]")
    requests = dict(
        zip((None, "concat", "shared"), re.split("; with a cache |, with a shared one ", default), strict=True)
    )
    shapes = SHAPES if kind is None else cached(kind)
    assert profiles_of(shapes, requests[kind].split()) == profiles_of(shapes)
    dims = {request.partition("=")[0] for request in requests[kind].split()}
    assert dims == {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)} - {"total_seq"}


def test_the_default_profile_of_a_grid_holds_its_tokens_and_those_before_them() -> None:
    spec = small_spec("rope-dinov3", grid=[14, 10], prefix_tokens=5)
    shapes = {name: shape for name, (shape, _) in graph_inputs(spec).items()}
    assert profiles_of(shapes, seq_limit=spec.token_limit())["hidden_states"]["max"][1] == 145


def test_ranges_of_a_profile() -> None:
    shapes = cached("concat")
    profiles = profiles_of(shapes, ["seq=1:2:3"])
    assert ranges_of(profiles, shapes) == {"batch": "1:1:8", "seq": "1:2:3", "past_seq": "0:1024:4096"}


def test_a_cache_may_be_empty_and_its_total_follows() -> None:
    found = profiles_of(cached("concat"))
    assert found["hidden_states"] == {"min": [1, 1, 32], "opt": [1, 1, 32], "max": [8, 4096, 32]}
    assert found["past_key"] == {"min": [1, 4, 0, 8], "opt": [1, 4, 1024, 8], "max": [8, 4, 4096, 8]}
    assert found["attention_mask"] == {"min": [1, 1], "opt": [1, 1025], "max": [8, 8192]}
    check_shapes(found, {name: shape["min"] for name, shape in found.items()})
    shared = profiles_of(cached("shared"))
    assert shared["attention_mask"] == {"min": [1, 1], "opt": [1, 4096], "max": [8, 4096]}
    assert shared["write_indices"] == {"min": [1], "opt": [1], "max": [8]}
    assert profiles_of(cached("concat"), seq_limit=512)["past_value"]["max"] == [8, 4, 511, 8]


@pytest.mark.parametrize(
    "requests",
    [
        ["past_seq=0:7:9", "seq=1:2:3"],
        ["past_seq=0:7:9", "seq=1:2:3", "total_seq=1:9:12"],
        ["past_key=1x4x0,1x4x7,8x4x9", "attention_mask=1x1,1x9,8x12", "hidden_states=1x1,1x2,8x3"],
    ],
)
def test_a_total_may_be_asked_for_what_it_is(requests: list[str]) -> None:
    found = profiles_of(cached("concat"), requests)
    assert found["attention_mask"] == {"min": [1, 1], "opt": [1, 9], "max": [8, 12]}
    assert found["past_value"] == {"min": [1, 4, 0, 8], "opt": [1, 4, 7, 8], "max": [8, 4, 9, 8]}


@pytest.mark.parametrize("request_", ["total_seq=1:2:3", "attention_mask=1x1,1x2,8x3", "total_seq=8"])
def test_a_total_that_is_not_the_sum_is_refused(request_: str) -> None:
    with pytest.raises(RequestError) as caught:
        profiles_of(cached("concat"), ["past_seq=0:7:9", request_])
    assert f"'{request_}' gives total_seq" in str(caught.value)
    assert "past_seq + seq, which span 1:8:4105" in str(caught.value)


def test_a_total_counts_what_the_graph_fixes() -> None:
    shapes = {name: tuple(4 if dim == "seq" else dim for dim in shape) for name, shape in cached("concat").items()}
    found = profiles_of(shapes, ["past_seq=0:7:9"], None, {"seq": 4})
    assert found["attention_mask"] == {"min": [1, 4], "opt": [1, 11], "max": [8, 13]}
    with pytest.raises(RequestError, match="which the graph lacks"):
        profiles_of(shapes, ["past_seq=0:7:9"])


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ("seq=0:1:2", "'0' is no size from 1"),
        ("max_seq=0:1:2", "'0' is no size from 1"),
        ("max_seq=-1:1:2", "'-1' is no size from 1"),
        ("past_key=1x4x0x8,1x4x8x8,1x4x9x8", "'0' is no size from 1"),
    ],
)
def test_nothing_but_a_grown_cache_may_be_empty(request_: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        profiles_of(cached("shared"), [request_])


@given(st.lists(st.integers(1, 5000), min_size=6, max_size=6))
def test_any_ordered_request_is_taken_whole(sizes: list[int]) -> None:
    (a, b, c), (d, e, f) = sorted(sizes[:3]), sorted(sizes[3:])
    by_dimension = profiles_of(SHAPES, [f"batch={a}:{b}:{c}", f"seq={d}:{e}:{f}"])
    assert by_dimension == profiles_of(SHAPES, [f"position_ids={a}x{d},{b}x{e},{c}x{f}"])
    for moment in ("min", "opt", "max"):
        shapes: dict[str, Any] = {name: shape[moment] for name, shape in by_dimension.items()}
        check_shapes(by_dimension, shapes)


@given(st.text(max_size=30))
def test_no_text_ends_otherwise_than_in_a_refusal(text: str) -> None:
    try:
        profiles_of(SHAPES, [text])
    except RequestError:
        return
    assert "=" in text


def test_shapes_outside_the_profile_are_refused() -> None:
    profiles = profiles_of(SHAPES, ["seq=2:7:9"])
    inside = {"hidden_states": (1, 7, 64), "position_ids": (1, 7, 2)}
    check_shapes(profiles, inside)
    for wrong in ((1, 1, 64), (1, 10, 64), (9, 7, 64), (1, 7, 65), (1, 7)):
        with pytest.raises(RequestError, match="the plan takes"):
            check_shapes(profiles, {**inside, "hidden_states": wrong})
    with pytest.raises(RequestError, match="the plan takes hidden_states, position_ids"):
        check_shapes(profiles, {"hidden_states": (1, 7, 64)})


def test_profiles_in_words() -> None:
    assert describe(profiles_of(SHAPES, ["seq=1:7:9", "batch=1"])) == [
        ("hidden_states", "1x1x64 to 1x9x64, tuned for 1x7x64"),
        ("position_ids", "1x1x2 to 1x9x2, tuned for 1x7x2"),
    ]
    assert describe({"x": {"min": [1, 2], "opt": [1, 2], "max": [1, 2]}}) == [("x", "1x2")]


@pytest.mark.parametrize(
    ("requests", "spans"),
    [
        ([], (1, 4096, 4096)),
        (["max_seq=512"], (1, 512, 512)),
        (["max_seq=16:64:512"], (1, 64, 512)),
        (["max_seq=512", "total_seq=1:160:384"], (1, 160, 384)),
        (["attention_mask=1x1,1x9,8x12"], (1, 9, 12)),
    ],
)
def test_a_mask_beside_a_buffer_spans_its_places(requests: list[str], spans: tuple[int, int, int]) -> None:
    """Decoders of other tools that were rewritten with shared caches have such a mask."""
    shapes = {"input_ids": ("batch", "seq"), "attention_mask": ("batch", "total_seq"), "past": ("batch", "max_seq", 8)}
    found = profiles_of(shapes, requests)["attention_mask"]
    assert tuple(found[moment][1] for moment in ("min", "opt", "max")) == spans


def test_a_mask_without_any_cache_is_refused() -> None:
    with pytest.raises(RequestError, match="past_seq \\+ seq, which the graph lacks"):
        profiles_of({"input_ids": ("batch", "seq"), "attention_mask": ("batch", "total_seq")})
