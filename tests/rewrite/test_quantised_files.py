"""Files whose weights were quantised, as onnxruntime.quantization.quantize_dynamic writes them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


def _feeds(cache: bool = False) -> dict[str, np.ndarray]:
    feeds = helpers.feeds(2, 6, 3 if cache else 0)
    return {name: array for name, array in feeds.items() if cache or "past" not in name}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("form", "cache", "kind"),
    [*itertools.product(["decomposed", "native"], [False, True], [QuantType.QUInt8, QuantType.QInt8])],
)
def test_attention_behind_quantised_tables_and_products(
    tmp_path: Path, form: str, kind: QuantType, cache: bool
) -> None:
    """Some features are quantised to integers, and the file states their dtypes, as after an opset conversion."""
    path = helpers.saved(tmp_path, small_graphs.decoder(cache=cache))
    quantised, out = tmp_path / "quantised.onnx", tmp_path / "out.onnx"
    quantize_dynamic(path, quantised, weight_type=kind, op_types_to_quantize=["MatMul", "Gather"])
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(quantised)), quantised)
    result = helpers.rewritten(quantised, out, form=form)
    assert [one["operator"] for one in result.attentions] == ["Softmax"] and result.is_complete
    feeds = _feeds(cache)
    have, want = helpers.ran(out, feeds)[0], helpers.ran(quantised, feeds)[0]
    assert have.shape == want.shape
    # A rounding error may change a quantised integer by one.
    assert float(np.abs(have - want).max()) <= 0.02 * float(np.abs(want).max())


class _TwoPrompts(CalibrationDataReader):
    def __init__(self) -> None:
        self._left = [_feeds() for _ in range(2)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_attention_between_quantised_projections(tmp_path: Path, form: str) -> None:
    """The weights of embeddings and projections go through DequantizeLinear, as quantize_static writes them."""
    path = helpers.saved(tmp_path, small_graphs.decoder(cache=False))
    quantised, out = tmp_path / "quantised.onnx", tmp_path / "out.onnx"
    model = onnx.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    read = {"Gather": 0, "MatMul": 1}
    kept = [node.name for node in model.graph.node if node.input[read.get(node.op_type, -1)] not in weights]
    kept += [node.name for node in model.graph.node if node.op_type not in read]
    quantize_static(path, quantised, _TwoPrompts(), nodes_to_exclude=kept)
    result = helpers.rewritten(quantised, out, form=form)
    assert result.is_complete, result.attentions
    feeds = _feeds()
    np.testing.assert_allclose(helpers.ran(out, feeds)[0], helpers.ran(quantised, feeds)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("form", "dtype"), [("native", "int8"), ("contrib", "uint8")])
def test_caches_of_whole_numbers(tmp_path: Path, form: str, dtype: str) -> None:
    """The graph dequantises cached keys and values when it reads them."""
    model, kind = small_graphs.decoder(), onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    caches = [value for value in model.graph.input if value.name.startswith("past_key_values")]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.02, np.float32), "step"))
    for number, value in enumerate(caches):
        value.type.tensor_type.elem_type = kind
        for node in model.graph.node:
            node.input[:] = [f"{name} scaled" if name == value.name else name for name in node.input]
        names = [value.name, "step"]
        scaled = onnx.helper.make_node("DequantizeLinear", names, [f"{value.name} scaled"], name=f"scaled {number}")
        model.graph.node.insert(0, scaled)
    path, out = helpers.saved(tmp_path, model), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, target="ort")
    assert result.is_complete, result.attentions
    feeds, rng, limits = _feeds(cache=True), np.random.default_rng(1), np.iinfo(dtype)
    for value in caches:
        feeds[value.name] = rng.integers(limits.min, limits.max, feeds[value.name].shape, dtype)
    np.testing.assert_allclose(helpers.ran(out, feeds)[0], helpers.ran(path, feeds)[0], rtol=1e-5, atol=1e-5)
