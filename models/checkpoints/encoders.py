"""Encoders: BERT, ModernBERT and T5; DeBERTa, XLNet and the conformers of wav2vec 2.0, whose scores mix content and
relative position.

All are bidirectional, except decoders: BERT and T5 with `is_decoder`, XLNet with `attn_type` uni. The default scale is
1/sqrt(head_dim), or the encoding's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posexport.models.checkpoints.architecture import (
    QKV,
    Architecture,
    Weights,
    count,
    full_heads,
    is_local,
    projections,
    read_renamed,
    renamed,
    under,
)
from posexport.models.checkpoints.config import Config, Data
from posexport.models.checkpoints.fused import blocks, fused_reader, groups
from posexport.models.checkpoints.rope import Rotary, rope_by_kind
from posexport.models.checkpoints.tensors import Tensors
from posexport.models.weights import layer_shapes
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


def bert(config: Config, layer: int) -> Data:
    """Read a layer of BERT. Positions are added at the input, so layers after the first have no encoding."""
    config.must("position_embedding_type", "absolute")
    rows = config.integer("max_position_embeddings", default=512)
    decoder = config.flag("is_decoder", default=False)
    encoding = {"name": "learned", "max_positions": rows} if layer == 0 else {"name": "none"}
    return {**full_heads(config, 768, 12), "causal": decoder, "bias": True, "encoding": encoding}


def bert_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    weights = read_renamed(tensors, path, spec, projections("self.query", "self.key", "self.value", "output.dense"))
    if spec.encoding.at_input:
        name = f"{path.partition('encoder.layer.')[0]}embeddings.position_embeddings.weight"
        weights["encoding.weight"] = tensors(name, spec.encoding.weights(spec)["weight"])
    return weights


def modernbert(config: Config, layer: int) -> Data:
    size = full_heads(config, 768, 12)
    every = config.integer("global_attn_every_n_layers", default=3)
    slides = is_local(config, layer, layer % every != 0)
    full = Rotary(length=8192, theta=160_000.0, theta_names=("global_rope_theta",))
    local = Rotary(length=8192, theta_names=("local_rope_theta",))
    side = config.integer("local_attention", default=128, at_least=0) // 2  # the largest visible distance
    return {
        **size,
        "window": side + 1 if slides else None,
        "bias": config.flag("attention_bias", default=False),
        "encoding": rope_by_kind(config, size["head_dim"], slides, full, local, scaled_sliding=True),
    }


def t5(config: Config, layer: int) -> Data:
    encoding = {
        "name": "t5",
        "num_buckets": config.integer("relative_attention_num_buckets", default=32),
        "max_distance": config.integer("relative_attention_max_distance", default=128),
    }
    return {
        "hidden_size": config.integer("d_model", "hidden_size", default=512),
        "num_heads": config.integer("num_heads", "num_attention_heads", default=8),
        "head_dim": config.integer("d_kv", default=64),
        "scale": 1.0,
        "causal": config.flag("is_decoder", default=False),
        "encoding": encoding,
    }


def _t5_block(layer: int) -> str:
    return f"block.{layer}.layer.0.SelfAttention"


def t5_paths(config: Config, layer: int) -> Sequence[str]:
    side = "decoder" if config.flag("is_decoder", default=False) else "encoder"
    return [f"{side}.{_t5_block(layer)}", _t5_block(layer)]


def t5_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """Read the weights of T5. All layers share the bias of the first layer."""
    ((name, shape),) = spec.encoding.weights(spec).items()
    bias = tensors(f"{path.partition('block.')[0]}{_t5_block(0)}.{name}", shape)
    return {**read_renamed(tensors, path, spec, projections(*"qkvo")), f"encoding.{name}": bias}


def _disentangled(config: Config) -> Data:
    """Read the parameters of the encoding that both versions of DeBERTa share."""
    config.must("relative_attention", True, default=False)
    config.must("position_biased_input", False, default=True)
    terms = config.value("pos_att_type")
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|")]
    if not isinstance(terms, list) or sorted(map(str, terms)) not in (["c2p", "p2c"], ["c2p"], ["p2c"]):
        raise config.wrong("pos_att_type", "c2p, p2c or both, in a list or with a | between them")
    reach = config.integer("max_relative_positions", default=-1, at_least=-1)
    longest = config.integer("max_position_embeddings", default=512)
    reach = reach if reach > 0 else longest
    return {"name": "deberta", "max_relative_positions": reach, "pos_att_type": "|".join(sorted(terms))}


def deberta(config: Config, layer: int) -> Data:
    config.must("talking_head", False)
    encoding = _disentangled(config)
    # Our encoding has biases on both projections or on none. The projection without a bias in the checkpoint gets
    # zeros.
    encoding["pos_bias"] = "p2c" in encoding["pos_att_type"]
    return {**full_heads(config, 768, 12), "bias": ["q_proj", "v_proj", "o_proj"], "encoding": encoding}


def deberta_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    module, width, shapes = f"{path}.self", spec.hidden_size, layer_shapes(spec)
    names = {"o_proj": "output.dense", "encoding.pos_query_proj": "self.pos_q_proj"}
    weights = read_renamed(tensors, path, spec, names, *QKV)
    fused = groups(tensors(f"{module}.in_proj.weight", (3 * width, width)), spec)
    weights |= {f"{name}.weight": part for name, part in zip(QKV, fused, strict=True)}
    weights |= {f"{name}_proj.bias": tensors(f"{module}.{name}_bias", (width,)) for name in "qv"}
    weights["encoding.weight"] = table = _table(tensors, path, spec)
    if "encoding.pos_key_proj.weight" in shapes:
        weights["encoding.pos_key_proj.weight"] = tensors(f"{module}.pos_proj.weight", (width, width))
    if "encoding.pos_key_proj.bias" in shapes:
        weights["encoding.pos_key_proj.bias"] = table.new_zeros(width)
    return weights


def _table(tensors: Tensors, path: str, spec: Spec) -> Tensor:
    """Read the table of distances, which all layers share."""
    root = path.partition("layer.")[0]
    return tensors(f"{root}rel_embeddings.weight", layer_shapes(spec)["encoding.weight"])


def deberta_v2(config: Config, layer: int) -> Data:
    size = full_heads(config, 1536, 24)
    config.must("attention_head_size", None, size["head_dim"])
    buckets = config.integer("position_buckets", default=-1, at_least=-1)
    config.flag("share_att_key", default=False)
    config.text("norm_rel_ebd", allowed=("none", "layer_norm"), default="none")
    encoding = {**_disentangled(config), "pos_bias": True, "position_buckets": buckets if buckets > 0 else None}
    return {**size, "bias": True, "encoding": encoding}


def deberta_v2_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    from torch.nn.functional import layer_norm

    names = projections("self.query_proj", "self.key_proj", "self.value_proj", "output.dense")
    stem = "self." if config.flag("share_att_key", default=False) else "self.pos_"
    names |= {f"encoding.pos_{name}": f"{stem}{name}" for name in ("key_proj", "query_proj")}
    weights = read_renamed(tensors, path, spec, names)
    table = _table(tensors, path, spec)
    if config.value("norm_rel_ebd") == "layer_norm":
        root, width = path.partition("layer.")[0], (spec.hidden_size,)
        weight, bias = (tensors(f"{root}LayerNorm.{kind}", width) for kind in ("weight", "bias"))
        table = layer_norm(table, width, weight, bias, config.number("layer_norm_eps", default=1e-7))
    return {**weights, "encoding.weight": table}


def xlnet(config: Config, layer: int) -> Data:
    """Read a layer of XLNet without the segment term, which does not exist without token_type_ids."""
    size = full_heads(config, 1024, 16, ("d_model", "hidden_size"), ("n_head", "num_attention_heads"))
    config.must("d_head", size["head_dim"])
    config.must("clamp_len", -1)
    config.must("untie_r", True)
    for key in ("bi_data", "same_length"):
        config.must(key, False)
    one_way = config.text("attn_type", allowed=("bi", "uni"), default="bi") == "uni"
    return {**size, "causal": one_way, "encoding": {"name": "relative"}}


def xlnet_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """Read the weights of XLNet. It stores all four projections as [hidden, heads, head_dim]."""
    heads = (spec.num_heads, spec.head_dim)

    def matrix(name: str) -> Tensor:
        return tensors(f"{path}.{name}", (spec.hidden_size, *heads)).flatten(1)

    return {
        **{f"{letter}_proj.weight": matrix(letter).T.contiguous() for letter in "qkv"},
        "o_proj.weight": matrix("o"),
        "encoding.r_proj.weight": matrix("r").T.contiguous(),
        "encoding.content_bias": tensors(f"{path}.r_w_bias", heads),
        "encoding.position_bias": tensors(f"{path}.r_r_bias", heads),
    }


CONFORMER_NAMES = projections("linear_q", "linear_k", "linear_v", "linear_out") | {
    "encoding.content_bias": "pos_bias_u",
    "encoding.position_bias": "pos_bias_v",
    "encoding.keys": "distance_embedding",
}


def wav2vec2_conformer(config: Config, layer: int) -> Data:
    config.must("position_embeddings_type", "relative")
    return {**full_heads(config, 768, 12), "bias": True, "encoding": {"name": "relative"}}


def wav2vec2_conformer_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """Read the weights of a conformer. Its sines and cosines alternate; in our encoding, all sines come first."""
    weights, width = read_renamed(tensors, path, spec, CONFORMER_NAMES), spec.hidden_size
    r_proj = tensors(f"{path}.linear_pos.weight", (width, width))
    return {**weights, "encoding.r_proj.weight": r_proj.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1).contiguous()}


def wav2vec2_bert(config: Config, layer: int) -> Data:
    config.must("position_embeddings_type", "relative_key")
    encoding = {
        "name": "shaw",
        "max_distance": config.integer("left_max_position_embeddings", default=64),
        "max_distance_ahead": config.integer("right_max_position_embeddings", default=8, at_least=0),
        "relative_values": False,
    }
    return {**full_heads(config, 1024, 16), "bias": True, "encoding": encoding}


ARCHITECTURES = {
    "bert": Architecture(count(12), bert, under("encoder.layer.{}.attention", "bert."), bert_weights),
    "modernbert": Architecture(
        count(22), modernbert, under("layers.{}.attn", "model."), fused_reader("Wqkv", "Wo", blocks)
    ),
    "t5": Architecture(count(6, "num_layers", "num_hidden_layers"), t5, t5_paths, t5_weights),
    "deberta": Architecture(count(12), deberta, under("encoder.layer.{}.attention", "deberta."), deberta_weights),
    "deberta-v2": Architecture(
        count(24), deberta_v2, under("encoder.layer.{}.attention", "deberta."), deberta_v2_weights
    ),
    "xlnet": Architecture(
        count(24, "n_layer", "num_hidden_layers"), xlnet, under("layer.{}.rel_attn", "transformer."), xlnet_weights
    ),
    "wav2vec2-conformer": Architecture(
        count(12),
        wav2vec2_conformer,
        under("encoder.layers.{}.self_attn", "wav2vec2_conformer."),
        wav2vec2_conformer_weights,
    ),
    "wav2vec2-bert": Architecture(
        count(24), wav2vec2_bert, under("encoder.layers.{}.self_attn", "wav2vec2_bert."), renamed(CONFORMER_NAMES)
    ),
}
