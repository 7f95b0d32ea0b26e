"""The evaluator against onnx's test vectors of single operators, in float64 and in their own dtypes."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import onnx_vectors
import pytest
import torch

from posexport.graphs.kernels import KERNELS

BOTH = {
    r"string|strnormalizer|regex|ai_onnx_ml_label_encoder": "strings are no tensors of torch",
    r"bernoulli|training_dropout": "random numbers",
    r"flexattention_(score|prob)_mod|flexattention_(causal|soft|relative)": "onnx's reference runs no bodies there",
    r"resize_downsample_scales_(linear|cubic)_align_corners": "onnx divides by the unrounded length, runtimes do not",
    r"cast_e8m0": "rounds up, torch to the nearest",
}
WIDE = {
    r"cast(like)?_(no_saturate_)?FLOAT(16)?_to_FLOAT[48]": "casts between floating-point types change nothing",
    r"bitcast_(2d_|scalar_)?float32": "float64 has other bits",
    r"dynamicquantizelinear(_expanded)?$": "a value halfway between two numbers in float64",
}
NARROW = {r"FLOAT4E2M1|float4e2m1": "torch has no float4", r"_expanded": "function bodies are tried in float64"}
ROUNDED = ("averagepool_2d_ceil_last_window", "gridsample_bicubic", "roialign_aligned")
"""Vectors with only four decimals."""

UNTRIED = {"ConcatFromSequence", "Optional", "SequenceAt", "SequenceConstruct", "SequenceErase", "GlobalLpPool"}
UNTRIED |= {"SimplifiedLayerNormalization"}
"""Kernels of the standard domain without a vector: test_evaluate_kernels and test_evaluate_contrib test them."""


def reason_to_skip(name: str, wide: bool) -> str:
    for pattern, reason in (BOTH | (WIDE if wide else NARROW)).items():
        if re.search(pattern, name):
            return reason
    return ""


@functools.cache
def outcomes(wide: bool) -> dict[str, str]:
    """What is wrong with each vector, by name; vectors of function bodies run only in float64."""
    found = {}
    for name, case in onnx_vectors.cases().items():
        if wide or not name.endswith("_expanded"):
            within = (1e-4, 1e-4) if any(part in name for part in ROUNDED) else None
            found[name] = onnx_vectors.outcome(case, wide, within)
    return found


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("wide", "least"), [(False, 1000), (True, 1700)])
def test_every_vector(wide: bool, least: int) -> None:
    wrong = {name: text for name, text in outcomes(wide).items() if text and not reason_to_skip(name, wide)}
    assert not wrong
    assert sum(not reason_to_skip(name, wide) for name in outcomes(wide)) >= least


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("wide", [False, True])
def test_nothing_is_skipped_without_need(wide: bool) -> None:
    for pattern in BOTH | (WIDE if wide else {}):
        skipped = [text for name, text in outcomes(wide).items() if re.search(pattern, name)]
        assert any(skipped), pattern


def vectors_of(operator: str) -> list[Any]:
    """The vectors that use an operator, those with few nodes first."""
    cases = sorted(onnx_vectors.cases().values(), key=lambda case: len(case.model.graph.node))
    return [case for case in cases if any(node.op_type == operator for node in case.model.graph.node)]


def disturbed(value: Any) -> Any:
    """Another value of the same type and shape."""
    if isinstance(value, tuple):
        return (disturbed(value[0]), *value[1:])
    if isinstance(value, list):
        return [*map(disturbed, value)] if value else [torch.zeros(1)]
    if value is None:
        return torch.ones(())
    if value.dtype == torch.bool:
        return ~value
    return value + (1e-3 * (1 + value.abs()) if value.is_floating_point() else 1).to(value.dtype)


@pytest.mark.slow
def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If any kernel returns slightly too large values, a vector of its operator fails."""
    unnoticed = set()
    for operator in sorted(name for domain, name in KERNELS if not domain):
        right = KERNELS["", operator]
        with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
            patch.setitem(KERNELS, ("", operator), lambda *a, _right=right: disturbed(_right(*a)))
            tried = (case for case in vectors_of(operator) if not outcomes(True)[case.name])
            if not any(onnx_vectors.outcome(case, True) for case in tried):
                unnoticed.add(operator)
    assert unnoticed == UNTRIED
