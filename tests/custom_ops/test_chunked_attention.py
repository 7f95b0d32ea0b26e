"""Chunked attention with padding: chunks begin at the first attended token of each row, in every form and cache.

The oracle is in numpy, from the formula in posexport.custom_ops.visibility. tests/models/test_transformers_decode.py
compares with transformers' Llama 4 with its own masks and caches.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import oracles
import pytest
import torch
from form_helpers import HOWS
from helpers import Array, as_float64, case, open_ort, run_block, weights_for
from trt_import_helpers import imported

from posexport.custom_ops import visibility
from posexport.custom_ops.heads import Heads
from posexport.export import export
from posexport.export.support import unsupported_reason
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec

MASKS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
"""Masks: no padding, padding on the left shorter and longer than a chunk, padding on the right, holes, all but the last
token, all tokens."""

BATCH, TOTAL = MASKS.shape
CHUNK, BOUND = 3, 5e-5
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both-ways": {"causal": False},
    "window": {"causal": True, "window": 2},
    "window-both-ways": {"causal": False, "window": 2},
    "sinks": {"causal": True, "sinks": True},
    "softcap": {"causal": True, "softcap": 2.0},
    "cope": {"encoding": "cope", "causal": True},
    "shaw": {"encoding": "shaw", "causal": True, "num_kv_heads": 4},
    "alibi": {"encoding": "alibi", "causal": True},
}


def spec_of(kind: str, kv_cache: str | None) -> Spec:
    over = {"encoding": "rope", "num_kv_heads": 2, "attention_chunk_size": CHUNK, "padding_mask": True, **KINDS[kind]}
    return case("none", kv_cache=kv_cache, **over)


def inputs(spec: Spec, seq: int, rows: slice = slice(None), seed: int = 0) -> dict[str, Array]:
    """The last `seq` of TOTAL tokens; the tokens before them are cached. A shared cache has two more slots."""
    random = np.random.default_rng(seed)
    given: dict[str, Array] = {
        "hidden_states": random.standard_normal((BATCH, seq, spec.hidden_size)).astype(np.float32),
        "position_ids": np.tile(np.arange(TOTAL - seq, TOTAL), (BATCH, 1)),
        "attention_mask": np.pad(MASKS, ((0, 0), (0, 2)), constant_values=1) if spec.kv_cache == "shared" else MASKS,
        "write_indices": np.full(BATCH, TOTAL - seq),
    }
    slots = TOTAL + 2 if spec.kv_cache == "shared" else TOTAL - seq
    shape = (BATCH, spec.num_kv_heads, slots, spec.head_dim)
    given |= {name: random.standard_normal(shape).astype(np.float32) for name in ("past_key", "past_value")}
    return {name: given[name][rows] for name in graph_inputs(spec)}


def queries(kv_cache: str | None) -> tuple[int, ...]:
    return (TOTAL,) if kv_cache is None else (TOTAL, 4, 1)


def by_rows(spec: Spec, seq: int, how: tuple[str, str]) -> list[slice]:
    """GroupQueryAttention takes several tokens over cached ones only for batch 1."""
    alone = how == ("contrib", "ort") and spec.kv_cache == "shared" and 1 < seq < TOTAL
    return [slice(at, at + 1) for at in range(BATCH)] if alone else [slice(None)]


@functools.cache
def wanted(kind: str, kv_cache: str | None, seq: int) -> Array:
    spec = spec_of(kind, kv_cache)
    return oracles.block(spec, as_float64(weights_for(spec)), inputs(spec, seq))


@pytest.mark.parametrize("kv_cache", [None, "concat", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_torch_block_is_the_oracle(kind: str, kv_cache: str | None) -> None:
    spec = spec_of(kind, kv_cache)
    for seq in queries(kv_cache):
        given = inputs(spec, seq)
        np.testing.assert_allclose(run_block(spec, weights_for(spec), given), wanted(kind, kv_cache, seq), atol=1e-10)


def graphs() -> list[Any]:
    """Every form and target that supports the case. Every run includes some of each kind."""
    found = []
    for at, (kind, kv_cache, how) in enumerate(itertools.product(KINDS, (None, "concat", "shared"), HOWS)):
        if unsupported_reason(spec_of(kind, kv_cache), *how) is None:
            marks = () if (kind == "causal" and kv_cache != "concat") or at % 23 == 0 else pytest.mark.slow
            found.append(pytest.param(kind, kv_cache, how, marks=marks, id=f"{kind}-{kv_cache}-{'-'.join(how)}"))
    return found


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("kind", "kv_cache", "how"), graphs())
def test_every_form_is_the_oracle(kind: str, kv_cache: str | None, how: tuple[str, str]) -> None:
    spec = spec_of(kind, kv_cache)
    model = export(spec, weights_for(spec), form=how[0], target=how[1])
    runs = [open_ort(model)]
    with TemporaryDirectory() as folder:
        if how[1] == "portable":
            runs.append(imported(ir.to_proto(model), Path(folder)).run)
        for run, seq in itertools.product(runs, queries(kv_cache)):
            made = np.concatenate([run(inputs(spec, seq, rows))["output"] for rows in by_rows(spec, seq, how)])
            right = wanted(kind, kv_cache, seq)
            assert np.abs(made - right).max() <= BOUND * max(1.0, np.abs(right).max())


@pytest.mark.parametrize("kind", ["causal", "both-ways", "sinks"])
def test_the_same_tokens_alone_and_padded(kind: str) -> None:
    """Rows are padded on the left, right or both sides, by any number of tokens. Their outputs equal those of the row
    without padding."""
    spec = spec_of(kind, None)
    random = np.random.default_rng(1)
    tokens = random.standard_normal((7, spec.hidden_size)).astype(np.float32)
    alone = {"hidden_states": tokens[None], "position_ids": np.arange(7)[None], "attention_mask": np.ones((1, 7), int)}
    right = run_block(spec, weights_for(spec), alone)[0]
    for left, behind in itertools.product(range(2 * CHUNK + 1), (0, 2)):
        padded = random.standard_normal((left + 7 + behind, spec.hidden_size)).astype(np.float32)
        padded[left : left + 7] = tokens
        mask = np.pad(np.ones((1, 7), int), ((0, 0), (left, behind)))
        positions = np.pad(np.arange(7)[None], ((0, 0), (left, behind)))
        given = {"hidden_states": padded[None], "position_ids": positions, "attention_mask": mask}
        made = run_block(spec, weights_for(spec), given)[0, left : left + 7]
        np.testing.assert_allclose(made, right, atol=1e-10)


def test_chunks_counted_from_the_first_column_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault is the earlier behaviour of the torch body."""
    sound = visibility.visible

    def faulty(heads: Heads, seq: int, total: int, mask: Any, *rest: Any) -> torch.Tensor | None:
        seen = sound(heads, seq, total, None if mask is None else torch.ones_like(mask), *rest)
        return seen if mask is None or seen is None else seen & (mask != 0)[:, None, None, :]

    monkeypatch.setattr("posexport.custom_ops.attention.visible", faulty)
    spec = spec_of("causal", None)
    off = np.abs(run_block(spec, weights_for(spec), inputs(spec, TOTAL)) - wanted("causal", None, TOTAL)).max((1, 2))
    assert list(off > 0.01) == [False, True, True, False, True, False, False]


def test_without_padding_the_mask_changes_nothing() -> None:
    """If all tokens are attended, chunks begin at the first column, as without a mask."""
    masked, plain = spec_of("causal", None), case("none", encoding="rope", causal=True, attention_chunk_size=CHUNK)
    given = inputs(masked, TOTAL, slice(0, 1))
    bare = {name: given[name] for name in graph_inputs(plain)}
    weights = weights_for(plain)
    np.testing.assert_allclose(
        run_block(
            case("none", encoding="rope", causal=True, attention_chunk_size=CHUNK, padding_mask=True), weights, given
        ),
        run_block(plain, weights, bare),
        atol=1e-12,
    )
