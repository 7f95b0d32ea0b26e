"""Encoders of text: BERT, ModernBERT and T5, or T5's decoder where config.json describes a decoder.

The default scale is 1/sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence

from posexport.models.checkpoints.architecture import (
    FULL,
    SLIDING,
    Architecture,
    Data,
    Weights,
    count,
    full_heads,
    kind_of,
    read_renamed,
    under,
)
from posexport.models.checkpoints.config import Config
from posexport.models.checkpoints.fused import blocks, fused_reader
from posexport.models.checkpoints.rope import ByKind, Rotary
from posexport.models.checkpoints.tensors import Tensors
from posexport.spec.spec import Spec


def bert(config: Config, layer: int) -> Data:
    """The table of positions is added at the input, so layers after the first have no encoding."""
    config.must("position_embedding_type", "absolute")
    rows = config.integer("max_position_embeddings", default=512)
    decoder = config.flag("is_decoder", default=False)
    encoding = {"name": "learned", "max_positions": rows} if layer == 0 else {"name": "none"}
    return {**full_heads(config, 768, 12), "causal": decoder, "bias": True, "encoding": encoding}


BERT_NAMES = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "o_proj": "output.dense"}


def bert_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    weights = read_renamed(tensors, path, spec, BERT_NAMES)
    if spec.encoding.at_input:
        shape = (config.integer("max_position_embeddings", default=512), spec.hidden_size)
        root = path.partition("encoder.layer.")[0]
        weights["encoding.weight"] = tensors(f"{root}embeddings.position_embeddings.weight", shape)
    return weights


MODERN_ROPE = ByKind(
    kinds={
        FULL: Rotary(theta=160_000.0, theta_names=("global_rope_theta",)),
        SLIDING: Rotary(theta=10_000.0, theta_names=("local_rope_theta",)),
    },
    scaled=(FULL, SLIDING),
)


def modernbert(config: Config, layer: int) -> Data:
    size = full_heads(config, 768, 12)
    every = config.integer("global_attn_every_n_layers", default=3)
    kind = kind_of(config, layer, (FULL, SLIDING), SLIDING if layer % every else FULL)
    side = config.integer("local_attention", default=128) // 2  # the largest visible distance
    return {
        **size,
        "window": side + 1 if kind == SLIDING else None,
        "bias": config.flag("attention_bias", default=False),
        "encoding": {"name": "rope", "layout": "half", **MODERN_ROPE.read(config, size["head_dim"], kind)},
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


def _t5_block(config: Config, layer: int) -> str:
    return f"block.{layer}.layer.0.SelfAttention"


def t5_paths(config: Config, layer: int) -> Sequence[str]:
    side = "decoder" if config.flag("is_decoder", default=False) else "encoder"
    return [f"{side}.{_t5_block(config, layer)}", _t5_block(config, layer)]


def t5_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    """All layers share the bias of the first layer."""
    names = {f"{letter}_proj": letter for letter in "qkvo"}
    root = path.partition("block.")[0]
    shape = (config.integer("relative_attention_num_buckets", default=32), spec.num_heads)
    name = "relative_attention_bias.weight"
    bias = tensors(f"{root}{_t5_block(config, 0)}.{name}", shape)
    return {**read_renamed(tensors, path, spec, names), f"encoding.{name}": bias}


ARCHITECTURES = {
    "bert": Architecture(
        layers=count(12),
        spec=bert,
        paths=under("encoder.layer.{}.attention", "bert."),
        weights=bert_weights,
        known="""type_vocab_size directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type""",
    ),
    "modernbert": Architecture(
        layers=count(22),
        spec=modernbert,
        paths=under("layers.{}.attn", "model."),
        weights=fused_reader("Wqkv", "Wo", blocks),
        known="""initializer_cutoff_factor norm_eps norm_bias embedding_dropout mlp_bias mlp_dropout decoder_bias
        classifier_pooling classifier_bias classifier_activation deterministic_flash_attn sparse_prediction
        sparse_pred_ignore_index reference_compile repad_logits_with_grad position_embedding_type""",
    ),
    "t5": Architecture(
        layers=count(6, "num_layers", "num_hidden_layers"),
        spec=t5,
        paths=t5_paths,
        weights=t5_weights,
        known="""d_ff num_decoder_layers n_positions dropout_rate feed_forward_proj dense_act_fn is_gated_act
        scale_decoder_outputs""",
    ),
}
