"""Artifacts with `positions="consecutive"`: the inputs that verify tries on them, and faults that it must find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mutants as to
import numpy as np
import onnx
import pytest
from helpers import cli, refused, small_spec
from onnx import helper, numpy_helper
from verify_helpers import plant, write

from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.errors import RequestError
from posexport.models import read_spec
from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.cases import make_cases
from posexport.verify.first_positions import NOTE
from posexport.verify.properties import PROPERTIES, make_probe
from posexport.verify.result import FAILED, NOT_RUN, PASSED

ENCODINGS = ("rope", "learned", "fire", "alibi", "relative", "none")


def spec_of(encoding: str, **over: Any) -> Spec:
    return small_spec(encoding, **{"positions": "consecutive", "causal": True, "kv_cache": "concat", **over})


@pytest.mark.sampled(24)
@pytest.mark.parametrize("cache", [None, "concat", "shared"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_inputs_are_consecutive_positions_within_the_limit(encoding: str, cache: str | None) -> None:
    spec = spec_of(encoding, kv_cache=cache, padding_mask=True)
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}))
    first = [case.arrays["position_ids"] for case in cases if "position_ids" in case.arrays]
    assert bool(first) == spec.takes_start
    for case in cases if first else ():
        assert case.positions is not None
        assert case.positions.shape == (case.sizes["batch"], case.sizes["seq"])
        assert (np.diff(case.positions, axis=1) == 1).all()
        if encoding == "learned":
            assert case.positions.min() >= 0
            assert case.positions.max() < 64
    if first:  # rows begin at any position, also far out, and below zero if the encoding allows it
        starts = np.concatenate([array.ravel() for array in first])
        assert any(len(np.unique(array)) > 1 for array in first)
        assert (starts.min() < 0) == (encoding != "learned")
        assert starts.max() > (2**18 if encoding != "learned" else 30)
    if encoding == "learned":
        assert {*range(64)} == {int(place) for case in cases for place in np.unique(case.positions)}


def test_timed_inputs_begin_behind_the_cache() -> None:
    inputs = seeded_inputs(spec_of("rope"), Sizes(batch=2, seq=3, past_seq=5), 0)
    assert inputs["position_ids"].tolist() == [[5], [5]]
    assert "position_ids" not in seeded_inputs(spec_of("alibi"), Sizes(batch=2, seq=3, past_seq=5), 0)


def one_off(begins: str, step: int) -> to.Mutate:
    """The Slice of the output of operator `begins` starts one element later or earlier."""

    def mutate(model: onnx.ModelProto) -> None:
        places = [(holder, at) for holder in (model.graph, *model.functions) for at in range(len(holder.node))]
        made_by = {name: node.op_type for holder, at in places for node in [holder.node[at]] for name in node.output}
        holder, index = next(
            (holder, at)
            for holder, at in places
            for node in [holder.node[at]]
            if node.op_type == "Slice" and made_by.get(node.input[1]) == begins
        )
        node = holder.node[index]
        constants = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array([value]), name))
            for name, value in (("one", step), ("end", -1 if step < 0 else 2**40))
        ]
        made = [*constants, helper.make_node("Add", [node.input[1], "one"], ["moved"])]
        node.input[1], node.input[2] = "moved", "end"
        for at, each in enumerate(made):
            holder.node.insert(index + at, each)

    return mutate


def backwards(name: str) -> list[onnx.NodeProto]:
    """The values of all differences in reverse order."""
    ends = {"first": -1, "last": -(2**40), "axis": 3, "step": -1}
    constants = [
        helper.make_node("Constant", [], [key], value=numpy_helper.from_array(np.array([value]), key))
        for key, value in ends.items()
    ]
    return [*constants, helper.make_node("Slice", [name, *ends], ["planted"], name="backwards")]


def nowhere(name: str) -> list[onnx.NodeProto]:
    """Every row begins at position 0."""
    return [helper.make_node("Sub", [name, name], ["planted"], name="nowhere")]


def of_first_row(name: str) -> list[onnx.NodeProto]:
    """Every row begins where the first one begins."""
    row = helper.make_node("Constant", [], ["row"], value=numpy_helper.from_array(np.array([0]), "row"))
    return [row, helper.make_node("Gather", [name, "row"], ["planted"], name="first row", axis=0)]


def upside_down(name: str) -> list[onnx.NodeProto]:
    """Rows of cells above a query and rows below it are exchanged."""
    rows = helper.make_node("Constant", [], ["rows"], value=numpy_helper.from_array(np.array(12), "rows"))
    return [rows, helper.make_node("Sub", ["rows", name], ["planted"], name="upside down")]


def last_cell(name: str) -> list[onnx.NodeProto]:
    """Only the last cell of a window is wrong, and only for the first row of keys."""
    last = helper.make_node("Constant", [], ["last"], value=numpy_helper.from_array(np.array(12 * 7 + 5), "last"))
    return [last, helper.make_node("Min", [name, "last"], ["planted"], name="last cell")]


FAULTS: dict[str, tuple[str, str, to.Mutate]] = {
    "bias one off": ("kerple", "decomposed", one_off("Shape", -1)),
    "bias one off in a function": ("t5", "function", one_off("Shape", -1)),
    "bias backwards": ("kerple", "decomposed", to.before("Expand", 0, backwards, nth=-1)),
    "score one off": ("relative", "decomposed", one_off("Shape", -1)),
    "score one off in a function": ("shaw", "function", one_off("Shape", -1)),
    "score of keys one off": ("deberta", "native", one_off("Sub", 1)),
    "window upside down": ("swin", "decomposed", to.before("Mul", 0, upside_down, "v_Add_15")),
    "last cell of a window": ("swin", "decomposed", to.before("Gather", 1, last_cell, "v_Add_18")),
    "start ignored": ("rope", "decomposed", to.before("Add", 0, nowhere, "position_ids")),
    "start of the first row in all rows": ("rope", "decomposed", to.before("Add", 0, of_first_row, "position_ids")),
    "start of a bias ignored": ("fire", "decomposed", to.before("Add", 0, nowhere, "position_ids")),
    "start of a table ignored": ("learned", "decomposed", to.before("Add", 0, nowhere, "position_ids")),
}


QUICK = ("start ignored",)


@pytest.mark.few_inputs
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in FAULTS])
def test_a_fault_is_found_and_the_sound_file_passes(name: str, tmp_path: Path) -> None:
    encoding, form, mutate = FAULTS[name]
    spec = spec_of(encoding, kv_cache=None if encoding in ("learned", "swin") else "concat")
    plant(tmp_path, "fault", spec, mutate, form)
    write(tmp_path, "sound", spec, form)
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 40})
    assert report.unreadable == ()
    fault, sound = (next(v for v in report.verdicts if Path(v.artifact).stem == stem) for stem in ("fault", "sound"))
    assert (fault.state, "off by" in (fault.reason or "")) == (FAILED, True), fault.reason
    assert sound.state == PASSED, sound.reason
    assert NOTE in sound.notes


@pytest.mark.few_inputs
def test_properties_that_break_the_promise_are_left_out_by_a_reason(tmp_path: Path) -> None:
    for encoding, cache in (("rope", "concat"), ("t5", None)):
        write(tmp_path, encoding, spec_of(encoding, kv_cache=cache, causal=encoding == "rope"))
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 40}, properties=True)
    states = {(Path(each.artifact).stem, each.check): each.state for each in report.verdicts}
    assert {key for key, state in states.items() if state == NOT_RUN} == {
        *(("t5", check) for check in ("shift", "buckets", "permutation", "finite"))
    }
    assert {check for (stem, check), state in states.items() if stem == "rope" and state == PASSED} == {
        *("parity", "norms", "shift", "prefix", "finite")
    }
    probe = make_probe(spec_of("t5"), bounds_of(graph_inputs(spec_of("t5")), {}), 0)
    assert not isinstance(probe, str)
    assert (
        PROPERTIES["shift"].why_untried(probe) == "it moves positions, and this file takes none: they are consecutive"
    )


def test_own_inputs_give_the_first_position(tmp_path: Path) -> None:
    spec = spec_of("learned", kv_cache=None)
    path = write(tmp_path, "learned", spec)
    inputs = tmp_path / "inputs.npz"
    x = np.zeros((2, 5, 32), np.float32)
    for start, ok in ((59, True), (60, False)):
        np.savez(inputs, hidden_states=x, position_ids=np.array([[0], [start]]))
        result = cli("verify", path, "--runtime", "ort-cpu", "--inputs", inputs)
        if ok:
            assert result.exit_code == 0, result.output
        else:
            refused(result, "'position_ids' reaches from 0 to 64, the table has rows 0 to 63")
    np.savez(inputs, hidden_states=x, position_ids=np.array([[0], [2**63 - 2]]))
    refused(cli("verify", path, "--runtime", "ort-cpu", "--inputs", inputs), "so that distances fit into int64")
    np.savez(inputs, hidden_states=x, position_ids=np.zeros((2, 5), np.int64))
    message = "'position_ids' has shape [2, 5], the graph takes ['batch', 1], the first position of each row."
    refused(cli("verify", path, "--runtime", "ort-cpu", "--inputs", inputs), message)


@pytest.mark.slow
@pytest.mark.few_inputs
def test_own_inputs_have_no_more_tokens_than_there_are_positions(tmp_path: Path) -> None:
    path = write(tmp_path, "swin", small_spec("swin", positions="consecutive"))
    inputs = tmp_path / "inputs.npz"
    for tokens, ok in ((49, True), (50, False)):
        np.savez(inputs, hidden_states=np.zeros((1, tokens, 32), np.float32) + 0.1)
        result = cli("verify", path, "--runtime", "ort-cpu", "--inputs", inputs)
        if ok:
            assert result.exit_code == 0, result.output
        else:
            refused(result, "'hidden_states' has 50 tokens, and there are 49 positions")


def test_a_fixed_size_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    for encoding, seq, ok in (("learned", 64, True), ("learned", 65, False), ("swin", 50, False)):
        path, promise = tmp_path / f"{encoding}{seq}.onnx", ("--positions", "consecutive", "--seq", str(seq))
        limit = ("--set", "max_positions=64") if encoding == "learned" else ()
        result = cli(
            "export", "--encoding", encoding, "--hidden-size", "64", "--num-heads", "4", *promise, *limit, "-o", path
        )
        if ok:
            assert result.exit_code == 0, result.output
        else:
            refused(result, f"seq is {seq}, and {encoding} has {64 if limit else 49} consecutive positions")
            assert not path.exists()


def test_layers_with_other_windows_promise_nothing() -> None:
    def pattern(*sides: int) -> dict[str, Any]:
        layers = [{"encoding": {"name": "swin", "window_size": side}} for side in sides]
        return {"hidden_size": 64, "num_heads": 4, "layers": len(sides), "layer_pattern": layers, **layers[0]}

    with pytest.raises(RequestError, match="with windows of the sides 4 and 7 in layer_pattern"):
        read_spec({**pattern(7, 4), "positions": "consecutive"})
    assert not read_spec(pattern(7, 4)).can_be_consecutive
    assert read_spec(pattern(4, 4)).can_be_consecutive


@pytest.mark.slow
@pytest.mark.few_inputs
def test_windows_in_the_order_of_reading_keep_their_properties(tmp_path: Path) -> None:
    windowed = small_spec("swin", window=3, positions="consecutive")
    write(tmp_path, "windowed", windowed)
    few = read_spec(
        {
            **small_spec("swin", causal=True, positions="consecutive").to_dict(),
            "encoding": {"name": "swin", "window_size": 4},
        }
    )
    write(tmp_path, "few", few)
    report = verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 40}, properties=True)
    assert not [each for each in report.verdicts if each.state == FAILED]
    reasons = {(Path(each.artifact).stem, each.check): each.reason for each in report.verdicts if each.state == NOT_RUN}
    assert "its tokens are the cells of a grid in order" in str(reasons["windowed", "translate"])
    probe = make_probe(few, bounds_of(graph_inputs(few), {}), 0)
    assert not isinstance(probe, str) and probe.seq == 16
