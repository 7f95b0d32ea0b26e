"""Blocks with `positions` = "consecutive": every encoding against the oracle.

The torch block in float64 looks up each position difference. Graphs run on ONNX Runtime and get all differences by
shifting rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import oracles
import pytest
import torch
from helpers import Array, as_float64, case, open_ort, small_spec, weights_for
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.export import export
from posexport.models import ENCODINGS, read_spec
from posexport.models.block import build_block
from posexport.spec.contract import graph_inputs, resolved
from posexport.spec.spec import Spec

VARIANTS: dict[str, dict[str, Any]] = {
    "relative": {},
    "relative-table": {},
    "shaw": {"causal": True},
    "shaw-sinks": {"causal": True},
    "shaw-keys": {"causal": True},
    "deberta": {},
    "deberta-buckets": {"causal": True},
    "deberta-p2c": {},
    "alibi": {"causal": True},
    "alibi-slopes": {},
    "t5": {},
    "t5-causal": {},
    "kerple": {"causal": True},
    "kerple-power": {},
    "sandwich": {"causal": True},
    "sandwich-sinks": {},
    "fire": {"causal": True},
    "rope": {},
    "rope-gqa-window": {},
    "rope-dynamic": {},
    "xpos": {},
    "temperature": {},
    "learned": {},
    "sinusoidal": {},
    "cope": {},
    "none": {},
    "pattern": {},
}
"""Cases of helpers.py, with options under which graphs shift their logits."""

NEED_START = {"fire", "rope-dynamic", "temperature", "learned", "sinusoidal", "pattern"}
ROTATED = {"rope", "rope-gqa-window", "xpos"}


def drawn(spec: Spec, batch: int, seq: int, past: int, seed: int = 0) -> dict[str, Array]:
    """Inputs of a graph with consecutive positions and rows padded on the left."""
    random = np.random.default_rng(seed)
    sizes = {"batch": batch, "seq": seq, "past_seq": past, "total_seq": past + seq, "max_seq": past + seq + 2}
    arrays: dict[str, Array] = {}
    for name, (shape, _) in graph_inputs(spec).items():
        dims = [resolved(dim, sizes) for dim in shape]
        if name == "position_ids":
            arrays[name] = random.integers(0, 20, dims)
        elif name == "write_indices":
            arrays[name] = random.integers(0, past + 1, dims)
        elif name == "attention_mask":
            padding = random.integers(0, past + seq, (batch, 1))
            arrays[name] = (np.arange(dims[1]) >= padding).astype(np.int64)
        else:
            arrays[name] = random.standard_normal(dims).astype(np.float32)
    return arrays


def opened(spec: Spec, how: str) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """The graph of a form, such as "native" or "contrib --target ort", on ONNX Runtime."""
    form, _, target = how.partition(" --target ")
    return open_ort(export(spec, weights_for(spec), form=form, target=target or "portable"))


def error(spec: Spec, made: dict[str, Array], inputs: dict[str, Array]) -> float:
    """The largest error of any output, relative to its largest value. In buffers, only slots with keys count."""
    wanted, worst = oracles.outputs(spec, as_float64(weights_for(spec)), inputs), 0.0
    assert list(made) == list(wanted)
    for name, array in wanted.items():
        off = np.abs(made[name] - array)
        if spec.kv_cache == "shared" and name.startswith("present"):
            ends = inputs["write_indices"] + next(iter(inputs.values())).shape[1]
            off = off * (np.arange(array.shape[2]) < ends[:, None])[:, None, :, None]
        worst = max(worst, float(off.max() / max(1.0, np.abs(array).max())))
    return worst


def by_torch(spec: Spec, inputs: dict[str, Array]) -> dict[str, Array]:
    """All outputs of the torch block in float64."""
    tensors = (torch.from_numpy(array) for array in inputs.values())
    made = build_block(spec, weights_for(spec), torch.float64)(
        *(t.double() if t.is_floating_point() else t for t in tensors)
    )
    names = ["output", *(f"present_{kind}{number}" for number in _numbers(spec) for kind in ("key", "value"))]
    outputs = made if isinstance(made, tuple) else (made,)
    return dict(zip(names, (t.numpy() for t in outputs), strict=True))


def _numbers(spec: Spec) -> list[str]:
    if spec.kv_cache is None:
        return []
    return [f".{index}" for index in range(spec.layers)] if spec.layers > 1 else [""]


def consecutive(name: str, **over: Any) -> Spec:
    return case(name, positions="consecutive", **{**VARIANTS.get(name, {}), **over})


@pytest.mark.parametrize("name", VARIANTS)
def test_positions_are_an_input_only_where_their_beginning_matters(name: str) -> None:
    for cache in (None, "concat", "shared"):
        spec = consecutive(name, kv_cache=cache)
        inputs = graph_inputs(spec)
        needed = (name in NEED_START and (name != "pattern" or cache is not None)) or (
            name in ROTATED and cache is not None
        )
        assert inputs.get("position_ids") == ((("batch", 1), "int64") if needed else None), (name, cache)


@given(
    name=st.sampled_from([*VARIANTS]),
    seq=st.integers(1, 9),
    past=st.integers(0, 9),
    batch=st.integers(1, 3),
    cache=st.sampled_from([None, "concat", "shared"]),
    padded=st.booleans(),
    window=st.sampled_from([None, 1, 3]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_torch_block_is_the_formula(
    name: str,
    seq: int,
    past: int,
    batch: int,
    cache: str | None,
    padded: bool,
    window: int | None,
    causal: bool,
    seed: int,
) -> None:
    over: dict[str, Any] = {"kv_cache": cache, "padding_mask": padded}
    if name != "pattern":
        over["window"] = window
    if name not in ("xpos", "cope", "t5-causal", "alibi-slopes"):
        over["causal"] = causal
    spec = consecutive(name, **over)
    inputs = drawn(spec, batch, seq, past, seed)
    assert error(spec, by_torch(spec, inputs), inputs) < 1e-10


GRAPHS = [
    (name, form, cache)
    for at, name in enumerate(VARIANTS)
    for form, cache in (
        (("decomposed", "concat"), ("contrib", None)),
        (("native", None), ("decomposed", "concat")),
        (("function", "concat"), ("decomposed", "shared")),
    )[at % 3]
]
SLIDING = ("relative", "shaw", "shaw-sinks", "deberta", "deberta-buckets", "alibi", "t5-causal")
GRAPHS += [
    (name, form, cache)
    for name in SLIDING
    for form, cache in (("contrib --target ort", "shared"), ("native", "shared"), ("contrib --target ort", None))
]


SCANNED = ("relative", "kerple", "sandwich", "fire", "cope", "deberta")
GRAPHS += [(name, "native --target ort", None) for name in SCANNED]


@pytest.mark.sampled(72)
@pytest.mark.parametrize(("name", "form", "cache"), GRAPHS)
def test_graphs_are_the_formula(name: str, form: str, cache: str | None) -> None:
    """Prompts, chunks and steps, with few and with many queries, for which W_r is multiplied in another order."""
    spec = consecutive(name, kv_cache=cache, padding_mask=True)
    run = opened(spec, form)
    rows = (
        1 if form.startswith("contrib") and cache == "shared" else 2
    )  # GroupQueryAttention accepts only one row in a chunk.
    for batch, seq, past in ((2, 5, 0), (3, 1, 6), (rows, 4, 9), (1, 1, 0), (1, 40, 3)):
        inputs = drawn(spec, batch, seq, past)
        if name == "learned":  # The table has 64 rows.
            inputs["position_ids"] = inputs["position_ids"].clip(0, 64 - seq)
        assert error(spec, run(inputs), inputs) < 2e-5, (batch, seq, past)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["decomposed", "native --target ort"])
@pytest.mark.parametrize("name", ["relative", "sandwich"])
def test_more_keys_than_coarse_angles_are_apart(name: str, form: str) -> None:
    """An angle is the sum of a coarse and a fine one, and there are 128 fine angles."""
    spec = consecutive(name, kv_cache="concat")
    run = opened(spec, form)
    for batch, seq, past in ((2, 1, 300), (1, 3, 256), (1, 150, 0)):
        inputs = drawn(spec, batch, seq, past)
        assert error(spec, run(inputs), inputs) < 2e-5, (seq, past)


@given(
    seq=st.integers(1, 8), past=st.integers(0, 8), batch=st.integers(1, 2), causal=st.booleans(), seed=st.integers(0, 9)
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_slides_are_lookups(seq: int, past: int, batch: int, causal: bool, seed: int) -> None:
    """The torch bodies of the operators look up each difference. Later keys count if a block is not causal."""
    random = torch.Generator().manual_seed(seed)
    keys, heads, width = past + seq, 2, 3
    length = keys + 1 if causal else keys + seq
    q, table = (torch.randn(shape, generator=random) for shape in ((batch, seq, heads * width), (heads, length, width)))
    numbers = torch.randn((1, heads, 1, length), generator=random)
    bias, score = (
        custom_ops.difference_bias(numbers, q, causal),
        custom_ops.difference_score(q, table, torch.arange(length).unsqueeze(0), heads, 1.0, causal),
    )
    k, wide = (
        torch.randn(shape, generator=random) for shape in ((batch, keys, heads * width), (heads, 2 * keys + 1, width))
    )
    rows = torch.arange(2 * keys + 1)
    by_key = custom_ops.difference_disentangled_score(q, k, rows, wide, num_heads=heads, scale=1.0)
    for i, j in np.ndindex(seq, keys):
        difference = j - (past + i)
        if difference <= 0 or not causal:
            column = difference + keys
            assert torch.equal(bias[0, :, i, j], numbers[0, :, 0, column])
            wanted = (q[:, i].unflatten(-1, (heads, width)) * table[:, column]).sum(-1)
            torch.testing.assert_close(score[:, :, i, j], wanted)
        wanted = (k[:, j].unflatten(-1, (heads, width)) * (wide[:, keys - difference] - wide[:, -1])).sum(-1)
        torch.testing.assert_close(by_key[:, :, i, j], wanted)


@pytest.mark.parametrize("name", [name for name, cls in ENCODINGS.items() if cls.axes > 1 and not cls.in_order])
def test_grids_refuse_consecutive_positions(name: str) -> None:
    axes = ENCODINGS[name].axes
    parameters = {"head_dim": 12} if axes == 3 else {}
    with pytest.raises(RequestError) as refused:
        small_spec(name, positions="consecutive", **parameters)
    assert str(refused.value) == (
        f"positions is 'consecutive' with {name}, whose tokens stand on a grid of {axes} axes and of any size: only "
        "positions on one axis, or in a window of swin or swinv2, can be consecutive, so drop it."
    )


WINDOWS = ("swin", "swinv2", "swinv2-pretrained")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("how", ["decomposed", "function", "native", "contrib --target ort"])
def test_windows_in_the_order_of_reading_are_the_formula(name: str, how: str) -> None:
    """Whole windows and their first cells, in torch and in graphs without an input of positions."""
    spec, with_positions = case(name, positions="consecutive"), case(name)
    assert list(graph_inputs(spec)) == ["hidden_states"]
    run = opened(spec, how)
    size = spec.encoding.position_limits()[0]
    for batch, seq in ((2, size**2), (1, size**2), (2, 2 * size), (1, 2 * size + 1), (2, 1), (1, size - 1)):
        inputs = drawn(spec, batch, seq, 0)
        cells = np.arange(seq)
        positions = np.broadcast_to(np.stack((cells % size, cells // size), -1), (batch, seq, 2))
        given = {**inputs, "position_ids": positions}
        wanted = oracles.outputs(with_positions, as_float64(weights_for(spec)), given)
        for made, limit in ((by_torch(spec, inputs), 1e-10), (run(inputs), 2e-5)):
            np.testing.assert_allclose(made["output"], wanted["output"], atol=limit, rtol=0)


def test_a_spec_says_so_and_says_nothing_by_default() -> None:
    spec = small_spec("alibi", positions="consecutive")
    assert spec.to_dict()["positions"] == "consecutive"
    assert read_spec(spec.to_dict()) == spec
    plain = attrs.evolve(spec, positions="data")
    assert "positions" not in plain.to_dict()
    assert read_spec(plain.to_dict()) == plain
    with pytest.raises(RequestError, match=r"^unknown positions 'first'"):
        small_spec("alibi", positions="first")
