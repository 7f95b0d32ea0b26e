"""Encoders whose checkpoints `--from` reads: a case for each architecture and for each variant of it."""

from __future__ import annotations

from typing import Any

import torch
from checkpoint_cases import (
    Case,
    batch_of_one,
    counted,
    grid,
    image,
    memory,
    offset,
    registers,
    speech,
    tokens,
    video,
    windows,
)
from hf_helpers import BATCH
from torch import Tensor

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 17, "max_position_embeddings": 16}
DEBERTA: dict[str, Any] = {
    **TEXT,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "c2p|p2c",
}
SPEECH: dict[str, Any] = {
    **SIZES,
    "conv_dim": [8],
    "conv_stride": [2],
    "conv_kernel": [3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_depthwise_kernel_size": 3,
    "vocab_size": 8,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
SAM2: dict[str, Any] = {
    "vision_config": {
        "model_type": "sam2_vision_model",
        "backbone_config": {
            "model_type": "sam2_hiera_det_model",
            "hidden_size": 8,
            "image_size": [64, 64],
            "blocks_per_stage": [1, 1, 1, 1],
            "embed_dim_per_stage": [8, 16, 32, 64],
            "num_attention_heads_per_stage": [1, 1, 1, 1],
            "global_attention_blocks": [2],
            "window_size_per_stage": [4, 4, 4, 2],
        },
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 32,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    "image_size": 64,
    "memory_attention_hidden_size": 32,
    "memory_attention_num_layers": 1,
    "memory_attention_feed_forward_hidden_size": 16,
    "memory_attention_num_attention_heads": 2,
    "memory_attention_rope_feat_sizes": [4, 3],
    "memory_encoder_hidden_size": 32,
    "mask_downsampler_embed_dim": 32,
    "memory_fuser_embed_dim": 32,
    "memory_fuser_intermediate_dim": 16,
}


def _stack(config: Any) -> Any:
    from transformers.models.t5.modeling_t5 import T5Stack

    return T5Stack(config)


def t5(*faults: dict[str, Any], **more: Any) -> Case:
    """T5, whose later layers use the bias of the first."""
    return Case(
        model="T5ForConditionalGeneration",
        config="T5",
        sizes={
            "d_model": 32,
            "d_kv": 6,
            "num_heads": 4,
            "num_layers": 2,
            "d_ff": 16,
            "vocab_size": 17,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 6,
            **more.pop("sizes", {}),
        },
        run=counted,
        faults=faults,
        path="block.{}.layer.0.SelfAttention",
        ends=("q", "o"),
        layers=(0, 1),
        **more,
    )


def deberta(name: str, *faults: dict[str, Any], **sizes: Any) -> Case:
    """DeBERTa with its head; its table has 2 * 16 rows unless `sizes` change it."""
    return Case(
        model=f"{name}ForMaskedLM",
        config=name,
        sizes={**DEBERTA, **sizes},
        run=tokens,
        faults=faults,
        inside="deberta",
        path="encoder.layer.{}.attention",
        ends=("self", "output.dense"),
        layers=(1,),
    )


def swin(version: str, ends: tuple[str, str], **more: Any) -> Case:
    return Case(
        model=f"Swin{version}ForImageClassification",
        config=f"Swin{version}",
        sizes={**SWIN, **more.pop("sizes", {})},
        faults=(more.pop("fault", {"num_heads": [4, 2]}),),
        inside=f"swin{version}",
        ends=ends,
        **more,
    )


def one_window(model: Any) -> Tensor:
    """Runs Swin; in its second stage, each image is one window of 4 by 4."""
    windows(model)
    return grid(4, 4).expand(BATCH, -1, -1)


FIRST, LAST = "encoder.layers.0.blocks.{}.attention", "encoder.layers.1.blocks.1.attention"
V2_ENDS = ("self.query", "output.dense")

CASES: dict[str, Case] = {
    "bert": Case(
        model="BertForMaskedLM",
        config="Bert",
        sizes=TEXT,
        run=counted,
        faults=({"num_attention_heads": 2}, {"is_decoder": True}),
        inside="bert",
        path="encoder.layer.{}.attention",
        ends=V2_ENDS,
        layers=(0, 1),
        table="embeddings.position_embeddings.weight",
    ),
    "modernbert": Case(
        model="ModernBertForMaskedLM",
        config="ModernBert",
        sizes={
            **{**TEXT, "num_hidden_layers": 4, "local_attention": 4},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        },
        run=offset,
        faults=({"layer_types": ["sliding_attention", "full_attention"] * 2},),
        inside="model",
        path="layers.{}.attn",
        ends=("Wqkv", "Wo"),
        layers=(0, 1),
    ),
    "t5": t5({"relative_attention_max_distance": 4}, inside="encoder"),
    "t5-decoder": t5({"is_decoder": False}, make=_stack, sizes={"is_decoder": True, "is_encoder_decoder": False}),
    "deberta": deberta("Deberta", {"pos_att_type": ["c2p"]}),
    "deberta-far": deberta("Deberta", {"pos_att_type": "p2c"}, max_relative_positions=3),
    "deberta-c2p": deberta("Deberta", {"num_attention_heads": 2}, pos_att_type="c2p"),
    "deberta-v2": deberta(
        "DebertaV2",
        {"norm_rel_ebd": "none"},
        position_buckets=4,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        pos_att_type="p2c|c2p",
    ),
    "deberta-v2-own": deberta("DebertaV2", {"pos_att_type": ["p2c"]}, max_relative_positions=4),
    "xlnet": Case(
        model="XLNetLMHeadModel",
        config="XLNet",
        sizes={"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 16, "vocab_size": 17},
        run=counted,
        faults=({"attn_type": "uni"},),
        inside="transformer",
        path="layer.{}.rel_attn",
        ends=("", "dropout"),
        layers=(1,),
        time_first=True,
    ),
    "wav2vec2-conformer": Case(
        model="Wav2Vec2ConformerForCTC",
        config="Wav2Vec2Conformer",
        sizes={**SPEECH, "max_source_positions": 20, "position_embeddings_type": "relative"},
        run=speech,
        faults=({"num_attention_heads": 2},),
        inside="wav2vec2_conformer",
        path="encoder.layers.{}.self_attn",
        ends=("linear_q", "linear_out"),
    ),
    "wav2vec2-bert": Case(
        model="Wav2Vec2BertForCTC",
        config="Wav2Vec2Bert",
        sizes={
            **{**SIZES, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "vocab_size": 8},
            **{"left_max_position_embeddings": 4, "right_max_position_embeddings": 2},
        },
        run=speech,
        faults=({"left_max_position_embeddings": 2, "right_max_position_embeddings": 4},),
        inside="wav2vec2_bert",
        path="encoder.layers.{}.self_attn",
        ends=("linear_q", "linear_out"),
    ),
    "vit": Case(
        model="ViTForImageClassification",
        config="ViT",
        sizes={**SIZES, "image_size": 12, "patch_size": 4},
        run=image(12, 12, lambda rows, columns: torch.arange(rows * columns + 1)[:, None]),
        faults=({"num_attention_heads": 2},),
        inside="vit",
        path="layers.{}.attention",
        layers=(0, 1),
        table="embeddings.position_embeddings",
    ),
    "swin": swin("", ("q_proj", "o_proj"), run=windows, path=FIRST),
    "swin-last": swin("", ("q_proj", "o_proj"), run=one_window, path=LAST, layers=(3,)),
    "swinv2": swin(
        "v2",
        V2_ENDS,
        run=windows,
        path=FIRST,
        sizes={"pretrained_window_sizes": [3, 0]},
        fault={"pretrained_window_sizes": [0, 0]},
    ),
    "swinv2-last": swin("v2", V2_ENDS, run=one_window, path=LAST, layers=(3,)),
    "dinov3_vit": Case(
        model="DINOv3ViTModel",
        config="DINOv3ViT",
        sizes={**SIZES, "image_size": 16, "patch_size": 4, "num_register_tokens": 2},
        run=image(12, 20, registers),
        faults=({"num_register_tokens": 1}, {"rope_theta": 9.0}),
        path="model.layer.{}.attention",
    ),
    "pixtral": Case(
        model="LlavaForConditionalGeneration",
        config="Llava",
        sizes={
            "vision_config": {**SIZES, "model_type": "pixtral", "image_size": 32, "patch_size": 4},
            "text_config": {**TEXT, "model_type": "mistral"},
        },
        run=batch_of_one,
        faults=({"vision_config.rope_parameters.rope_theta": 9.0},),
        inside="model.vision_tower",
        path="transformer.layers.{}.attention",
    ),
    "vjepa2": Case(
        model="VJEPA2Model",
        config="VJEPA2",
        sizes={
            **{**SIZES, "hidden_size": 40, "num_attention_heads": 2, "patch_size": 4, "crop_size": 12},
            **{"frames_per_clip": 4, "tubelet_size": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 2},
            **{"pred_num_hidden_layers": 1, "pred_num_mask_tokens": 2, "num_pooler_layers": 1},
        },
        run=video,
        faults=({"num_attention_heads": 4},),
        path="encoder.layer.{}.attention",
        ends=("query", "proj"),
    ),
    "sam2_video": Case(
        model="Sam2VideoModel",
        config="Sam2Video",
        sizes=SAM2,
        run=memory,
        faults=({"rope_parameters.rope_theta": 9.0}, {"memory_attention_downsample_rate": 2}),
        path="memory_attention.layers.{}.self_attn",
    ),
}
