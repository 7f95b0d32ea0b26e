"""QAttention, which ONNX Runtime's quantizer writes for optimised BERT and GPT-2, is rewritten like Attention.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from descriptions import described
from onnx import TensorProto, helper
from small_graphs import HEADS, HIDDEN, SIZE, Graph, _info

from posexport.graphs.evaluate import Evaluator
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model

Array = np.ndarray[Any, Any]

PLAIN: dict[str, Any] = {"mask": "", "columns": False, "past": False, "zeros": 1, "mask_rank": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a mask": {"mask": "mask"},
    "a scale for each column": {"columns": True, "mask": "mask"},
    "a cache": {"past": True},
}


def quantised(case: Mapping[str, Any]) -> onnx.ModelProto:
    """One QAttention with its output projection. Its features are quantised as they come."""
    how, g, rng = PLAIN | dict(case), Graph(), np.random.default_rng(0)
    x, x_scale, x_zero = g.parts("DynamicQuantizeLinear", 3, "features")
    # 7 bits: on CPUs without VNNI, ONNX Runtime's sums of two products with signed weights saturate at 16 bits
    weights = g.constant(rng.integers(-63, 64, (HIDDEN, 3 * HIDDEN)), np.int8)
    scale = g.constant(rng.uniform(0.002, 0.006, 3 * HIDDEN) if how["columns"] else 0.004, np.float32)
    zeros = g.constant([3] * 3 * HIDDEN if how["zeros"] > 1 else 3, np.int8)
    inputs = [_info("features", TensorProto.FLOAT, "batch", "seq", HIDDEN)]
    outputs = [_info("output", TensorProto.FLOAT, "batch", "seq", HIDDEN)]
    if how["mask"]:
        inputs.append(_info("mask", TensorProto.INT32, "batch", "seq"))
    given = [x, weights, g.random("bias", 3 * HIDDEN), x_scale, scale, how["mask"], x_zero, zeros]
    results = ["attended"]
    if how["past"]:
        given, results = [*given, "past"], [*results, "present"]
        inputs.append(_info("past", TensorProto.FLOAT, 2, "batch", HEADS, "cached", SIZE))
        outputs.append(_info("present", TensorProto.FLOAT, 2, "batch", HEADS, "all", SIZE))
    attributes = {"num_heads": HEADS, "unidirectional": int(how["past"])}
    node = helper.make_node("QAttention", given, results, name="attention", domain="com.microsoft", **attributes)
    g.nodes.append(node)
    g.op("MatMul", "attended", g.random("o_proj", HIDDEN, HIDDEN), name="output")
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(g.nodes, "g", inputs, outputs, g.weights), opset_imports=domains)
    model.ir_version = 9
    return model


def feeds(model: onnx.ModelProto, rows: int, tokens: int) -> dict[str, Array]:
    rng = np.random.default_rng(tokens)
    made = {
        "features": rng.standard_normal((rows, tokens, HIDDEN)).astype(np.float32),
        "mask": (np.arange(tokens) < rng.integers(1, tokens + 1, (rows, 1))).astype(np.int32),
        "past": rng.standard_normal((2, rows, HEADS, 3, SIZE)).astype(np.float32),
    }
    return {value.name: made[value.name] for value in model.graph.input}


def ran(model: onnx.ModelProto, arrays: Mapping[str, Array]) -> list[Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(one) for one in session.run(None, dict(arrays))]


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_that_of_onnx_runtime(case: str) -> None:
    model = quantised(CASES[case])
    arrays = feeds(model, 3, 6)
    names = [value.name for value in model.graph.output]
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
    found = Evaluator(ir.from_proto(model)).run(given, names)
    for name, want in zip(names, ran(model, arrays), strict=True):
        np.testing.assert_allclose(found[name].numpy(), want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_rewritten(case: str, form: str) -> None:
    model = quantised(CASES[case])
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    after = ir.to_proto(done.model)
    assert "QAttention" not in {node.op_type for node in after.graph.node}
    for rows, tokens in ((1, 1), (3, 9), (2, 70)):
        arrays = feeds(model, rows, tokens)
        for want, have in zip(ran(model, arrays), ran(after, arrays), strict=True):
            np.testing.assert_allclose(have, want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


def test_it_is_described() -> None:
    found = described(quantised(CASES["a cache"]))
    assert (found["num_heads"], found["head_dim"], found["mask"]["kind"]) == (HEADS, SIZE, "causal")
    assert described(quantised(CASES["a mask"]))["mask"]["padding"] == ["mask"]


def test_several_zero_points_stay() -> None:
    done = rewrite_model(ir.from_proto(quantised({"zeros": 3})), form="native", target="ort")
    ((state, reason),) = [(one.state, one.reason) for one in done.sites]
    assert state == KEPT and reason is not None and "zero points" in reason.text
