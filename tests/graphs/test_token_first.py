"""Inputs with tokens before rows, [seq, batch, ...]: dimension names tell this, otherwise both axes are drawn long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graph_signatures import Signature, graph_of

from posexport.errors import RequestError
from posexport.graphs.axes import said_by
from posexport.graphs.cases import cases_of
from posexport.graphs.draw import Kinds, draw_inputs
from posexport.graphs.roles import roles_of

TOKENS_FIRST = ("seq", "batch", 8)
ROWS_FIRST = ("batch", "seq", 8)

ORDERS: dict[str, tuple[Signature, dict[str, tuple[object, ...]]]] = {
    "by both names": ({"x": (["seq", "batch", 8], "fp32")}, {"x": TOKENS_FIRST}),
    "by torch's letters": ({"x": (["T", "N", 8], "fp32")}, {"x": TOKENS_FIRST}),
    "by the rows alone": ({"x": (["s0", "batch_size", 8], "fp32")}, {"x": TOKENS_FIRST}),
    "by the tokens alone": ({"x": (["num_tokens", "s1", 8], "fp32")}, {"x": TOKENS_FIRST}),
    "one row": ({"x": (["sequence_length", 1, 8], "fp32")}, {"x": TOKENS_FIRST}),
    "no axis of rows": ({"x": (["seq", 8], "fp32")}, {"x": ("seq", None)}),
    "rows first": ({"x": (["B", "T", 8], "fp32")}, {"x": ROWS_FIRST}),
    "no names": ({"x": (["s0", "s1", 8], "fp32")}, {"x": ROWS_FIRST}),
    "names of the input": ({"x": (["tokens_dynamic_axes_1", "tokens_dynamic_axes_2", 8], "fp32")}, {"x": ROWS_FIRST}),
    "channels first": ({"x": (["batch", 8, "length"], "fp32")}, {"x": ("batch", None, "seq")}),
    "by a mask": (
        {"x": (["s0", "s1", 8], "fp32"), "key_padding_mask": (["s1", "s0"], "bool")},
        {"x": TOKENS_FIRST, "key_padding_mask": ("batch", "seq")},
    ),
    "by a mask beside proper names": (
        {"x": (["seq", "batch", 8], "fp32"), "key_padding_mask": (["batch", "seq"], "bool")},
        {"x": TOKENS_FIRST, "key_padding_mask": ("batch", "seq")},
    ),
    "by what an encoder shares": (
        {"x": (["a0", "a1", 8], "fp32"), "memory": (["a2", "a1", 8], "fp32")},
        {"x": TOKENS_FIRST, "memory": ("encoder", "batch", 8)},
    ),
    "of tokens and a mask": (
        {"input_ids": (["seq", "batch"], "int64"), "attention_mask": (["seq", "batch"], "int64")},
        {"input_ids": ("seq", "batch"), "attention_mask": ("seq", "batch")},
    ),
    "a mask of tokens and keys": (
        {"x": (["batch", "seq", 8], "fp32"), "attention_mask": (["seq", "a0"], "int64")},
        {"x": ROWS_FIRST, "attention_mask": ("seq", "total")},
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_names_say_which_axis_is_that_of_tokens(name: str, tmp_path: Path) -> None:
    signature, axes = ORDERS[name]
    roles = roles_of(graph_of(tmp_path, signature))
    for key, wanted in axes.items():
        assert [axis for axis in roles[key].axes if isinstance(axis, str)] == [
            axis for axis in wanted if isinstance(axis, str)
        ]


@pytest.mark.parametrize("dim", ["batch", "batchSize", "B", "num_rows", "bs"])
def test_names_of_rows(dim: str) -> None:
    assert said_by(dim) == "batch"


@pytest.mark.parametrize("dim", ["seq", "seqLen", "T", "source_length", "num_tokens", "past_sequence_length + 1"])
def test_names_of_tokens(dim: str) -> None:
    assert said_by(dim) == "seq"


@pytest.mark.parametrize("dim", ["s0", "N", "batch_seq", "input_ids_dynamic_axes_1", "?", "unk__12", 7])
def test_names_that_say_nothing(dim: str | int) -> None:
    assert said_by(dim) is None


@pytest.mark.parametrize(
    "shapes",
    [["seq", "batch", 8], ["s0", "s1", 8], ["batch", "seq", 8], ["?", "?", 8], ["s0", 1, 8], ["s0", 8]],
    ids=str,
)
def test_whatever_may_be_the_tokens_gets_long(shapes: list[str | int], tmp_path: Path) -> None:
    roles = roles_of(graph_of(tmp_path, {"x": (shapes, "fp32")}))
    drawn = [case.arrays["x"].shape for case in cases_of(roles, 0)]
    for at, dim in enumerate(shapes):
        longest = max(shape[at] for shape in drawn)
        assert longest == dim if isinstance(dim, int) else longest >= 131 or dim == "batch"


def test_axes_of_no_known_meaning_get_long(tmp_path: Path) -> None:
    roles = roles_of(graph_of(tmp_path, {"x": (["batch", 5, "a", "b"], "fp32"), "y": (["batch", "seq", "c"], "fp32")}))
    cases = cases_of(roles, 0)
    assert max(case.arrays["x"].shape[3] for case in cases) >= 131
    assert max(case.arrays["y"].shape[2] for case in cases) >= 131


@pytest.mark.slow
def test_sets_that_would_be_huge_are_not_drawn(tmp_path: Path) -> None:
    roles = roles_of(graph_of(tmp_path, {"x": (["?", 64, 300, 300], "fp32")}))
    assert max(case.arrays["x"].shape[0] for case in cases_of(roles, 0)) < 8


def test_positions_and_padding_are_turned_with_the_tokens(tmp_path: Path) -> None:
    shape: list[str | int] = ["seq", "batch"]
    signature: Signature = {
        "x": ([*shape, 8], "fp32"),
        "position_ids": (shape, "int64"),
        "attention_mask": (shape, "int64"),
        "key_padding_mask": (["batch", "seq"], "bool"),
    }
    roles = roles_of(graph_of(tmp_path, signature))
    arrays = draw_inputs(roles, {"batch": 3, "seq": 9}, np.random.default_rng(0), Kinds(padding="left")).arrays
    assert arrays["x"].shape == (9, 3, 8)
    mask = arrays["attention_mask"]
    assert (~arrays["key_padding_mask"] == mask.T).all()
    assert mask[-1].all() and not mask[0].all()
    for row in range(3):
        seen = -1
        for place in range(9):
            seen += int(mask[place, row])
            assert arrays["position_ids"][place, row] == max(seen, 0)


def test_an_encoder_has_positions_and_padding_of_its_own(tmp_path: Path) -> None:
    signature: Signature = {
        "x": (["batch", "seq", 8], "fp32"),
        "memory": (["batch", "mem", 8], "fp32"),
        "position_ids": (["batch", "seq"], "int64"),
        "k_pos": (["batch", "mem"], "int64"),
        "key_padding_mask": (["batch", "mem"], "bool"),
    }
    roles = roles_of(graph_of(tmp_path, signature), {"k_pos": "position_ids"})
    drawn = draw_inputs(roles, {"batch": 3, "seq": 4, "encoder": 9}, np.random.default_rng(0), Kinds(padding="left"))
    assert drawn.keys.all(), "nothing says that tokens are padding"
    hidden = drawn.arrays["key_padding_mask"]
    assert hidden.shape == (3, 9) and hidden.any() and not hidden.all(1).any()
    assert (drawn.arrays["k_pos"] == np.maximum((~hidden).cumsum(1) - 1, 0)).all()


def test_axes_that_a_role_does_not_have_are_a_sentence(tmp_path: Path) -> None:
    signature: Signature = {"x": (["batch", "seq", 8], "fp32"), "seqlens_k": (["seq"], "int32")}
    roles = roles_of(graph_of(tmp_path, signature))
    with pytest.raises(
        RequestError, match=r"^the input 'seqlens_k' can't be drawn as last_key: .*\[seq\].*--input sc?"
    ):
        cases_of(roles, 0)
