"""Linear attention and its convolution: the evaluator in float64 against ONNX Runtime's CPU kernels in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from one_node import MICROSOFT, Array, compare, one_node

from posexport.errors import RequestError
from posexport.graphs.evaluate import Evaluator

BATCH, TOKENS, SIZE, WIDE = 2, 7, 4, 3
RANDOM = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def numbers(query_heads: int, heads: int, decay: int | None, beta: bool, past: bool = True) -> list[Array | None]:
    """Inputs of LinearAttention; `decay` is the number of decay values of each token."""
    key_heads = min(query_heads, heads)
    keys = normal(BATCH, TOKENS, key_heads, SIZE)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return [
        normal(BATCH, TOKENS, query_heads * SIZE),
        keys.reshape(BATCH, TOKENS, -1),
        normal(BATCH, TOKENS, heads * WIDE),
        normal(BATCH, heads, SIZE, WIDE) if past else None,
        None if decay is None else -np.abs(normal(BATCH, TOKENS, decay)),
        1 / (1 + np.exp(normal(BATCH, TOKENS, heads))) if beta else None,
    ]


RULES: dict[str, tuple[list[Array | None], dict[str, Any]]] = {
    "linear": (numbers(2, 2, None, False)[:4], {"update_rule": "linear"}),
    "gated": (numbers(2, 2, 2, False)[:5], {"update_rule": "gated", "scale": 1.0}),
    "gated features": (numbers(2, 2, 2 * SIZE, False)[:5], {"update_rule": "gated"}),
    "delta": (numbers(2, 2, None, True), {"update_rule": "delta"}),
    "gated delta": (numbers(2, 2, 2, True), {"update_rule": "gated_delta", "scale": 0.3}),
    "by default": (numbers(2, 2, 2 * SIZE, True), {}),
    "no state before": (numbers(2, 2, 2, True, past=False), {}),
    "grouped queries": (numbers(4, 2, 2, True), {"q_num_heads": 4}),
    "grouped values": (numbers(2, 4, 4, True), {"kv_num_heads": 4}),
}


@pytest.mark.parametrize("name", RULES)
def test_linear_attention(name: str) -> None:
    inputs, attributes = RULES[name]
    compare("LinearAttention", inputs, 2, domain=MICROSOFT, **({"q_num_heads": 2, "kv_num_heads": 2} | attributes))


@pytest.mark.parametrize("attributes", [{}, {"activation": "silu"}, {"activation": "swish", "dilation": 2}])
@pytest.mark.parametrize("given", ["all", "no state", "no bias"])
def test_causal_convolution(attributes: dict[str, Any], given: str) -> None:
    kept = 3 * attributes.get("dilation", 1)
    inputs = [normal(BATCH, SIZE, TOKENS), normal(SIZE, 1, 4), normal(SIZE), normal(BATCH, SIZE, kept)]
    inputs = {"no state": inputs[:3], "no bias": [*inputs[:2], None, inputs[3]]}.get(given, inputs)
    compare("CausalConvWithState", inputs, 2, domain=MICROSOFT, **attributes)


def test_fewer_tokens_than_the_state_holds() -> None:
    inputs = [normal(BATCH, SIZE, 1), normal(SIZE, 1, 4), normal(SIZE), normal(BATCH, SIZE, 3)]
    compare("CausalConvWithState", inputs, 2, domain=MICROSOFT)


@pytest.mark.parametrize("domain", ["", MICROSOFT])
def test_the_standard_has_the_same_operators(domain: str) -> None:
    for operator, inputs, attributes in (
        ("LinearAttention", RULES["gated delta"][0], {"q_num_heads": 2, "kv_num_heads": 2}),
        ("CausalConvWithState", [normal(1, 2, 5), normal(2, 1, 3)], {}),
    ):
        model, feeds = one_node(operator, inputs, 2, domain=domain, opset=27, **attributes)
        made = Evaluator(ir.from_proto(model)).run({name: torch.from_numpy(value) for name, value in feeds.items()})
        assert all(value.isfinite().all() for value in made.values())


@pytest.mark.parametrize(
    ("operator", "attributes", "text"),
    [
        ("LinearAttention", {"q_num_heads": 2, "kv_num_heads": 2, "state_window": 2}, "states of several tokens"),
        ("CausalConvWithState", {"state_window": 1}, "states of several tokens"),
        ("CausalConvWithState", {"channels_last": 1}, "channels that are last"),
    ],
)
def test_what_can_t_be_evaluated_is_refused(operator: str, attributes: dict[str, Any], text: str) -> None:
    inputs = RULES["linear"][0] if operator == "LinearAttention" else [normal(1, 2, 5), normal(2, 1, 3)]
    model, feeds = one_node(operator, inputs, 2, domain=MICROSOFT, **attributes)
    with pytest.raises(RequestError, match=text):
        Evaluator(ir.from_proto(model)).run({name: torch.from_numpy(value) for name, value in feeds.items()})
