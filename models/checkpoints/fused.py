"""Decoders with one fused projection for queries, keys and values: Phi-3, GPT-NeoX, Falcon, BLOOM, MPT; and GPT-J.

All are causal. The default scale is 1/sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from posexport.models.biases import alibi_slopes
from posexport.models.checkpoints.architecture import (
    QKV,
    Architecture,
    Reader,
    Weights,
    causal,
    count,
    full_heads,
    grouped_heads,
    read_renamed,
    renamed,
    under,
    window,
)
from posexport.models.checkpoints.config import COMMON, Config, Data
from posexport.models.checkpoints.rope import Rotary, rope
from posexport.models.checkpoints.tensors import Tensors
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

Split = Callable[["Tensor", Spec], tuple["Tensor", ...]]


def blocks(fused: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """Split rows in the order: all queries, all keys, all values."""
    keys = spec.num_kv_heads * spec.head_dim
    return tuple(fused.split((spec.num_heads * spec.head_dim, keys, keys)))


def groups(fused: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """Split rows in the order of key heads, each with its queries, key and value. Equals `blocks` for one key head."""
    by_head = fused.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
    return by_head[:, :-2].flatten(0, 2), by_head[:, -2].flatten(0, 1), by_head[:, -1].flatten(0, 1)


def fused_reader(fused: str, output: str, split: Split) -> Reader:
    """Return a reader of a layer with the modules `fused` (all three input projections) and `output`."""

    def read(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        shapes = {"weight": (rows, spec.hidden_size), "bias": (rows,)}
        if "q_proj" not in spec.bias:
            del shapes["bias"]
        weights = read_renamed(tensors, path, spec, {"o_proj": output}, *QKV)
        for kind, shape in shapes.items():
            parts = split(tensors(f"{path}.{fused}.{kind}", shape), spec)
            weights |= {f"{name}.{kind}": part.contiguous() for name, part in zip(QKV, parts, strict=True)}
        return weights

    return read


_LONG = {"default": None, "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def phi3(config: Config, layer: int) -> Data:
    size = grouped_heads(config, 3072, 32)
    for key, value in (("attention_bias", False), ("full_attn_mod", 1), ("interpolate_factor", 1)):
        config.must(key, value)
    encoding = rope(config, size["head_dim"], Rotary(length=4096, part=1.0, types=_LONG, trained_length=4096))
    width = window(config, config.optional_integer("sliding_window", at_least=0))
    return {**size, **causal(config, width), "encoding": encoding}


def gpt_neox(config: Config, layer: int) -> Data:
    size = full_heads(config, 6144, 64)
    bias, ignored = config.flag("attention_bias", default=True), ("rope_theta", "partial_rotary_factor")
    rotary = Rotary(
        length=2048, theta_names=("rotary_emb_base",), part=0.25, part_names=("rotary_pct",), ignored=ignored
    )
    return {**size, **causal(config), "bias": bias, "encoding": rope(config, size["head_dim"], rotary)}


def gptj(config: Config, layer: int) -> Data:
    size = full_heads(config, 4096, 16, ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    config.must("rotary", True)
    config.must("scale_attn_weights", True)
    encoding = {"name": "rope", "layout": "interleaved", "rotary_dim": config.integer("rotary_dim", default=64)}
    return {**size, **causal(config), "encoding": encoding}


def _alibi(config: Config, **parameters: object) -> Data:
    """Return ALiBi of a decoder.

    Biases in transformers grow with the position of the key and do not depend on the query. This is ALiBi only if no
    query sees later keys.
    """
    config.must("is_causal", True)
    return {"name": "alibi", **parameters}


def falcon(config: Config, layer: int) -> Data:
    size = full_heads(config, 4544, 71, ("hidden_size", "n_embed"))
    grouped = config.flag("new_decoder_architecture", default=False)
    one = config.flag("multi_query", default=True)
    kv_heads = config.optional_integer("num_kv_heads")
    rotary = rope(config, size["head_dim"], Rotary(length=2048))
    # Falcon multiplies the slopes by 1/sqrt(head_dim) together with the logits. transformers also rounds the products
    # of slopes and positions to bf16, which is not part of the encoding.
    slopes = [slope * size["head_dim"] ** -0.5 for slope in alibi_slopes(size["num_heads"])]
    return {
        **size,
        **causal(config),
        "num_kv_heads": (kv_heads if grouped else 1 if one else None) or size["num_heads"],
        "bias": config.flag("bias", default=False),
        "encoding": _alibi(config, slopes=slopes) if config.flag("alibi", default=False) else rotary,
    }


def bloom(config: Config, layer: int) -> Data:
    size = full_heads(config, 64, 8, ("hidden_size", "n_embed"), ("n_head", "num_attention_heads"))
    return {**size, **causal(config), "bias": True, "encoding": _alibi(config)}


def mpt(config: Config, layer: int) -> Data:
    size = full_heads(config, 2048, 16, ("d_model", "hidden_size"), ("n_heads", "num_attention_heads"))
    attention = config.table("attn_config", COMMON | {"attn_pdrop", "attn_impl"})
    for key, value in (("alibi", True), ("alibi_bias_max", 8), ("attn_type", "multihead_attention")):
        attention.must(key, value)
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        attention.must(key, False)
    attention.must("clip_qkv", None)
    scale = attention.optional_number("softmax_scale")
    return {**size, **causal(config), "scale": scale, "encoding": _alibi(config)}


QUERY_KEY_VALUE = fused_reader("query_key_value", "dense", groups)

ARCHITECTURES = {
    "phi3": Architecture(
        count(32), phi3, under("layers.{}.self_attn", "model."), fused_reader("qkv_proj", "o_proj", blocks)
    ),
    "gpt_neox": Architecture(count(44), gpt_neox, under("layers.{}.attention", "gpt_neox."), QUERY_KEY_VALUE),
    "gptj": Architecture(
        count(28, "n_layer", "num_hidden_layers"),
        gptj,
        under("h.{}.attn", "transformer."),
        renamed({"o_proj": "out_proj"}),
    ),
    "falcon": Architecture(count(32), falcon, under("h.{}.self_attention", "transformer."), QUERY_KEY_VALUE),
    "bloom": Architecture(
        count(2, "n_layer", "num_hidden_layers"), bloom, under("h.{}.self_attention", "transformer."), QUERY_KEY_VALUE
    ),
    "mpt": Architecture(
        count(24, "n_layers", "num_hidden_layers"),
        mpt,
        under("blocks.{}.attn", "transformer."),
        fused_reader("Wqkv", "out_proj", blocks),
    ),
}
