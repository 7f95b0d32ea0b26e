"""The inputs of verify: cases drawn from a seed, and the user's own inputs, which are checked."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import CASES, case, small_spec

from posexport.errors import RequestError
from posexport.runtimes.npz import read_arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases
from posexport.verify.user_inputs import fit_inputs

Array = np.ndarray[Any, Any]
TRACED = {"batch": 2, "seq": 7}


def made(spec: Spec, seed: int = 0, **bounds: tuple[int, int | None]) -> list[Case]:
    return make_cases(spec, seed, {**bounds_of(graph_inputs(spec), {}), **bounds})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_cases_cover_lengths_batches_and_positions(name: str) -> None:
    spec = case(name)
    cases = made(spec)
    sizes = [next(iter(each.arrays.values())).shape[:2] for each in cases]
    traced = [each.name for each, (_, seq) in zip(cases, sizes, strict=True) if seq == TRACED["seq"]]
    assert [name.partition(" [")[0] for name in traced] == ["traced sizes"]
    assert {1} < {batch for batch, _ in sizes}
    assert (1, 1) in sizes
    assert len({seq for _, seq in sizes}) > 3
    if spec.window is not None:
        assert max(seq for _, seq in sizes) > spec.window
    if not spec.encoding.axes:
        return
    positions = [each.arrays["position_ids"] for each in cases]
    limit = spec.encoding.position_limit()
    assert all((p.min() >= 0 or spec.negative_positions) and (limit is None or p.max() < limit) for p in positions)
    assert min(p.min() for p in positions) < 0 or not spec.negative_positions
    assert max(p.max() for p in positions) == (limit or 2**20) - 1
    long = [p if p.ndim == 2 else p[..., 0] for p in positions if p.shape[1] > 1]
    assert any(p[0, 0] > 0 and (np.diff(p) == 1).all() for p in long) or spec.encoding.axes > 1  # offset
    assert any((np.diff(p) < 0).any() for p in long)  # not in order
    assert any((np.diff(p) > 1).any() for p in long)  # with gaps
    assert any(len(np.unique(row)) < len(row) for p in long for row in p)  # starting over
    if spec.encoding.axes > 1:
        for each in positions:
            for row in each:
                if (row[:, 0] != row[:, 1]).sum() > 4:
                    assert sorted(map(tuple, row)) != sorted(map(tuple, row[:, ::-1]))  # a swap changes the grid
        as_text = [row for each in positions for row in each if len(row) > 1 and (row[:, 0] == row[:, 1]).all()]
        assert len(as_text) >= (1 if limit else 20)


def test_cases_follow_the_seed_and_the_bounds() -> None:
    spec = case("rope")
    first, again, other = made(spec), made(spec), made(spec, 1)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.arrays["hidden_states"], b.arrays["hidden_states"])
    for a, c in zip(first, other, strict=False):  # the number of cases depends on the seed too
        shown = a.arrays["hidden_states"].any()  # the row of zeros is the same in every seed
        assert not shown or not np.array_equal(a.arrays["hidden_states"], c.arrays["hidden_states"])
    for each in made(spec, batch=(4, 4), seq=(5, 11)):
        assert each.arrays["hidden_states"].shape[0] == 4
        assert 5 <= each.arrays["hidden_states"].shape[1] <= 11
    found = bounds_of(graph_inputs(spec), {"hidden_states": (("batch", 196, 32), "fp32")})
    assert found == {"batch": (1, None), "seq": (196, 196)}


def test_input_ids_lie_within_the_vocabulary() -> None:
    spec = small_spec("learned", vocab_size=11)
    for each in made(spec):
        assert set(each.arrays) == {"input_ids", "position_ids"}
        assert 0 <= each.arrays["input_ids"].min() <= each.arrays["input_ids"].max() < 11


def fit(spec: Spec, **arrays: Array) -> tuple[Case, tuple[str, ...]]:
    return fit_inputs(
        Path("batch.npz"), arrays, spec, graph_inputs(spec), bounds_of(graph_inputs(spec), graph_inputs(spec))
    )


def hidden(batch: int = 2, seq: int = 3, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).standard_normal((batch, seq, 32)).astype(dtype)


def positions(batch: int = 2, seq: int = 3) -> Array:
    return np.tile(np.arange(seq), (batch, 1))


def test_the_users_own_inputs_are_taken_as_they_are_and_rounded_for_bf16_alone() -> None:
    same, notes = fit(case("rope", dtype="fp16"), hidden_states=hidden(dtype=np.float16), position_ids=positions())
    assert notes == ()
    assert same.arrays["hidden_states"].dtype == np.float16
    rounded, notes = fit(case("rope", dtype="bf16"), hidden_states=hidden(), position_ids=positions())
    assert rounded.arrays["hidden_states"].dtype == NUMPY_DTYPES["bf16"]
    assert notes == ("hidden_states was rounded from float32 to bf16",)


@pytest.mark.parametrize(("dtype", "given"), [("fp16", np.float32), ("fp32", np.float64), ("bf16", np.float16)])
def test_another_dtype_is_refused(dtype: str, given: type) -> None:
    with pytest.raises(RequestError, match=f"'hidden_states' is {np.dtype(given)}, the graph takes"):
        fit(case("rope", dtype=dtype), hidden_states=hidden(dtype=given), position_ids=positions())
    right = hidden(dtype={"fp16": np.float16}.get(dtype, np.float32))
    with pytest.raises(RequestError, match="'position_ids' is int32, the graph takes int64"):
        fit(case("rope", dtype=dtype), hidden_states=right, position_ids=positions().astype(np.int32))


def test_bfloat16_comes_back_from_a_file_by_its_bits(tmp_path: Path) -> None:
    spec = case("none", dtype="bf16")
    want = hidden(dtype=ml_dtypes.bfloat16)
    np.savez(tmp_path / "batch.npz", hidden_states=want)
    found, notes = fit(spec, **read_arrays(tmp_path / "batch.npz"))
    assert notes == ()
    assert found.arrays["hidden_states"].tobytes() == want.tobytes()


ROPE, TABLE, TOKENS = case("rope"), small_spec("learned", max_positions=8), small_spec("none", vocab_size=9)
BAD: dict[str, tuple[Spec, dict[str, Array], str]] = {
    "missing": (ROPE, {"hidden_states": hidden()}, "lack 'position_ids'"),
    "many": (ROPE, {f"array{number}": hidden() for number in range(99)}, "'array0'"),
    "extra": (TOKENS, {"input_ids": positions(), "ids": positions()}, "'ids'"),
    "rank": (ROPE, {"hidden_states": hidden()[0], "position_ids": positions()}, "has shape [3, 32]"),
    "width": (ROPE, {"hidden_states": hidden()[..., 1:], "position_ids": positions()}, "has shape [2, 3, 31]"),
    "lengths": (ROPE, {"hidden_states": hidden(), "position_ids": positions(2, 4)}, "has shape [2, 4]"),
    "empty": (ROPE, {"hidden_states": hidden(2, 0), "position_ids": positions(2, 0)}, "has shape [2, 0, 32]"),
    "nan": (ROPE, {"hidden_states": hidden() * np.nan, "position_ids": positions()}, "NaN"),
    "integers": (ROPE, {"hidden_states": positions()[..., None].repeat(32, 2), "position_ids": positions()}, "int64"),
    "floats": (ROPE, {"hidden_states": hidden(), "position_ids": positions() * 1.0}, "takes int64"),
    "objects": (ROPE, {"hidden_states": hidden().astype(object), "position_ids": positions()}, "object"),
    "beyond": (TABLE, {"hidden_states": hidden(), "position_ids": positions() + 6}, "reaches from 6 to 8"),
    "negative": (TABLE, {"hidden_states": hidden(), "position_ids": positions() - 1}, "reaches from -1"),
    "far apart": (
        ROPE,
        {"hidden_states": hidden(), "position_ids": positions() + np.iinfo(np.int64).min},
        "reach from -9223372036854775808 to -9223372036854775806, at most",
    ),
    "undefined": (
        case("temperature"),
        {"hidden_states": hidden(), "position_ids": positions() - 1},
        "temperature is only defined for positions from 0 on",
    ),
    "token": (TOKENS, {"input_ids": positions() + 7}, "the vocabulary"),
    "overflow": (case("none", dtype="bf16"), {"hidden_states": np.full((1, 2, 32), 3.4e38, np.float32)}, "NaN or Inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_do_not_fit_are_refused_in_one_sentence(name: str) -> None:
    spec, arrays, said = BAD[name]
    with pytest.raises(RequestError) as caught:
        fit(spec, **arrays)
    sentence = str(caught.value)
    assert "batch.npz" in sentence
    assert said in sentence, sentence
    assert sentence.endswith(".")
    assert len(sentence) < 500


@pytest.mark.parametrize("content", [b"", b"words", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch.npz").write_bytes(content)
    with pytest.raises(RequestError, match="npz"):
        read_arrays(tmp_path / "batch.npz")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "batch.npz", hidden_states=np.array([{}, None], object))
    with pytest.raises(RequestError, match="plain arrays"):
        read_arrays(tmp_path / "batch.npz")


@pytest.mark.parametrize("second", ["input_ids.npy", "input_ids"])
def test_an_array_that_is_there_twice_is_refused(tmp_path: Path, second: str) -> None:
    np.savez(tmp_path / "batch.npz", input_ids=positions())
    with zipfile.ZipFile(tmp_path / "batch.npz", "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr(second, archive.read("input_ids.npy"))
    with pytest.raises(RequestError, match="plain arrays"):
        read_arrays(tmp_path / "batch.npz")
