"""The com.microsoft operators: the evaluator in float64 against ONNX Runtime's CPU kernels in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from one_node import MICROSOFT, RANDOM, Array, assert_same, compare, evaluated, normal, one_node, run
from onnx import TensorProto, helper, numpy_helper
from test_evaluate_q_linear import CASES as Q_LINEAR

from posexport.errors import RequestError
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.kernels import KERNELS

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, SIZE, PAST = 2, 5, 7, 4, 2, 16, 3
WIDTH = HEADS * SIZE


def whole(*values: Any) -> Array:
    return np.array(values if len(values) > 1 else values[0], np.int32)


def bits(*shape: int) -> Array:
    return RANDOM.integers(0, 2, shape).astype(np.int32)


def bytes_(*shape: int) -> Array:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


Q, K, V = normal(BATCH, QUERIES, WIDTH), normal(BATCH, KEYS, WIDTH), normal(BATCH, KEYS, WIDTH)
SELF = [normal(BATCH, QUERIES, WIDTH) for _ in range(3)]
CACHES = [normal(BATCH, HEADS, PAST, SIZE) for _ in range(2)]
SPLIT = [normal(BATCH, HEADS, KEYS, SIZE) for _ in range(2)]
TOTAL = PAST + QUERIES
SCORES = normal(BATCH, HEADS, QUERIES, TOTAL)
ONE = [normal(BATCH, 1, WIDTH) for _ in range(3)]
BUFFERS = [normal(BATCH, HEADS, 9, SIZE) for _ in range(2)]
MASK = np.array([[1] * KEYS, [0, 0, 1, 1, 1, 0, 1]], np.int32)

MULTI_HEAD: dict[str, tuple[list[Array | None], int | str, dict[str, Any]]] = {
    "cross": ([Q, K, V], 1, {}),
    "bias, scale": ([Q, K, V, normal(3 * WIDTH)], 1, {"scale": 0.3}),
    "wider values": ([Q, K, normal(BATCH, KEYS, 2 * WIDTH)], 1, {}),
    "unidirectional": (SELF, 1, {"unidirectional": 1}),
    "lengths": ([Q, K, V, None, whole(3, 7)], 1, {}),
    "mask": ([Q, K, V, None, MASK], 1, {}),
    "mild mask": ([Q, K, V, None, MASK], 1, {"mask_filter_value": -3.0}),
    "mask of queries": ([Q, K, V, None, bits(BATCH, QUERIES, KEYS)], 1, {"mask_filter_value": -20.0}),
    "attention bias": ([Q, K, V, None, None, normal(1, HEADS, QUERIES, KEYS)], 1, {}),
    "mask and bias": ([Q, K, V, None, MASK, normal(BATCH, 1, QUERIES, KEYS)], "a--d", {}),
    "cache": ([*SELF, None, None, None, *CACHES], 3, {}),
    "causal cache": ([*SELF, None, None, None, *CACHES], 3, {"unidirectional": 1}),
    "everything": ([*SELF, None, np.ones((BATCH, TOTAL), np.int32), SCORES, *CACHES], 3, {"unidirectional": 1}),
    "keys as cache": ([Q, *SPLIT], 1, {}),
    "keys as cache, bias": ([Q, *SPLIT, normal(3 * WIDTH)], 1, {}),
    "one query": ([ONE[0], K, V], 1, {"unidirectional": 1}),
    "shared buffer": ([*ONE, None, None, None, *BUFFERS, whole([4])], 3, {}),
}


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_multi_head_attention(name: str) -> None:
    inputs, outputs, options = MULTI_HEAD[name]
    compare("MultiHeadAttention", inputs, outputs, domain=MICROSOFT, num_heads=HEADS, **options)


def test_packed_inputs_equal_separate_ones() -> None:
    """ONNX Runtime runs packed heads [batch, length, heads, 3, size] and [..., 2, size] only on GPUs."""
    apart = [x.reshape(BATCH, QUERIES, HEADS, SIZE) for x in SELF]
    expected = compare("MultiHeadAttention", SELF, domain=MICROSOFT, num_heads=HEADS)
    for inputs in ([np.stack(apart, 3)], [SELF[0], np.stack(apart[1:], 3)]):
        model, feeds = one_node("MultiHeadAttention", inputs, domain=MICROSOFT, num_heads=HEADS)
        np.testing.assert_array_equal(evaluated(model, feeds), expected)


def test_decoder_masked_attention() -> None:
    options = {"domain": MICROSOFT, "num_heads": HEADS, "past_present_share_buffer": 1}
    compare("DecoderMaskedMultiHeadAttention", [*ONE, None, None, *BUFFERS, whole([4])], 3, **options)


WEIGHTS = [normal(WIDTH, 3 * WIDTH) * 0.2, normal(3 * WIDTH)]
PACKED: dict[str, tuple[list[Array | None], int, dict[str, Any]]] = {
    "plain": ([], 1, {}),
    "causal": ([], 1, {"unidirectional": 1, "scale": 0.5}),
    "lengths": ([whole(3, 5)], 1, {}),
    "ends and starts": ([whole(3, 5, 1, 0)], 1, {}),
    "mask": ([np.array([[1, 1, 0, 0, 1], [0, 1, 1, 1, 1]], np.int32)], 1, {}),
    "mask of queries": ([bits(BATCH, QUERIES, QUERIES)], 1, {"mask_filter_value": -20.0}),
    "past": ([None, normal(2, BATCH, HEADS, PAST, SIZE)], 2, {"unidirectional": 1}),
    "bias": ([None, None, normal(1, HEADS, QUERIES, QUERIES)], 1, {}),
}


@pytest.mark.parametrize("name", PACKED)
def test_attention_with_its_projections(name: str) -> None:
    more, outputs, options = PACKED[name]
    compare("Attention", [Q, *WEIGHTS, *more], outputs, domain=MICROSOFT, num_heads=HEADS, **options)


ROTARY: dict[str, tuple[Array, Array, int, dict[str, Any]]] = {
    "positions": (Q, np.arange(BATCH * QUERIES).reshape(BATCH, QUERIES), SIZE, {}),
    "offset, interleaved": (Q, np.array([3]), SIZE, {"interleaved": 1}),
    "4-D": (normal(BATCH, HEADS, QUERIES, SIZE), np.array([3]), SIZE, {}),
    "partial": (Q, np.array([3]), SIZE // 2, {"rotary_embedding_dim": SIZE // 2, "num_heads": HEADS}),
}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embedding(name: str) -> None:
    x, positions, width, options = ROTARY[name]
    tables = [normal(20, width // 2), normal(20, width // 2)]
    compare("RotaryEmbedding", [x, positions, *tables], domain=MICROSOFT, **options)


GROUPED: dict[str, dict[str, Any]] = {
    "prompt": {"queries": 5, "lengths": [5, 5]},
    "packed": {"queries": 5, "lengths": [5, 5], "packed": True},
    "rotary": {"queries": 5, "lengths": [5, 5], "do_rotary": 1},
    "packed, interleaved": {"queries": 5, "lengths": [5, 5], "packed": True, "do_rotary": 1, "rotary_interleaved": 1},
    "window": {"queries": 5, "lengths": [5, 5], "local_window_size": 2},
    "softcap and bias": {"queries": 5, "lengths": [5, 5], "softcap": 0.5, "bias": (1, HEADS), "qk_output": 1},
    "smooth softmax": {"queries": 5, "lengths": [5, 5], "smooth_softmax": 1, "qk_output": 2},
    "sinks": {"queries": 5, "lengths": [5, 5], "sinks": True, "local_window_size": 1, "scale": 0.8},
    "bidirectional": {"queries": 5, "lengths": [3, 5], "causal": 0, "do_rotary": 1, "bias": (2, 1)},
    "right padding": {"queries": 5, "lengths": [3, 5], "do_rotary": 1},
    "prompt in a buffer": {"queries": 5, "lengths": [5, 5], "past": 12},
    "step": {"queries": 1, "lengths": [4, 9], "past": 8, "do_rotary": 1, "bias": (2, HEADS)},
    "step in a buffer": {"queries": 1, "lengths": [4, 9], "past": 12, "do_rotary": 1, "local_window_size": 3},
    "step, packed": {"queries": 1, "lengths": [4, 9], "past": 8, "packed": True, "sinks": True, "softcap": 1.0},
    "chunk": {"queries": 3, "lengths": [9], "past": 6, "do_rotary": 1, "local_window_size": 2, "bias": (1, 1)},
    "chunk at positions": {"queries": 3, "lengths": [9], "past": 6, "do_rotary": 1, "at": [[1, 3, 20]]},
    "prompt at positions": {"queries": 2, "lengths": [2, 2], "do_rotary": 1, "at": [[5, 9], [2, 1]]},
}


def grouped(
    queries: int,
    lengths: list[int],
    past: int | None = None,
    packed: bool = False,
    bias: tuple[int, int] | None = None,
    sinks: bool = False,
    at: list[list[int]] | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Array]]:
    batch, total, narrow = len(lengths), max(lengths), KV_HEADS * SIZE
    inputs: list[Array | None] = [normal(batch, queries, WIDTH + (2 * narrow if packed else 0))]
    inputs += [None, None] if packed else [normal(batch, queries, narrow) for _ in range(2)]
    inputs += [None if past is None else normal(batch, KV_HEADS, past, SIZE) for _ in range(2)]
    inputs += [np.array(lengths, np.int32) - 1, whole(total)]
    inputs += [normal(40, SIZE // 2) if "do_rotary" in options else None for _ in range(2)]
    inputs += [None if at is None else np.array(at)]
    inputs += [None if bias is None else normal(*bias, queries, total), normal(HEADS) if sinks else None]
    while inputs[-1] is None:
        inputs.pop()
    outputs = 4 if "qk_output" in options else 3
    sizes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    return one_node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **sizes, **options)


@pytest.mark.parametrize("name", GROUPED)
def test_group_query_attention(name: str) -> None:
    model, feeds = grouped(**GROUPED[name])
    lengths, queries = GROUPED[name]["lengths"], GROUPED[name]["queries"]
    got, expected = evaluated(model, feeds), run(model, feeds)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        for row, length in enumerate(lengths):  # Values after the tokens of a row are undefined.
            tokens = min(queries, length) if number in (0, 3) else length
            x, y = (value[row, :tokens] if number == 0 else value[row, :, :tokens] for value in (a, b))
            np.testing.assert_allclose(x, y, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("do_rotary", 0), ("local_window_size", 4), ("softcap", 0.7), ("scale", 0.3), ("rotary_interleaved", 1)],
)
def test_an_ignored_attribute_is_noticed(key: str, wrong: float) -> None:
    """Plants a fault: the runtime has one value of an attribute and the evaluator another."""
    options = {"do_rotary": 1, "local_window_size": 2, "softcap": 0.5, "scale": 0.8, "rotary_interleaved": 0}
    model, feeds = grouped(5, [5, 5], **options)
    expected = run(model, feeds)
    attribute = next(a for a in model.graph.node[0].attribute if a.name == key)
    if isinstance(wrong, float):
        attribute.f = wrong
    else:
        attribute.i = wrong
    assert np.abs(evaluated(model, feeds)[0] - expected[0]).max() > 1e-2


D = 16
TOKENS = RANDOM.integers(0, 9, (2, 5)).astype(np.int32)
TABLES = [normal(9, D), normal(7, D)]
PLACED = [np.array([[1, 1, 1, 0, 0]] * 2, np.int32), np.array([[1, 2, 3, 4, 6]], np.int32)]
"""A mask, and positions."""
FUSED: dict[str, tuple[str, list[Array | None], int | str, dict[str, Any]]] = {
    "gelu": ("Gelu", [normal(3, D)], 1, {}),
    "bias gelu": ("BiasGelu", [normal(3, D), normal(D)], 1, {}),
    "fast gelu": ("FastGelu", [normal(3, D)], 1, {}),
    "fast gelu, bias": ("FastGelu", [normal(3, D), normal(D)], 1, {}),
    "quick gelu": ("QuickGelu", [normal(3, D)], 1, {"alpha": 1.5}),
    "skip norm": ("SkipLayerNormalization", [normal(2, 3, D), normal(2, 3, D), *(normal(D) for _ in range(3))], 4, {}),
    "skip norm, no shift": ("SkipLayerNormalization", [normal(2, 3, D), normal(3, D), normal(D)], 1, {"epsilon": 0.1}),
    "skip rms": ("SkipSimplifiedLayerNormalization", [normal(2, 3, D), normal(2, 3, D), normal(D)], 1, {}),
    "skip rms, bias": (
        "SkipSimplifiedLayerNormalization",
        [normal(2, 3, D), normal(2, 3, D), normal(D), normal(D)],
        "a--d",
        {"epsilon": 0.1},
    ),
    "rms": ("SimplifiedLayerNormalization", [normal(2, 3, D), normal(3, D)], 1, {"axis": 1, "domain": ""}),
    "embeddings": (
        "EmbedLayerNormalization",
        [TOKENS, bits(2, 5), *TABLES, normal(2, D), normal(D), normal(D)],
        3,
        {"dtypes": {1: TensorProto.INT32}},
    ),
    "embeddings at positions": (
        "EmbedLayerNormalization",
        [TOKENS, None, *TABLES, None, normal(D), normal(D), *PLACED],
        3,
        {"dtypes": {1: TensorProto.INT32}, "epsilon": 1e-5},
    ),
    "matmul": ("FusedMatMul", [normal(2, 5, 4), normal(2, 6, 5)], 1, {"transA": 1, "transB": 1, "alpha": 0.5}),
    "matmul, batch behind": ("FusedMatMul", [normal(4, 2, 3, 5), normal(2, 3, 5, 6)], 1, {"transBatchA": 1}),
    "matmul, both": ("FusedMatMul", [normal(2, 3, 4, 5), normal(6, 2, 3, 5)], 1, {"transBatchB": 1, "transB": 1}),
    "transposed": ("TransposeMatMul", [normal(5, 3), normal(5, 4)], 1, {"transA": 1}),
    "gemm": ("FusedGemm", [normal(3, 4), normal(4, 5), normal(5)], 1, {"activation": "Relu"}),
    "leaky gemm": ("FusedGemm", [normal(3, 4), normal(4, 5)], 1, {"activation": "LeakyRelu", "activation_alpha": 0.2}),
    "conv": ("FusedConv", [normal(2, 3, 6, 5), normal(4, 3, 3, 2), normal(4)], 1, {"activation": "Relu"}),
    "conv and a sum": (
        "FusedConv",
        [normal(2, 3, 6, 5), normal(4, 3, 3, 2), normal(4), normal(2, 4, 4, 4)],
        1,
        {"activation": "Clip", "activation_params": [-0.5, 0.75]},
    ),
    "leaky conv": (
        "FusedConv",
        [normal(1, 2, 5, 5), normal(4, 1, 3, 3)],
        1,
        {"activation": "LeakyRelu", "activation_params": [0.3], "group": 2, "strides": [2, 1]},
    ),
    "integers": (
        "MatMulIntegerToFloat",
        [bytes_(2, 3, 4), bytes_(4, 5), np.float32([0.1]), np.float32([0.2]), np.uint8([7]), np.uint8([130])],
        1,
        {},
    ),
    "integers by column": (
        "MatMulIntegerToFloat",
        [bytes_(3, 4), bytes_(4, 5), np.float32([0.1]), np.abs(normal(5)), np.uint8([7]), bytes_(5), normal(5)],
        1,
        {},
    ),
    "dynamic integers": ("DynamicQuantizeMatMul", [normal(2, 3, 4), bytes_(4, 5), np.float32([0.2])], 1, {}),
    "dynamic integers by column": (
        "DynamicQuantizeMatMul",
        [normal(3, 4), bytes_(4, 5), np.abs(normal(5)), bytes_(5), normal(5)],
        1,
        {},
    ),
    "trilu": ("Trilu", [normal(3, 4), np.array(1)], 1, {"upper": 0}),
    "gather": ("GatherND", [normal(3, 4, 5), np.array([[0, 1], [2, 3]])], 1, {}),
    "range": ("Range", [np.array(x, np.float32) for x in (1, 4, 0.5)], 1, {}),
    "quantize": (
        "QuantizeLinear",
        [normal(3, 4), np.array([0.1, 0.2, 0.3, 0.1], np.float32), np.array([3] * 4, np.uint8)],
        1,
        {"axis": 1, "dtypes": {0: TensorProto.UINT8}},
    ),
    "dequantize": ("DequantizeLinear", [bytes_(3, 4), np.array(0.1, np.float32), np.array(3, np.uint8)], 1, {}),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operators(name: str) -> None:
    operator, inputs, outputs, options = FUSED[name]
    compare(operator, inputs, outputs, **{"domain": MICROSOFT, **options})


@pytest.mark.parametrize(("width", "block"), [(4, 32), (8, 32), (2, 32), (4, 16)])
@pytest.mark.parametrize("zeros", ["none", "packed", "floats"])
def test_products_with_weights_of_few_bits(width: int, block: int, zeros: str) -> None:
    if (width, zeros) == (8, "floats"):
        pytest.skip("the runtime has no such kernel")
    rows, columns = 70, 6
    blocks = -(-rows // block)
    middle = {"packed": bytes_(columns * -(-blocks * width // 8)), "floats": np.abs(normal(columns, blocks)) * 3}
    weights = bytes_(columns, blocks, block * width // 8)
    inputs = [normal(3, rows) * 0.01, weights, np.abs(normal(columns, blocks)) * 0.1, middle.get(zeros)]
    inputs += [None, normal(columns)]
    compare("MatMulNBits", inputs, domain=MICROSOFT, K=rows, N=columns, bits=width, block_size=block)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_features_of_8_bits_where_the_file_asks_for_them(level: int) -> None:
    """In the file's dtypes, features are rounded to 8 bits; in float64 they are exact. 70 features are blocks of 32, 32
    and 6."""
    rows, columns, block = 70, 6, 32
    x, packed, scales = normal(3, rows), bytes_(columns, 3, 16), np.abs(normal(columns, 3)) * 0.1
    domains = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    options = {"K": rows, "N": columns, "bits": 4, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain=MICROSOFT, **options)
    weights = [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales.reshape(-1), "s")]
    sizes = {"x": rows, "y": columns}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", size]) for name, size in sizes.items()]
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], weights), opset_imports=domains)
    numbers = np.stack([packed & 15, packed >> 4], -1).reshape(columns, 3, block) - 8.0
    matrix = (numbers * scales[..., None]).reshape(columns, -1)[:, :rows].astype(np.float64)
    parts = []
    for start in range(0, rows, block):
        unit = np.abs(x[:, start : start + block]).max(1, keepdims=True).astype(np.float64) / 127
        parts.append(np.round(x[:, start : start + block] / unit) * unit)
    rounded = np.concatenate(parts, 1) if level == 4 else x
    for wide, features in ((True, x), (False, rounded)):
        found = Evaluator(ir.from_proto(model), wide=wide).run({"x": torch.from_numpy(x)})["y"]
        np.testing.assert_allclose(found.numpy(), features @ matrix.T, atol=1e-5)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("width", "block"), [(4, 16), (4, 32), (8, 16)])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_rows_of_tables_of_few_bits(width: int, block: int, zeros: bool, shape: tuple[int, ...]) -> None:
    rows, columns = 9, 80
    blocks = -(-columns // block)
    middle = bytes_(rows, -(-blocks * width // 8)) if zeros else None
    at = np.array(RANDOM.integers(-rows, rows, shape))
    inputs = [bytes_(rows, columns * width // 8), at, np.abs(normal(rows, blocks)), middle]
    compare("GatherBlockQuantized", inputs, domain=MICROSOFT, bits=width, block_size=block, quantize_axis=1)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize(("along", "axis"), [(0, 2), (1, 0), (2, 1)])
def test_slices_of_numbers_of_four_bits(kind: int, along: int, axis: int) -> None:
    shape, blocks = [20, 20, 20], [20, 20, 20]
    blocks[axis] = 2
    least = -8 if kind == TensorProto.INT4 else 0
    inputs: list[Array | None] = [np.zeros(1, np.int8), np.array([[3, -1], [0, 7]]), np.abs(normal(*blocks)), None]
    model, feeds = one_node(
        "GatherBlockQuantized", inputs, domain=MICROSOFT, gather_axis=along, quantize_axis=axis, block_size=16
    )
    numbers = RANDOM.integers(least, least + 16, shape)
    model.graph.initializer.append(helper.make_tensor("in0", kind, shape, numbers.flatten()))
    del model.graph.input[0], feeds["in0"]
    assert_same(evaluated(model, feeds), run(model, feeds))


def test_every_kernel_of_the_runtime_is_tried() -> None:
    tried = {entry[0] for entry in FUSED.values()} | {
        "MatMulNBits",
        "GatherBlockQuantized",
        "MultiHeadAttention",
        "Attention",
    }
    tried |= {"RotaryEmbedding", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention"}
    tried |= {"LinearAttention", "CausalConvWithState"}  # test_evaluate_linear.py
    tried |= {"QAttention"}  # tests/rewrite/test_quantised_attention.py
    tried |= {operator for operator, *_ in Q_LINEAR.values()}
    assert {name for domain, name in KERNELS if domain == MICROSOFT} <= tried


REFUSED: dict[str, Callable[[], tuple[Any, dict[str, Array]]]] = {
    "unidirectional attention of 5 queries over 7 keys": lambda: one_node(
        "MultiHeadAttention", [Q, K, V], domain=MICROSOFT, num_heads=HEADS, unidirectional=1
    ),
    "its rotation": lambda: one_node("Attention", [Q, *WEIGHTS], domain=MICROSOFT, num_heads=HEADS, do_rotary=1),
    "its key or value is missing": lambda: one_node("MultiHeadAttention", [Q], domain=MICROSOFT, num_heads=HEADS),
    "caches of the window's size": lambda: grouped(1, [4, 9], past=8, sliding_window_cache=1, local_window_size=3),
    "an index is outside a dimension of size 40": lambda: grouped(1, [4], past=8, do_rotary=1, at=[[40]]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_can_t_be_evaluated_is_refused(text: str) -> None:
    model, feeds = REFUSED[text]()
    with pytest.raises(RequestError, match=text) as caught:
        Evaluator(ir.from_proto(model)).run({name: torch.from_numpy(value) for name, value in feeds.items()})
    assert "out_a" in str(caught.value)
