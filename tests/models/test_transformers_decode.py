"""Blocks with caches against transformers' decoders with caches: a prefill, single tokens and a chunk, all in fp32.

The model makes masks, positions and caches (hf_helpers). The block runs in torch, and its exported forms run in ONNX
Runtime. The comparison leaves out queries that are padding, because nothing reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import open_ort, small_spec
from hf_helpers import (
    ATTENTION,
    BATCH,
    BOUND,
    FAMILIES,
    LAYERS,
    PLAIN,
    Call,
    Watch,
    Weights,
    error,
    made,
    renamed,
    spec_and_weights,
    states,
    torch_call,
    transformers,
)
from torch import Tensor

from posexport.export import export, support
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import CACHES, Spec

STEPS = tuple(pairwise((0, 6, 7, 8, 11, 12)))
"""The start and end of each call: a prefill, two single tokens, a chunk, a single token."""

TOTAL = STEPS[-1][1]
MASKS = {
    "whole": None,
    "left": [[1] * TOTAL, [0, 0, 0] + [1] * (TOTAL - 3)],
    "gaps": [[0] + [1] * (TOTAL - 1), [0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1]],
    "chunk": [[1] * TOTAL, [1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]],
}
"""Which tokens are padding: none, some on the left, some in between too, or the first of a chunk after cached ones."""


@dataclass(frozen=True)
class Decoded:
    """A run of a model: its attention layers, and the input and output of each layer by step."""

    layers: list[Any]
    entered: list[list[Tensor]]
    left: list[list[Tensor]]
    caches: list[tuple[Tensor, Tensor]]
    positions: Tensor
    mask: Tensor | None


def places(mask: str) -> tuple[Tensor, Tensor | None]:
    """Positions and mask [B, T]. With a mask, positions count tokens and are 0 at padding, as in `generate`."""
    if MASKS[mask] is None:
        return torch.arange(TOTAL) + torch.tensor([[0], [40]]), None
    kept = torch.tensor(MASKS[mask])
    return (kept.cumsum(1) - 1) * kept, kept


@functools.cache
def decoded(name: str, mask: str) -> Decoded:
    family = FAMILIES[name]
    model, layers, watches = family.build()
    positions, kept = places(mask)
    x, cache = states(TOTAL, family.width), transformers.DynamicCache(config=model.config)
    entered: list[list[Tensor]] = [[] for _ in layers]
    left: list[list[Tensor]] = [[] for _ in layers]
    for start, end in STEPS:
        model(
            inputs_embeds=x[:, start:end],
            attention_mask=None if kept is None else kept[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        for index, watch in enumerate(watches):
            entered[index].append(watch.entered)
            left[index].append(watch.left)
    caches = [(layer.keys, layer.values) for layer in cache.layers]
    return Decoded(layers, entered, left, caches, positions, kept)


def empty(spec: Spec) -> Tensor:
    """A cache before the first token: empty, or a buffer with values that must not be visible."""
    shape = (BATCH, spec.num_kv_heads, TOTAL + 3 if spec.kv_cache == "shared" else 0, spec.head_dim)
    return torch.full(shape, 3.0)


def replay(
    call: Call, spec: Spec, entered: list[Tensor], positions: Tensor, mask: Tensor | None
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """The block's outputs, step by step, and its caches after the last."""
    given = {"past_key": empty(spec), "past_value": empty(spec)}
    outputs = []
    for (start, end), x in zip(STEPS, entered, strict=True):
        given |= {"hidden_states": x, "position_ids": positions[:, start:end]}
        if mask is not None:
            shared = torch.nn.functional.pad(mask, (0, 3), value=1)  # Slots after the last token do not contain keys.
            given["attention_mask"] = shared if spec.kv_cache == "shared" else mask[:, :end]
        if spec.kv_cache == "shared":
            given["write_indices"] = torch.full((BATCH,), start)
        out = call({name: given[name] for name in graph_inputs(spec)})
        given |= {"past_key": out["present_key"], "past_value": out["present_value"]}
        outputs.append(out["output"])
    return outputs, (given["past_key"], given["past_value"])


def errors(outputs: list[Tensor], left: list[Tensor], mask: Tensor | None) -> list[float]:
    """The error of each step over its tokens."""
    kept = torch.ones(BATCH, TOTAL) if mask is None else mask
    return [
        error(ours, theirs, kept[:, start:end]) for ours, theirs, (start, end) in zip(outputs, left, STEPS, strict=True)
    ]


def cache_error(caches: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> float:
    """The error of cached keys and values. With a window, transformers drops old ones and posexport keeps all."""
    return max(error(own[:, :, :TOTAL][:, :, -kept.shape[2] :], kept) for own, kept in zip(caches, theirs, strict=True))


def _masked_layers() -> Iterator[Any]:
    for name, index in LAYERS:
        for mask in MASKS:
            if mask in ("gaps", "chunk") and FAMILIES[name].counts_gaps:
                continue  # A block never counts gaps.
            yield pytest.param(name, index, mask, id=f"{name}-{index}-{mask}")


@pytest.mark.parametrize("kv_cache", CACHES)
@pytest.mark.parametrize(("name", "index", "mask"), list(_masked_layers()))
def test_decode(name: str, index: int, mask: str, kv_cache: str) -> None:
    run = decoded(name, mask)
    over = {"kv_cache": kv_cache, "padding_mask": run.mask is not None}
    spec, weights = spec_and_weights(name, index, run.layers[index], fields=over)
    outputs, caches = replay(torch_call(spec, weights), spec, run.entered[index], run.positions, run.mask)
    assert max(errors(outputs, run.left[index], run.mask)) <= BOUND
    assert cache_error(caches, run.caches[index]) <= BOUND


def test_the_cache_of_a_window_may_forget() -> None:
    """transformers keeps window - 1 keys of Mistral. The block gives the same results from these as from all keys."""
    run = decoded("mistral", "whole")
    spec, weights = spec_and_weights("mistral", 0, run.layers[0], fields={"kv_cache": "concat"})
    keys, values = run.caches[0]
    assert spec.window is not None and keys.shape[2] == spec.window - 1 < TOTAL
    call, x = torch_call(spec, weights), states(2, seed=5)
    _, whole = replay(call, spec, run.entered[0], run.positions, None)
    at = run.positions[:, -1:] + torch.tensor([[1, 2]])
    outs = [
        call({"hidden_states": x, "position_ids": at, "past_key": past[0], "past_value": past[1]})["output"]
        for past in ((keys, values), whole, (keys[:, :, 1:], values[:, :, 1:]))
    ]
    assert error(outs[0], outs[1]) <= BOUND
    assert error(outs[2], outs[1]) > PLAIN


@pytest.mark.parametrize("kv_cache", CACHES)
def test_the_temperature_of_llama_4_goes_by_position_ids(kv_cache: str) -> None:
    """transformers counts cache columns, including padding; with these as position_ids, the block gives the same.

    With positions that count tokens, padded rows give the same results as without padding.
    """
    config = FAMILIES["llama4"].config()
    config.no_rope_layers, config.layer_types = [0], ["full_attention"]
    config.floor_scale, config.attn_scale = 3, 2.0
    model = made(transformers.Llama4TextModel(config))
    layer, (counted, kept) = model.layers[0].self_attn, places("left")
    assert kept is not None
    watch, cache, entered, left = Watch(layer.q_proj, layer.o_proj), transformers.DynamicCache(config=config), [], []
    x = states(TOTAL)
    x[1, 3:] = x[0, :-3]  # The second row is the first after three tokens of padding.
    for start, end in STEPS:
        given = {"attention_mask": kept[:, :end], "position_ids": counted[:, start:end], "past_key_values": cache}
        model(inputs_embeds=x[:, start:end], use_cache=True, **given)
        entered.append(watch.entered)
        left.append(watch.left)
    over = {"floor_scale": 3, "attn_scale": 2.0, "kv_cache": kv_cache, "padding_mask": True}
    spec = small_spec("temperature", num_kv_heads=2, causal=True, **over)
    call = torch_call(spec, renamed(layer, {name: name for name in ATTENTION}))
    columns, _ = replay(call, spec, entered, torch.arange(TOTAL).expand(BATCH, TOTAL), kept)
    assert max(errors(columns, left, kept)) <= BOUND
    tokens, _ = replay(call, spec, entered, counted, kept)
    assert max(errors(tokens, left, kept)) > PLAIN
    whole = torch.cat(tokens, 1)
    assert torch.allclose(whole[1, 3:], whole[0, :-3], atol=1e-5)


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"layout": "interleaved"}),
    ("llama", {"theta": 500.0}),
    ("llama-bias", {"bias": False}),
    ("mistral", {"window": 3}),
    ("mistral", {"window": 5}),
    ("mistral", {"window": None}),
    ("qwen2", {"bias": ["q_proj", "k_proj"]}),
    ("qwen3", {"qk_norm": False, "norm_eps": None}),
    ("qwen3", {"norm_eps": 1e-6}),
    ("gemma2", {"softcap": None}),
    ("gemma2", {"scale": None}),
    ("gemma2", {"window": 3}),
    ("gemma2", {"window": 5}),
    ("gpt-oss", {"sinks": False}),
    ("gpt-oss", {"window": 2}),
    ("gpt-oss", {"window": 4}),
    ("llama4", {"attention_chunk_size": 5}),
    ("llama4", {"attention_chunk_size": None}),
    ("bloom", {"encoding": "none"}),
    ("bloom-6-heads", {"bias": ["q_proj", "k_proj", "v_proj"]}),
    ("mpt-6-heads", {"encoding": "none"}),
    ("t5", {"scale": None}),
    ("t5", {"max_distance": 5}),
    *((name, {"causal": False}) for name in ("llama", "bloom", "mpt", "gpt-oss", "t5")),
]
"""Faults in the spec of layer 0 of a family."""


@pytest.mark.parametrize(("name", "wrong"), FAULTS, ids=str)
def test_a_wrong_spec_is_noticed(name: str, wrong: dict[str, Any]) -> None:
    run = decoded(name, "whole")
    spec, weights = spec_and_weights(name, 0, run.layers[0], fields={"kv_cache": "concat"}, wrong=wrong)
    outputs, _ = replay(torch_call(spec, weights), spec, run.entered[0], run.positions, run.mask)
    found = errors(outputs, run.left[0], None)
    assert found[0] > PLAIN
    assert max(found[1:]) > PLAIN


def zeroed(weights: Weights) -> Weights:
    return {**weights, "sinks": torch.zeros_like(weights["sinks"])}


def heads_moved(weights: Weights) -> Weights:
    return {**weights, "k_proj.weight": weights["k_proj.weight"].roll(8, 0)}


@pytest.mark.parametrize(("name", "spoil"), [("gpt-oss", zeroed), ("llama", heads_moved), ("bloom", heads_moved)])
def test_wrong_weights_are_noticed(name: str, spoil: Any) -> None:
    run = decoded(name, "whole")
    spec, weights = spec_and_weights(name, 0, run.layers[0], fields={"kv_cache": "concat"})
    outputs, _ = replay(torch_call(spec, spoil(weights)), spec, run.entered[0], run.positions, run.mask)
    assert min(errors(outputs, run.left[0], None)) > PLAIN


@pytest.mark.parametrize(
    ("name", "mask", "wrong"),
    [
        ("llama", "left", "mask"),
        ("bloom", "gaps", "mask"),
        ("gpt-oss", "left", "mask"),
        ("llama", "left", "positions"),
        ("bloom", "gaps", "positions"),
    ],
)
def test_wrong_inputs_are_noticed(name: str, mask: str, wrong: str) -> None:
    """The fault is a mask of ones, or positions that count the padding."""
    run = decoded(name, mask)
    assert run.mask is not None
    spec, weights = spec_and_weights(name, 0, run.layers[0], fields={"kv_cache": "concat", "padding_mask": True})
    given = torch.ones_like(run.mask) if wrong == "mask" else run.mask
    counted = torch.arange(TOTAL).expand(BATCH, TOTAL) + (torch.arange(TOTAL) > 6) * 3  # with a gap after token 6
    outputs, _ = replay(
        torch_call(spec, weights), spec, run.entered[0], counted if wrong == "positions" else run.positions, given
    )
    assert max(errors(outputs, run.left[0], run.mask)) > PLAIN


GRAPHS = [
    *(("llama", form, "concat", padded) for form in ("decomposed", "native", "contrib") for padded in (True, False)),
    *(("llama", form, "shared", True) for form in ("native", "contrib")),
    *(("gemma2", form, "concat", True) for form in ("decomposed", "native", "contrib")),
    *(("gpt-oss", form, "concat", True) for form in ("decomposed", "native", "contrib")),
    *((name, "contrib", "shared", True) for name in ("gemma2", "gpt-oss")),
    *(("llama4", form, "concat", True) for form in ("native", "contrib", "decomposed")),
    *(("llama4", form, "shared", True) for form in ("contrib", "native")),
]
GRAPHS = [graph if at % 10 == 0 else pytest.param(*graph, marks=pytest.mark.slow) for at, graph in enumerate(GRAPHS)]


def ort_call(spec: Spec, weights: Weights, form: str) -> Call:
    """The exported form on ONNX Runtime."""
    target = "portable" if form == "decomposed" else "ort"
    run = open_ort(export(spec, weights, form=form, target=target))

    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        out = run({name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in out.items()}

    def row_by_row(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs each row alone: GroupQueryAttention accepts a chunk after cached keys only for batch 1."""
        if inputs["hidden_states"].shape[1] == 1 or int(inputs["write_indices"].max()) == 0:
            return call(inputs)
        rows = [call({name: value[row : row + 1] for name, value in inputs.items()}) for row in range(BATCH)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    return row_by_row if form == "contrib" and spec.kv_cache == "shared" else call


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "form", "kv_cache", "padded"), GRAPHS)
def test_decode_of_exported_forms(name: str, form: str, kv_cache: str, padded: bool) -> None:
    fields = {"kv_cache": kv_cache, "padding_mask": padded}
    spec, weights = spec_and_weights(name, 0, decoded(name, "whole").layers[0], fields=fields)
    call = ort_call(spec, weights, form)
    for mask in ("whole", "left", "gaps") if padded else ("whole",):
        run = decoded(name, mask)
        kept = torch.ones_like(run.positions) if run.mask is None else run.mask
        outputs, caches = replay(call, spec, run.entered[0], run.positions, kept)
        assert max(errors(outputs, run.left[0], kept)) <= BOUND
        assert cache_error(caches, run.caches[0]) <= BOUND


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "form", "wrong"),
    [
        ("llama", "native", {"layout": "interleaved"}),
        ("gemma2", "native", {"softcap": 3.0}),
        ("gpt-oss", "contrib", {"window": 4}),
        ("gpt-oss", "decomposed", {"sinks": False}),
    ],
)
def test_a_wrong_graph_is_noticed(name: str, form: str, wrong: dict[str, Any]) -> None:
    run = decoded(name, "whole")
    fields = {"kv_cache": "concat", "padding_mask": True}
    spec, weights = spec_and_weights(name, 0, run.layers[0], fields=fields, wrong=wrong)
    outputs, _ = replay(
        ort_call(spec, weights, form), spec, run.entered[0], run.positions, torch.ones_like(run.positions)
    )
    found = errors(outputs, run.left[0], None)
    assert found[0] > PLAIN
    assert max(found[1:]) > PLAIN


def test_no_form_is_refused() -> None:
    """These families have every form for ONNX Runtime."""
    refused = set()
    for name in ("llama", "gemma2", "gpt-oss"):
        for form in ("decomposed", "native", "contrib"):
            for kv_cache in CACHES:
                spec = small_spec(**FAMILIES[name].of_layer(0, kv_cache=kv_cache, padding_mask=True))
                if support.unsupported_reason(spec, form, "ort") is not None:
                    refused.add((name, form, kv_cache))
    assert refused == set()
