"""Files whose weights were quantised, as onnxruntime.quantization.quantize_dynamic writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from onnxruntime.quantization import QuantType, quantize_dynamic


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


@pytest.mark.parametrize("form", ["decomposed", "native"])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8])
def test_attention_behind_quantised_tables_and_products(
    tmp_path: Path, form: str, kind: QuantType, cache: bool
) -> None:
    """Features are whole numbers on their way, and the file says so, as after a conversion of its opset."""
    path = helpers.saved(tmp_path, small_graphs.decoder(cache=cache))
    quantised, out = tmp_path / "quantised.onnx", tmp_path / "out.onnx"
    quantize_dynamic(path, quantised, weight_type=kind, op_types_to_quantize=["MatMul", "Gather"])
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(quantised)), quantised)
    result = helpers.rewritten(quantised, out, form=form)
    assert [one["operator"] for one in result.attentions] == ["Softmax"] and result.is_complete
    feeds = {
        name: array for name, array in helpers.feeds(2, 6, 3 if cache else 0).items() if cache or "past" not in name
    }
    have, want = helpers.ran(out, feeds)[0], helpers.ran(quantised, feeds)[0]
    assert have.shape == want.shape
    # a rounding error may move a whole number by one
    assert float(np.abs(have - want).max()) <= 0.02 * float(np.abs(want).max())
