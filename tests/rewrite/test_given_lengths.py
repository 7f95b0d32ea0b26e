"""Attention-24 whose rows have given numbers of keys (`nonpad_kv_seqlen`), with and without a buffer for its cache.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
from descriptions import described
from onnx import TensorProto, helper
from small_graphs import Graph, run

HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 8, 32
WIDTHS = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
BY_HEADS = {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
BUFFER = 24


def model_of(g: Graph, inputs: dict[str, list[str | int]], outputs: dict[str, list[str | int]]) -> onnx.ModelProto:
    def infos(values: dict[str, list[str | int]]) -> list[onnx.ValueInfoProto]:
        whole = ("lengths", "write_indices")
        return [
            helper.make_tensor_value_info(name, TensorProto.INT64 if name in whole else TensorProto.FLOAT, shape)
            for name, shape in values.items()
        ]

    graph = helper.make_graph(g.nodes, "main_graph", infos(inputs), infos(outputs), g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return model


def projected(g: Graph, name: str) -> str:
    return g.op("MatMul", "features", g.random(f"{name}_proj", HIDDEN, WIDTHS[name]))


def encoder(causal: bool) -> onnx.ModelProto:
    """The last `features` of a row that are behind its length are padding."""
    g = Graph()
    operands = [projected(g, name) for name in "qkv"]
    mixed = g.op("Attention", *operands, "", "", "", "lengths", **BY_HEADS, is_causal=int(causal))
    g.op("MatMul", mixed, g.random("o_proj", HIDDEN, HIDDEN), name="output")
    return model_of(g, {"features": ["batch", "seq", HIDDEN], "lengths": ["batch"]}, {"output": ["batch", "seq", 32]})


def decoder(shift: int = 0) -> onnx.ModelProto:
    """New keys are written into a buffer; a row's length is its write index plus the number of tokens plus `shift`."""
    g = Graph()

    def heads(name: str) -> str:
        shape = g.constant([0, 0, WIDTHS[name] // SIZE, SIZE])
        return g.op("Transpose", g.op("Reshape", projected(g, name), shape), perm=[0, 2, 1, 3])

    angles = np.arange(64)[:, None] * 100.0 ** -(np.arange(SIZE // 2) / (SIZE // 2))
    tables = [g.constant(np.cos(angles), np.float32), g.constant(np.sin(angles), np.float32)]
    count = g.op("Squeeze", g.length("features", 1))
    steps = g.op("Range", g.constant(0), count, g.constant(1))
    places = g.op("Add", g.op("Unsqueeze", "write_indices", g.constant([1])), steps)
    q, k = (g.op("RotaryEmbedding", heads(name), *tables, places) for name in "qk")
    key = g.op("TensorScatter", "past_key", k, "write_indices", axis=2, name="present_key")
    value = g.op("TensorScatter", "past_value", heads("v"), "write_indices", axis=2, name="present_value")
    lengths = g.op("Add", g.op("Add", "write_indices", count), g.constant(shift))
    mixed = g.op("Attention", q, key, value, "", "", "", lengths, is_causal=1)
    tokens = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    g.op("MatMul", tokens, g.random("o_proj", HIDDEN, HIDDEN), name="output")
    cache: list[str | int] = ["batch", KV_HEADS, "buffer", SIZE]
    inputs = {"features": ["batch", "seq", HIDDEN], "write_indices": ["batch"], "past_key": cache, "past_value": cache}
    return model_of(g, inputs, {"output": ["batch", "seq", 32], "present_key": cache, "present_value": cache})


MODELS = {
    "encoder": lambda: encoder(False),
    "causal encoder": lambda: encoder(True),
    "decoder": decoder,
    "decoder that sees a key more": lambda: decoder(1),
}


def feeds(name: str, tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    features = drawn(3, tokens, HIDDEN)
    if "encoder" in name:
        return {"features": features, "lengths": np.array([tokens, 1, max(tokens - 2, 1)])}
    caches = {f"past_{kind}": drawn(3, KV_HEADS, BUFFER, SIZE) for kind in ("key", "value")}
    return {"features": features, "write_indices": np.array([0, 9, 4]), **caches}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["decomposed", "native", "contrib"])
@pytest.mark.parametrize("name", MODELS)
def test_given_lengths_are_kept(name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    path, out = helpers.saved(tmp_path, MODELS[name]()), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, target="ort")
    [found] = result.attentions
    assert (found["reason"] or {}).get("code") == ("already-in-form" if form == "native" else None)
    if name.startswith("decoder"):
        assert (found["cache"]["kind"], found["encoding"]["name"]) == ("shared", "rope")
    for tokens in (1, 2, 7):
        given = feeds(name, tokens)
        expected, actual = (run(onnx.load(file), given) for file in (path, out))
        for output, array in expected.items():
            assert actual[output].shape == array.shape
            assert np.isfinite(actual[output]).all()
            bound = 2e-5 * float(np.abs(array).max())
            np.testing.assert_allclose(actual[output], array, rtol=0, atol=bound)


def test_an_operator_without_a_name_is_called_as_its_output_is() -> None:
    """TensorRT names it so too, and `compile` looks for its kernels by that name."""
    model = encoder(True)
    for node in model.graph.node:
        node.name = ""
    [operator] = [node for node in model.graph.node if node.op_type == "Attention"]
    assert described(model)["nodes"] == dict.fromkeys(("softmax", "scores", "values"), operator.output[0])


def test_another_length_is_another_function() -> None:
    """Shows that the comparison above can fail."""
    given = feeds("decoder", 2)
    sound, shifted = (run(model, given)["output"] for model in (decoder(), decoder(1)))
    assert np.abs(sound - shifted).max() > 0.01 * np.abs(sound).max()
