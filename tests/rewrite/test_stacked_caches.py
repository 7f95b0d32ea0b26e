"""Decoders with one cache [2, rows, heads, tokens, size] for keys and values, as exporters of the first GPT-2 wrote it.

The oracle is ONNX Runtime on the graph as it was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto
from small_graphs import HEADS, HIDDEN, SIZE, VOCABULARY, Graph, _info, _model, causal

from posexport.graphs.cases import cases_of
from posexport.graphs.roles import roles_of
from posexport.rewrite.whole import whole_evidence

SHAPES = ((2, 9, 0), (3, 4, 6), (2, 1, 12))
"""Rows, tokens and cached tokens."""


def decoder(*, layers: int = 2, faulty: bool = False) -> onnx.ModelProto:
    """Hidden keys have the logits -10,000 and -20,000, so padded tokens, which see no key, weigh hidden ones.

    `faulty`: the present keys are twice as large.
    """
    g = Graph()
    inputs = [_info("input_ids", TensorProto.INT64, "batch", "seq")]
    inputs.append(_info("attention_mask", TensorProto.INT64, "batch", "total"))
    outputs = [_info("logits", TensorProto.FLOAT, "batch", "seq", VOCABULARY)]
    x = g.op("Gather", g.random("embed", VOCABULARY, HIDDEN), "input_ids")
    mask = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.constant([1, 2])), to=TensorProto.FLOAT)
    padding = g.op("Mul", g.op("Sub", g.constant(1.0, np.float32), mask), g.constant(-1e4, np.float32))
    split = g.constant([0, 0, HEADS, SIZE])
    for layer in range(layers):
        q, k, v = (
            g.op(
                "Transpose",
                g.op("Reshape", g.op("MatMul", x, g.random(f"{side}{layer}", HIDDEN, HIDDEN)), split),
                perm=[0, 2, 1, 3],
            )
            for side in "qkv"
        )
        cached = (g.op("Gather", f"past_{layer}", g.constant(at), axis=0) for at in (0, 1))
        k, v = (g.op("Concat", old, new, axis=-2) for old, new in zip(cached, (k, v), strict=True))
        given = g.op("Mul", k, g.constant(2.0, np.float32)) if faulty else k
        g.op(
            "Concat", *(g.op("Unsqueeze", one, g.constant([0])) for one in (given, v)), axis=0, name=f"present_{layer}"
        )
        scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.op("Where", causal(g, scores), scores, g.constant(-1e4, np.float32))
        mixed = g.op("MatMul", g.op("Softmax", g.op("Add", scores, padding), axis=-1), v)
        tokens = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
        x = g.op("Add", x, g.op("MatMul", tokens, g.random(f"o{layer}", HIDDEN, HIDDEN)))
        inputs.append(_info(f"past_{layer}", TensorProto.FLOAT, 2, "batch", HEADS, "past", SIZE))
        outputs.append(_info(f"present_{layer}", TensorProto.FLOAT, 2, "batch", HEADS, "total", SIZE))
    g.op("MatMul", x, g.random("head", HIDDEN, VOCABULARY), name="logits")
    return _model(g, inputs, outputs, 18)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_padded_rows_of_a_stacked_cache_do_not_count(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.in_process(monkeypatch)
    path, out = helpers.saved(tmp_path, decoder()), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, target="ort")
    assert [(one["state"], one["reason"]) for one in result.attentions] == [("rewritten", None)] * 2
    rng = np.random.default_rng(0)
    for batch, seq, past in SHAPES:
        mask = np.ones((batch, past + seq), np.int64)
        mask[1:, : (past + seq) // 3] = 0
        arrays = {"input_ids": rng.integers(0, VOCABULARY, (batch, seq)), "attention_mask": mask}
        for layer in range(2):
            arrays[f"past_{layer}"] = rng.standard_normal((2, batch, HEADS, past, SIZE)).astype(np.float32)
        before, after = helpers.ran(path, arrays), helpers.ran(out, arrays)
        seen = mask[:, past:] == 1
        np.testing.assert_allclose(after[0][seen], before[0][seen], rtol=0, atol=2e-5)
        for old, new in zip(before[1:], after[1:], strict=True):
            by_token = [one.transpose(1, 3, 0, 2, 4)[mask == 1] for one in (new, old)]
            np.testing.assert_allclose(*by_token, rtol=0, atol=2e-5)


def test_a_planted_fault_in_a_stacked_cache_is_seen() -> None:
    one, other = (ir.from_proto(decoder(faulty=faulty)) for faulty in (False, True))
    evidence = whole_evidence(one, other, cases_of(roles_of(one), 0))
    assert evidence.problem is not None
    assert "present_0" in str(evidence.problem)
