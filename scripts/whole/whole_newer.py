"""Newer and rarer architectures of the matrix of whole models: rotations in sections, latent and sparse attention,
other kinds of caches, sections of text that see each other, and encoders of all kinds."""

from __future__ import annotations

from decoders import COMMON, GPT, GROUPED, HALF_LAYERS, HEADED, WINDOWED, decoder, multimodal
from encoders import BART, DEBERTA, T5, encoder, seq2seq
from encoders import COMMON as TEXT
from vision import COMMON as IMAGE
from vision import SPEECH, image
from whole_options import EXPERTS, LATENT, ROUTED, SECTIONS, SHARED_EXPERT, SOUND

TOWER = {"hidden_size": 64, "intermediate_size": 96, "depth": 2, "num_heads": 4, "patch_size": 8, "out_hidden_size": 64}
INDEXED = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 32}
"""Options of an indexer. Its scores are sums of the positive terms of its heads. With few heads, several tokens would
have the score 0, and TopK does not define which of equal scores it takes."""

NEWER = [
    multimodal(
        "qwen2_vl",
        "Qwen2VL",
        "rope",
        {
            "text_config": {**GROUPED, "rope_parameters": SECTIONS},
            "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "patch_size": 8},
        },
    ),
    multimodal(
        "qwen3_vl",
        "Qwen3VL",
        "rope",
        {
            "text_config": {**HEADED, "rope_parameters": SECTIONS},
            "vision_config": {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    multimodal(
        "glm4v",
        "Glm4v",
        "rope",
        {"text_config": {**GROUPED, "rope_parameters": SECTIONS}, "vision_config": {**TOWER, "image_size": 32}},
    ),
    multimodal(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoe",
        "rope",
        {
            "text_config": {
                **GROUPED,
                **{"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_intermediate_size": [32, 16]},
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
            },
            "vision_config": TOWER,
        },
    ),
    decoder(
        "gpt_neo",
        "GPTNeo",
        "learned",
        {
            **{"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 5, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    decoder("gpt_bigcode", "GPTBigCode", "learned", GPT),
    decoder("deepseek_v32", "DeepseekV32", "rope", {**LATENT, **INDEXED, "n_shared_experts": 1}),
    decoder(
        "longcat_flash",
        "LongcatFlash",
        "rope",
        {
            **LATENT,
            **{"num_hidden_layers": 4, "num_layers": 2, "ffn_hidden_size": 96, "moe_topk": 2, "zero_expert_num": 2},
            **{"expert_ffn_hidden_size": 32, "head_dim": 8},
        },
    ),
    decoder("mimo_v2_flash", "MiMoV2Flash", "rope", {**HEADED, **ROUTED, "v_head_dim": 8, **WINDOWED}),
    decoder("minimax_m2", "MiniMaxM2", "rope", {**HEADED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    decoder(
        "deepseek_v4",
        "DeepseekV4",
        "rope",
        {
            **COMMON,
            **ROUTED,
            **{"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 32, "n_shared_experts": 1},
            **{"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "o_groups": 2, "o_lora_rank": 16},
            **{"sliding_window": 8, "hc_mult": 2},
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        },
    ),
    decoder("zaya", "Zaya", "rope", {**HEADED, **EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16}),
    decoder("kolibri1", "Kolibri1", "rope", {**HEADED, **SHARED_EXPERT, **WINDOWED}),
    decoder("laguna", "Laguna", "rope", {**HEADED, **SHARED_EXPERT, **WINDOWED}),
    decoder("lfm3", "Lfm3", "rope", {**HEADED, "sliding_window": 5}),
    decoder(
        "hrm_text",
        "HrmText",
        "rope",
        {**HEADED, "prefix_lm": False, "H_cycles": 1, "L_cycles": 1, "num_hidden_layers": 1},
    ),
    decoder(
        "bailing_hybrid",
        "BailingHybrid",
        "rope",
        {
            **LATENT,
            **{"head_dim": 8, "num_local_experts": 4, "n_shared_experts": 1, "layer_group_size": 2},
            "q_lora_rank": None,
        },
    ),
    decoder("flint", "Flint", "rope", {**HEADED, **SHARED_EXPERT, **WINDOWED}),
    decoder("beam", "Beam", "rope", {**HEADED, **EXPERTS, "n_group": 1, "topk_group": 1, **WINDOWED}),
    decoder(
        "dots3_note",
        "Dots3NoteText",
        "rope",
        {**LATENT, **INDEXED, "shared_experts_intermediate_size": 32},
        model="Dots3NoteForCausalLM",
    ),
    decoder(
        "gemma4",
        "Gemma4Text",
        "rope",
        {
            **HEADED,
            **WINDOWED,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 1,
        },
        model="Gemma4ForCausalLM",
    ),
    decoder(
        "mamba2",
        "Mamba2",
        "none",
        {
            **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
            **{"num_heads": 8, "head_dim": 16, "n_groups": 2},
        },
    ),
    decoder(
        "falcon_alibi",
        "Falcon",
        "alibi",
        {
            **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": True},
            **{"alibi": True, "multi_query": False, "parallel_attn": False},
        },
    ),
    decoder("rwkv", "Rwkv", "none", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}),
    decoder("hy_v4", "HYV4", "rope", {**LATENT, **INDEXED, "n_shared_experts": 1, "hc_mult": 2}),
    encoder("deberta_v2", "DebertaV2", "content", DEBERTA | {"position_buckets": 8, "share_att_key": True}),
    encoder("luke", "Luke", "learned", {**TEXT, "entity_vocab_size": 16, "entity_emb_size": 16}),
    encoder("mra", "Mra", "learned", TEXT),
    encoder("yoso", "Yoso", "learned", TEXT),
    encoder(
        "perceiver",
        "Perceiver",
        "learned",
        {
            **{"vocab_size": 128, "d_model": 64, "d_latents": 64, "num_latents": 8, "num_self_attends_per_block": 2},
            **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 64},
        },
        model="PerceiverForMaskedLM",
    ),
    encoder("esmc", "Esmc", "rope", TEXT),
    encoder(
        "neomme",
        "NeoMME",
        "rope",
        {**TEXT, "embedding_rank": 16, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6, "patch_size": 8},
    ),
    encoder("ultrabert", "Ultrabert", "rope", {**TEXT, "sliding_window": 6, "layer_types": HALF_LAYERS}),
    seq2seq(
        "t5gemma",
        "T5Gemma",
        "rope",
        {"encoder": {**HEADED, **WINDOWED}, "decoder": {**HEADED, **WINDOWED}, "vocab_size": 128},
    ),
    seq2seq("longt5", "LongT5", "t5 buckets", {**T5, "local_radius": 4}),
    seq2seq(
        "nllb_moe",
        "NllbMoe",
        "sinusoidal",
        {**BART, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
    seq2seq("pegasus_x", "PegasusX", "sinusoidal", {**BART, "num_global_tokens": 2, "block_size": 8}),
    seq2seq(
        "fsmt", "FSMT", "sinusoidal", {**BART, "src_vocab_size": 128, "tgt_vocab_size": 128, "langs": ["en", "de"]}
    ),
    image("aimv2_vision", "Aimv2Vision", "learned", IMAGE),
    image(
        "vjepa2",
        "VJEPA2",
        "rope3d",
        {
            **IMAGE,
            "crop_size": 32,
            "frames_per_clip": 4,
            "pred_hidden_size": 64,
            "pred_num_attention_heads": 4,
            "pred_num_hidden_layers": 1,
            "mlp_ratio": 2.0,
        },
    ),
    image(
        "focalnet",
        "FocalNet",
        "none",
        {
            "image_size": 32,
            "embed_dim": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    ),
    image("mlcd_vision", "MLCDVision", "rope2d", IMAGE),
    image("radio", "Radio", "learned", {**IMAGE, "mlp_ratio": 2.0, "max_img_size": 64}),
    image(
        "videoprism_vision",
        "VideoPrismVision",
        "learned",
        {**IMAGE, "num_frames": 4, "tubelet_size": [1, 8, 8], "num_spatial_layers": 2, "num_temporal_layers": 2},
    ),
    image(
        "vitdet",
        "VitDet",
        "offset",
        {
            **IMAGE,
            "pretrain_image_size": 32,
            "mlp_ratio": 2,
            "window_size": 2,
            "window_block_indices": [0],
            "use_relative_position_embeddings": True,
        },
    ),
    image(
        "lasr_encoder",
        "LasrEncoder",
        "rope",
        {**COMMON, "num_mel_bins": 16, "subsampling_conv_channels": 16, "conv_kernel_size": 4},
        model="LasrEncoder",
        kind="features",
    ),
    image("qwen2_audio_encoder", "Qwen2AudioEncoder", "sinusoidal", SOUND, model="Qwen2AudioEncoder", kind="features"),
    image(
        "voxtral_encoder",
        "VoxtralEncoder",
        "sinusoidal",
        {**COMMON, "num_mel_bins": 8, "max_source_positions": 12},
        model="VoxtralEncoder",
        kind="features",
    ),
    image(
        "sew_d",
        "SEWD",
        "content",
        {**SPEECH, "squeeze_factor": 2, "max_position_embeddings": 64, "position_buckets": 8},
        kind="audio",
    ),
]
