"""Which timings may be compared, how certain an order is, and which artifact a result is about."""

from __future__ import annotations

import pytest

from posexport.bench.comparisons import order_of
from posexport.bench.evidence import same
from posexport.bench.statistics import Ratio


@pytest.mark.parametrize(
    ("low", "high", "confidence", "expected"),
    [
        (0.0008, 0.0009, 0.75, "too few rounds"),
        (0.0008, 0.0009, 0.95, "faster"),
        (0.9, 1.1, 0.75, "tie"),
        (1.0, 1.2, 0.95, "tie"),
        (1.1, 1.2, 0.95, "inconclusive"),
    ],
)
def test_a_tie_is_only_an_interval_that_holds_one(low: float, high: float, confidence: float, expected: str) -> None:
    ratio = Ratio(median=(low + high) / 2, low=low, high=high, confidence=confidence)
    assert order_of(ratio) == expected
    turned = Ratio(median=1 / ratio.median, low=1 / high, high=1 / low, confidence=confidence)
    assert order_of(turned, inverted=True) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("a.onnx", "1"), ("b.onnx", "1"), True),
        (("a.onnx", "1"), ("a.onnx", "2"), False),
        (("out/a.onnx", ""), ("a.onnx", "2"), True),
        (("a.onnx", ""), ("b.onnx", "2"), False),
    ],
    ids=["bytes", "other-bytes", "name", "other-name"],
)
def test_bytes_count_where_both_are_known_and_names_otherwise(
    one: tuple[str, str], other: tuple[str, str], expected: bool
) -> None:
    assert same(*one, *other) is expected
    assert same(*other, *one) is expected
