"""Corner cases of whole graphs: inputs that work only for some outputs, overflow in the file's dtypes, broken files."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from posexport.graphs.cases import cases_of
from posexport.graphs.roles import roles_of
from posexport.rewrite.whole import DIFFERS, whole_evidence

WIDTH = 4


def table_of_positions(rows: int, *, joined: bool = False, factor: float = 1.0) -> ir.Model:
    """A graph whose output `turned` reads a table of positions and whose output `plain` does not.

    If both are `joined` in one operator, neither can be computed without the table. `factor` is a fault of `plain`.
    """
    weights = [
        numpy_helper.from_array(np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32), "table"),
        numpy_helper.from_array(np.random.default_rng(1).standard_normal((50, WIDTH)).astype(np.float32), "words"),
        numpy_helper.from_array(np.array(factor, np.float32), "factor"),
        numpy_helper.from_array(np.array([-1]), "last"),
    ]
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Abs", ["position_ids"], ["distances"]),  # The draws do not recognise its table.
        helper.make_node("Unsqueeze", ["distances", "last"], ["places"]),
        helper.make_node("GatherND", ["table", "places"], ["position"]),
    ]
    if joined:
        nodes.append(helper.make_node("Concat", ["position", "word"], ["both"], axis=-1))
        nodes.append(helper.make_node("Split", ["both"], ["turned", "read"], axis=-1, num_outputs=2))
        nodes.append(helper.make_node("Mul", ["read", "factor"], ["plain"]))
    else:
        nodes.append(helper.make_node("Identity", ["position"], ["turned"]))
        nodes.append(helper.make_node("Mul", ["word", "factor"], ["plain"]))
    names = ("input_ids", "position_ids")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in names]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", WIDTH]) for name in ("turned", "plain")
    ]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


@pytest.mark.parametrize("rows", [256, 1_000_000])
def test_inputs_that_the_original_takes_in_parts_only_say_nothing(rows: int) -> None:
    before, after = table_of_positions(rows), table_of_positions(rows, joined=True)
    cases = cases_of(roles_of(before), 0)
    evidence = whole_evidence(before, after, cases)
    assert evidence.problem is None
    assert evidence.error == 0
    assert 0 < evidence.cases <= len(cases)
    assert (evidence.cases == len(cases)) == (rows > 256)  # Some positions are beyond the shorter table.


def test_a_fault_is_found_on_the_other_inputs() -> None:
    before, after = table_of_positions(256), table_of_positions(256, joined=True, factor=1.001)
    evidence = whole_evidence(before, after, cases_of(roles_of(before), 0))
    assert evidence.problem is not None
    assert evidence.problem.code == DIFFERS


def masked_mean(*, twice: bool) -> ir.Model:
    """Two layers of means over the tokens that are not padding; a padded query sees no key.

    If the mask is multiplied by two (`twice`), it overflows to minus infinity in fp32, and padded queries are NaN. In
    the second layer, all queries of the row are then NaN. There is no overflow in float64.
    """
    lowest = float(np.finfo(np.float32).min)
    weights = [
        numpy_helper.from_array(np.random.default_rng(1).standard_normal((50, WIDTH)).astype(np.float32), "words"),
        numpy_helper.from_array(np.array(lowest, np.float32), "lowest"),
        numpy_helper.from_array(np.array(1.0, np.float32), "one"),
        numpy_helper.from_array(np.array(1 + twice, np.float32), "times"),
        numpy_helper.from_array(np.array([1]), "first"),
        numpy_helper.from_array(np.array([-1]), "last"),
    ]
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "seen"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "lowest"], ["row"]),
        helper.make_node("Unsqueeze", ["row", "first"], ["keys"]),  # [B, 1, S]
        helper.make_node("Unsqueeze", ["hidden", "last"], ["queries"]),  # [B, S, 1]: a padded query sees no key
        helper.make_node("Mul", ["queries", "lowest"], ["column"]),
        helper.make_node("Min", ["keys", "column"], ["once"]),
        helper.make_node("Mul", ["once", "times"], ["mask"]),
        helper.make_node("Softmax", ["mask"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "word"], ["middle"]),
        helper.make_node("MatMul", ["weights", "middle"], ["mean"]),
    ]
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in names]
    outputs = [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", "seq", WIDTH])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


def test_a_mask_that_is_minus_infinity_in_the_dtypes_of_the_file_is_not_made_finite() -> None:
    once, twice = masked_mean(twice=False), masked_mean(twice=True)
    cases = cases_of(roles_of(once), 0)
    assert whole_evidence(once, once, cases).problem is None
    assert whole_evidence(twice, twice, cases).problem is None
    evidence = whole_evidence(twice, once, cases)
    assert evidence.error == 0  # There is no difference in float64.
    assert evidence.problem is not None
    assert "dtypes of the file" in evidence.problem.text


def test_two_nodes_that_give_one_name_are_found() -> None:
    before, after = table_of_positions(256), table_of_positions(256)
    next(node for node in after.graph if node.op_type == "Identity").outputs[0].name = "word"
    after.graph.outputs[0].name = before.graph.outputs[0].name = "word"
    evidence = whole_evidence(before, after, cases_of(roles_of(before), 0))
    assert evidence.problem is not None
    assert "two of its nodes give 'word'" in evidence.problem.text


def chosen(inner: str) -> ir.Model:
    """A graph with an If; a value in one branch has the name `inner`. The outer graph has `word` and `twice`."""

    def branch(kind: str, name: str) -> onnx.GraphProto:
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(kind, ["word"], [name])], kind, [], [output])

    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Add", ["word", "word"], ["twice"]),
        helper.make_node("If", ["yes"], ["part"], then_branch=branch("Neg", inner), else_branch=branch("Abs", "last")),
        helper.make_node("Mul", ["part", "twice"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.random.default_rng(1).standard_normal((50, WIDTH)).astype(np.float32), "words"),
        numpy_helper.from_array(np.array(True), "yes"),
    ]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", WIDTH])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


def test_names_in_branches_that_become_those_of_the_graph_around_are_found() -> None:
    cases = cases_of(roles_of(chosen("first")), 0)
    for inner in ("first", "last"):  # The other branch may have the same name.
        assert whole_evidence(chosen("first"), chosen(inner), cases).problem is None
    evidence = whole_evidence(chosen("first"), chosen("twice"), cases)
    assert evidence.problem is not None
    assert "two of its nodes give 'twice'" in evidence.problem.text
    assert (
        whole_evidence(chosen("twice"), chosen("twice"), cases).problem is None
    )  # The file itself has this name twice.
