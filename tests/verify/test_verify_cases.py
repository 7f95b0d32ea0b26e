"""Cases for any bounds, table, window and seed, and a user's own input files of any kind."""

from __future__ import annotations

import tracemalloc
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import case
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.artifact.loaded import LoadedArtifact
from posexport.artifact.profiles import profiles_of
from posexport.errors import RequestError
from posexport.graphs.roles import Role
from posexport.models import read_spec
from posexport.runtimes import RUNTIMES
from posexport.runtimes.npz import read_arrays
from posexport.spec.contract import Bounds, bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases
from posexport.verify.graph.cases import GraphCase, drawn_cases
from posexport.verify.positions import FAR
from posexport.verify.reach import SEQ, default_reach
from posexport.verify.submission import run_options
from posexport.verify.user_inputs import fit_inputs

Array = np.ndarray[Any, Any]
FREE: Bounds = {"batch": (1, None), "seq": (1, None)}
BLOCKS = ("none", "learned", "sinusoidal", "relative", "t5", "rope", "rope2d", "alibi", "rope-gqa-window")


def _cases(spec: Spec, seed: int = 0, bounds: Bounds = FREE) -> list[Case]:
    return make_cases(spec, seed, bounds)


def _same(one: list[Case], other: list[Case]) -> bool:
    return all(
        np.array_equal(a.arrays[name], b.arrays[name])
        for a, b in zip(one, other, strict=True)
        for name in {*a.arrays, *b.arrays}
    )


def test_positions_are_consecutive_offset_packed_in_no_order_and_far_out() -> None:
    found = {each.name.split(" [")[0]: each.arrays["position_ids"] for each in _cases(case("rope"))}
    assert (np.diff(found["consecutive"]) == 1).all()
    assert (found["consecutive"][:, 0] == 0).all()
    assert (found["long"] == np.arange(SEQ)).all()
    offset = found["offset"]
    assert (np.diff(offset) == 1).all()
    assert offset[0, 0] > 0
    assert len({*offset[:, 0]}) == 2  # each row has its own start
    packed = found["packed"][0]
    assert (np.diff(packed) <= 0).sum() == 1
    assert packed[0] == 0
    scattered = np.diff(found["scattered"])
    assert (scattered < 0).any()
    assert (scattered > 1).any()
    assert found["far out"].max() == FAR - 1
    assert found["one token"].shape == (1, 1)


@given(
    block=st.sampled_from(BLOCKS),
    seed=st.integers(0, 2**31),
    batch=st.tuples(st.integers(1, 9), st.none() | st.integers(0, 9)),
    seq=st.tuples(st.integers(1, 50), st.none() | st.integers(0, 50)),
    positions=st.integers(1, 60),
)
@settings(max_examples=6)
def test_cases_stay_within_the_bounds_and_the_table(
    block: str, seed: int, batch: tuple[int, int | None], seq: tuple[int, int | None], positions: int
) -> None:
    spec = case(block, hidden_size=16, **({"max_positions": positions} if block == "learned" else {}))
    bounds = {dim: (low, None if more is None else low + more) for dim, (low, more) in (("batch", batch), ("seq", seq))}
    made = _cases(spec, seed, bounds)
    assert made
    for each in made:
        for size, (low, high) in zip(each.sizes.values(), bounds.values(), strict=True):
            assert low <= size
            assert high is None or size <= high
        for name, (shape, dtype) in graph_inputs(spec).items():
            array = each.arrays[name]
            assert array.shape == (*each.sizes.values(), *shape[2:])
            assert array.dtype == {"fp32": np.float32, "int64": np.int64}[dtype]
            assert np.isfinite(array).all()
        if spec.encoding.axes:
            found = each.arrays["position_ids"]
            assert found.min() >= 0 or spec.negative_positions
            assert found.max() < (spec.encoding.position_limit() or FAR)
    assert _same(made, _cases(spec, seed, bounds))
    assert len({each.name for each in made}) == len(made)


def test_a_table_is_used_to_its_last_row() -> None:
    spec = case("learned", max_positions=5)
    assert max(int(each.arrays["position_ids"].max()) for each in _cases(spec)) == 4


@pytest.mark.parametrize("window", [2, 100, 2199, 2500, 6000])
def test_a_sequence_reaches_over_the_window(window: int) -> None:
    spec = case("rope", window=window)
    assert max(each.sizes["seq"] for each in _cases(spec)) == default_reach(spec).seq > window
    assert default_reach(spec).seq >= SEQ


def test_words_lie_in_the_vocabulary() -> None:
    spec = case("alibi", vocab_size=3)
    words = np.concatenate([each.arrays["input_ids"].ravel() for each in _cases(spec)])
    assert {*words.tolist()} == {0, 1, 2}
    assert words.dtype == np.int64


HUGE = 2**25
"""More than any table or vocabulary has. A list of so many numbers takes more than a GB."""


def _large(what: str) -> Sequence[Case | GraphCase]:
    """Cases of a file that states a huge size."""
    if what == "distances":
        encoding = {"name": "relative", "table": "learned", "max_distance": HUGE}
        return _cases(read_spec({"encoding": encoding, "hidden_size": 16, "num_heads": 2}))
    if what == "vocabulary":
        return _cases(case("alibi", vocab_size=HUGE))
    kind: dict[str, Any] = {
        "kind": "token_ids",
        "dtype": "int64",
        "shape": ("b", "s"),
        "axes": ("batch", "seq"),
        "stated": ("b", "s"),
    }
    tokens = {"input_ids": Role(name="input_ids", rows=HUGE, **kind)}
    return drawn_cases(tokens, 0)


@pytest.mark.parametrize("what", ["distances", "vocabulary", "vocabulary of a graph"])
def test_a_size_that_a_file_states_takes_no_memory(what: str) -> None:
    """Whoever made the file or the config.json chose it."""
    tracemalloc.start()
    try:
        assert len(_large(what)) > 5
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_values_are_rounded_to_the_graphs_dtype(dtype: str) -> None:
    array = _cases(case("none", dtype=dtype))[0].arrays["hidden_states"]
    assert array.dtype == {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    assert 0.7 < array.astype(np.float64).std() < 1.3


def test_a_graphs_own_sizes_bound_the_cases() -> None:
    wanted = graph_inputs(case("rope"))
    fixed = bounds_of(wanted, {"hidden_states": ((1, "seq", 32), "fp32"), "position_ids": (("batch", 5), "int64")})
    assert fixed == {"batch": (1, 1), "seq": (5, 5)}
    assert bounds_of(wanted, {}) == FREE


def test_a_plan_built_on_the_fly_takes_every_case(tmp_path: Path) -> None:
    spec = case("learned", max_positions=4)
    subject = LoadedArtifact(path=tmp_path / "a.onnx", source=None, inputs=graph_inputs(spec), outputs={}, bounds=FREE)  # type: ignore[arg-type]
    made = _cases(spec)
    assert run_options(subject, RUNTIMES["ort-cpu"], [each.sizes for each in made]) == {"spinning": False}
    options = run_options(subject, RUNTIMES["tensorrt-rtx"], [each.sizes for each in made])
    profiles = profiles_of({name: shape for name, (shape, _) in graph_inputs(spec).items()}, options["profile"], 4)
    most = [max(each.sizes["batch"] for each in made), SEQ]
    assert profiles["position_ids"] == {"min": [1, 1], "opt": most, "max": most}


def _npz(folder: Path, **arrays: Array) -> Path:
    path = folder / "own.npz"
    np.savez(path, **arrays)
    return path


def _fit(path: Path, spec: Spec, bounds: Bounds = FREE) -> tuple[Case, tuple[str, ...]]:
    return fit_inputs(path, read_arrays(path), spec, graph_inputs(spec), bounds)


HIDDEN = np.ones((2, 5, 32), np.float32)
POSITIONS = np.tile(np.arange(5), (2, 1))


def test_right_inputs_are_taken_as_they_are(tmp_path: Path) -> None:
    found, notes = _fit(_npz(tmp_path, position_ids=POSITIONS - 2, hidden_states=HIDDEN), case("rope"))
    assert notes == ()
    assert found.name == "own.npz"
    assert list(found.arrays) == ["hidden_states", "position_ids"]  # the graph's order
    assert (found.arrays["position_ids"] == POSITIONS - 2).all()
    assert found.arrays["hidden_states"].dtype == np.float32


def test_floats_for_bf16_are_rounded_and_a_note_says_so(tmp_path: Path) -> None:
    found, notes = _fit(_npz(tmp_path, hidden_states=HIDDEN / np.float32(3)), case("none", dtype="bf16"))
    assert notes == ("hidden_states was rounded from float32 to bf16",)
    _, silent = _fit(_npz(tmp_path, hidden_states=HIDDEN.astype(np.float32)), case("none", dtype="bf16"))
    assert silent == ()
    assert found.arrays["hidden_states"].astype(np.float64).max() == pytest.approx(1 / 3, rel=1e-2)


def test_shapes_outside_a_plans_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="seq from 1 to 4"):
        _fit(_npz(tmp_path, hidden_states=HIDDEN), case("none"), {"batch": (1, None), "seq": (1, 4)})


def _one_sentence(error: RequestError, said: str) -> None:
    text = str(error)
    assert said in text, text
    assert "own.npz" in text
    assert text.endswith(".")
    assert "\n" not in text


def _pickled(path: Path) -> None:
    np.savez(path, hidden_states=np.array([{"a": 1}], dtype=object))


def _member(content: bytes) -> Any:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("hidden_states.npy", content)

    return write


def _damaged(path: Path) -> None:
    np.savez_compressed(path, hidden_states=np.random.default_rng(0).standard_normal((2, 5, 32)))
    content = bytearray(path.read_bytes())
    content[300:400] = bytes(100)
    path.write_bytes(content)


def _cut(path: Path) -> None:
    np.savez(path, hidden_states=HIDDEN)
    path.write_bytes(path.read_bytes()[:500])


def _single(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, HIDDEN)


_HUGE = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999, 32), }".ljust(127)
    + b"\n"
)

FILES: dict[str, Any] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hidden_states = 1"),
    "junk": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(range(256))),
    "a folder": lambda path: path.mkdir(),
    "not there": lambda path: None,
    "pickled": _pickled,
    "not numpy": _member(b"words"),
    "a header only": _member(b"\x93NUMPY\x01\x00"),
    "beyond memory": _member(_HUGE),
    "damaged": _damaged,
    "cut short": _cut,
    "one .npy": _single,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_npz_of_plain_arrays_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "own.npz"
    FILES[name](path)
    with pytest.raises(RequestError) as caught:
        _fit(path, case("none"))
    _one_sentence(caught.value, "npz")
