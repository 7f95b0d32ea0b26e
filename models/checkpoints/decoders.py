"""Decoders with rotary positions and separate projections: Llama and its descendants.

All are causal, and all except Llama 4 rotate in the `half` layout. The default scale is 1/sqrt(head_dim).
"""

from __future__ import annotations

from posexport.errors import RequestError
from posexport.models.checkpoints.architecture import (
    CHUNKED,
    FULL,
    SLIDING,
    Architecture,
    Data,
    Weights,
    causal,
    count,
    full_heads,
    full_sizes,
    grouped_heads,
    kind_of,
    read_renamed,
    renamed,
    under,
)
from posexport.models.checkpoints.config import Config
from posexport.models.checkpoints.rope import TYPES, ByKind, Rotary
from posexport.models.checkpoints.tensors import Tensors
from posexport.spec.spec import Spec

LAYER = "layers.{}.self_attn"
ALONE = under(LAYER, "model.")
IN_A_PAIR = under(LAYER, "model.", "language_model.", "language_model.model.", "model.language_model.")
"""Where models of text and images store the text model."""


def rope(config: Config, head_dim: int, rotary: Rotary | None = None) -> Data:
    """RoPE in the half layout."""
    return {"name": "rope", "layout": "half", **(rotary or Rotary()).read(config, head_dim)}


def llama(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32)
    bias = config.flag("attention_bias", default=False)
    return {**size, **causal(config), "bias": bias, "encoding": rope(config, size["head_dim"])}


def mistral(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32, kv=8)
    window = config.optional_integer("sliding_window", default=4096)
    config.must("attention_bias", False)
    return {**size, **causal(config, window), "encoding": rope(config, size["head_dim"])}


def _qwen_window(config: Config, layer: int, first: int) -> int | None:
    """The window of one of Qwen's layers: with `use_sliding_window`, those from `max_window_layers` on have one."""
    used = config.flag("use_sliding_window", default=False)
    width = config.optional_integer("sliding_window", default=4096)
    slides = layer >= config.integer("max_window_layers", default=first, at_least=0)
    window = width if used else None
    kind = kind_of(config, layer, (FULL, SLIDING), SLIDING if window and slides else FULL)
    return window if kind == SLIDING else None


QKV = ["q_proj", "k_proj", "v_proj"]


def qwen2(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32, kv=32)
    config.must("use_mrope", False)
    window = _qwen_window(config, layer, 28)
    return {**size, **causal(config, window), "bias": QKV, "encoding": rope(config, size["head_dim"])}


def _head_norms(config: Config, epsilon: float = 1e-6) -> Data:
    return {"qk_norm": True, "norm_eps": config.number("rms_norm_eps", default=epsilon)}


def qwen3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32, kv=32, head_dim=128)
    window, bias = _qwen_window(config, layer, 28), config.flag("attention_bias", default=False)
    seen = {**causal(config, window), **_head_norms(config)}
    return {**size, **seen, "bias": bias, "encoding": rope(config, size["head_dim"])}


def _mrope(config: Config, head_dim: int, theta: float, section: list[int], interleaved: bool) -> Data:
    rotary = Rotary(theta=theta, types={**TYPES, "mrope": None})
    parameters, table = rotary.read(config, head_dim), rotary.table(config)
    table.must("mrope_interleaved", interleaved)
    section = table.integers("mrope_section", default=section) or section
    return {"name": "mrope", "layout": "half", "mrope_section": section, "mrope_interleaved": interleaved, **parameters}


def qwen2_vl(config: Config, layer: int) -> Data:
    size = full_sizes(config, 8192, 64, kv=8)
    width = full_heads(config, 8192, 64)["head_dim"]
    config.must("head_dim", None, width)
    window = _qwen_window(config, layer, 80)
    encoding = _mrope(config, width, 1e6, [16, 24, 24], interleaved=False)
    return {**size, "head_dim": width, **causal(config, window), "bias": QKV, "encoding": encoding}


def qwen3_vl(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32, kv=32, head_dim=128)
    bias = config.flag("attention_bias", default=False)
    encoding = _mrope(config, size["head_dim"], 5e5, [24, 20, 20], interleaved=True)
    return {**size, **causal(config), **_head_norms(config), "bias": bias, "encoding": encoding}


def gemma(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 3072, 16, kv=16, head_dim=256)
    config.must("use_bidirectional_attention", None, False)
    bias = config.flag("attention_bias", default=False)
    return {**size, **causal(config), "bias": bias, "encoding": rope(config, size["head_dim"])}


def _gemma_scale(config: Config) -> float:
    scalar = config.number("query_pre_attn_scalar", default=256)
    if scalar <= 0:
        raise config.wrong("query_pre_attn_scalar", "above 0")
    return float(scalar**-0.5)


def gemma2(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2304, 8, kv=4, head_dim=256)
    config.must("use_bidirectional_attention", None, False)
    width = config.optional_integer("sliding_window", "sliding_window_size", default=4096)
    kind = kind_of(config, layer, (FULL, SLIDING), FULL if layer % 2 else SLIDING)
    return {
        **size,
        **causal(config, width if kind == SLIDING else None),
        "bias": config.flag("attention_bias", default=False),
        "scale": _gemma_scale(config),
        "softcap": config.optional_number("attn_logit_softcapping", default=50.0),
        "encoding": rope(config, size["head_dim"]),
    }


GEMMA3_ROPE = ByKind(
    kinds={FULL: Rotary(theta=1e6), SLIDING: Rotary(theta=1e4, theta_names=("rope_local_base_freq",))}, scaled=(FULL,)
)


def gemma3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2304, 8, kv=4, head_dim=256)
    config.must("attn_logit_softcapping", None)  # transformers ignores one
    every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kind = kind_of(config, layer, (FULL, SLIDING), SLIDING if (layer + 1) % every else FULL)
    width = config.integer("sliding_window", default=4096)
    seen = causal(config, width if kind == SLIDING else None)
    if config.flag("use_bidirectional_attention", default=False):
        # EmbeddingGemma: sliding_window counts both sides of the query
        seen = {"causal": False, "window": width // 2 + 1 if kind == SLIDING else None}
    return {
        **size,
        **seen,
        **_head_norms(config),
        "bias": config.flag("attention_bias", default=False),
        "scale": _gemma_scale(config),
        "encoding": {"name": "rope", "layout": "half", **GEMMA3_ROPE.read(config, size["head_dim"], kind)},
    }


def gemma3_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """Gemma's norms multiply by 1 + weight."""
    weights = read_renamed(tensors, path, spec, {})
    return {name: tensor + 1 if "_norm." in name else tensor for name, tensor in weights.items()}


GPT_OSS_ROPE = Rotary(
    theta=150_000.0,
    missing={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)


def gpt_oss(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2880, 64, kv=8, head_dim=64)
    width = config.optional_integer("sliding_window", default=128)
    kind = kind_of(config, layer, (FULL, SLIDING), FULL if layer % 2 else SLIDING)
    return {
        **size,
        **causal(config, width if kind == SLIDING else None),
        "bias": config.flag("attention_bias", default=True),
        "sinks": True,
        "encoding": rope(config, size["head_dim"], GPT_OSS_ROPE),
    }


def _rotates(config: Config, layer: int) -> bool:
    """Whether a layer of Llama 4 or SmolLM3 has RoPE; 1 in `no_rope_layers` means that it has."""
    every = config.integer("no_rope_layer_interval", default=4)
    listed = config.integers("no_rope_layers")
    if not listed:
        return bool((layer + 1) % every)
    if len(listed) <= layer:
        raise config.wrong("no_rope_layers", "a list of 1 (RoPE) and 0, one for each layer")
    return bool(listed[layer])


def llama4(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 5120, 40, kv=8, head_dim=128)
    rotates, normed = _rotates(config, layer), config.flag("use_qk_norm", default=True)
    kind = kind_of(config, layer, (FULL, CHUNKED), CHUNKED if rotates else FULL)
    chunk = config.optional_integer("attention_chunk_size", default=8192)
    tuned = config.flag("attn_temperature_tuning", default=True)
    heat = {
        "name": "temperature",
        "floor_scale": config.integer("floor_scale", default=8192),
        "attn_scale": config.number("attn_scale", default=0.1),
    }
    rotary = {**rope(config, size["head_dim"], Rotary(theta=5e5)), "layout": "interleaved"}
    norms = {**_head_norms(config, 1e-5), "qk_norm_type": "l2"}
    return {
        **size,
        **causal(config, chunk=chunk if kind == CHUNKED else None),
        "bias": config.flag("attention_bias", default=False),
        **(norms if rotates and normed else {}),
        "encoding": rotary if rotates else heat if tuned else {"name": "none"},
    }


def smollm3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2048, 16, kv=4)
    rotates, used = _rotates(config, layer), config.flag("use_sliding_window", default=False)
    width = config.optional_integer("sliding_window")
    kind = kind_of(config, layer, (FULL, SLIDING), SLIDING if used and width and not rotates else FULL)
    if kind == SLIDING and not (used and width):
        raise RequestError(
            f"{config.where}: layer_types has {SLIDING} without use_sliding_window: give a sliding_window."
        )
    encoding = rope(config, size["head_dim"], Rotary(theta=2e6))
    return {
        **size,
        **causal(config, width if kind == SLIDING else None),
        "bias": config.flag("attention_bias", default=False),
        "encoding": encoding if rotates else {"name": "none"},
    }


_EXPERTS = "num_local_experts num_experts_per_tok output_router_logits router_aux_loss_coef router_jitter_noise"

ARCHITECTURES = {
    "llama": Architecture(layers=count(32), spec=llama, paths=ALONE, weights=renamed(), known="mlp_bias"),
    "mistral": Architecture(layers=count(32), spec=mistral, paths=ALONE, weights=renamed()),
    "qwen2": Architecture(layers=count(32), spec=qwen2, paths=ALONE, weights=renamed()),
    "qwen3": Architecture(layers=count(32), spec=qwen3, paths=ALONE, weights=renamed()),
    "qwen2_vl_text": Architecture(layers=count(80), spec=qwen2_vl, paths=IN_A_PAIR, weights=renamed()),
    "qwen2_5_vl_text": Architecture(layers=count(80), spec=qwen2_vl, paths=IN_A_PAIR, weights=renamed()),
    "qwen3_vl_text": Architecture(layers=count(32), spec=qwen3_vl, paths=IN_A_PAIR, weights=renamed()),
    "gemma": Architecture(layers=count(28), spec=gemma, paths=ALONE, weights=renamed()),
    "gemma2": Architecture(
        layers=count(26), spec=gemma2, paths=ALONE, weights=renamed(), known="final_logit_softcapping"
    ),
    "gemma3_text": Architecture(
        layers=count(26), spec=gemma3, paths=IN_A_PAIR, weights=gemma3_weights, known="final_logit_softcapping"
    ),
    "gpt_oss": Architecture(
        layers=count(36),
        spec=gpt_oss,
        paths=ALONE,
        weights=renamed(),
        known=f"{_EXPERTS} experts_per_token initial_context_length swiglu_alpha swiglu_limit",
    ),
    "llama4_text": Architecture(
        layers=count(48),
        spec=llama4,
        paths=IN_A_PAIR,
        weights=renamed(),
        known=f"{_EXPERTS} intermediate_size_mlp interleave_moe_layer_step moe_layers for_llm_compressor",
    ),
    "smollm3": Architecture(
        layers=count(36), spec=smollm3, paths=ALONE, weights=renamed(), known="mlp_bias max_window_layers"
    ),
}
