"""Evidence does not compute nodes before the features that it draws, if input shapes tell the sizes of these."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from small_graphs import HIDDEN, decoder

from posexport.graphs.attention.attention import Attention
from posexport.graphs.cases import cases_of
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.view import View, view_of
from posexport.rewrite.evidence import Evidence, evidence_of
from posexport.runtimes.tensors import to_tensors

QUERIES = "layers.0.q_proj.weight"


def scaled(model: ir.Model, by: float) -> ir.Model:
    """A copy whose scores are multiplied by another number."""
    copy = model.clone()
    scale = next(node for node in copy.graph if node.op_type == "Softmax").inputs[0].producer().inputs[0].producer()
    number = ir.tensor(np.float32(by * scale.inputs[1].const_value.numpy()))
    scale.replace_input_with(1, other := ir.Value(name="other", const_value=number))
    copy.graph.register_initializer(other)
    return copy


def without_queries(model: ir.Model) -> ir.Model:
    """A copy whose queries cannot be computed: their weight has the wrong shape."""
    copy = model.clone()
    copy.graph.initializers[QUERIES].const_value = ir.tensor(np.zeros((HIDDEN + 1, HIDDEN), np.float32))
    return copy


def found(view: View, before: ir.Model, after: ir.Model) -> Evidence:
    chosen = [one for one in view.attentions if isinstance(one, Attention)]
    cases = cases_of(view.roles, 0)[:4]
    (evidence,) = evidence_of(before, after, chosen, cases, shapes_on=view.shapes_on).values()
    return evidence


def test_shapes_on_other_inputs_are_those_of_the_graph() -> None:
    view = view_of(ir.from_proto(decoder()))
    values = [node.outputs[0] for node in view.model.graph if node.outputs[0].uses()]
    names = [str(value.name) for value in values]
    for case in cases_of(view.roles, 0)[::3]:
        actual = Evaluator(view.model).run(to_tensors(case.arrays), names)
        shapes = view.shapes_on(values, case.arrays)
        assert shapes == {value: tuple(actual[str(value.name)].shape) for value in shapes}
        known = {str(value.name) for value in shapes}
        assert {name for name in names if name.startswith("transpose")} <= known and "present.0.key" in known


def test_what_stands_above_the_features_is_not_computed() -> None:
    view = view_of(ir.from_proto(decoder()))
    unread = without_queries(view.model)
    evidence = found(view, unread, unread)
    assert evidence.agrees and evidence.cases == 4


def test_a_difference_on_inputs_that_the_model_does_not_take_counts_for_nothing() -> None:
    view = view_of(ir.from_proto(decoder()))
    other = scaled(view.model, 1.1)
    assert found(view, view.model, other).differs
    evidence = found(view, without_queries(view.model), other)
    assert not evidence.differs
    assert evidence.cases == 1  # the case of one token, whose attention weight is always 1
