"""Inputs and attributes of operators that are expanded: domain, operator, inputs, attributes, number of outputs.

B rows, S queries, P cached keys, N query heads, K key heads, D features of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

B, S, P, N, K, D = 2, 5, 3, 4, 2, 8
FLOAT, INT, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
MASK = np.tril(np.ones((S, P + S), bool), P)
MASK[2, 4] = False


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape) for shape in shapes]


def bias(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).standard_normal(shape)


FLAT = ((B, S, N * D), (B, S, K * D), (B, S, K * D))
HEADS = ((B, N, S, D), (B, K, S, D), (B, K, S, D))
PAST = ((B, K, P, D), (B, K, P, D))
BY_HEADS = {"q_num_heads": N, "kv_num_heads": K}
COS, SIN = np.cos(bias(B, S, 3)), np.sin(bias(B, S, 3))
TABLES = [np.cos(bias(40, 3)), np.sin(bias(40, 3))]
PLACES = np.array([[3, 1, 7, 30, 2], [0, 39, 5, 6, 6]])

SEEN = np.tril(np.ones((S, S), np.int32))
WEIGHTS = arrays((B, S, 12), (12, 3 * N * D), (3 * N * D,))
PADDED = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]], np.int32)
PACKED: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "plain": (WEIGHTS, {"num_heads": N}, 1),
    "without biases": (WEIGHTS[:2], {"num_heads": N, "scale": 0.3, "do_rotary": 0}, 2),
    "causal": (WEIGHTS, {"num_heads": N, "unidirectional": 1}, 2),
    "of other sizes": (
        arrays((B, S, 12), (12, 2 * N * D + N * 6)),
        {"num_heads": N, "qkv_hidden_sizes": [32, 32, 24]},
        1,
    ),
    "with lengths": ([*WEIGHTS, np.array([3, S], np.int32)], {"num_heads": N}, 1),
    "with ends and starts": ([*WEIGHTS, np.array([3, S, 0, 2], np.int32)], {"num_heads": N}, 1),
    "padded": ([*WEIGHTS, PADDED], {"num_heads": N}, 1),
    "padded mildly": ([*WEIGHTS, PADDED], {"num_heads": N, "mask_filter_value": -3.0}, 1),
    "without keys that are seen": ([*WEIGHTS, np.zeros(B, np.int32)], {"num_heads": N}, 1),
    "with a mask of queries": ([*WEIGHTS, np.stack([SEEN, SEEN[::-1]])], {"num_heads": N}, 1),
    "cached": (
        [*WEIGHTS, np.ones((B, P + S), np.int32), bias(2, B, N, P, D), bias(1, N, S, P + S)],
        {"num_heads": N, "unidirectional": 1},
        2,
    ),
    "cached with a mask of all places": (
        [*WEIGHTS, np.tril(np.ones((B, 1, 20, 20), np.int32)), bias(2, B, N, P, D)],
        {"num_heads": N},
        2,
    ),
}
"""Cases of com.microsoft Attention, which projects its input."""

STEP = [
    *arrays((B, 1, N * D), (B, 1, K * D), (B, 1, K * D), *PAST),
    np.array([P, P - 1], np.int32),
    np.array(P + 1, np.int32),
    np.cos(bias(40, 4)),
    np.sin(bias(40, 4)),
]
"""The inputs of a step of GroupQueryAttention with its rotation."""
PROMPT = [
    *arrays(*FLAT),
    *[None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32), np.cos(bias(40, 4)), np.sin(bias(40, 4))],
]
"""The inputs of a prompt of GroupQueryAttention with its rotation."""

CASES: dict[str, tuple[str, str, list[Any], dict[str, Any], int]] = {
    "plain": ("", "Attention", arrays(*FLAT), BY_HEADS, 1),
    "scale": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "scale": 0.3}, 1),
    "heads": ("", "Attention", arrays(*HEADS), {}, 1),
    "causal": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "is_causal": 1}, 1),
    "softcap": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "softcap": 2.0}, 1),
    "cached": ("", "Attention", [*arrays(*FLAT), MASK, *arrays(*PAST)], BY_HEADS, 3),
    "added": ("", "Attention", [*arrays(*FLAT), bias(B, 1, S, P + S), *arrays(*PAST)], BY_HEADS, 3),
    "cached causal": ("", "Attention", [*arrays(*FLAT), None, *arrays(*PAST)], {**BY_HEADS, "is_causal": 1}, 3),
    "of given lengths": ("", "Attention", [*arrays(*FLAT), *[None] * 3, np.array([S, S - 2])], BY_HEADS, 1),
    "causal, of given lengths": (
        "",
        "Attention",
        [*arrays((B, 2, N * D), *FLAT[1:]), None, None, None, np.array([S, S - 2])],
        {**BY_HEADS, "is_causal": 1},
        1,
    ),
    "of lengths that hide queries": (
        "",
        "Attention",
        [*arrays(*FLAT), None, None, None, np.array([2, S])],
        {**BY_HEADS, "is_causal": 1},
        1,
    ),
    "masked, of given lengths": (
        "",
        "Attention",
        [*arrays(*FLAT), MASK[:, :S], None, None, np.array([1, S - 1])],
        BY_HEADS,
        1,
    ),
    "window": (
        "",
        "Attention",
        [*arrays(*FLAT), None, *arrays(*PAST)],
        {**BY_HEADS, "is_causal": 1, "left_window_size": 2},
        3,
    ),
    "window on both sides": (
        "",
        "Attention",
        arrays(*FLAT),
        {**BY_HEADS, "left_window_size": 2, "right_window_size": 1},
        1,
    ),
    "window on the right": ("", "Attention", arrays(*FLAT), {**BY_HEADS, "right_window_size": 1}, 1),
    "window of given lengths": (
        "",
        "Attention",
        [*arrays(*FLAT), None, None, None, np.array([2, S])],
        {**BY_HEADS, "is_causal": 1, "left_window_size": 0},
        1,
    ),
    "rotation": ("", "RotaryEmbedding", [bias(B, N, S, D), COS, SIN], {"rotary_embedding_dim": 6}, 1),
    "rotation of tokens": (
        "",
        "RotaryEmbedding",
        [bias(B, S, N * D), *TABLES, PLACES],
        {"num_heads": N, "rotary_embedding_dim": 6, "interleaved": 1},
        1,
    ),
    "microsoft rotation": (
        "com.microsoft",
        "RotaryEmbedding",
        [bias(B, S, N * D), PLACES, *TABLES],
        {"num_heads": N, "rotary_embedding_dim": 6},
        1,
    ),
    "microsoft rotation from a place": (
        "com.microsoft",
        "RotaryEmbedding",
        [bias(B, S, N * 6), np.array([4]), *TABLES],
        {"interleaved": 1},
        1,
    ),
    "multi head": ("com.microsoft", "MultiHeadAttention", arrays(*(FLAT[:1] * 3)), {"num_heads": N}, 1),
    "multi head of another size": (
        "com.microsoft",
        "MultiHeadAttention",
        arrays(FLAT[0], FLAT[0], (B, S, N * 6)),
        {"num_heads": N, "unidirectional": 1},
        1,
    ),
    "multi head with biases": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), bias(3 * N * D), None, bias(1, N, S, S)],
        {"num_heads": N, "scale": 0.2},
        1,
    ),
    "multi head of keys as a cache has them, with biases": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(FLAT[0], (B, N, S + 2, D), (B, N, S + 2, D)), bias(3 * N * D)],
        {"num_heads": N},
        1,
    ),
    "multi head cached": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), None, None, None, *arrays((B, N, P, D), (B, N, P, D))],
        {"num_heads": N},
        3,
    ),
    "multi head with a mask of queries": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), None, np.stack([SEEN, SEEN[::-1]])],
        {"num_heads": N},
        1,
    ),
    "multi head with lengths": (
        "com.microsoft",
        "MultiHeadAttention",
        [*arrays(*(FLAT[:1] * 3)), None, np.array([3, S], np.int32)],
        {"num_heads": N},
        1,
    ),
    **{f"packed {name}": ("com.microsoft", "Attention", *case) for name, case in PACKED.items()},
    "grouped": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays(*FLAT), None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K},
        1,
    ),
    "grouped and rotated": (
        "com.microsoft",
        "GroupQueryAttention",
        [
            *arrays((B, 1, N * D), (B, 1, K * D), (B, 1, K * D), *PAST),
            np.array([P, P], np.int32),
            np.array(P + 1, np.int32),
            np.cos(bias(40, 4)),
            np.sin(bias(40, 4)),
        ],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1, "rotary_interleaved": 1},
        3,
    ),
    "grouped and packed": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays((B, S, (N + 2 * K) * D)), None, None, None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K, "scale": 0.25},
        1,
    ),
    "grouped step": (
        "com.microsoft",
        "GroupQueryAttention",
        [
            *arrays((B, 1, N * D), (B, 1, K * D), (B, 1, K * D), *PAST),
            np.array([P, P - 1], np.int32),
            np.array(P + 1, np.int32),
        ],
        {"num_heads": N, "kv_num_heads": K, "local_window_size": 2, "softcap": 3.0},
        3,
    ),
    "grouped in all directions": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays(*FLAT), None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K, "causal": 0, "local_window_size": 3},
        1,
    ),
    "grouped with a smooth softmax": (
        "com.microsoft",
        "GroupQueryAttention",
        [*arrays(*FLAT), None, None, np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        {"num_heads": N, "kv_num_heads": K, "smooth_softmax": 1},
        1,
    ),
    "grouped at given positions": (
        "com.microsoft",
        "GroupQueryAttention",
        [*STEP, PLACES[:, :1]],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1},
        3,
    ),
    "a grouped prompt at given positions": (
        "com.microsoft",
        "GroupQueryAttention",
        [*PROMPT, PLACES],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1},
        1,
    ),
    "grouped with norms": (
        "com.microsoft",
        "GroupQueryAttention",
        [*STEP, *[None] * 5, *arrays((D,), (D,))],
        {"num_heads": N, "kv_num_heads": K, "do_rotary": 1, "qk_norm_epsilon": 0.01},
        3,
    ),
}


SHORTER: dict[str, tuple[str, str, list[Any], dict[str, Any], int]] = {
    "shorter": ("", "Attention", [*arrays(*FLAT), MASK[:, : S - 1]], BY_HEADS, 1),
    "shorter behind a cache": ("", "Attention", [*arrays(*FLAT), bias(S, S), *arrays(*PAST)], BY_HEADS, 3),
}
"""Masks that are shorter than the keys and hide the rest."""
