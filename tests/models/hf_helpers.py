"""Small, randomly initialised models of transformers, with hooks on their attention layers.

A hook on the first projection of a layer records the layer's input, and one on the last projection its output. The
model itself thus computes masks, positions and caches. Everything is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import small_spec
from torch import Tensor

from posexport.models.block import build_block
from posexport.models.weights import weight_shapes
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

transformers: Any = pytest.importorskip("transformers")

BATCH, HIDDEN = 2, 32
BOUND = 1e-5
"""The largest allowed error against transformers, relative to the largest output."""

PLAIN = 100 * BOUND
"""The error that a planted fault must exceed, far above rounding."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Weights = dict[str, Tensor]
Call = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Runs a block: inputs of the spec by name to outputs by name."""


def made(module: Any) -> Any:
    """The module with random weights: large enough that every term matters, small enough for soft attention weights."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            table = "relative_attention_bias" in name or "embed" in name
            width = parameter.shape[-1] if parameter.ndim > 1 and not table else 4 if name.endswith("bias") else 1
            parameter.copy_(torch.randn(parameter.shape, generator=random) * width**-0.5)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.mul_(0.3).add_(1)
    return module.float().eval().requires_grad_(False)


def states(seq: int, width: int = HIDDEN, seed: int = 1) -> Tensor:
    """Standard normal numbers [BATCH, seq, width]."""
    return torch.randn(BATCH, seq, width, generator=torch.Generator().manual_seed(seed))


def renamed(module: Any, names: dict[str, str]) -> Weights:
    """The weights, and biases if present, of a module under the names of a block.

    `names` maps the names of a block to those of the module.
    """
    state = module.state_dict()
    found = {}
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in state:
                found[f"{ours}.{kind}"] = state[f"{theirs}.{kind}"]
    return found


def torch_call(spec: Spec, weights: Weights) -> Call:
    """The torch block in fp32. The weights must have exactly the names of the spec's weights."""
    assert set(weights) == set(weight_shapes(spec))
    block = build_block(spec, weights)

    def call(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        out = block(*(inputs[name] for name in graph_inputs(spec)))
        return dict(zip(graph_outputs(spec), out if isinstance(out, tuple) else (out,), strict=True))

    return call


def error(ours: Tensor, theirs: Tensor, real: Tensor | None = None) -> float:
    """The largest difference relative to the largest output, over queries where `real` [B, S] is not 0."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == torch.float32
    assert bool(torch.isfinite(ours).all())
    assert theirs.abs().max() > 0.1
    apart = (ours - theirs).abs() if real is None else (ours - theirs).abs()[real.bool()]
    return float(apart.max() / theirs.abs().max())


class Watch:
    """Records the input of the projection `first` and the output of the projection `last` at the latest call."""

    def __init__(self, first: Any, last: Any) -> None:
        first.register_forward_hook(self._enter)
        last.register_forward_hook(self._leave)

    def _enter(self, module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        self.entered = args[0].clone()

    def _leave(self, module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        self.left = out.clone()


def _same_names(layer: Any) -> Weights:
    names = {name: name for name in (*ATTENTION, "q_norm", "k_norm")}
    found = renamed(layer, names)
    return {**found, "sinks": layer.sinks} if hasattr(layer, "sinks") else found


def _bloom_weights(layer: Any) -> Weights:
    """Splits Bloom's fused rows: queries, keys and values of head 0, then those of head 1, and so on."""
    fused, heads, width = layer.query_key_value, layer.num_heads, layer.hidden_size
    found = renamed(layer, {"o_proj": "dense"})
    for index, name in enumerate(ATTENTION[:3]):
        found[f"{name}.weight"] = fused.weight.view(heads, 3, -1, width)[:, index].flatten(0, 1)
        found[f"{name}.bias"] = fused.bias.view(heads, 3, -1)[:, index].flatten()
    return found


def _mpt_weights(layer: Any) -> Weights:
    thirds = layer.Wqkv.weight.chunk(3)
    found = {f"{name}.weight": third for name, third in zip(ATTENTION[:3], thirds, strict=True)}
    return {**found, **renamed(layer, {"o_proj": "out_proj"})}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder of transformers: its config, and arguments of `small_spec` for each of its attention layers."""

    model: str
    sizes: dict[str, Any]
    spec: dict[str, Any]
    layers: tuple[dict[str, Any], ...] = ({},)
    path: str = "layers.{}.self_attn"
    ends: tuple[str, str] = ("q_proj", "o_proj")
    weights: Callable[[Any], Weights] = _same_names
    counts_gaps: bool = False
    """True if the model computes distances from indices, so that padding between tokens takes up positions."""
    make: Callable[[Any], Any] | None = None
    """Makes the model from a config, if it is not the class with the name of `model`."""

    @property
    def width(self) -> int:
        return int(self.spec.get("hidden_size", HIDDEN))

    def of_layer(self, index: int = 0, **over: Any) -> dict[str, Any]:
        """Arguments of `small_spec` for one layer; `over` replaces some."""
        return {**self.spec, "causal": True, **self.layers[index], **over}

    def config(self) -> Any:
        return getattr(transformers, f"{self.model}Config")(
            vocab_size=17, num_hidden_layers=len(self.layers), attn_implementation="eager", **self.sizes
        )

    def build(self) -> tuple[Any, list[Any], list[Watch]]:
        """The model, its attention layers, and a Watch for each."""
        model = made((self.make or getattr(transformers, f"{self.model}Model"))(self.config()))
        layers = [model.get_submodule(self.path.format(index)) for index in range(len(self.layers))]
        watches = [Watch(*(layer.get_submodule(end) for end in self.ends)) for layer in layers]
        return model, layers, watches


def _rope(model: str, spec: dict[str, Any], layers: tuple[dict[str, Any], ...] = ({},), **sizes: Any) -> Family:
    """A model with RoPE in the layout half. The config takes shared sizes from `spec`."""
    spec = {"encoding": "rope", "layout": "half", "theta": 10_000.0, "num_kv_heads": 2, **spec}
    common = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": spec["num_kv_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": spec["theta"]},
    }
    if "head_dim" in spec:
        common["head_dim"] = spec["head_dim"]
    return Family(model=model, sizes={**common, **sizes}, spec=spec, layers=layers)


def _bloom(heads: int) -> Family:
    return Family(
        model="Bloom",
        sizes={"hidden_size": 8 * heads, "n_head": heads, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        spec={"encoding": "alibi", "hidden_size": 8 * heads, "num_heads": heads, "bias": list(ATTENTION)},
        path="h.{}.self_attention",
        ends=("query_key_value", "dense"),
        weights=_bloom_weights,
    )


def _mpt(heads: int) -> Family:
    return Family(
        model="Mpt",
        sizes={"d_model": 8 * heads, "n_heads": heads, "max_seq_len": 64},
        spec={"encoding": "alibi", "hidden_size": 8 * heads, "num_heads": heads},
        path="blocks.{}.attn",
        ends=("Wqkv", "out_proj"),
        weights=_mpt_weights,
        counts_gaps=True,
    )


def _t5_decoder(config: Any) -> Any:
    from transformers.models.t5.modeling_t5 import T5Stack

    return T5Stack(config)


def t5_weights(layer: Any) -> Weights:
    found = renamed(layer, dict(zip(ATTENTION, "qkvo", strict=True)))
    if layer.has_relative_attention_bias:
        found["encoding.relative_attention_bias.weight"] = layer.relative_attention_bias.weight
    return found


T5_SIZES = {
    "d_model": HIDDEN,
    "d_kv": 6,
    "d_ff": 48,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
T5_SPEC = {"encoding": "t5", "num_buckets": 8, "max_distance": 10, "head_dim": 6, "scale": 1.0}


FAMILIES: dict[str, Family] = {
    "llama": _rope("Llama", {}),
    "llama-bias": _rope("Llama", {"bias": True, "num_kv_heads": 4}, attention_bias=True),
    "mistral": _rope("Mistral", {"num_kv_heads": 1, "head_dim": 6, "theta": 500.0, "window": 4}, sliding_window=4),
    "qwen2": _rope("Qwen2", {"theta": 1e6, "bias": list(ATTENTION[:3])}),
    "qwen3": _rope("Qwen3", {"head_dim": 12, "qk_norm": True, "norm_eps": 0.05}, rms_norm_eps=0.05),
    "gemma2": _rope(
        "Gemma2",
        {"head_dim": 16, "scale": 24**-0.5, "softcap": 1.5},
        ({"window": 4}, {}),
        sliding_window=4,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.5,
    ),
    "gpt-oss": _rope(
        "GptOss",
        {"head_dim": 16, "bias": True, "sinks": True, "theta": 150_000.0},
        ({"window": 3}, {}),
        sliding_window=3,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "llama4": _rope(
        "Llama4Text",
        {
            **{"layout": "interleaved", "head_dim": 8, "theta": 100.0, "attention_chunk_size": 4},
            **{"qk_norm": True, "qk_norm_type": "l2", "norm_eps": 0.05},
        },
        attention_chunk_size=4,
        rms_norm_eps=0.05,
        intermediate_size_mlp=16,
        num_local_experts=2,
    ),
    "bloom": _bloom(4),
    "bloom-6-heads": _bloom(6),
    "mpt": _mpt(4),
    "mpt-6-heads": _mpt(6),
    "t5": Family(
        model="T5",
        sizes={**T5_SIZES, "is_decoder": True, "is_encoder_decoder": False},
        spec=T5_SPEC,
        path="block.{}.layer.0.SelfAttention",
        ends=("q", "o"),
        weights=t5_weights,
        counts_gaps=True,
        make=_t5_decoder,
    ),
}

LAYERS = [(name, index) for name, family in FAMILIES.items() for index in range(len(family.layers))]


def spec_and_weights(
    name: str, index: int, layer: Any, fields: dict[str, Any], wrong: dict[str, Any] | None = None
) -> tuple[Spec, Weights]:
    """The spec of a layer of a family with `fields`, and its weights.

    `wrong` plants a fault; weights that the faulty spec does not have are dropped.
    """
    family = FAMILIES[name]
    spec, weights = small_spec(**{**family.of_layer(index, **fields), **(wrong or {})}), family.weights(layer)
    return spec, {key: value for key, value in weights.items() if wrong is None or key in weight_shapes(spec)}
