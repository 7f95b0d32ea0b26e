"""The work of graphs without a spec: equal to that of the exported block, and the work of single operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_files import foreign
from graph_signatures import model_of
from helpers import small_spec
from onnx import helper, numpy_helper
from small_graphs import decoder

from posexport.artifact.graph_file import read_graph
from posexport.bench.graph_work import works_of
from posexport.bench.timed_graph import timed_graph
from posexport.bench.work import Heads, Product, Work, work
from posexport.errors import RequestError

Sizes = dict[str, int]


def work_of(path: Path, sizes: Mapping[str, int], roles: Mapping[str, str] | None = None) -> Work:
    file = timed_graph(read_graph(path), roles or {})
    read = file.read_sizes(",".join(f"{name}={size}" for name, size in sizes.items()))
    (found,) = works_of(path, [*file.roles.values()], [file._sizes.asked(read)], 4)
    return found


BLOCKS: dict[str, tuple[dict[str, Any], Sizes]] = {
    "rows": ({}, {"seq": 5, "batch": 2}),
    "step": ({"kv_cache": "concat", "causal": True}, {"seq": 1, "past_seq": 7}),
    "groups": ({"num_kv_heads": 2, "kv_cache": "concat", "causal": True}, {"seq": 3, "past_seq": 7, "batch": 2}),
    "window": ({"window": 4, "kv_cache": "concat", "causal": True}, {"seq": 1, "past_seq": 9}),
    "both sides": ({"window": 4, "causal": False}, {"seq": 20}),
    "chunk": ({"attention_chunk_size": 4, "kv_cache": "concat", "causal": True}, {"seq": 1, "past_seq": 9}),
    "layers": ({"layers": 3, "pattern": "rope:window=4,rope", "causal": True}, {"seq": 9}),
    "mlp": ({"block": "transformer", "mlp": "swiglu", "intermediate_size": 40}, {"seq": 3}),
    "encoder": ({"encoding": "none", "cross": True}, {"seq": 3, "encoder_seq": 9}),
    "padding": ({"encoding": "alibi", "causal": True, "padding_mask": True}, {"seq": 6, "batch": 2}),
    "contrib": ({"num_kv_heads": 2, "kv_cache": "concat", "causal": True}, {"seq": 3, "past_seq": 7}),
    "native": ({"num_kv_heads": 2, "causal": True}, {"seq": 3}),
    "buffer": ({"kv_cache": "shared", "causal": True}, {"seq": 1, "past_seq": 7, "max_seq": 64}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_work_of_a_file_is_that_of_the_block_it_was_exported_from(name: str, tmp_path: Path) -> None:
    changes, sizes = BLOCKS[name]
    spec = small_spec(**{"encoding": "rope", "hidden_size": 32, "num_heads": 4, **changes})
    path = foreign(tmp_path, "block", spec, name if name in ("contrib", "native") else "decomposed")
    found, expected = work_of(path, sizes), work(spec, {"batch": 1, **sizes})
    assert found.operations == expected.operations
    assert found.attentions == expected.attentions
    assert found.bytes == expected.bytes


def planted(model: onnx.ModelProto) -> None:
    """Inserts one more product of the features before all nodes."""
    name = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["planted" if one == name else one for one in node.input]
    model.graph.node.insert(0, helper.make_node("MatMul", [name, "planted weight"], ["planted"]))
    model.graph.initializer.append(numpy_helper.from_array(np.eye(32, dtype=np.float32), "planted weight"))


def test_a_planted_product_is_counted(tmp_path: Path) -> None:
    spec = small_spec("rope", hidden_size=32, num_heads=4)
    before, after = (
        work_of(foreign(tmp_path, f"block{at}", spec, change=change), {"seq": 5, "batch": 2})
        for at, change in enumerate((None, planted))
    )
    assert after.operations - before.operations == 2 * 10 * 32 * 32
    assert after.bytes - before.bytes == 4 * 32 * 32


def test_a_whole_decoder_has_its_layers_and_its_logits(tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(), path)
    found = work_of(path, {"seq": 1, "past_seq": 64})
    assert found.attentions == [Heads(2, 2, 8, 65, 8)]
    assert found.layers[-1].products == (Product(1, 1, 32, 32), Product(1, 1, 32, 19))


F = np.float32
OPERATORS: dict[str, tuple[list[Any], onnx.NodeProto, dict[str, Any], list[Product], int]] = {
    "MatMul": (["b", 4, 6], helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (6, 5)}, [Product(1, 8, 6, 5)], 30),
    "vector": (["b", 4, 6], helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (6,)}, [Product(1, 8, 6, 1)], 6),
    "itself": (["b", 4, 4], helper.make_node("MatMul", ["x", "x"], ["y"]), {}, [Product(2, 4, 4, 4)], 0),
    "Gemm": (
        ["b", 6],
        helper.make_node("Gemm", ["x", "w", "c"], ["y"], transB=1),
        {"w": (5, 6), "c": (5,)},
        [Product(1, 2, 6, 5)],
        30,
    ),
    "Conv": (
        ["b", 4, 8, 8],
        helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2], kernel_shape=[2, 2]),
        {"w": (6, 4, 2, 2)},
        [Product(1, 2 * 16, 16, 6)],
        96,
    ),
    "groups": (
        ["b", 4, 8],
        helper.make_node("Conv", ["x", "w"], ["y"], group=2, kernel_shape=[3]),
        {"w": (6, 2, 3)},
        [Product(2, 2 * 6, 6, 3)],
        36,
    ),
    "depthwise": (
        ["b", 4, 8],
        helper.make_node("Conv", ["x", "w"], ["y"], group=4, kernel_shape=[3]),
        {"w": (4, 1, 3)},
        [],
        12,
    ),
    "ConvTranspose": (
        ["b", 4, 8],
        helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2], kernel_shape=[2]),
        {"w": (4, 6, 2)},
        [Product(1, 2 * 8, 4, 12)],
        48,
    ),
    "Einsum": (
        ["b", 4, 6],
        helper.make_node("Einsum", ["x", "w"], ["y"], equation="bsd,hde->bhse"),
        {"w": (3, 6, 5)},
        [Product(1, 8, 6, 15)],
        90,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_products_of_an_operator(name: str, tmp_path: Path) -> None:
    shape, node, weights, products, size = OPERATORS[name]
    arrays = {weight: np.ones(dims, F) for weight, dims in weights.items()}
    model = model_of({"x": (shape, "fp32")}, {"y": (["b", *["?"] * (len(shape) - 1)], "fp32")}, [node], arrays)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    path = tmp_path / "one.onnx"
    onnx.save(model, path)
    found = work_of(path, {"batch": 2}, {"x": "features" if len(shape) < 4 else "images"})
    assert [product for layer in found.layers for product in layer.products] == products
    assert found.bytes == 4 * size
    assert found.operations == sum(2 * math.prod((one.count, one.rows, one.inner, one.columns)) for one in products)


QUANTISED = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])
REFUSED: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "quantised": ([QUANTISED, helper.make_node("Identity", ["x"], ["y"])], "DynamicQuantizeLinear"),
    "Einsum of three": (
        [helper.make_node("Einsum", ["x", "x", "x"], ["y"], equation="bs,bs,bs->bs")],
        "to be one product",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_work_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    nodes, said = REFUSED[name]
    path = tmp_path / "odd.onnx"
    model = model_of({"x": (["b", 4], "fp32")}, {"y": (["b", 4], "fp32")}, nodes)
    model.graph.output.append(helper.make_tensor_value_info("q", onnx.TensorProto.UINT8, ["b", 4])) if len(
        nodes
    ) > 1 else None
    onnx.save(model, path)
    with pytest.raises(RequestError, match=said):
        work_of(path, {"batch": 2}, {"x": "features"})


def test_unknown_attention_is_named(tmp_path: Path) -> None:
    def shuffled(model: onnx.ModelProto) -> None:
        softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
        softmax.attribute[0].i = 1

    path = foreign(tmp_path, "odd", small_spec("none", hidden_size=32, num_heads=4), change=shuffled)
    with pytest.raises(RequestError, match=r"attention .* is not recognised"):
        work_of(path, {"seq": 5})
