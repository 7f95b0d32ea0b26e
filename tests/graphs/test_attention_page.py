"""docs/reference/attentions.md lists every key, every kind of mask and every code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import onnx_ir as ir
import pytest
from onnx import helper

from posexport.export import fused_attention
from posexport.graphs import inspection
from posexport.graphs.attention import biases, describe, masks, rotation, support
from posexport.graphs.expand import Expanded

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "attentions.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)))


def test_every_key_is_on_the_page() -> None:
    assert set(describe.KEYS) <= NAMED


@pytest.mark.parametrize("module", [biases, describe, fused_attention, inspection, rotation, support], ids=str)
def test_every_code_is_on_the_page(module: ModuleType) -> None:
    """Finds the codes as constants in kebab-case."""
    codes = {
        value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and re.fullmatch(r"[a-z]+(-[a-z]+)*", value)
    }
    assert codes - NAMED - {"recognised", "unknown", "total", "seq", "past", "batch", "encoder"} == set()


def test_every_kind_of_mask_is_on_the_page() -> None:
    source = Path(masks.__file__).read_text(encoding="utf-8")
    kinds = set(re.findall(r'_mask\("(\w+)"', source)) | set(re.findall(r'yield "(\w+)"', source))
    assert len(kinds) > 6 and kinds <= NAMED


def test_the_reach_of_masks_and_biases_is_that_of_the_page() -> None:
    assert f"{masks.FAR_KEYS:,} keys behind a\ncache, {masks.FAR_ROW} without one" in PAGE
    assert f"rows of {biases.ROW} tokens, or of one token behind {biases.FAR_KEYS - 1:,}" in PAGE
    assert f"narrower than {support.HEAD_DIMS[0]} or wider than {support.HEAD_DIMS[-1]}" in PAGE
    assert f"more than {inspection.LONGEST / 60:g} minutes" in PAGE


@pytest.mark.parametrize(("operator", "expected"), [("Softmax", "kernels of their own"), ("Attention", "one operator")])
def test_what_was_not_measured_on_a_gpu_says_what_to_expect_and_do(operator: str, expected: str) -> None:
    carried = support.Carried(operator=operator, dtype="fp16", head_dim=64, value_dim=64, softcap=False, sinks=False)
    found = support.kernels_of(carried)["ort-cuda"]
    assert found["one_kernel"] is None and found["reason"]["code"] == support.NOT_MEASURED
    assert expected in found["reason"]["text"] and "bench --runtime ort-cuda" in found["reason"]["text"]


@pytest.mark.parametrize(
    ("change", "code"), [({}, support.DTYPE), ({"head_dim": 8}, support.HEAD_SIZE), ({"sinks": True}, support.SCORES)]
)
def test_another_dtype_is_the_advice_where_it_helps_alone(change: dict[str, Any], code: str) -> None:
    plain = support.Carried(operator="Softmax", dtype="fp32", head_dim=64, value_dim=64, softcap=False, sinks=False)
    carried = attrs.evolve(plain, **change)
    assert support.kernels_of(carried)["tensorrt"]["reason"]["code"] == code


@pytest.mark.parametrize(
    ("change", "ort", "tensorrt"),
    [
        ({}, True, True),
        ({"left_window_size": 3}, False, False),
        ({"scale": -1.0}, False, False),
        ({"softmax_precision": 1}, True, False),
        ({"lengths": True}, True, False),
        ({"past": True}, True, False),
    ],
)
def test_what_engines_take_of_attention(change: dict[str, Any], ort: bool, tensorrt: bool) -> None:
    given = {"past": ["a", "b", ""], "lengths": ["", "", "n"]}
    padded = next((["", *names] for name, names in given.items() if name in change), [])
    attributes = {name: value for name, value in change.items() if name not in given}
    operator = expanded("Attention", [*"qkv", *padded], **attributes)
    assert (support.ort_takes(operator), support.tensorrt_takes(operator)) == (ort, tensorrt)


@pytest.mark.parametrize(
    ("inputs", "tensorrt"), [("qkv", True), ("qkvb", False), ("qkv-p", False), ("qkv--a", True), ("qkv---cd", False)]
)
def test_what_tensorrt_takes_of_multi_head_attention(inputs: str, tensorrt: bool) -> None:
    operator = expanded("MultiHeadAttention", inputs, "com.microsoft")
    assert support.ort_takes(operator)
    assert support.tensorrt_takes(operator) == tensorrt


def expanded(kind: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> Expanded:
    """An operator with one output; an input `-` is absent."""
    names = ["" if name == "-" else name for name in inputs]
    node = ir.serde.deserialize_node(helper.make_node(kind, names, ["y"], domain=domain, **attributes))
    return Expanded(name="y", node=node, inputs=tuple(node.inputs), outputs=("y",), nodes=frozenset())
