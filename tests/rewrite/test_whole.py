"""Comparisons of two whole graphs in float64: what counts as a difference, and the number of input sets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_graphs
import torch
from onnx import helper, numpy_helper

from posexport.graphs.cases import cases_of
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.roles import roles_of
from posexport.rewrite import whole
from posexport.rewrite.whole import WholeEvidence, whole_evidence

pytestmark = pytest.mark.all_inputs

Change = Callable[[onnx.ModelProto], object]


def evidence(change: Change, base: Change = lambda model: None) -> WholeEvidence:
    """The evidence from a decoder and a changed copy; `base` changes both."""
    before = small_graphs.decoder()
    base(before)
    after = onnx.ModelProto()
    after.CopyFrom(before)
    change(after)
    models = [ir.from_proto(model) for model in (before, after)]
    return whole_evidence(*models, cases_of(roles_of(models[0]), 0))


def weight(model: onnx.ModelProto, name: str, factor: float) -> None:
    """Multiplies one weight by a factor."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))


def test_the_same_graph_has_no_error() -> None:
    found = evidence(lambda model: None)
    assert (found.error, found.problem, found.untested) == (0.0, None, None)
    assert found.cases == 24


@pytest.mark.parametrize("name", ["layers.0.q_proj.weight", "layers.0.v_proj.weight", "head.weight"])
def test_another_weight_is_found(name: str) -> None:
    found = evidence(lambda model: weight(model, name, 1 + 1e-5))
    assert found.problem is not None and found.problem.code == whole.DIFFERS
    assert "differs by" in found.problem.text and 1e-7 < found.error < 1e-3


def _append(model: onnx.ModelProto, kind: str, inputs: list[str], output: str, dtype: int, **attributes: Any) -> None:
    model.graph.node.append(helper.make_node(kind, inputs, [output], **attributes))
    model.graph.output.append(helper.make_tensor_value_info(output, dtype, None))


def test_whole_numbers_must_be_equal() -> None:
    def tokens(model: onnx.ModelProto) -> None:
        _append(model, "ArgMax", ["logits"], "tokens", onnx.TensorProto.INT64, axis=-1, keepdims=0)

    def other(model: onnx.ModelProto) -> None:
        model.graph.node[-1].op_type = "ArgMin"

    found = evidence(other, tokens)
    assert found.problem is not None and "'tokens' differs by inf" in found.problem.text


def test_another_shape_is_found() -> None:
    def flat(model: onnx.ModelProto) -> None:
        _append(model, "ReduceSum", ["logits"], "sums", onnx.TensorProto.FLOAT, keepdims=1)

    def squeezed(model: onnx.ModelProto) -> None:
        model.graph.node[-1].attribute[0].i = 0

    found = evidence(squeezed, flat)
    assert found.problem is not None and "'sums' has shape [] instead of [1, 1, 1]" in found.problem.text


def test_a_missing_output_is_found() -> None:
    found = evidence(lambda model: model.graph.output.pop())
    assert found.problem is not None and "it has no output 'present.0.value'" in found.problem.text


def test_inputs_that_only_the_new_graph_can_t_take_are_a_difference() -> None:
    def fixed(model: onnx.ModelProto) -> None:
        shape = next(t for t in model.graph.initializer if numpy_helper.to_array(t).tolist() == [0, 0, 4, 8])
        shape.CopyFrom(numpy_helper.from_array(np.array([1, 9, 4, 8]), shape.name))

    found = evidence(fixed)
    assert found.problem is not None
    assert re.search(r"it takes no inputs such as [a-z ]+ \[3, 12\] past=0$", found.problem.text), "no evaluator's text"


def test_what_padding_gives_says_nothing() -> None:
    """The mask hides keys with another number, so rows that see no key give another mean."""

    def least(model: onnx.ModelProto, number: float) -> None:
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if array.size == 1 and array.dtype == np.float32 and float(array) < -1e30:
                tensor.CopyFrom(numpy_helper.from_array(np.float32(number), tensor.name))

    found = evidence(lambda model: least(model, -1e6))
    assert (found.problem, found.cases) == (None, 24)
    shown = evidence(lambda model: least(model, -1.0))
    assert shown.problem is not None


def case_of(tokens: list[list[bool]]) -> DrawnInputs:
    model = ir.from_proto(small_graphs.decoder())
    case = cases_of(roles_of(model), 0)[0]
    keys = np.array(tokens)
    sizes = {**case.sizes, "batch": keys.shape[0], "seq": keys.shape[1], "past": 0}
    return DrawnInputs(
        label="drawn",
        arrays={},
        sizes=sizes,
        kinds=case.kinds,
        keys=keys,
        encoder_keys=np.ones((1, 1), bool),
        begins=np.zeros(len(keys), int),
    )


def test_numbers_that_are_not_finite() -> None:
    case = case_of([[True, True, False]])
    values = torch.tensor([[[1.0], [2.0], [float("nan")]]])
    assert whole._difference(values, values.clone(), case) == 0.0
    padded = torch.tensor([[[1.0], [2.0], [7.0]]])
    assert whole._difference(values, padded, case) == 0.0
    assert whole._difference(padded, torch.tensor([[[1.0], [float("inf")], [7.0]]]), case) == math.inf
    assert whole._difference(padded, torch.tensor([[[1.0], [2.5], [9.0]]]), case) == pytest.approx(0.25)


def test_large_models_are_tried_on_fewer_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ir.from_proto(small_graphs.decoder())
    cases = cases_of(roles_of(model), 0)
    assert [each.label for each in whole._affordable(model, cases)] == [each.label for each in cases]
    for work, least, most in ((2e6, 4, 22), (1.0, 3, 3)):
        monkeypatch.setattr(whole, "WORK", work)
        chosen = whole._affordable(model, cases)
        assert least <= len(chosen) <= most
        assert any(case.sizes["past"] for case in chosen) and not all(case.sizes["past"] for case in chosen)
    assert whole._affordable(model, []) == []


def test_without_a_case_it_is_untested(tmp_path: Path) -> None:
    def unknown(model: onnx.ModelProto) -> None:
        model.graph.node.insert(0, helper.make_node("Magic", ["input_ids"], ["ids"], domain="somebody"))
        model.graph.node[1].input[1] = "ids"
        model.opset_import.append(helper.make_opsetid("somebody", 1))

    found = evidence(lambda model: None, unknown)
    assert found.problem is None and found.cases == 0
    assert found.untested is not None and "Magic" in found.untested.text


def no_numbers(model: onnx.ModelProto) -> None:
    """Replaces the logits by NaN: logarithms of negative numbers."""
    next(node for node in model.graph.node if "logits" in node.output).output[0] = "scores"
    model.graph.node.append(helper.make_node("Abs", ["scores"], ["size"]))
    model.graph.node.append(helper.make_node("Neg", ["size"], ["below"]))
    model.graph.node.append(helper.make_node("Log", ["below"], ["logits"]))


def test_outputs_without_a_number_are_named() -> None:
    found = evidence(lambda model: weight(model, "head.weight", 2.0), no_numbers)
    assert (found.problem, found.cases, found.left) == (None, 24, ("logits",))


def test_graphs_without_a_number_are_untested() -> None:
    def base(model: onnx.ModelProto) -> None:
        no_numbers(model)
        del model.graph.output[1:]

    found = evidence(lambda model: weight(model, "head.weight", 2.0), base)
    assert (found.problem, found.cases, found.left) == (None, 0, ())
    assert found.untested is not None and found.untested.code == whole.NOT_TESTED
    assert "no output is finite" in found.untested.text


def test_logits_that_are_never_chosen_measure_nothing() -> None:
    """Tokens that must not be chosen get the lowest number, which is not a measure for the others."""
    case, lowest = case_of([[True, True, True]]), -3.4e38
    values, other = (torch.tensor([[[1.0], [second], [lowest]]], dtype=torch.float64) for second in (2.0, 2.5))
    assert whole._difference(values, other, case) == pytest.approx(0.25)
    assert whole._difference(values, values.clone(), case) == 0.0
    higher = torch.tensor([[[1.0], [2.0], [lowest / 2]]], dtype=torch.float64)
    assert whole._difference(values, higher, case) == pytest.approx(0.5)
