"""Unusual configurations of architectures in the matrix of whole models, and architectures that are like this by
default: one head of keys, heads that are wider than the hidden size implies, stretched rotations, parallel blocks, no
biases or biases everywhere."""

from __future__ import annotations

from decoders import COMMON, FALCON, GPT, GROUPED, HEADED, LLAMA3, LLAMA4, WINDOWED, YARN, decoder, multimodal
from encoders import BART, SPECIAL, T5, encoder, seq2seq
from encoders import COMMON as TEXT
from vision import COMMON as IMAGE
from vision import SPEECH, SWIN, image
from whole_options import DELTA, EXPERTS, LATENT, ROUTED, SECTIONS, SHARED_EXPERT

ONE_HEAD = {**COMMON, "num_key_value_heads": 1}
WIDE = {**ONE_HEAD, "head_dim": 24}
"""One head of keys, and heads that together are wider than the hidden states."""

LONG = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256},
    **{"short_factor": [1.0 + 0.1 * at for at in range(8)], "long_factor": [1.0 + 0.5 * at for at in range(8)]},
}
ALL_LAYERS = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

DECODERS = [
    decoder("olmo2_one_head", "Olmo2", "rope", {**ONE_HEAD, "tie_word_embeddings": False}),
    decoder("llama_wide_biases", "Llama", "rope", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    decoder("llama_tied_mqa_llama3", "Llama", "rope", {**WIDE, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    decoder("phi3_longrope", "Phi3", "rope", {**GROUPED, "rope_parameters": LONG}),
    decoder(
        "qwen3_windows_yarn",
        "Qwen3",
        "rope",
        {**HEADED, "rope_parameters": YARN, "use_sliding_window": True}
        | {"sliding_window": 5, "max_window_layers": 1, "attention_bias": True},
    ),
    decoder("gpt_neox_in_line", "GPTNeoX", "rope", {**COMMON, "use_parallel_residual": False, "attention_bias": False}),
    decoder(
        "bloom_slow",
        "Bloom",
        "alibi",
        {"vocab_size": 128, "hidden_size": 60, "n_layer": 2, "n_head": 6}
        | {"apply_residual_connection_post_layernorm": True, "pad_token_id": 0},
    ),
    decoder(
        "mpt_clipped",
        "Mpt",
        "alibi",
        {"vocab_size": 128, "d_model": 60, "n_heads": 6, "n_layers": 2}
        | {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3, "alibi_bias_max": 4}, "no_bias": False},
    ),
    decoder("falcon_alibi_mqa", "Falcon", "alibi", {**FALCON, "alibi": True, "multi_query": True, "bias": True}),
    decoder("stablelm_parallel", "StableLm", "rope", {**ONE_HEAD, "use_parallel_residual": True}),
    decoder(
        "gemma3_softcap",
        "Gemma3Text",
        "rope",
        {**HEADED, **WINDOWED}
        | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0, "num_key_value_heads": 1},
        model="Gemma3ForCausalLM",
    ),
    decoder(
        "llama4_chunks",
        "Llama4Text",
        "rope",
        {**LLAMA4, "moe_layers": [1], "use_qk_norm": True} | {"layer_types": ["chunked_attention", "full_attention"]},
        model="Llama4ForCausalLM",
    ),
    decoder(
        "gpt2_scaled",
        "GPT2",
        "learned",
        {**GPT, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}
        | {"reorder_and_upcast_attn": True},
        model="GPT2LMHeadModel",
    ),
    decoder(
        "opt_behind",
        "OPT",
        "learned",
        {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 32} | {"do_layer_norm_before": False, "enable_bias": False},
    ),
    decoder("cohere2_moe", "Cohere2Moe", "rope", {**HEADED, **EXPERTS, **WINDOWED}),
    decoder("exaone_moe", "ExaoneMoe", "rope", {**HEADED, **EXPERTS, **WINDOWED}),
    decoder("flex_olmo", "FlexOlmo", "rope", {**ONE_HEAD, "num_experts": 4, "num_experts_per_tok": 2}),
    decoder("glm4_moe_lite", "Glm4MoeLite", "rope", LATENT),
    decoder("jais2", "Jais2", "rope", {**HEADED, "num_key_value_heads": 1}),
    decoder(
        "lfm2_moe",
        "Lfm2Moe",
        "rope",
        {**GROUPED, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    decoder("ministral3", "Ministral3", "rope", {**HEADED, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
    decoder("mistral4", "Mistral4", "rope", {**LATENT, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
    decoder("solar_open", "SolarOpen", "rope", {**HEADED, **ROUTED}),
    decoder("youtu", "Youtu", "rope", LATENT),
    decoder(
        "granitemoeshared",
        "GraniteMoeShared",
        "rope",
        {**GROUPED, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    decoder(
        "granite_swa",
        "GraniteSWA",
        "rope",
        {**GROUPED, **WINDOWED} | {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    decoder("gpt_neox_japanese", "GPTNeoXJapanese", "rope", COMMON),
    decoder("hy_v3", "HYV3", "rope", {**HEADED, **EXPERTS}),
    decoder("mellum", "Mellum", "rope", {**HEADED, **EXPERTS, **WINDOWED} | {"rope_parameters": ALL_LAYERS}),
    decoder(
        "qwen3_5_moe", "Qwen3_5MoeText", "rope", {**HEADED, **SHARED_EXPERT, **DELTA}, model="Qwen3_5MoeForCausalLM"
    ),
    decoder(
        "roformer_decoder",
        "RoFormer",
        "rope",
        {**TEXT, "is_decoder": True, "rotary_value": True},
        model="RoFormerForCausalLM",
    ),
    decoder("bart_decoder", "Bart", "learned", BART, model="BartForCausalLM"),
    decoder(
        "trocr",
        "TrOCR",
        "learned",
        {"vocab_size": 128, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 96, "max_position_embeddings": 256},
    ),
    decoder(
        "zamba",
        "Zamba",
        "none",
        {**COMMON, "num_key_value_heads": 4, "attention_head_dim": 32, "mamba_d_state": 4, "mamba_dt_rank": 4}
        | {"layers_block_type": ["linear_attention", "hybrid"]},
    ),
    decoder(
        "cpmant",
        "CpmAnt",
        "t5 buckets",
        {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "dim_head": 16}
        | {"dim_ff": 96, "num_hidden_layers": 2, "prompt_length": 4},
    ),
    decoder("xlstm", "xLSTM", "none", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}),
    decoder(
        "falcon_mamba",
        "FalconMamba",
        "none",
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    ),
    multimodal(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        "rope",
        {
            "text_config": {**GROUPED, "rope_parameters": SECTIONS},
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 4,
                "patch_size": 8,
                "out_hidden_size": 64,
                "window_size": 32,
                "fullatt_block_indexes": [1],
            },
        },
    ),
    multimodal(
        "paligemma",
        "PaliGemma",
        "rope",
        {
            "text_config": {**HEADED, "model_type": "gemma"},
            "projection_dim": 64,
            "vision_config": {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False},
        },
    ),
    multimodal(
        "mistral3",
        "Mistral3",
        "rope",
        {
            "text_config": {**HEADED, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**IMAGE, "model_type": "pixtral", "head_dim": 16},
        },
    ),
    multimodal(
        "internvl",
        "InternVL",
        "rope",
        {
            "text_config": {**GROUPED, "model_type": "qwen2"},
            "vision_config": {**IMAGE, "image_size": [32, 32], "patch_size": [8, 8]},
        },
    ),
    multimodal(
        "idefics3",
        "Idefics3",
        "rope",
        {"text_config": {**GROUPED, "model_type": "llama"}, "vision_config": IMAGE, "scale_factor": 2},
    ),
    multimodal(
        "llama4_vision",
        "Llama4",
        "rope",
        {
            "text_config": {**LLAMA4, "rope_scaling": None},
            "vision_config": {**IMAGE, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        },
    ),
    multimodal(
        "mllama",
        "Mllama",
        "rope",
        {
            "text_config": {**GROUPED, "num_hidden_layers": 4, "cross_attention_layers": [1]},
            "vision_config": {
                **IMAGE,
                "num_global_layers": 1,
                "attention_heads": 4,
                "vision_output_dim": 128,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1]],
            },
        },
    ),
]

TRANSLATORS = [
    seq2seq("t5_gated", "T5", "t5 buckets", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    seq2seq("bigbird_pegasus", "BigBirdPegasus", "learned", {**BART, "attention_type": "original_full"}),
    seq2seq("blenderbot_small", "BlenderbotSmall", "learned", BART),
    seq2seq("plbart", "PLBart", "learned", BART),
    seq2seq(
        "t5gemma2",
        "T5Gemma2",
        "rope",
        {"encoder": {"text_config": {**HEADED, **WINDOWED}, "vision_config": IMAGE}, "decoder": {**HEADED, **WINDOWED}},
    ),
    seq2seq(
        "moonshine_streaming",
        "MoonshineStreaming",
        "rope",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "decoder_start_token_id": 1,
            "encoder_config": {**COMMON, "num_key_value_heads": 4},
        },
    ),
]

ENCODERS = [
    encoder("ernie", "Ernie", "learned", {**TEXT, "use_task_id": True}),
    encoder("roberta_prelayernorm", "RobertaPreLayerNorm", "learned", TEXT),
    encoder("xlm_roberta_xl", "XLMRobertaXL", "learned", TEXT),
    encoder("xmod", "Xmod", "learned", {**TEXT, "languages": ["en_XX"], "default_language": "en_XX"}),
    encoder("ibert", "IBert", "learned", {**TEXT, "quant_mode": False}),
    encoder("splinter", "Splinter", "learned", TEXT),
    encoder("roc_bert", "RoCBert", "learned", {**TEXT, "pronunciation_vocab_size": 16, "shape_vocab_size": 16}),
    encoder(
        "flaubert",
        "Flaubert",
        "learned",
        {"vocab_size": 128, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "pre_norm": False}
        | {"max_position_embeddings": 256, "pad_index": 0},
    ),
    encoder(
        "modernbert_classifier",
        "ModernBert",
        "rope",
        {**TEXT, **SPECIAL, "local_attention": 6, "num_labels": 3},
        model="ModernBertForSequenceClassification",
    ),
    encoder(
        "openai_privacy_filter",
        "OpenAIPrivacyFilter",
        "rope",
        {**HEADED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    encoder(
        "embedding_gemma2", "EmbeddingGemma2Text", "rope", {**HEADED, **WINDOWED}, model="EmbeddingGemma2TextModel"
    ),
]

SEEN_AND_HEARD = [
    image("donut_swin", "DonutSwin", "offset table", SWIN),
    image(
        "swin2sr",
        "Swin2SR",
        "offset mlp",
        {**SWIN, "upscale": 2, "patch_size": 1, "image_size": 16},
        model="Swin2SRForImageSuperResolution",
    ),
    image(
        "pvt_v2",
        "PvtV2",
        "convolution",
        {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64]}
        | {"num_attention_heads": [1, 2, 2, 4]},
    ),
    image("dpt", "DPT", "learned", IMAGE),
    image("vivit", "Vivit", "learned", {**IMAGE, "num_frames": 4, "tubelet_size": [2, 8, 8]}),
    image("timesformer", "Timesformer", "learned", {**IMAGE, "num_frames": 2}),
    image("vit_msn", "ViTMSN", "learned", IMAGE),
    image("convnext", "ConvNext", "none", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    image(
        "glpn",
        "GLPN",
        "convolution",
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    ),
    image("siglip2_vision", "Siglip2Vision", "learned", {**IMAGE, "num_patches": 16}),
    image("pixio", "Pixio", "learned", IMAGE),
    image("sapiens2", "Sapiens2", "rope2d", IMAGE),
    image(
        "wav2vec2_stable",
        "Wav2Vec2",
        "convolution",
        {**SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        kind="audio",
    ),
    image("unispeech_sat", "UniSpeechSat", "convolution", SPEECH, kind="audio"),
]

VARIANTS = [*DECODERS, *TRANSLATORS, *ENCODERS, *SEEN_AND_HEARD]
