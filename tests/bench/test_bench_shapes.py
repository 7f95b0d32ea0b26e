"""Sizes and inputs of a benchmark: defaults that the artifact accepts, and refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from helpers import small_spec

from posexport.artifact.loaded import LoadedArtifact
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.shapes import Sizes, load_for_bench, read_sizes, seeded_inputs, sizes_of
from posexport.errors import RequestError
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec

Ranges = tuple[int, int | None, int | None]
FREE: Ranges = (1, None, None)
"""The smallest, optimal and largest size of a dimension."""


def artifact(spec: Spec, batch: Ranges = FREE, seq: Ranges = FREE) -> LoadedArtifact:
    """An artifact without a file."""
    path = Path("block.onnx")
    source: Any = SimpleNamespace(path=path, spec=spec, form="function", opset=18)
    loaded = LoadedArtifact(path=path, source=source, inputs={}, outputs={}, bounds={})
    return ranged(loaded, {"batch": batch, "seq": seq})


def ranged(loaded: LoadedArtifact, ranges: dict[str, Ranges]) -> LoadedArtifact:
    bounds = {dim: (low, high) for dim, (low, _, high) in ranges.items()}
    optimal = {dim: best for dim, (_, best, _) in ranges.items() if best is not None}
    return attrs.evolve(loaded, bounds=bounds, optimal_sizes=optimal)


def texts(found: list[Sizes]) -> list[str]:
    return [str(each) for each in found]


def test_defaults_are_two_lengths() -> None:
    assert texts(sizes_of(artifact(small_spec("rope")), ())) == ["batch=1,seq=128", "batch=1,seq=512"]


def test_defaults_stay_within_a_trained_table() -> None:
    assert texts(sizes_of(artifact(small_spec("learned", max_positions=64)), ())) == ["batch=1,seq=64"]


def test_defaults_are_the_fixed_sizes_of_a_graph() -> None:
    found = sizes_of(artifact(small_spec("rope"), batch=(3, 3, 3), seq=(196, 196, 196)), ())
    assert texts(found) == ["batch=3,seq=196"]


def test_defaults_are_the_preferred_sizes_of_a_plan() -> None:
    found = sizes_of(artifact(small_spec("rope"), batch=(1, 2, 8), seq=(16, 1024, 4096)), ())
    assert texts(found) == ["batch=2,seq=1024"]


def within(spec: Spec, form: str = "function", **ranges: Ranges) -> LoadedArtifact:
    """An artifact whose dimensions are free unless `ranges` limit them."""
    free = {dim: (low, None, high) for dim, (low, high) in bounds_of(graph_inputs(spec), {}).items()}
    one = artifact(spec)
    source: Any = SimpleNamespace(**{**vars(one.source), "form": form})
    return attrs.evolve(ranged(one, {**free, **ranges}), source=source)


CACHED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "grown": ({"kv_cache": "concat"}, {}, ["batch=1,seq=512,past_seq=0", "batch=1,seq=1,past_seq=512"]),
    "shared": (
        {"kv_cache": "shared"},
        {},
        ["batch=1,seq=512,past_seq=0,max_seq=1024", "batch=1,seq=1,past_seq=512,max_seq=1024"],
    ),
    "small buffer": (
        {"kv_cache": "shared"},
        {"max_seq": (64, 64, 64)},
        ["batch=1,seq=64,past_seq=0,max_seq=64", "batch=1,seq=1,past_seq=63,max_seq=64"],
    ),
    "encoder": ({"cross": True}, {}, ["batch=1,seq=128,encoder_seq=512", "batch=1,seq=512,encoder_seq=512"]),
    "tuned": ({"kv_cache": "concat"}, {"seq": (1, 1, 9), "past_seq": (0, 1024, 4096)}, ["batch=1,seq=1,past_seq=1024"]),
    "never filled": (
        {"kv_cache": "concat"},
        {"past_seq": (0, 0, 0)},
        ["batch=1,seq=512,past_seq=0", "batch=1,seq=1,past_seq=0"],
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_defaults_are_a_prefill_and_a_step(name: str) -> None:
    over, ranges, wanted = CACHED[name]
    assert texts(sizes_of(within(small_spec("none", **over), **ranges), ())) == wanted


def test_defaults_with_a_cache_stay_within_a_trained_table() -> None:
    one = within(small_spec("learned", max_positions=64, kv_cache="concat"))
    assert texts(sizes_of(one, ())) == ["batch=1,seq=64,past_seq=0", "batch=1,seq=1,past_seq=63"]


def test_a_buffer_that_is_not_named_holds_what_is_named() -> None:
    one = within(small_spec("rope", kv_cache="shared"))
    assert texts(sizes_of(one, ["seq=1,past_seq=2048", "seq=1,past_seq=9", "seq=1,past_seq=9,max_seq=10"])) == [
        "batch=1,seq=1,past_seq=2048,max_seq=2049",
        "batch=1,seq=1,past_seq=9,max_seq=1024",
        "batch=1,seq=1,past_seq=9,max_seq=10",
    ]


SHARED, LEARNED = {"kv_cache": "shared"}, {"encoding": "learned", "max_positions": 64}
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no cache": ({}, "function", "past_seq=3", "unknown dimension in --shape 'past_seq'"),
    "no buffer": ({"kv_cache": "concat"}, "function", "max_seq=3", "unknown dimension in --shape 'max_seq'"),
    "a sum": ({"kv_cache": "concat"}, "function", "total_seq=3", "unknown dimension in --shape 'total_seq'"),
    "full": (SHARED, "function", "seq=2,past_seq=9,max_seq=10", "past_seq \\+ seq is 11: the cache has 10 places"),
    "beyond": ({**LEARNED, "kv_cache": "concat"}, "function", "seq=1,past_seq=64", "seq is 65: learned knows 64"),
    "negative": ({"kv_cache": "concat"}, "function", "past_seq=-1", "past_seq is '-1'"),
    "chunks": (SHARED, "contrib", "batch=2,seq=2,past_seq=3", "GroupQueryAttention, which"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_a_cache_cannot_take_are_refused(name: str) -> None:
    over, form, text, message = REFUSED[name]
    one = within(small_spec(**{"encoding": "rope", **over}), form)
    with pytest.raises(RequestError, match=message):
        sizes_of(one, [text])


def test_chunks_of_one_row_and_steps_of_several_are_taken() -> None:
    one = within(small_spec("rope", kv_cache="shared"), "contrib")
    assert len(sizes_of(one, ["batch=1,seq=2,past_seq=3", "batch=2,seq=1,past_seq=3", "batch=2,seq=2,past_seq=0"])) == 3


@pytest.mark.parametrize("kind", ["concat", "shared"])
def test_inputs_with_a_cache_go_on_where_it_ends(kind: str) -> None:
    spec = small_spec("rope", kv_cache=kind, padding_mask=True, num_kv_heads=2)
    sizes = Sizes(batch=2, seq=3, past_seq=5, **({"max_seq": 11} if kind == "shared" else {}))
    inputs = seeded_inputs(spec, sizes, 0)
    places = 11 if kind == "shared" else 5
    assert inputs["past_key"].shape == inputs["past_value"].shape == (2, 2, places, 8)
    assert inputs["position_ids"].tolist() == [[5, 6, 7]] * 2
    assert (inputs["attention_mask"] == np.ones((2, 11 if kind == "shared" else 8))).all()
    assert (inputs["past_key"][:, :, :5] != 0).all()
    assert (inputs["past_key"][:, :, 5:] == 0).all()
    if kind == "shared":
        assert inputs["write_indices"].tolist() == [5, 5]


def test_a_dimension_that_is_not_named_takes_its_default() -> None:
    assert texts(sizes_of(artifact(small_spec("rope")), ["seq=7"])) == ["batch=1,seq=7"]
    assert texts(sizes_of(artifact(small_spec("rope")), ["batch=4", "batch=2,seq=5"])) == [
        "batch=4,seq=128",
        "batch=2,seq=5",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq", "not like batch=1,seq=128"),
        ("length=3", "unknown dimension in --shape 'length'"),
        ("sequ=3", "did you mean 'seq'"),
        ("seq=0", "seq is '0'"),
        ("seq=-4", "seq is '-4'"),
        ("seq=1.5", "seq is '1.5'"),
        ("seq=", "seq is ''"),
    ],
)
def test_shapes_that_say_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_sizes(text, Sizes())


@pytest.mark.parametrize(
    ("given", "message"), [("seq=197", "takes exactly 196"), ("batch=9", "takes 2 to 8"), ("batch=1", "takes 2 to 8")]
)
def test_shapes_outside_the_artifact_are_refused(given: str, message: str) -> None:
    one = artifact(small_spec("rope"), batch=(2, 4, 8), seq=(196, 196, 196))
    with pytest.raises(RequestError, match=message):
        sizes_of(one, [given])


def test_more_tokens_than_a_trained_table_are_refused() -> None:
    with pytest.raises(RequestError, match="learned knows 64 positions"):
        sizes_of(artifact(small_spec("learned", max_positions=64)), ["seq=65"])


def test_a_profile_spans_the_sizes_and_leaves_fixed_dimensions_out() -> None:
    one = artifact(small_spec("rope"), batch=(1, 1, 1))
    assert one.profile_requests([{"seq": 128}, {"seq": 512}]) == ["seq=128:512:512"]


@pytest.mark.parametrize("encoding", ["none", "learned", "rope", "rope2d"])
def test_inputs_are_those_of_the_graph(encoding: str) -> None:
    spec = small_spec(encoding)
    inputs = seeded_inputs(spec, Sizes(batch=2, seq=10), 0)
    assert list(inputs) == list(graph_inputs(spec))
    assert inputs["hidden_states"].shape == (2, 10, 32)
    assert inputs["hidden_states"].dtype == np.float32
    again, other = seeded_inputs(spec, Sizes(batch=2, seq=10), 0), seeded_inputs(spec, Sizes(batch=2, seq=10), 1)
    assert np.array_equal(inputs["hidden_states"], again["hidden_states"])
    assert not np.array_equal(inputs["hidden_states"], other["hidden_states"])


def test_positions_are_consecutive_or_cells_of_a_grid() -> None:
    line = seeded_inputs(small_spec("rope"), Sizes(batch=2, seq=10), 0)["position_ids"]
    assert line.dtype == np.int64
    assert line.tolist() == [list(range(10))] * 2
    grid = seeded_inputs(small_spec("rope2d"), Sizes(batch=2, seq=10), 0)["position_ids"]
    assert grid.shape == (2, 10, 2)
    assert grid[1, :5].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [0, 1]]
    assert len({tuple(cell) for cell in grid[0].tolist()}) == 10


def test_token_ids_lie_in_the_vocabulary_and_half_precision_is_kept() -> None:
    ids = seeded_inputs(small_spec("rope", vocab_size=11), Sizes(batch=2, seq=50), 0)["input_ids"]
    assert ids.dtype == np.int64
    assert set(ids.ravel().tolist()) <= set(range(11))
    assert str(seeded_inputs(small_spec("rope", dtype="bf16"), Sizes(), 0)["hidden_states"].dtype) == "bfloat16"


@pytest.mark.parametrize("name", ["block.txt", "block"])
def test_other_files_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"neither \.onnx nor \.plan"):
        load_for_bench(Path(name))


def test_a_plan_without_manifest_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "block.plan"
    plan.write_bytes(b"code")
    with pytest.raises(RequestError, match="no manifest"):
        load_for_bench(plan)


@pytest.mark.parametrize("spoil", ["inputs", "rank"])
def test_a_graph_that_is_not_that_of_its_spec_is_refused(tmp_path: Path, spoil: str) -> None:
    spec = small_spec("none")
    path = tmp_path / "block.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    model = onnx.load(path)
    if spoil == "inputs":
        model.graph.ClearField("input")
    else:
        del model.graph.input[0].type.tensor_type.shape.dim[1:]
    onnx.save(model, path)
    with pytest.raises(RequestError, match="hidden_states"):
        load_for_bench(path)
