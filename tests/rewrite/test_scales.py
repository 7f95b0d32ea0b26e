"""A scale that a graph has in several parts is written exactly, whatever the parts are."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
import torch

from posexport.graphs.attention.layouts import snapped
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.nodes import Nodes
from posexport.rewrite.site import split_scale
from posexport.rewrite.writing import times


def float32(number: float) -> float:
    return float(np.float32(number))


SCALES = [float32(size**-0.5) for size in (24, 32, 64, 80, 128, 256)]


@pytest.mark.parametrize("scale", SCALES)
def test_a_root_on_both_sides_is_the_scale(scale: float) -> None:
    root = math.sqrt(scale)
    for nearly in (root, root * (1 + 3e-16), root * (1 - 3e-16)):
        assert snapped(nearly) == root
    assert snapped(-root) == -root
    q = ir.Value(name="q", type=ir.TensorType(ir.DataType.FLOAT))
    assert split_scale([root, root], q) == (scale, [])
    assert split_scale([2.0, root, root], q) == (2 * scale, [])


def test_other_factors_stay_as_they_are() -> None:
    q = ir.Value(name="q", type=ir.TensorType(ir.DataType.FLOAT))
    assert split_scale([0.5, 0.5], q) == (0.25, [])
    third = 1 / 3.0
    attribute, left = split_scale([third, third], q)
    assert (attribute, left) == (1.0, [third, third])
    root, other = (math.sqrt(float32(number)) for number in (0.1, 0.2))
    assert split_scale([root, other], q) == (1.0, [root, other])  # None of their combinations is a float32 number.
    assert snapped(0.1234567890123456) is None
    assert snapped(math.sqrt(0.3)) is None  # neither 0.3 nor 1 / 0.3 is a float32 number


ROOT = math.sqrt(float32(0.3))


@pytest.mark.parametrize("number", [12**-0.5, 80**-0.25, ROOT, math.sqrt(ROOT), 12**0.5, 0.25, 1 / 3.0])
def test_a_product_with_a_root_is_exact(number: float) -> None:
    """A scale that the graph computes from the head size is not an fp32 number."""
    x, nodes = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3])), Nodes(set())
    y = times(nodes, x, number)
    model = ir.Model(ir.Graph([x], [y], nodes=nodes.nodes, opset_imports={"": 20}, name="product"), ir_version=10)
    given = torch.tensor([1.0, -2.0, 1e3], dtype=torch.float64)
    (product,) = Evaluator(model).run({"x": given}).values()
    torch.testing.assert_close(product, given * number, rtol=1e-13, atol=0)


@pytest.mark.parametrize("size", [8, 24, 32, 80, 128])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
def test_one_by_a_root_keeps_its_digits(size: int, dtype: ir.DataType) -> None:
    """A graph that computes 1 / sqrt(size) from shapes is more precise than a float32 constant."""
    nodes = Nodes(set())
    times(nodes, ir.Value(name="q", type=ir.TensorType(dtype)), size**-0.5)
    (constant,) = (node.attributes["value"].as_tensor() for node in nodes.nodes if node.op_type == "Constant")
    operators = [node.op_type for node in nodes.nodes if node.op_type in ("Sqrt", "Mul", "Div")]
    assert operators[0] == "Sqrt"
    root = math.sqrt(float(constant.numpy()))
    assert {"Mul": root, "Div": 1.0 / root}[operators[1]] == pytest.approx(size**-0.5, rel=1e-15)


def test_a_number_that_is_no_root_is_the_nearest_constant() -> None:
    nodes = Nodes(set())
    times(nodes, ir.Value(name="q", type=ir.TensorType(ir.DataType.FLOAT)), 0.1234567890123456)
    assert [node.op_type for node in nodes.nodes] == ["Constant", "Div"]
