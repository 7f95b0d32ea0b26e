"""Decoders with rotary positions and separate projections: Llama and its descendants.

All are causal, and all except Llama 4 rotate in the `half` layout. The default scale is 1/sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posexport.errors import RequestError
from posexport.models.checkpoints.architecture import (
    CHUNKED,
    QKV,
    SLIDING,
    Architecture,
    Weights,
    causal,
    count,
    full_heads,
    grouped_heads,
    is_local,
    read_renamed,
    under,
    window,
)
from posexport.models.checkpoints.config import Config, Data
from posexport.models.checkpoints.rope import TYPES, Rotary, rope, rope_by_kind
from posexport.models.checkpoints.tensors import Tensors
from posexport.spec.spec import Spec

LAYER = "layers.{}.self_attn"
ALONE = under(LAYER, "model.")
IN_A_PAIR = under(LAYER, "model.", "language_model.", "language_model.model.", "model.language_model.")
"""Where models of text and images store the text model."""


def decoder(
    config: Config,
    size: Data,
    encoding: Rotary | Data,
    *,
    width: int | None = None,
    chunk: int | None = None,
    bias: bool | Sequence[str] | None = None,
) -> Data:
    """Return a decoder's layer with a window of `width` tokens.

    `encoding` is its encoding, or how the config writes RoPE in the half layout. If `bias` is None, the key
    `attention_bias` is read.
    """
    return {
        **size,
        **causal(config, width, chunk),
        "bias": config.flag("attention_bias", default=False) if bias is None else bias,
        "encoding": rope(config, size["head_dim"], encoding) if isinstance(encoding, Rotary) else encoding,
    }


def llama(config: Config, layer: int) -> Data:
    return decoder(config, grouped_heads(config, 4096, 32), Rotary(length=2048))


def mistral(config: Config, layer: int) -> Data:
    config.must("attention_bias", False)
    width = window(config, config.optional_integer("sliding_window", default=4096, at_least=0))
    return decoder(config, grouped_heads(config, 4096, 32, kv=8), Rotary(length=131_072), width=width)


def _qwen_window(config: Config, layer: int, first: int) -> int | None:
    """Return the window of a Qwen layer. With `use_sliding_window`, layers from `max_window_layers` on have one."""
    used = config.flag("use_sliding_window", default=False)
    width = config.optional_integer("sliding_window", default=4096, at_least=0)
    late = layer >= config.integer("max_window_layers", default=first, at_least=0)
    slides = is_local(config, layer, used and width is not None and late)
    return _used_window(config, width, slides, used)


def _used_window(config: Config, width: int | None, slides: bool, used: bool) -> int | None:
    """Return `window` for a model that has a window only if it is `used`."""
    if slides and (width is None or not used):
        raise RequestError(
            f"{config.where}: layer_types has {SLIDING} without use_sliding_window: give a sliding_window."
        )
    return window(config, width, slides)


def qwen2(config: Config, layer: int) -> Data:
    config.must("use_mrope", False)
    size, width = grouped_heads(config, 4096, 32, kv=32), _qwen_window(config, layer, 28)
    return decoder(config, size, Rotary(length=32_768), width=width, bias=QKV)


def _head_norms(config: Config, epsilon: float = 1e-6) -> Data:
    return {"qk_norm": True, "norm_eps": config.number("rms_norm_eps", default=epsilon)}


def qwen3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32, kv=32, head_dim=128)
    width = _qwen_window(config, layer, 28)
    return {**decoder(config, size, Rotary(length=32_768), width=width), **_head_norms(config)}


def _mrope(config: Config, head_dim: int, rotary: Rotary, section: list[int], interleaved: bool) -> Data:
    parameters, table = rotary.read(config, head_dim), rotary.table(config)
    table.must("mrope_interleaved", interleaved)
    section = table.integers("mrope_section", default=section) or section
    return {"name": "mrope", "layout": "half", "mrope_section": section, "mrope_interleaved": interleaved, **parameters}


MROPE: Mapping[str, str | None] = {**TYPES, "mrope": None}


def qwen2_vl(config: Config, layer: int) -> Data:
    width = full_heads(config, 8192, 64)["head_dim"]
    config.must("head_dim", None, width)
    rotary = Rotary(length=32_768, theta=1e6, types=MROPE)
    encoding = _mrope(config, width, rotary, [16, 24, 24], interleaved=False)
    size = grouped_heads(config, 8192, 64, kv=8)
    return decoder(config, size, encoding, width=_qwen_window(config, layer, 80), bias=QKV)


def qwen3_vl(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 4096, 32, kv=32, head_dim=128)
    rotary = Rotary(length=128_000, theta=5e5, types=MROPE)
    encoding = _mrope(config, size["head_dim"], rotary, [24, 20, 20], interleaved=True)
    return {**decoder(config, size, encoding), **_head_norms(config)}


def gemma(config: Config, layer: int) -> Data:
    config.must("use_bidirectional_attention", None, False)
    return decoder(config, grouped_heads(config, 3072, 16, kv=16, head_dim=256), Rotary(length=8192))


def _gemma_scale(config: Config) -> float:
    scalar = config.number("query_pre_attn_scalar", default=256)
    if scalar <= 0:
        raise config.wrong("query_pre_attn_scalar", "above 0")
    return float(scalar**-0.5)


def gemma2(config: Config, layer: int) -> Data:
    config.must("use_bidirectional_attention", None, False)
    width = config.optional_integer("sliding_window", "sliding_window_size", default=4096, at_least=0)
    size = grouped_heads(config, 2304, 8, kv=4, head_dim=256)
    slides = is_local(config, layer, layer % 2 == 0)
    return {
        **decoder(config, size, Rotary(length=8192), width=window(config, width, slides)),
        "scale": _gemma_scale(config),
        "softcap": config.optional_number("attn_logit_softcapping", default=50.0),
    }


def gemma3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2304, 8, kv=4, head_dim=256)
    config.must("attn_logit_softcapping", None)  # transformers ignores it
    every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    slides = is_local(config, layer, (layer + 1) % every != 0)
    width = config.integer("sliding_window", default=4096, at_least=0)
    both_ways = config.flag("use_bidirectional_attention", default=False)
    if both_ways:  # EmbeddingGemma: sliding_window counts both sides of the query
        width = width // 2 + 1
    full = Rotary(length=131_072, theta=1e6)
    local = Rotary(length=131_072, theta_names=("rope_local_base_freq",))
    encoding = rope_by_kind(config, size["head_dim"], slides, full, local, scaled_sliding=False)
    layer_data = decoder(config, size, encoding, width=window(config, width, slides))
    return {
        **layer_data,
        "causal": layer_data["causal"] and not both_ways,
        **_head_norms(config),
        "scale": _gemma_scale(config),
    }


def gemma3_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """Read the weights of Gemma 3. Its norms multiply by 1 + weight."""
    weights = read_renamed(tensors, path, spec, {})
    return {name: tensor + 1 if "_norm." in name else tensor for name, tensor in weights.items()}


GPT_OSS_TABLE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS_TABLE |= {"original_max_position_embeddings": 4096}
GPT_OSS_ROPE = Rotary(length=131_072, theta=150_000.0, missing=GPT_OSS_TABLE)


def gpt_oss(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2880, 64, kv=8, head_dim=64)
    width = config.optional_integer("sliding_window", default=128, at_least=0)
    width = window(config, width, is_local(config, layer, layer % 2 == 0))
    bias = config.flag("attention_bias", default=True)
    return {**decoder(config, size, GPT_OSS_ROPE, width=width, bias=bias), "sinks": True}


def _rotates(config: Config, layer: int) -> bool:
    """Whether a layer of Llama 4 or SmolLM3 has RoPE. 1 in `no_rope_layers` means that it has."""
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
    chunk = config.optional_integer("attention_chunk_size", default=8192)
    tuned = config.flag("attn_temperature_tuning", default=True)
    heat = {
        "name": "temperature",
        "floor_scale": config.integer("floor_scale", default=8192),
        "attn_scale": config.number("attn_scale", default=0.1),
    }
    rotary = rope(config, size["head_dim"], Rotary(length=131_072, theta=5e5), layout="interleaved")
    norms = {**_head_norms(config, 1e-5), "qk_norm_type": "l2"}
    encoding = rotary if rotates else heat if tuned else {"name": "none"}
    local = is_local(config, layer, rotates, CHUNKED)
    layer_data = decoder(config, size, encoding, chunk=chunk if local else None)
    return {**layer_data, **(norms if rotates and normed else {})}


def smollm3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 2048, 16, kv=4)
    rotates, used = _rotates(config, layer), config.flag("use_sliding_window", default=False)
    width = config.optional_integer("sliding_window", at_least=0)
    slides = is_local(config, layer, used and width is not None and not rotates)
    encoding = rope(config, size["head_dim"], Rotary(length=32_768, theta=2e6))
    width = _used_window(config, width, slides, used)
    return decoder(config, size, encoding if rotates else {"name": "none"}, width=width)


ARCHITECTURES = {
    "llama": Architecture(count(32), llama, ALONE),
    "mistral": Architecture(count(32), mistral, ALONE),
    "qwen2": Architecture(count(32), qwen2, ALONE),
    "qwen3": Architecture(count(32), qwen3, ALONE),
    "qwen2_vl_text": Architecture(count(80), qwen2_vl, IN_A_PAIR),
    "qwen2_5_vl_text": Architecture(count(80), qwen2_vl, IN_A_PAIR),
    "qwen3_vl_text": Architecture(count(32), qwen3_vl, IN_A_PAIR),
    "gemma": Architecture(count(28), gemma, ALONE),
    "gemma2": Architecture(count(26), gemma2, ALONE),
    "gemma3_text": Architecture(count(26), gemma3, IN_A_PAIR, gemma3_weights),
    "gpt_oss": Architecture(count(36), gpt_oss, ALONE),
    "llama4_text": Architecture(count(48), llama4, IN_A_PAIR),
    "smollm3": Architecture(count(36), smollm3, ALONE),
}
