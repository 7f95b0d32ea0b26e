"""Nodes of torch's exporter that are written in fewer: the same function, and ONNX Runtime makes RMS norms of it."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from posexport.export import exporter
from posexport.export.fewer_nodes import with_fewer_nodes
from posexport.export.modules import export_any

TOKENS = 5


class Norms(nn.Module):
    """An RMS norm, and positions that follow those of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return normed * self.weight, torch.arange(x.shape[1]) + past.shape[1]


def exported() -> ir.Model:
    arrays = (torch.randn(2, TOKENS, 8), torch.randn(2, 3, 8))
    sizes = {"x": {1: torch.export.Dim("seq")}, "past": {1: torch.export.Dim("past_seq")}}
    with exporter.quiet():
        program = torch.onnx.export(Norms().eval(), arrays, dynamo=True, dynamic_shapes=sizes, verbose=False)
    assert program is not None
    return program.model


def run(model: ir.Model, path: Path, past: int) -> list[np.ndarray]:
    ir.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, length, 8), np.float32) for length in (TOKENS, past)]
    return session.run(None, dict(zip([one.name for one in session.get_inputs()], arrays, strict=True)))


def test_the_function_stays_and_the_nodes_become_fewer(tmp_path: Path) -> None:
    model = exported()
    before = {past: run(model, tmp_path / "before.onnx", past) for past in (3, 7)}
    count = Counter(node.op_type for node in model.graph)
    assert count["Reciprocal"] == 1
    with_fewer_nodes(model)
    after = Counter(node.op_type for node in model.graph)
    assert (after["Reciprocal"], after["Div"], after["Range"]) == (0, count["Div"] + 1, count["Range"])
    for past, (normed, positions) in before.items():
        now = run(model, tmp_path / "after.onnx", past)
        np.testing.assert_allclose(now[0], normed, rtol=1e-6)
        assert now[1].tolist() == positions.tolist() == list(range(past, past + TOKENS))
    begins = next(node for node in model.graph if node.op_type == "Range").inputs[0]
    assert begins is not None and begins.producer() is not None, "it begins at 0"


def test_onnxruntime_makes_one_node_of_a_norm(tmp_path: Path) -> None:
    model = exported()
    for name, count in (("before", 0), ("after", 1)):
        path = tmp_path / f"{name}.onnx"
        ir.save(model, path)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"optimized-{name}.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        optimized = ir.load(options.optimized_model_filepath)
        assert [node.op_type for node in optimized.graph].count("SimplifiedLayerNormalization") == count
        with_fewer_nodes(model)


@pytest.mark.parametrize(
    ("dtype", "is_read", "operators"),
    [("INT64", False, ["Add", "Range"]), ("INT64", True, ["Range", "Add"]), ("FLOAT", False, ["Range", "Add"])],
)
def test_only_a_range_of_integers_that_nothing_else_reads_is_moved(
    dtype: str, is_read: bool, operators: list[str]
) -> None:
    kind = ir.TensorType(ir.DataType[dtype])
    zero, one, end, begin = (ir.Value(name=name, type=kind, shape=ir.Shape([])) for name in ("0", "1", "end", "begin"))
    zero.const_value, one.const_value = (
        ir.tensor(number, dtype=ir.DataType[dtype], name=str(number)) for number in (0, 1)
    )
    steps = ir.node("Range", [zero, end, one])
    total = ir.node("Add", [steps.outputs[0], begin])
    results = [total.outputs[0], *([steps.outputs[0]] if is_read else [])]
    graph = ir.Graph([end, begin], results, nodes=[steps, total], initializers=[zero, one], opset_imports={"": 18})
    with_fewer_nodes(ir.Model(graph, ir_version=10))
    assert [node.op_type for node in graph] == operators


@pytest.mark.parametrize(("end", "operators"), [(2, ["Add", "Range"]), (3, ["Range", "Add"])])
def test_only_one_length_begins_a_range(end: int, operators: list[str]) -> None:
    kind = ir.TensorType(ir.DataType.INT64)
    zero, one = (ir.Value(name=str(i), type=kind, shape=ir.Shape([]), const_value=ir.tensor(i)) for i in (0, 1))
    x, count = ir.Value(name="x", type=kind, shape=ir.Shape([2, 3, 4])), ir.Value(name="n", type=kind)
    lengths = ir.node("Shape", [x], {"start": 1, "end": end})
    begin = ir.node("Squeeze", lengths.outputs)
    begin.outputs[0].type = kind
    steps = ir.node("Range", [zero, count, one])
    total = ir.node("Add", [steps.outputs[0], begin.outputs[0]])
    nodes = [lengths, begin, steps, total]
    graph = ir.Graph([x, count], total.outputs, nodes=nodes, initializers=[zero, one], opset_imports={"": 18})
    with_fewer_nodes(ir.Model(graph, ir_version=10))
    assert [node.op_type for node in graph if node.op_type in operators] == operators


def test_exported_modules_have_fewer_nodes() -> None:
    made = export_any(Norms(), (torch.randn(2, TOKENS, 8), torch.randn(2, 3, 8)), form="decomposed")
    assert "Reciprocal" not in {node.op_type for node in made.model.graph}
