"""Architectures of the matrix of whole models that combine others: separate encoder and decoder models, language models
behind an image, and detectors after a convolutional network."""

from __future__ import annotations

from typing import Any

from decoders import COMMON, HEADED, decoder, multimodal
from encoders import BART, encoder
from encoders import COMMON as TEXT
from vision import COMMON as IMAGE
from vision import PARAKEET, SPEECH, SWIN, image
from whole_newer import TOWER
from whole_options import EXPERTS, SECTIONS

START = {"decoder_start_token_id": 2, "pad_token_id": 0}
CROSSED = {"is_decoder": True, "add_cross_attention": True, "is_encoder_decoder": False}
BERT = {"model_type": "bert", **TEXT}
RESNET = {
    **{"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "layer_type": "basic",
}
LEVELS = {"out_features": ["stage2", "stage3", "stage4"]}
DETR = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 10},
}
SIDES = {"encoder_hidden_dim": 32, "encoder_in_channels": [16, 32, 32], "decoder_in_channels": [32, 32, 32]}
CONVOLVED = {"use_timm_backbone": False, "backbone": None}


def both(name: str, prefix: str, encoding: str, parts: dict[str, Any]) -> Any:
    """A row that combines an encoder and a decoder."""
    return encoder(name, prefix, encoding, {**parts, **START}, kind="seq2seq", sites=6)


PARTS = [
    both(
        "trocr",
        "VisionEncoderDecoder",
        "learned",
        {
            "encoder": {"model_type": "vit", **IMAGE},
            "decoder": {"model_type": "trocr", **BART, **CROSSED, "cross_attention_hidden_size": 64},
        },
    ),
    both(
        "donut",
        "VisionEncoderDecoder",
        "learned",
        {"encoder": {"model_type": "donut-swin", **SWIN}, "decoder": {"model_type": "mbart", **BART, **CROSSED}},
    ),
    both(
        "vit_gpt2",
        "VisionEncoderDecoder",
        "learned",
        {
            "encoder": {"model_type": "vit", **IMAGE},
            "decoder": {"model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
            | {"n_positions": 256, **CROSSED},
        },
    ),
    both("bert_to_bert", "EncoderDecoder", "learned", {"encoder": BERT, "decoder": {**BERT, **CROSSED}}),
    both(
        "wav2vec2_bart",
        "SpeechEncoderDecoder",
        "convolution",
        {
            "encoder": {"model_type": "wav2vec2", **SPEECH, "num_feat_extract_layers": 2},
            "decoder": {"model_type": "bart", **BART, **CROSSED},
        },
    ),
    image(
        "rt_detr",
        "RTDetr",
        "sinusoidal",
        {
            **DETR,
            "backbone_config": {**RESNET, **LEVELS, "model_type": "rt_detr_resnet"},
            **SIDES,
            "anchor_image_size": None,
        },
        model="RTDetrForObjectDetection",
    ),
    image(
        "table_transformer",
        "TableTransformer",
        "sinusoidal",
        {**DETR, **CONVOLVED, "backbone_config": {**RESNET, "out_features": ["stage4"]}},
        model="TableTransformerForObjectDetection",
    ),
    image(
        "deformable_detr",
        "DeformableDetr",
        "sinusoidal",
        {**DETR, **CONVOLVED, "backbone_config": {**RESNET, **LEVELS}, "num_feature_levels": 3},
        model="DeformableDetrForObjectDetection",
    ),
    encoder(
        "layoutlmv3",
        "LayoutLMv3",
        "boxes",
        {
            **{**TEXT, "coordinate_size": 10, "shape_size": 12, "input_size": 32, "patch_size": 8},
            **{"max_2d_position_embeddings": 1024, "rel_pos_bins": 8, "max_rel_pos": 16},
            **{"rel_2d_pos_bins": 8, "max_rel_2d_pos": 16, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    encoder(
        "speecht5",
        "SpeechT5",
        "relative keys",
        {
            **{**SPEECH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_text_positions": 64},
        },
        model="SpeechT5ForSpeechToText",
        kind="seq2seq",
        sites=6,
    ),
    image(
        "rt_detr_v2",
        "RTDetrV2",
        "sinusoidal",
        {
            **{**DETR, **SIDES, "anchor_image_size": None},
            "backbone_config": {**RESNET, **LEVELS, "model_type": "rt_detr_resnet"},
        },
        model="RTDetrV2ForObjectDetection",
    ),
    image(
        "vitpose",
        "VitPose",
        "learned",
        {"backbone_config": {**IMAGE, "model_type": "vitpose_backbone", "image_size": [32, 32], "patch_size": [8, 8]}},
        model="VitPoseForPoseEstimation",
    ),
    image(
        "mgp_str",
        "Mgpstr",
        "learned",
        {**IMAGE, "image_size": [32, 64], "num_bpe_labels": 50, "num_wordpiece_labels": 60},
        model="MgpstrForSceneTextRecognition",
    ),
    image("bit", "Bit", "none", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4}),
    image(
        "segformer_segmentation",
        "Segformer",
        "convolution",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]}
        | {"decoder_hidden_size": 32, "image_size": 32},
        model="SegformerForSemanticSegmentation",
    ),
    image(
        "parakeet_ctc",
        "ParakeetCTC",
        "xl",
        {"vocab_size": 32, "pad_token_id": 0, "encoder_config": PARAKEET},
        model="ParakeetForCTC",
        kind="features",
    ),
    encoder(
        "clip_text",
        "CLIPText",
        "learned",
        {**TEXT, "eos_token_id": 2, "projection_dim": 32},
        model="CLIPTextModelWithProjection",
    ),
    encoder(
        "owlvit_detection",
        "OwlViT",
        "learned",
        {
            "text_config": {**TEXT, "eos_token_id": 2},
            "vision_config": {**IMAGE, "projection_dim": 64},
            "projection_dim": 64,
        },
        model="OwlViTForObjectDetection",
    ),
    encoder(
        "blip_retrieval",
        "Blip",
        "learned",
        {"text_config": {**TEXT, "encoder_hidden_size": 64}, "vision_config": IMAGE, "image_text_hidden_size": 32},
        model="BlipForImageTextRetrieval",
    ),
    encoder("tapas", "Tapas", "learned", {**TEXT, "type_vocab_sizes": [3, 16, 16, 2, 16, 16, 10]}),
    multimodal(
        "blip_2",
        "Blip2",
        "learned",
        {
            "text_config": {"model_type": "opt", **COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64},
            "vision_config": IMAGE,
            "qformer_config": {**TEXT, "encoder_hidden_size": 64},
        },
    ),
    multimodal(
        "kosmos_2",
        "Kosmos2",
        "sinusoidal",
        {
            "text_config": {"vocab_size": 128, "max_position_embeddings": 256, "embed_dim": 64, "layers": 2}
            | {"ffn_dim": 96, "attention_heads": 4},
            "vision_config": IMAGE,
            "latent_query_num": 4,
        },
    ),
    decoder(
        "inkling2",
        "Inkling2Text",
        "relative",
        {
            **HEADED,
            **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "d_rel": 8},
            **{"rel_extent": 8, "sliding_window_size": 5, "swa_head_dim": 16, "swa_num_attention_heads": 4},
            **{"swa_num_key_value_heads": 2, "n_layers_per_attn_res_block": 2, "unpadded_vocab_size": 128},
            "layer_types": ["hybrid_sliding", "hybrid"],
        },
        model="Inkling2ForCausalLM",
    ),
    multimodal(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        "rope",
        {
            "text_config": {**HEADED, **EXPERTS, "rope_parameters": SECTIONS},
            "vision_config": {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
    ),
]
