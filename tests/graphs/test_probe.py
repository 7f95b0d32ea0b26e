"""The memory that a probe keeps for a graph of fixed sizes with large scores: it does not grow with the layers."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from attention_graphs import attention, visible
from descriptions import described
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from small_graphs import HEADS, HIDDEN, SIZE, Graph, decoder

from posexport.graphs.attention import probe
from posexport.graphs.attention.attention import Attention
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.view import View, view_of

TOKENS = 48


def encoder(layers: int) -> onnx.ModelProto:
    """Layers of attention over TOKENS tokens, as for an image of a fixed size."""
    g = Graph()
    x = "hidden_states"
    for layer in range(layers):
        heads = []
        for name in "qkv":
            projected = g.op("MatMul", x, g.random(f"{layer}.{name}.weight", HIDDEN, HEADS * SIZE))
            split = g.op("Reshape", projected, g.constant([0, TOKENS, HEADS, SIZE]))
            heads.append(g.op("Transpose", split, perm=[0, 2, 1, 3]))
        q, k, v = heads
        scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(0.3, np.float32))
        out = g.op("MatMul", g.op("Softmax", scores, axis=-1, name=f"attention_{layer}"), v)
        merged = g.op("Reshape", g.op("Transpose", out, perm=[0, 2, 1, 3]), g.constant([0, TOKENS, HEADS * SIZE]))
        x = g.op("Add", x, merged)
    g.op("Identity", x, name="output")
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", TOKENS, HIDDEN])]
        for name in ("hidden_states", "output")
    )
    graph = helper.make_graph(g.nodes, "encoder", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def held(view: View) -> int:
    """The bytes of all tensors that a probe keeps."""
    tensors = (value for value in view.probe.values.values() if not value.is_meta)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_a_probe_holds_no_more_of_a_deeper_graph() -> None:
    shallow, deep = (view_of(ir.from_proto(encoder(layers))) for layers in (2, 10))
    assert [isinstance(one, Attention) for one in deep.attentions] == [True] * 10
    scores = 8 * math.prod(deep.probe.shape(deep.flow.values["attention_0"]))
    assert held(deep) - held(shallow) < scores / 10


def test_numbers_that_are_not_kept_are_computed_again() -> None:
    model = encoder(2)
    view = view_of(ir.from_proto(model))
    value = view.flow.values["attention_1"]
    assert view.probe.values["attention_1"].is_meta
    model.graph.output.append(helper.make_empty_tensor_value_info("attention_1"))
    (expected,) = ReferenceEvaluator(model).run(["attention_1"], dict(view.inputs.arrays))
    assert view.probe.shape(value) == expected.shape
    assert view.probe.dtype(value) == torch.float64
    np.testing.assert_allclose(view.probe.get(value).numpy(), expected, atol=1e-5)
    drawn = torch.softmax(view.probe.random_like(value), -1)
    (output,) = view.probe.replaced({value: drawn}, [view.flow.values["output"]], [*_behind(view, value)])
    np.testing.assert_allclose(output.numpy(), _with_weights(model, view, drawn.numpy().astype(np.float32)), atol=1e-4)


def _behind(view: View, value: ir.Value) -> list[ir.Node]:
    """The nodes that depend on a value."""
    behind = {value}
    for node in view.flow.graph:
        if any(one in behind for one in node.inputs):
            behind.update(node.outputs)
    return [node for node in view.flow.graph if node.outputs[0] in behind and node.outputs[0] is not value]


def _with_weights(model: onnx.ModelProto, view: View, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The output with these attention weights in the second layer, by onnx's reference evaluator."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    (softmax,) = (node for node in changed.graph.node if node.output[0] == "attention_1")
    changed.graph.node.remove(softmax)
    del changed.graph.output[1:]
    changed.graph.input.append(helper.make_tensor_value_info("attention_1", TensorProto.FLOAT, None))
    (output,) = ReferenceEvaluator(changed).run(["output"], {**view.inputs.arrays, "attention_1": weights})
    return np.asarray(output)


def test_values_that_are_only_seen_are_freed() -> None:
    model = ir.from_proto(encoder(6))
    made, most = list[weakref.ref[torch.Tensor]](), 0

    def see(name: str, value: torch.Tensor) -> None:
        nonlocal most
        made.append(weakref.ref(value))
        most = max(most, sum(reference() is not None for reference in made))

    names = [node.outputs[0].name or "" for node in model.graph]
    given = {"hidden_states": torch.randn(2, TOKENS, HIDDEN)}
    assert Evaluator(model).run(given, names, see=see) == {}
    assert len(made) == len(names) > 60
    assert most <= 8


def test_masks_that_are_not_kept_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention(fixed=(2, 72), add=[visible(behind=9)])
    expected = described(model)
    monkeypatch.setattr(probe, "MOST_HELD", 0)
    view = view_of(ir.from_proto(model))
    masks = [name for name, value in view.probe.values.items() if value.is_meta and value.shape == (72, 72)]
    assert masks
    assert described(model) == expected
    assert expected["mask"]["window"] == 9


def test_dtypes_of_many_layers_take_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in the dtypes of the file computes the whole graph."""
    view = view_of(ir.from_proto(decoder(layers=3)))
    runs: list[bool] = []
    plain = Evaluator.run

    def counted(self: Evaluator, *args: Any, **options: Any) -> Any:
        runs.append(self._wide)
        return plain(self, *args, **options)

    monkeypatch.setattr(Evaluator, "run", counted)
    sources = [one.q.source.value for one in view.attentions if isinstance(one, Attention)]
    assert len(sources) == 3 and all(value.dtype is None for value in sources)
    found = [view.dtypes([value]) for value in sources]
    assert [*found] == [{value.name: ir.DataType.FLOAT} for value in sources]
    assert runs == [False]
