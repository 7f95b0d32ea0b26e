"""Attention of long prompts for ONNX Runtime only, which handles some queries at a time with only the keys visible to
them. It is compared with attention in numpy, from the definition of each mask. The contents of its graph are tested
too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.custom_ops.attention_by_queries import WHOLE
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort
from posexport.spec.spec import Spec

Array = np.ndarray[Any, Any]

FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 40},
    {"window": 40, "causal": False},
    {"attention_chunk_size": 50},
    {"window": 300, "sinks": True},
    {"softcap": 2.0, "num_kv_heads": 2},
]


def block(**fields: Any) -> Spec:
    """A small block without an encoding."""
    sizes = {"hidden_size": 32, "num_heads": 4, "causal": True}
    return read_spec({"encoding": {"name": "none"}, **sizes, **fields})


def runner_of(spec: Spec, folder: Path) -> tuple[Any, dict[str, Array]]:
    """The block's file for ONNX Runtime only, opened, and its weights in float64."""
    weights = seeded_weights(spec, 0)
    write_onnx(export(spec, weights, form="decomposed", target="ort"), folder / "a.onnx")
    return ort.load(folder / "a.onnx", {"threads": 1}), {name: each.double().numpy() for name, each in weights.items()}


def attended(spec: Spec, weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """The block in float64, from the definition of which keys each query sees."""
    hidden = inputs["hidden_states"].astype(np.float64)
    batch, seq = hidden.shape[:2]
    width, group = spec.head_dim, spec.num_heads // spec.num_kv_heads

    def heads(name: str, count: int) -> Array:
        return (hidden @ weights[f"{name}.weight"].T).reshape(batch, seq, count, width).transpose(0, 2, 1, 3)

    q, k, v = (heads(f"{name}_proj", spec.num_heads if name == "q" else spec.num_kv_heads) for name in "qkv")
    first = np.zeros(batch, np.int64)
    if spec.kv_cache == "concat":
        k, v = (np.concatenate((inputs[f"past_{name}"], new), 2) for name, new in (("key", k), ("value", v)))
        first += inputs["past_key"].shape[2]
    elif spec.kv_cache == "shared":
        first = inputs["write_indices"]
        buffers = [inputs[f"past_{name}"].astype(np.float64) for name in ("key", "value")]
        for buffer, new in zip(buffers, (k, v), strict=True):
            for row, at in enumerate(first):
                buffer[row, :, at : at + seq] = new[row]
        k, v = buffers
    mask = inputs.get("attention_mask", np.ones((batch, k.shape[2]), np.int64))
    out = np.zeros((batch, seq, spec.num_heads, width))
    for row in range(batch):
        at, keys = np.arange(seq)[:, None] + first[row], np.arange(k.shape[2])[None]
        seen = (mask[row][None] != 0) & (keys < first[row] + seq)
        if spec.causal:
            seen = seen & (keys <= at)
        if spec.window is not None:
            seen = seen & (abs(at - keys) < spec.window)
        if spec.attention_chunk_size is not None:
            start = int(np.argmax(mask[row] != 0))
            chunks = ((places - start) // spec.attention_chunk_size for places in (at, keys))
            seen = seen & np.equal(*chunks)
        for head in range(spec.num_heads):
            logits = q[row, head] @ k[row, head // group].T / math.sqrt(width)
            if spec.softcap is not None:
                logits = spec.softcap * np.tanh(logits / spec.softcap)
            grown = np.where(seen, np.exp(logits), 0.0)
            total = grown.sum(1, keepdims=True)
            if spec.sinks:
                total += np.exp(weights["sinks"][head])
            out[row, :, head] = grown / np.where(total > 0, total, 1.0) @ v[row, head // group]
    return out.reshape(batch, seq, -1) @ weights["o_proj.weight"].T


def compare(spec: Spec, folder: Path, sizes: list[Sizes]) -> None:
    """Compare the file with the definition. If there is a mask, the last row lacks its first keys and some others."""
    runner, weights = runner_of(spec, folder)
    for each in sizes:
        inputs = seeded_inputs(spec, each, 0)
        if "attention_mask" in inputs:
            inputs["attention_mask"][-1, :30] = 0
            inputs["attention_mask"][-1, 60:200:3] = 0
        if "write_indices" in inputs:
            inputs["write_indices"] = inputs["write_indices"] + 5 * np.arange(each.batch)
        expected = attended(spec, weights, inputs)
        limit = 5e-3 if spec.dtype == "fp16" else 2e-6
        np.testing.assert_allclose(
            runner.run(inputs)["output"], expected, atol=limit * max(1.0, float(abs(expected).max())), rtol=0
        )


@pytest.mark.parametrize("fields", FEATURES, ids=str)
def test_blocks_of_queries_see_what_they_must(fields: dict[str, Any], tmp_path: Path) -> None:
    lengths = [Sizes(batch=batch, seq=seq) for batch, seq in ((1, WHOLE + 1), (2, 391), (1, 1100), (2, WHOLE))]
    compare(block(**fields), tmp_path, lengths)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache", ["concat", "shared"])
@pytest.mark.parametrize("fields", FEATURES, ids=str)
def test_behind_a_cache_with_padding(fields: dict[str, Any], cache: str, tmp_path: Path) -> None:
    spec = block(kv_cache=cache, padding_mask=True, **fields)
    slots = {"max_seq": 700} if cache == "shared" else {}
    sizes = [Sizes(batch=2, seq=seq, past_seq=past, **slots) for seq, past in ((300, 57), (513, 0), (3, 290))]
    compare(spec, tmp_path, sizes)


def test_half_precision(tmp_path: Path) -> None:
    compare(block(dtype="fp16", window=100), tmp_path, [Sizes(batch=2, seq=400)])


@pytest.mark.parametrize(
    ("fields", "divided"),
    [
        ({}, True),
        ({"window": 9, "causal": False}, True),
        ({"causal": False}, False),
        ({"kv_cache": "shared", "window": 9, "causal": False}, False),
    ],
    ids=str,
)
def test_only_attention_that_hides_keys_is_divided(fields: dict[str, Any], divided: bool) -> None:
    model = export(block(**fields), seeded_weights(block(**fields), 0), form="decomposed", target="ort")
    assert ("Scan" in {node.op_type for node in model.graph.all_nodes()}) is divided


def test_files_for_all_targets_have_no_blocks() -> None:
    model = export(block(), seeded_weights(block(), 0), form="decomposed", target="portable")
    assert not {"If", "Scan"} & {node.op_type for node in model.graph.all_nodes()}
