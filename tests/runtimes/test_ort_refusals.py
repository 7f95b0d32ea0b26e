"""Graphs that look right but that ONNX Runtime refuses with an error. Forms and their refusals depend on these.

If a version accepts one of them, the form that works around it should be reviewed.
"""

from __future__ import annotations

from typing import Any

import pytest
from trap_helpers import FLAT, GROUP, HEADS, LENGTHS, MULTI, OUT, PAST, PRESENT, SAME, SIZES
from trt_import_helpers import graph, inputs_for, on_ort

ROTATE = "=> (float[i,j,l] y) { y = RotaryEmbedding"
LOUD: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "Attention with a past and without presents": (
        f"({SAME}, {PAST}) {OUT} {{ y = Attention<{HEADS}>(q, k, v, , pk, pv) }}", 23, {}, "present_key == nullptr",
    ),
    "a mask of one row": (
        f"({FLAT}, float[b,1,1,t] g) {OUT} {{ y = Attention<{HEADS}>(q, k, v, g) }}",
        23, {}, "inconsistent q_sequence_length",
    ),
    "queries flat and keys by heads": (
        f"(float[b,s,32] q, float[b,4,t,8] k, float[b,4,t,8] v) {OUT} {{ y = Attention<{HEADS}>(q, k, v) }}",
        23, {}, "Q and K must have the same rank",
    ),
    "windows of Attention-25": (
        f"({FLAT}) {OUT} {{ y = Attention<{HEADS}, left_window_size = 2>(q, k, v) }}",
        25, {}, "Unrecognized attribute: left_window_size",
    ),
    "a table of angles for all rows": (
        f"(float[b,s,32] x, float[s,4] c, float[s,4] n) {ROTATE}<num_heads = 4>(x, c, n) }}",
        23, {}, "expected to have 3 dimensions",
    ),
    "angles of one row": (
        f"(float[b,s,32] x, float[1,s,4] c, float[1,s,4] n) {ROTATE}<num_heads = 4>(x, c, n) }}",
        23, {}, "expected to have the same shape as input",
    ),
    "angles of each feature": (
        f"(float[b,s,32] x, float[b,s,8] c, float[b,s,8] n) {ROTATE}<num_heads = 4>(x, c, n) }}",
        23, {}, "should be same as head_size / 2",
    ),
    "heads that aren't counted": (
        f"(float[b,s,32] x, float[b,s,4] c, float[b,s,4] n) {ROTATE}(x, c, n) }}",
        23, {}, "num_heads attribute must be provided",
    ),
    "a position beyond the table": (
        f"(float[b,s,32] x, float[9,4] c, float[9,4] n, int64[b,s] p) {ROTATE}<num_heads = 4>(x, c, n, p) }}",
        23, {"p": [[0, 1, 9], [0, 1, 2]]}, "out of range",
    ),
    "a chunk of two rows behind a past": (
        f"({SAME}, {PAST}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}>(q, k, v, pk, pv, n, a) }}",
        23, {"n": [6, 6], "a": 7}, "batch_size must be 1 when sequence_length > 1",
    ),
    "a window to both sides": (
        f"({SAME}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}, causal = 0, local_window_size = 2>(q, k, v, , , n, a) }}",
        23, {"n": [2, 2], "a": 3}, "local_window_size must be -1 when causal is 0",
    ),
    "a bias of one row in GroupQueryAttention": (
        f"({SAME}, {LENGTHS}, float[b,1,1,s] g) {PRESENT} {{ y, x, z = {GROUP}>(q, k, v, , , n, a, , , , g) }}",
        23, {"n": [2, 2], "a": 3}, "must be equal to the sequence length",
    ),
    "heads of 12 features": (
        f"(float[b,s,48] q, float[b,s,48] k, float[b,s,48] v, {LENGTHS}) {PRESENT} "
        f"{{ y, x, z = {GROUP}>(q, k, v, , , n, a) }}",
        23, {"n": [2, 2], "a": 3}, "head_size must be a multiple of 8",
    ),
    "more keys than queries": (
        f"({FLAT}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}, causal = 0>(q, k, v, , , n, a) }}",
        23, {"n": [6, 6], "a": 7}, "query and key must have the same sequence length",
    ),
    "a bias of one row in MultiHeadAttention": (
        f"({FLAT}, float[b,1,1,t] g) {OUT} {{ y = {MULTI}>(q, k, v, , , g) }}",
        23, {}, "should be same as sequence_length",
    ),
    "a buffer that is full": (
        "(float[b,4,m,8] c, float[b,4,s,8] u, int64[b] w) => (float[i,j,k,l] y) "
        "{ y = TensorScatter<axis = 2>(c, u, w) }",
        24, {"w": [7, 0]}, "exceeds max_sequence_length",
    ),
}  # fmt: skip
"""By name: the text of the graph, the opset, inputs, and words of the refusal."""


@pytest.mark.parametrize("name", LOUD)
def test_what_onnx_runtime_refuses(name: str) -> None:
    text, opset, given, said = LOUD[name]
    model = graph(text, opset)
    with pytest.raises(Exception, match=said):
        on_ort(model, inputs_for(model, SIZES, given))
