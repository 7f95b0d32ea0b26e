"""Rows of a batch that share their padding or positions, as the beams of one prompt do. Rows whose positions start at
their first token that is not padding. The first token of a buffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import small_spec
from mutants import Mutate
from mutation.surgery import Nodes, change_input, change_value
from verify_helpers import plant

from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.cases import Case, make_cases
from posexport.verify.result import FAILED

DECODER = {"causal": True, "padding_mask": True}


def _made(spec: Spec, seed: int = 0) -> list[Case]:
    return [each for each in make_cases(spec, seed, bounds_of(graph_inputs(spec), {})) if each.sizes["batch"] > 1]


def _is_of_all_rows(each: Case, name: str) -> bool:
    return bool((each.arrays[name] == each.arrays[name][:1]).all())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cache", [None, "concat", "shared"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_share_their_padding_and_their_positions(cache: str | None, seed: int) -> None:
    cases = _made(small_spec("rope", kv_cache=cache, **DECODER), seed)
    padded = [each for each in cases if not each.arrays["attention_mask"].all()]
    alike = [each for each in padded if _is_of_all_rows(each, "attention_mask")]
    assert len(alike) >= (12 if cache else 2)
    assert not cache or {each.sizes["seq"] == 1 for each in alike} == {True, False}
    several = [each for each in cases if each.sizes["seq"] > 2 and _is_of_all_rows(each, "position_ids")]
    assert any((np.diff(each.arrays["position_ids"]) != 1).any() for each in several)
    counted = [
        each.arrays["position_ids"]
        for each in padded
        if not each.arrays["attention_mask"][:, 0].all() and (each.arrays["position_ids"][:, 0] == 0).all()
    ]
    assert any((rows != rows[:1]).any() for rows in counted)


def test_the_first_token_comes_into_large_buffers() -> None:
    spec = small_spec("rope", kv_cache="shared", **DECODER)
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}))
    first = [each for each in cases if each.sizes["seq"] == 1 and not each.arrays["write_indices"].any()]
    assert {each.sizes["batch"] == 1 for each in first if each.sizes["max_seq"] > 100} == {True, False}


def _rows_alike(nodes: Nodes, value: str) -> str:
    """Whether a batch has several rows that are all equal."""
    first = nodes.op("Gather", value, nodes.const([0]), axis=0)
    same = nodes.op("Cast", nodes.op("Equal", value, first), to=onnx.TensorProto.INT64)
    several = nodes.op("Greater", nodes.size(value, 0), nodes.const(1))
    return nodes.all_of(nodes.op("Cast", nodes.op("ReduceMin", same, keepdims=0), to=onnx.TensorProto.BOOL), several)


def _mask_ignored_where_rows_share_it(model: onnx.ModelProto) -> None:
    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Where", _rows_alike(nodes, value), nodes.const(1), value)

    change_input(model, "attention_mask", change)


def _counted_where_rows_share_positions(model: onnx.ModelProto) -> None:
    def change(nodes: Nodes, value: str) -> str:
        first = nodes.op("Slice", value, nodes.const([0]), nodes.const([1]), nodes.const([1]))
        counted = nodes.op("Add", first, nodes.steps(nodes.size(value, 1)))
        return nodes.op("Where", _rows_alike(nodes, value), counted, value)

    change_input(model, "position_ids", change)


def _wrong_in_an_empty_buffer(model: onnx.ModelProto) -> None:
    def change(nodes: Nodes, value: str) -> str:
        last = nodes.op("ReduceMax", "write_indices", keepdims=0)
        wrong = nodes.all_of(
            nodes.op("Equal", last, nodes.const(0)),
            nodes.op("Equal", nodes.size("hidden_states", 1), nodes.const(1)),
            nodes.op("Greater", nodes.size("past_key", 2), nodes.const(100)),
        )
        return nodes.op("Where", wrong, nodes.op("Mul", value, nodes.like(value, 1.2)), value)

    change_value(model.graph, "output", change)


def _read_for_all_where_rows_begin_alike(model: onnx.ModelProto) -> None:
    """In batches whose rows all begin at the same position, every row reads the positions of row 0."""

    def change(nodes: Nodes, value: str) -> str:
        row = nodes.op("Gather", value, nodes.const([0]), axis=0)
        begins = nodes.op("Gather", value, nodes.const([0]), axis=1)
        row = nodes.op("Add", row, nodes.op("Mul", value, nodes.const(0)))
        return nodes.op("Where", _rows_alike(nodes, begins), row, value)

    change_input(model, "position_ids", change)


FAULTS: dict[str, tuple[str | None, Mutate]] = {
    "padding that all rows share": ("concat", _mask_ignored_where_rows_share_it),
    "positions that all rows share": ("concat", _counted_where_rows_share_positions),
    "the first token of a buffer": ("shared", _wrong_in_an_empty_buffer),
    "rows that begin alike": (None, _read_for_all_where_rows_begin_alike),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_only_such_rows_show_are_caught(name: str, tmp_path: Path) -> None:
    cache, mutate = FAULTS[name]
    wrong = plant(tmp_path, "wrong", small_spec("rope", kv_cache=cache, **DECODER), mutate)
    report = verify([wrong], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 300})
    assert [verdict.state for verdict in report.verdicts] == [FAILED]
