"""Architectures of the matrix of whole models: those of the suite of graphs with more layers, and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from architecture import Architecture
from decoders import COMMON, GROUPED, HEADED, WINDOWED, decoder, multimodal
from encoders import BART, SPECIAL, T5, encoder, seq2seq
from encoders import COMMON as TEXT
from table import ARCHITECTURES
from vision import COMMON as IMAGE
from vision import SPEECH, image
from whole_newer import NEWER
from whole_options import DELTA, EXPERTS, HALF_LINEAR, LATENT, MAMBA, ROUTED, SHARED_EXPERT, SOUND
from whole_parts import PARTS
from whole_variants import VARIANTS

MORE = [
    decoder("granitemoe", "GraniteMoe", "rope", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    decoder("qwen2_moe", "Qwen2Moe", "rope", {**GROUPED, **SHARED_EXPERT}),
    decoder("olmoe", "Olmoe", "rope", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    decoder("deepseek_v2", "DeepseekV2", "rope", LATENT),
    decoder("deepseek_v3_moe", "DeepseekV3", "rope", LATENT),
    decoder(
        "dbrx",
        "Dbrx",
        "rope",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "vocab_size": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    decoder("dots1", "Dots1", "rope", {**HEADED, **ROUTED, "n_shared_experts": 1}),
    decoder("glm4_moe", "Glm4Moe", "rope", {**HEADED, **ROUTED, "n_shared_experts": 1}),
    decoder(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        "rope",
        {**HEADED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    decoder("hunyuan_v1_moe", "HunYuanMoEV1", "rope", {**HEADED, "num_experts": 4, "moe_topk": 2}),
    decoder(
        "minimax",
        "MiniMax",
        "rope",
        {**HEADED, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    decoder(
        "jamba",
        "Jamba",
        "none",
        {
            **GROUPED,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    decoder("lfm2", "Lfm2", "rope", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    decoder("mamba", "Mamba", "none", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4}),
    decoder("qwen3_next", "Qwen3Next", "rope", {**HEADED, **SHARED_EXPERT, **DELTA}),
    decoder("qwen3_5", "Qwen3_5Text", "rope", {**HEADED, **DELTA}, model="Qwen3_5ForCausalLM"),
    decoder("olmo_hybrid", "OlmoHybrid", "rope", {**GROUPED, **DELTA}),
    decoder(
        "kimi_linear",
        "KimiLinear",
        "rope",
        {
            **LATENT,
            "q_lora_rank": None,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_experts": 4,
            "layer_types": HALF_LINEAR,
        },
    ),
    decoder("bamba", "Bamba", "rope", {**GROUPED, **MAMBA, "attn_layer_indices": [1, 3]}),
    decoder("falcon_h1", "FalconH1", "rope", {**HEADED, **MAMBA, "mamba_d_ssm": 128}),
    decoder(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        "rope",
        {
            **GROUPED,
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": HALF_LINEAR,
        },
    ),
    decoder(
        "nemotron_h",
        "NemotronH",
        "none",
        {
            **HEADED,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "time_step_min": 1e-30,
            "n_groups": 2,
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        },
    ),
    decoder(
        "zamba2",
        "Zamba2",
        "none",
        {
            **COMMON,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "time_step_min": 1e-30,
            "n_mamba_heads": 8,
            "attention_head_dim": 32,
            "num_mem_blocks": 1,
            "layers_block_type": ["linear_attention", "hybrid"],
        },
    ),
    multimodal(
        "llava",
        "Llava",
        "rope",
        {"text_config": {**GROUPED, "model_type": "llama"}, "vision_config": IMAGE | {"projection_dim": 64}},
    ),
    multimodal(
        "gemma3_vision",
        "Gemma3",
        "rope",
        {
            "text_config": {**HEADED, **WINDOWED},
            "vision_config": IMAGE | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
    ),
    multimodal(
        "qwen3_5_vision",
        "Qwen3_5",
        "rope",
        {
            # with heads of 8, one token has values near zero, and their norm turns fp16 rounding into a tenth of a key
            "text_config": {**HEADED, **DELTA, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
            "vision_config": {
                **{"hidden_size": 64, "intermediate_size": 96, "depth": 2, "num_heads": 4, "patch_size": 8},
                **{"out_hidden_size": 64, "num_position_embeddings": 16},
            },
        },
    ),
    decoder("olmo3", "Olmo3", "rope", {**GROUPED, **WINDOWED}),
    decoder("nanochat", "NanoChat", "rope", GROUPED),
    decoder("ministral", "Ministral", "rope", {**HEADED, **WINDOWED}),
    decoder("bitnet", "BitNet", "rope", GROUPED),
    decoder("doge", "Doge", "rope", {**GROUPED, "keep_window_size": 512}),
    decoder("minicpm3", "MiniCPM3", "rope", LATENT),
    decoder(
        "jetmoe",
        "JetMoe",
        "rope",
        {**GROUPED, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None},
    ),
    decoder("afmoe", "Afmoe", "rope", {**HEADED, **EXPERTS, "num_dense_layers": 1, "sliding_window": 5}),
    decoder("cwm", "Cwm", "rope", {**HEADED, "sliding_window": 5}),
    decoder("hyperclovax", "HyperCLOVAX", "rope", HEADED),
    decoder("axk1", "AXK1", "rope", {**LATENT, "n_shared_experts": 1}),
    decoder(
        "gemma3n",
        "Gemma3nText",
        "rope",
        {
            **HEADED,
            **WINDOWED,
            "intermediate_size": [96, 96],
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        model="Gemma3nForCausalLM",
    ),
    decoder("bert_decoder", "Bert", "learned", {**TEXT, "is_decoder": True}, model="BertLMHeadModel"),
    decoder("modernbert_decoder", "ModernBertDecoder", "rope", {**TEXT, **SPECIAL, "local_attention": 6}),
    decoder(
        "recurrent_gemma",
        "RecurrentGemma",
        "rope",
        {**GROUPED, "lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
    seq2seq("mbart", "MBart", "learned", BART),
    seq2seq("m2m_100", "M2M100", "sinusoidal", BART),
    seq2seq("blenderbot", "Blenderbot", "learned", BART),
    seq2seq("mt5", "MT5", "t5 buckets", T5),
    seq2seq("umt5", "UMT5", "t5 buckets", T5),
    seq2seq("led", "LED", "learned", {**BART, "attention_window": 4}),
    seq2seq(
        "prophetnet",
        "ProphetNet",
        "learned",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 256,
            "decoder_start_token_id": 2,
        },
    ),
    seq2seq(
        "switch_transformers", "SwitchTransformers", "t5 buckets", {**T5, "num_experts": 2, "num_decoder_layers": 4}
    ),
    seq2seq("whisper", "Whisper", "sinusoidal", SOUND),
    seq2seq(
        "speech_to_text",
        "Speech2Text",
        "sinusoidal",
        {
            **BART,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 400,
            "max_target_positions": 256,
        },
    ),
    seq2seq(
        "moonshine",
        "Moonshine",
        "rope",
        {
            **COMMON,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "decoder_start_token_id": 1,
        },
    ),
    encoder("camembert", "Camembert", "learned", TEXT, model="CamembertForMaskedLM"),
    encoder("bert_masked", "Bert", "learned", TEXT, model="BertForMaskedLM"),
    encoder("convbert", "ConvBert", "learned", {**TEXT, "embedding_size": 64}),
    encoder("mobilebert", "MobileBert", "learned", {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32}),
    encoder(
        "xlm",
        "XLM",
        "learned",
        {"vocab_size": 128, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 256, "pad_index": 0},
    ),
    encoder(
        "funnel",
        "Funnel",
        "xl",
        {
            "vocab_size": 128,
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 96,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
    ),
    encoder("fnet", "FNet", "learned", TEXT),
    encoder("nystromformer", "Nystromformer", "learned", {**TEXT, "num_landmarks": 4, "segment_means_seq_len": 256}),
    encoder("megatron_bert", "MegatronBert", "learned", TEXT),
    encoder("layoutlm", "LayoutLM", "learned", TEXT),
    encoder(
        "canine",
        "Canine",
        "learned",
        {**TEXT, "num_hash_functions": 2, "num_hash_buckets": 64, "local_transformer_stride": 8},
    ),
    encoder("clip", "CLIP", "learned", {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE}),
    image(
        "audio_spectrogram_transformer",
        "AST",
        "learned",
        {**IMAGE, "num_mel_bins": 16, "max_length": 40, "patch_size": 8, "frequency_stride": 4, "time_stride": 4},
        kind="features",
    ),
    image("wav2vec2_ctc", "Wav2Vec2", "convolution", SPEECH, model="Wav2Vec2ForCTC", kind="audio"),
    image("data2vec_audio", "Data2VecAudio", "convolution", {**SPEECH, "conv_pos_kernel_size": 3}, kind="audio"),
    image("unispeech", "UniSpeech", "convolution", SPEECH, kind="audio"),
    image("sew", "SEW", "convolution", {**SPEECH, "squeeze_factor": 2}, kind="audio"),
    image("vit_classifier", "ViT", "learned", IMAGE, model="ViTForImageClassification"),
    image("siglip", "SiglipVision", "learned", IMAGE),
    image("vit_mae", "ViTMAE", "sinusoidal", IMAGE),
    image(
        "yolos",
        "Yolos",
        "learned",
        {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4},
        model="YolosForObjectDetection",
    ),
    image(
        "depth_anything",
        "DepthAnything",
        "learned",
        {
            "backbone_config": {
                "model_type": "dinov2",
                **IMAGE,
                "out_features": ["stage1", "stage2"],
                "reshape_hidden_states": False,
            },
            "patch_size": 8,
            "reassemble_hidden_size": 64,
            "neck_hidden_sizes": [16, 32],
            "reassemble_factors": [2, 1],
            "fusion_hidden_size": 16,
            "head_hidden_size": 8,
        },
        model="DepthAnythingForDepthEstimation",
    ),
    image("videomae", "VideoMAE", "sinusoidal", {**IMAGE, "num_frames": 4}),
    image(
        "pvt",
        "Pvt",
        "learned",
        {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 32, 64],
            "num_attention_heads": [1, 2, 2, 4],
            "sequence_reduction_ratios": [4, 2, 1, 1],
            "patch_sizes": [4, 2, 2, 2],
            "strides": [4, 2, 2, 2],
        },
    ),
    image(
        "mobilevit",
        "MobileViT",
        "none",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": 4,
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
        },
    ),
    image("resnet", "ResNet", "none", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    image(
        "detr",
        "Detr",
        "sinusoidal",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 16,
                "hidden_sizes": [16, 32],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_queries": 5,
        },
        model="DetrForObjectDetection",
    ),
]

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_LISTS = ("layer_types", "no_rope_layers", "block_types", "activation_sparsity_pattern", "layers_block_type")


def deeper(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for twice as many layers, so that every kind of layer occurs more than once."""
    made = {name: value * 2 if name in _DEPTHS + _LISTS else value for name, value in options.items()}
    if "attention_types" in made:
        made["attention_types"] = [[kinds, 2 * count] for kinds, count in made["attention_types"]]
    if isinstance(made.get("intermediate_size"), list):
        made["intermediate_size"] = made["intermediate_size"] * 2
    return made


def _whole(row: Architecture) -> bool:
    """Whether a row of the suite is a separate model. Other rows are the same models with other inputs or dtypes."""
    others = ("_counted", "_eager", "_fp16", "whisper_encoder")
    return not row.name.endswith(others) and not (row.kind == "causal" and row.name != "ctrl_causal")


ROWS = {
    row.name: attrs.evolve(row, options=deeper(row.options), part="", dtype="float32", attention="eager")
    for row in [*filter(_whole, ARCHITECTURES.values()), *MORE, *NEWER, *VARIANTS, *PARTS]
}
"""All architectures by name."""
