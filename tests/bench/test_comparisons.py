"""Which timings may be compared, how certain an order is, and which artifact a result belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from posexport.bench.comparisons import order, order_of, rows_of
from posexport.bench.evidence import same
from posexport.bench.result import Benchmark, Shape, Timing
from posexport.bench.statistics import Ratio, summarize


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


def benchmark(*timings: Timing) -> Benchmark:
    shape = Shape(scenario="prefill:8", batch=1, seq=8, rounds=20, results=timings)
    told: dict[str, Any] = {"file": "one.onnx", "sha256": "0", "encoding": "rope", "form": "native", "opset": 23}
    told |= {"dtype": "fp32", "spec": {}, "rounds": 20, "burst": 3, "processes": 1, "seed": 0, "machine_load": 0.0}
    return Benchmark(**told, machine={}, threads=None, shapes=(shape,))


def timing(runtime: str, **ratios: float) -> Timing:
    """A candidate that differs from others only by its ratios."""
    exact = {role: Ratio(median=one, low=one, high=one, confidence=0.95) for role, one in ratios.items()}
    return Timing(runtime=runtime, state="timed", seconds=summarize([1.0] * 20), ratios=exact)


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ("ort-cuda", "against:ort-cuda", "inconclusive"),
        ("ort-cuda", "against:tensorrt", "faster"),
        ("tensorrt", "against:ort-cuda", "faster"),
        ("tensorrt", "against:tensorrt", "inconclusive"),
        ("ort-cpu", "against:ort-cpu", "inconclusive"),
        ("ort-cpu", "against:onnx-reference", "faster"),
        ("ort-cpu", "against:tensorrt", "tie"),
    ],
)
def test_an_earlier_artifact_is_that_of_its_own_runtime(first: str, other: str, expected: str) -> None:
    """On the same device, the order follows the ratio to the other artifact, or else the ratios to torch.

    On another device, it follows the times.
    """
    result = benchmark(timing(first, against=2.0, torch=0.5), timing(other, torch=1.0))
    one, two = rows_of("one.json", result)
    assert order(one, two) == expected
