"""Sizes and inputs of a benchmark: defaults that the artifact takes, and what is refused."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import small_spec

from posexport.artifact import write_onnx
from posexport.bench_shapes import Sizes, Subject, read_sizes, read_subject, seeded_inputs
from posexport.errors import RequestError
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.spec import Spec

FREE = (1, None, None)


def subject(spec: Spec, batch: tuple = FREE, seq: tuple = FREE) -> Subject:  # type: ignore[type-arg]
    ranges = {"batch": batch, "seq": seq}
    path = Path("block.onnx")
    return Subject(path=path, onnx=path, spec=spec, form="function", opset=18, plan_runtime=None, ranges=ranges)


def texts(found: list[Sizes]) -> list[str]:
    return [str(each) for each in found]


def test_defaults_are_two_lengths() -> None:
    assert texts(subject(small_spec("rope")).sizes(())) == ["batch=1,seq=128", "batch=1,seq=512"]


def test_defaults_stay_within_a_trained_table() -> None:
    assert texts(subject(small_spec("learned", max_positions=64)).sizes(())) == ["batch=1,seq=64"]


def test_defaults_are_the_fixed_sizes_of_a_graph() -> None:
    found = subject(small_spec("rope"), batch=(3, 3, 3), seq=(196, 196, 196)).sizes(())
    assert texts(found) == ["batch=3,seq=196"]


def test_defaults_are_the_preferred_sizes_of_a_plan() -> None:
    found = subject(small_spec("rope"), batch=(1, 2, 8), seq=(16, 1024, 4096)).sizes(())
    assert texts(found) == ["batch=2,seq=1024"]


def test_a_dimension_that_is_not_named_takes_its_default() -> None:
    assert texts(subject(small_spec("rope")).sizes(["seq=7"])) == ["batch=1,seq=7"]
    assert texts(subject(small_spec("rope")).sizes(["batch=4", "batch=2,seq=5"])) == [
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
    ("given", "message"),
    [
        ("seq=197", "takes exactly 196"),
        ("batch=9", "takes 2 to 8"),
        ("batch=1", "takes 2 to 8"),
    ],
)
def test_shapes_outside_the_artifact_are_refused(given: str, message: str) -> None:
    one = subject(small_spec("rope"), batch=(2, 4, 8), seq=(196, 196, 196))
    with pytest.raises(RequestError, match=message):
        one.sizes([given])


def test_more_tokens_than_a_trained_table_are_refused() -> None:
    with pytest.raises(RequestError, match="learned knows 64 positions"):
        subject(small_spec("learned", max_positions=64)).sizes(["seq=65"])


def test_a_profile_spans_the_sizes_and_leaves_fixed_dimensions_out() -> None:
    one = subject(small_spec("rope"), batch=(1, 1, 1))
    assert one.profile([Sizes(seq=128), Sizes(seq=512)]) == ["seq=128:512:512"]


@pytest.mark.parametrize("encoding", ["none", "learned", "rope", "rope2d"])
def test_inputs_are_those_of_the_graph(encoding: str) -> None:
    spec = small_spec(encoding)
    inputs = seeded_inputs(spec, Sizes(batch=2, seq=10), 0)
    assert list(inputs) == list(spec.inputs())
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
        read_subject(Path(name))


def test_a_plan_without_manifest_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "block.plan"
    plan.write_bytes(b"code")
    with pytest.raises(RequestError, match="no manifest"):
        read_subject(plan)


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
        read_subject(path)
