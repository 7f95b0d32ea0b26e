"""Nodes of torch's exporter are replaced by fewer nodes: same results, and ONNX Runtime can fuse RMS norms."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from posexport.export import exporter
from posexport.export.fewer_nodes import with_fewer_nodes
from posexport.export.modules import export_any

TOKENS = 5


class Norms(nn.Module):
    """An RMS norm, and positions that continue those of a cache."""

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


class Masked(nn.Module):
    """The mask of a cached decoder as transformers looks it up, and a rotation with equal halves of angles."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(x.shape[0])[:, None, None, None]
        columns = torch.arange(mask.shape[1])[None, None, None, :]
        queries = torch.arange(x.shape[1])[None, None, :, None] + mask.shape[1] - x.shape[1]
        seen = mask.bool()[rows, columns] & (columns <= queries)
        angles = positions[:, :, None].float() * torch.tensor([1.0, 0.5, 0.25])
        joined = torch.cat((angles, angles), -1)
        cos = (joined.cos() * 0.5).unsqueeze(1).squeeze(1)[..., :3]
        return seen, x[..., :3] * cos + joined.sin()[..., 3:]


def masked() -> tuple[ir.Model, list[torch.Tensor]]:
    arrays = [torch.randn(3, 4, 6), torch.ones(3, 9, dtype=torch.int64), torch.arange(12).reshape(3, 4)]
    names = {"x": ("batch", "seq"), "mask": ("batch", "total"), "positions": ("batch", "seq")}
    sizes = {name: {axis: torch.export.Dim(size) for axis, size in enumerate(both)} for name, both in names.items()}
    with exporter.quiet():
        program = torch.onnx.export(Masked().eval(), tuple(arrays), dynamo=True, dynamic_shapes=sizes, verbose=False)
    assert program is not None
    return program.model, arrays


def outputs(model: ir.Model, path: Path, arrays: list[torch.Tensor]) -> list[np.ndarray]:
    ir.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return session.run(None, {name: array.numpy() for name, array in zip(names, arrays, strict=True)})


@pytest.mark.slow
def test_a_mask_that_is_looked_up_is_the_mask(tmp_path: Path) -> None:
    model, _ = masked()
    named = [[value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)]
    sizes = ((3, 4, 9), (1, 1, 1), (2, 5, 5), (4, 1, 12))
    rng = np.random.default_rng(0)
    cases = [
        [
            torch.from_numpy(rng.standard_normal((batch, seq, 6)).astype(np.float32)),
            torch.from_numpy(rng.integers(0, 2, (batch, total))),
            torch.from_numpy(rng.integers(0, 50, (batch, seq))),
        ]
        for batch, seq, total in sizes
    ]
    before = [outputs(model, tmp_path / "before.onnx", arrays) for arrays in cases]
    count = Counter(node.op_type for node in model.graph)
    assert count["GatherND"] == 1
    with_fewer_nodes(model)
    after = Counter(node.op_type for node in model.graph)
    assert (after["GatherND"], after["Expand"]) == (0, 0)
    assert after["Squeeze"] < count["Squeeze"]
    assert [[value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)] == named
    for arrays, (seen, rotated) in zip(cases, before, strict=True):
        now = outputs(model, tmp_path / "after.onnx", arrays)
        assert np.array_equal(now[0], seen)
        np.testing.assert_allclose(now[1], rotated, rtol=1e-6, atol=1e-6)
        expected = Masked()(*arrays)
        assert np.array_equal(now[0], expected[0].numpy())


def lookup(order: tuple[int, int] = (0, 1), *, joint: str = "Max", start: int = 0, dims: str = "batch") -> ir.Model:
    """mask[rows, columns] as torch's exporter writes it, with the axes of rows and columns in the given `order`."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=0, end=1),
        helper.make_node("Squeeze", ["length"], ["rows"]),
        helper.make_node("Shape", ["mask"], ["size"], start=1, end=2),
        helper.make_node("Squeeze", ["size"], ["columns"]),
    ]
    for at, name in enumerate(("rows", "columns")):
        nodes += [
            helper.make_node("Range", [f"start{at}", name, "one"], [f"count{at}"]),
            helper.make_node("Unsqueeze", [f"count{at}", f"axes{at}"], [f"index{at}"]),
        ]
    nodes += [
        helper.make_node(joint, ["index0", "index1"], ["joint"]),
        helper.make_node("Shape", ["joint"], ["shape"]),
        *(helper.make_node("Expand", [f"index{at}", "shape"], [f"wide{at}"]) for at in range(2)),
        *(helper.make_node("Unsqueeze", [f"wide{at}", "last"], [f"part{at}"]) for at in range(2)),
        helper.make_node("Concat", ["part0", "part1"], ["indices"], axis=-1),
        helper.make_node("GatherND", ["mask", "indices"], ["y"]),
    ]
    constants = {"one": 1, "start0": 0, "start1": start, "last": [-1], "axes0": [1 - order[0]], "axes1": [1 - order[1]]}
    graph = helper.make_graph(
        nodes,
        "lookup",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [dims, 4]),
            helper.make_tensor_value_info("mask", TensorProto.INT64, ["batch", "total"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT64, None)],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


LOOKUPS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "rows and columns": ({}, {"GatherND": 0, "Slice": 0}),
    "fewer rows than the mask": ({"dims": "other"}, {"GatherND": 0, "Slice": 1}),
    "columns before rows": ({"order": (1, 0)}, {"GatherND": 1}),
    "from the second column": ({"start": 1}, {"GatherND": 1}),
}
"""Arguments of a lookup, and the number of some operators afterwards."""


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_other_kinds_stay(name: str, tmp_path: Path) -> None:
    options, counts = LOOKUPS[name]
    model = lookup(**options)
    arrays = [torch.zeros(2 if "dims" in options else 3, 4), torch.arange(21).reshape(3, 7)]
    before = outputs(model, tmp_path / "before.onnx", arrays)
    with_fewer_nodes(model)
    found = Counter(node.op_type for node in model.graph)
    assert {operator: found[operator] for operator in counts} == counts
    assert np.array_equal(outputs(model, tmp_path / "after.onnx", arrays)[0], before[0])
