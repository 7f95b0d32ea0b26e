"""Capped scores over a growing cache: GroupQueryAttention accepts any number of rows, tokens and cached keys."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from attention_graphs import HEADS, SIZE, attention, padding, rotation
from rewrite_helpers import rewritten_model

from posexport.rewrite.rewriter import REWRITTEN, rewrite_model

FREQUENCIES = 10_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))


def outputs(model: onnx.ModelProto, batch: int, seq: int, past: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(batch + seq)
    mask = np.ones((batch, past + seq), np.int64)
    mask[1:, : past // 2] = 0
    inputs = {
        "hidden_states": rng.standard_normal((batch, seq, HEADS * SIZE)).astype(np.float32),
        "position_ids": np.broadcast_to(past + np.arange(seq), (batch, seq)).astype(np.int64),
        "attention_mask": mask,
    }
    for name in ("past_key", "past_value"):
        inputs[name] = rng.standard_normal((batch, 2, past, SIZE)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(one) for one in session.run(None, inputs)]


@pytest.fixture(scope="module")
def both() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    model = attention(rotate=rotation(FREQUENCIES), add=[padding()], cached=True, softcap=5.0, key_heads=2)
    result = rewrite_model(ir.from_proto(model), form="contrib", target="ort")
    (site,) = result.sites
    assert site.state == "rewritten" and site.evidence is not None and site.evidence.agrees
    return model, ir.to_proto(result.model)


@pytest.mark.parametrize(
    ("batch", "seq", "past"), [(1, 5, 0), (3, 5, 0), (3, 1, 6), (1, 4, 6), (3, 4, 6), (2, 2, 1), (3, 1, 0)]
)
def test_any_tokens_over_any_cache(
    both: tuple[onnx.ModelProto, onnx.ModelProto], batch: int, seq: int, past: int
) -> None:
    model, new = both
    for want, have in zip(outputs(model, batch, seq, past), outputs(new, batch, seq, past), strict=True):
        assert want.shape == have.shape and np.isfinite(have).all()
        assert np.abs(want - have).max() <= 1e-5 * np.abs(want).max()


def test_it_is_one_operator(both: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    names = [node.op_type for node in both[1].graph.node]
    assert names.count("GroupQueryAttention") == 1 and "Softmax" not in names and "Tanh" not in names


@pytest.mark.parametrize("cap", [5.0, 30.0, 50.0, 3.3])
def test_caps_of_float16_are_exact(cap: float) -> None:
    """The form writes caps by exponentials, which TensorRT fuses. A rounded factor 2 / cap would be another cap."""
    done, _ = rewritten_model(attention(softcap=cap, half=True), form="function")
    assert [site.state for site in done.sites] == [REWRITTEN], done.sites[0].reason
