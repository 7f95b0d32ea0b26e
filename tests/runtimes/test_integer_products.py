"""8-bit products overflow in ONNX Runtime on some CPUs. `verify` says so beside the node that departs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from trt_import_helpers import on_ort

from posexport.runtimes import integer_products
from posexport.runtimes.integer_products import overflows

ROWS = np.array([[255, 255], [1, 2]], np.uint8)
COLUMNS = np.array([[127, 1], [127, -3]], np.int8)


def test_the_warning_is_right_on_this_cpu() -> None:
    """255 * 127 + 255 * 127 is 64,770, and 32,767 if it overflows. The oracle is numpy's product in 32 bits."""
    text = """<ir_version: 10, opset_import: ["" : 18]> g (uint8[n, 2] x) => (int32[n, 2] y)
        <int8[2, 2] w = {127, 1, 127, -3}> { y = MatMulInteger(x, w) }"""
    found = on_ort(onnx.parser.parse_model(text), {"x": ROWS})["y"]
    is_exact = (found == ROWS.astype(np.int32) @ COLUMNS.astype(np.int32)).all()
    assert is_exact or overflows("MatMulInteger", "ort-cpu")


@pytest.mark.parametrize(
    ("sets", "operator", "runtime", "expected"),
    [
        (["AVX", "AVX2"], "MatMulInteger", "ort-cpu", True),
        (["AVX2", "AVX-512"], "QGemm", "ort-cpu", True),
        (["AVX2", "AVX VNNI"], "MatMulInteger", "ort-cpu", False),
        (["AVX2", "AVX-512", "AVX-512 VNNI"], "MatMulInteger", "ort-cpu", False),
        (["NEON"], "MatMulInteger", "ort-cpu", False),
        (None, "MatMulInteger", "ort-cpu", False),
        (["AVX2"], "MatMul", "ort-cpu", False),
        (["AVX2"], "MatMulInteger", "onnx-reference", False),
    ],
)
def test_which_cpus_overflow(
    sets: list[str] | None, operator: str, runtime: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integer_products, "instruction_sets", lambda: sets)
    assert overflows(operator, runtime) is expected
