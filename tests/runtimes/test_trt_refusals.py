"""Errors for files that TensorRT's parser or builder refuses: in posexport's words, followed by the engine's after a
label."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from trt_helpers import RTX, needs_rtx

from posexport.artifact.graph_file import read_graph
from posexport.errors import RequestError
from posexport.runtimes.tensorrt.builder import Shapes, build
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.runtimes.tensorrt.refusals import build_error, detail

FLOAT = TensorProto.FLOAT
ROWS = ["n", 4]
PROGRAM = re.compile(r"Assertion failed|Error Code|\.cpp|/_src|Cuda|&&|\|\||==|Invalid Node|Plugin|\n")
"""Words of the engine about its own source code, which errors must not contain."""


def saved(
    folder: Path, operator: str, inputs: tuple[str, ...] = ("x",), *, kind: int = FLOAT, domain: str = "", **more: Any
) -> Path:
    """A graph with one node named `odd` whose input x is [n, 4]. `weights` in `more` are initializers by name."""
    weights = [numpy_helper.from_array(np.array(value), name) for name, value in more.pop("weights", {}).items()]
    node = helper.make_node(operator, inputs, ["y"], more.pop("name", "odd"), domain=domain, **more)
    values = [helper.make_tensor_value_info("x", kind, ROWS), helper.make_tensor_value_info("y", kind, None)]
    graph = helper.make_graph([node], "g", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "graph.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


def said(path: Path, **options: Any) -> str:
    """The error of a build."""
    shapes = Shapes(profiles={"x": {"min": [1, 4], "opt": [2, 4], "max": [3, 4]}}, dimensions={}, attentions=0)
    with pytest.raises(RequestError) as caught:
        build(read_graph(path), BuildOptions(runtime=RTX, **options), shapes=shapes)
    text = str(caught.value)
    assert not PROGRAM.search(text), text
    assert text.endswith(".") and text.count("TensorRT says:") <= 1
    return text


WRONG: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("no-operator", {"operator": "Foo"}, ("node 'odd' (operator Foo)", "it has no such operator", "without it")),
    ("no-name", {"operator": "Foo", "name": ""}, ("a node Foo of",)),
    ("contrib", {"operator": "BiasGelu", "domain": "com.microsoft"}, ("posexport rewrite --target tensorrt",)),
    ("attribute", {"operator": "Softmax", "axis": 7}, ("(operator Softmax)", "(TensorRT says: Axis must be in")),
    (
        "shapes",
        {"operator": "MatMul", "inputs": ("x", "w"), "weights": {"w": np.ones((5, 4), np.float32)}},
        ("don't fit together", "TensorRT says: odd: last dimension of input0 = 4 and"),
    ),
    ("types", {"operator": "Gather", "inputs": ("x", "x")}, ("don't fit together", "indices input has type Float")),
    ("nothing-said", {"operator": "Conv", "inputs": ("x", "x")}, ("(operator Conv)", "or run it on ONNX Runtime.")),
    ("no-value", {"operator": "Add", "inputs": ("x", "z")}, ("not valid there", "a value that nothing gives")),
    ("no-attribute", {"operator": "Cast"}, ("its parser stopped", "onnx.checker.check_model")),
    ("texts", {"operator": "Identity", "kind": TensorProto.STRING}, ("input 'x' has the type string: it takes",)),
    ("uint16", {"operator": "Identity", "kind": TensorProto.UINT16}, ("input 'x' has the type uint16",)),
]


@needs_rtx
@pytest.mark.parametrize(("graph", "parts"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_the_parser_refuses_in_words_of_ours(graph: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    text = said(saved(tmp_path, **graph))
    assert all(part in text for part in parts), text


@needs_rtx
def test_the_builder_refuses_in_words_of_ours(tmp_path: Path) -> None:
    path = saved(tmp_path, "CumSum", ("x", "axis"), weights={"axis": np.array(7)})
    text = said(path, memory_limit="1G", compute_capability=("8.9",))
    assert "raise --memory-limit, drop --compute-capability 8.9, give smaller sizes with --profile" in text
    assert "TensorRT says: ICumulativeLayer odd: odd: axis (7) >= input rank (2))" in text
    assert "--memory-limit" not in said(path)


def test_a_builder_that_says_nothing_is_one_sentence() -> None:
    for errors in ([], ["false"], ["IBuilder::build: Error Code 2: Internal Error (x != 0 && y)"]):
        text = str(build_error(RTX, "a.onnx", errors))
        assert "TensorRT says" not in text and text.endswith("--form decomposed."), text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("false", ""),
        ("Invalid Node - odd", ""),
        ("Assertion failed: a ? b : c: The rank is 2.", "The rank is 2"),
        ('a == "b" && "It takes b and " "c!"', "It takes b and c!"),
        ("Attribute not found: to", "Attribute not found: to"),
        ("[a.cpp::f::1] Error Code 1: Cuda Runtime (In f at /s/a.cpp:1 (cudaError 35: old))", ""),
        (
            "I::f: Error Code 1: Myelin ([p.cpp:3: g] FP32 GEMM is not supported. In h at /s/q.cpp:9)",
            "FP32 GEMM is not supported",
        ),
        (
            "first, with no sense ==\nError Code 4: Shape Error (sizes differ (3 and 4). In operator() at /s.cpp:1)",
            "sizes differ (3 and 4)",
        ),
    ],
)
def test_words_of_the_engine_are_without_its_program(message: str, words: str) -> None:
    assert detail(message) == words
