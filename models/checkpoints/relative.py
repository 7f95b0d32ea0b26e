"""Encoders whose scores mix content and relative position: DeBERTa, XLNet and the conformers of wav2vec 2.0.

All are bidirectional, except XLNet with `attn_type` uni. The scale is the encoding's default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posexport.models.checkpoints.architecture import (
    Architecture,
    Data,
    Weights,
    count,
    full_heads,
    read_renamed,
    renamed,
    under,
)
from posexport.models.checkpoints.config import Config
from posexport.models.checkpoints.fused import QKV, groups
from posexport.models.checkpoints.tensors import Tensors
from posexport.models.weights import layer_shapes
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


def _disentangled(config: Config) -> Data:
    """The parameters of the encoding that both versions of DeBERTa share."""
    config.must("relative_attention", True, default=False)
    config.must("position_biased_input", False, default=True)
    terms = config.value("pos_att_type")
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|")]
    if not isinstance(terms, list) or sorted(map(str, terms)) not in (["c2p", "p2c"], ["c2p"], ["p2c"]):
        raise config.wrong("pos_att_type", "c2p, p2c or both, in a list or with a | between them")
    reach = config.integer("max_relative_positions", default=-1, at_least=-1)
    longest = config.integer("max_position_embeddings", default=512)
    return {
        "name": "deberta",
        "max_relative_positions": reach if reach > 0 else longest,
        "pos_att_type": "|".join(sorted(terms)),
    }


def deberta(config: Config, layer: int) -> Data:
    config.must("talking_head", False)
    encoding = _disentangled(config)
    # our encoding has biases on both projections or on none; the one without a bias in the checkpoint gets zeros
    encoding["pos_bias"] = "p2c" in encoding["pos_att_type"]
    return {**full_heads(config, 768, 12), "bias": ["q_proj", "v_proj", "o_proj"], "encoding": encoding}


def deberta_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    module, width, shapes = f"{path}.self", spec.hidden_size, layer_shapes(spec)
    weights = read_renamed(tensors, path, spec, {"o_proj": "output.dense"}, *QKV)
    fused = groups(tensors(f"{module}.in_proj.weight", (3 * width, width)), spec)
    weights |= {f"{name}.weight": part for name, part in zip(QKV, fused, strict=True)}
    weights |= {f"{name}_proj.bias": tensors(f"{module}.{name}_bias", (width,)) for name in "qv"}
    weights["encoding.weight"] = table = _table(tensors, path, spec)
    for ours, name in (("pos_key_proj", "pos_proj.weight"), ("pos_query_proj", "pos_q_proj.weight")):
        if f"encoding.{ours}.weight" in shapes:
            weights[f"encoding.{ours}.weight"] = tensors(f"{module}.{name}", (width, width))
    if "encoding.pos_query_proj.bias" in shapes:
        weights["encoding.pos_query_proj.bias"] = tensors(f"{module}.pos_q_proj.bias", (width,))
    if "encoding.pos_key_proj.bias" in shapes:
        weights["encoding.pos_key_proj.bias"] = table.new_zeros(width)
    return weights


def _table(tensors: Tensors, path: str, spec: Spec) -> Tensor:
    """The table of distances, which all layers share."""
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


DEBERTA_V2_NAMES = {
    "q_proj": "self.query_proj",
    "k_proj": "self.key_proj",
    "v_proj": "self.value_proj",
    "o_proj": "output.dense",
    "encoding.pos_key_proj": "self.pos_key_proj",
    "encoding.pos_query_proj": "self.pos_query_proj",
}
SHARED_KEYS = {"encoding.pos_key_proj": "self.key_proj", "encoding.pos_query_proj": "self.query_proj"}


def deberta_v2_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    from torch.nn.functional import layer_norm

    shared = config.flag("share_att_key", default=False)
    weights = read_renamed(tensors, path, spec, {**DEBERTA_V2_NAMES, **(SHARED_KEYS if shared else {})})
    table = _table(tensors, path, spec)
    if config.value("norm_rel_ebd") == "layer_norm":
        root, width = path.partition("layer.")[0], (spec.hidden_size,)
        weight, bias = (tensors(f"{root}LayerNorm.{kind}", width) for kind in ("weight", "bias"))
        table = layer_norm(table, width, weight, bias, config.number("layer_norm_eps", default=1e-7))
    return {**weights, "encoding.weight": table}


def xlnet(config: Config, layer: int) -> Data:
    """Without the segment term, which is absent without token_type_ids."""
    size = full_heads(config, 1024, 16, ("d_model", "hidden_size"), ("n_head", "num_attention_heads"))
    config.must("d_head", size["head_dim"])
    config.must("clamp_len", -1)
    config.must("untie_r", True)
    for key in ("bi_data", "same_length"):
        config.must(key, False)
    one_way = config.text("attn_type", allowed=("bi", "uni"), default="bi") == "uni"
    return {**size, "causal": one_way, "encoding": {"name": "relative"}}


def xlnet_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """XLNet stores its projections, the output's too, as [hidden, heads, head_dim]."""
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


CONFORMER_NAMES = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_out",
    "encoding.content_bias": "pos_bias_u",
    "encoding.position_bias": "pos_bias_v",
    "encoding.keys": "distance_embedding",
}


def wav2vec2_conformer(config: Config, layer: int) -> Data:
    config.must("position_embeddings_type", "relative")
    return {**full_heads(config, 768, 12), "bias": True, "encoding": {"name": "relative"}}


def wav2vec2_conformer_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """In the checkpoint sines and cosines alternate; ours have all sines first."""
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


_SPEECH = """
    activation_dropout feat_proj_dropout final_dropout layerdrop apply_spec_augment mask_time_prob mask_time_length
    mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks ctc_loss_reduction
    ctc_zero_infinity use_weighted_layer_sum classifier_proj_size tdnn_dim tdnn_kernel tdnn_dilation
    xvector_output_dim add_adapter adapter_kernel_size adapter_stride num_adapter_layers output_hidden_size
    max_source_positions rotary_embedding_base conv_depthwise_kernel_size conformer_conv_dropout
"""

ARCHITECTURES = {
    "deberta": Architecture(
        layers=count(12),
        spec=deberta,
        paths=under("encoder.layer.{}.attention", "deberta."),
        weights=deberta_weights,
        known="type_vocab_size legacy pooler_dropout pooler_hidden_act pooler_hidden_size padding_idx",
    ),
    "deberta-v2": Architecture(
        layers=count(24),
        spec=deberta_v2,
        paths=under("encoder.layer.{}.attention", "deberta."),
        weights=deberta_v2_weights,
        known="""type_vocab_size legacy pooler_dropout pooler_hidden_act pooler_hidden_size padding_idx conv_kernel_size
        conv_groups conv_act cls_dropout""",
    ),
    "xlnet": Architecture(
        layers=count(24, "n_layer", "num_hidden_layers"),
        spec=xlnet,
        paths=under("layer.{}.rel_attn", "transformer."),
        weights=xlnet_weights,
        known="""d_inner ff_activation dropout mem_len reuse_len use_mems_eval use_mems_train summary_type
        summary_use_proj summary_activation summary_last_dropout start_n_top end_n_top""",
    ),
    "wav2vec2-conformer": Architecture(
        layers=count(12),
        spec=wav2vec2_conformer,
        paths=under("encoder.layers.{}.self_attn", "wav2vec2_conformer."),
        weights=wav2vec2_conformer_weights,
        known=f"""{_SPEECH} feat_quantizer_dropout feat_extract_norm feat_extract_activation conv_dim conv_stride
        conv_kernel conv_bias num_conv_pos_embeddings num_conv_pos_embedding_groups num_codevectors_per_group
        num_codevector_groups contrastive_logits_temperature num_negatives codevector_dim proj_codevector_dim
        diversity_loss_weight num_feat_extract_layers
        do_stable_layer_norm feat_extract_dropout""",
    ),
    "wav2vec2-bert": Architecture(
        layers=count(24),
        spec=wav2vec2_bert,
        paths=under("encoder.layers.{}.self_attn", "wav2vec2_bert."),
        weights=renamed(CONFORMER_NAMES),
        known=f"{_SPEECH} feature_projection_input_dim adapter_act use_intermediate_ffn_before_adapter",
    ),
}
