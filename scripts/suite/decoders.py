"""Decoders with caches: an architecture for every way in which decoders in transformers get positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from architecture import HEAD_SIZE, HEADS, HIDDEN, KEY_HEADS, LAYERS, VOCABULARY, architecture

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": KEY_HEADS}
HEADED = {**GROUPED, "head_dim": HEAD_SIZE}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPTJ = {**GPT, "rotary_dim": 8}
NEOX = {**COMMON, "rope_parameters": PARTIAL}
BLOOM = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
XGLM = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "ffn_dim": 96, "max_position_embeddings": 256}
HALF_LAYERS = ["sliding_attention", "full_attention"]
WINDOWED = {"sliding_window": 5, "layer_types": HALF_LAYERS}
GEMMA2 = {
    **HEADED,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
}
LLAMA4 = {
    **HEADED,
    "intermediate_size_mlp": 96,
    "num_local_experts": 2,
    "moe_layers": [],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 8,
    "floor_scale": 3,
    "attn_scale": 0.5,
}
GEMMA3 = {
    **HEADED,
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "layer_types": HALF_LAYERS,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


decoder = partial(architecture, "decoder", "ForCausalLM")

multimodal = partial(architecture, "decoder", "ForConditionalGeneration")
"""A decoder that could also read images."""


DECODERS = [
    decoder("llama", "Llama", "rope", HEADED, rope="half"),
    decoder("qwen3", "Qwen3", "rope", HEADED, rope="half"),
    decoder("gptj", "GPTJ", "rope", GPTJ, rope="interleaved partial", attention="eager"),
    decoder("gpt_neox", "GPTNeoX", "rope", NEOX, rope="half partial"),
    decoder("gpt2", "GPT2", "learned", GPT, model="GPT2LMHeadModel"),
    decoder("bloom", "Bloom", "alibi", BLOOM, attention="eager", positions=False),
    decoder("gemma2", "Gemma2", "rope", GEMMA2, rope="half", attention="eager"),
    decoder("mistral", "Mistral", "rope", {**HEADED, "sliding_window": 5}, rope="half"),
    decoder(
        "qwen2",
        "Qwen2",
        "rope",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        rope="half",
    ),
    decoder("gemma", "Gemma", "rope", HEADED, rope="half"),
    decoder("gemma3", "Gemma3Text", "rope", GEMMA3, model="Gemma3ForCausalLM", rope="half"),
    decoder("phi", "Phi", "rope", {**GROUPED, "rope_parameters": PARTIAL}, rope="half partial"),
    decoder("phi3", "Phi3", "rope", GROUPED, rope="half"),
    decoder("opt", "OPT", "learned", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": HIDDEN}),
    decoder("falcon", "Falcon", "rope", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, rope="half"),
    decoder("falcon_mqa", "Falcon", "rope", {**FALCON, "multi_query": True}, rope="half"),
    decoder(
        "falcon_alibi",
        "Falcon",
        "alibi",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False},
        notes="eager adds the bias twice in 5.23: sdpa",
    ),
    decoder(
        "mpt",
        "Mpt",
        "alibi",
        {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "expansion_ratio": 2},
        attention="eager",
        positions=False,
    ),
    decoder(
        "stablelm",
        "StableLm",
        "rope",
        {**GROUPED, "rope_parameters": PARTIAL, "use_qkv_bias": True, "qk_layernorm": True},
        rope="half partial",
    ),
    decoder("cohere", "Cohere", "rope", {**GROUPED, "use_qk_norm": True}, rope="interleaved"),
    decoder(
        "cohere2",
        "Cohere2",
        "rope",
        {**GROUPED, **WINDOWED},
        rope="interleaved",
        notes="the layer of full attention has no rotation",
    ),
    decoder("olmo2", "Olmo2", "rope", GROUPED, rope="half"),
    decoder(
        "granite", "Granite", "rope", {**GROUPED, "attention_multiplier": 0.3, "residual_multiplier": 0.5}, rope="half"
    ),
    decoder("starcoder2", "Starcoder2", "rope", {**GROUPED, "sliding_window": 5}, rope="half"),
    decoder(
        "gpt_oss",
        "GptOss",
        "rope",
        {
            **HEADED,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            **WINDOWED,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        rope="half",
        attention="eager",
        notes="sinks",
    ),
    decoder("glm", "Glm", "rope", {**HEADED, "rope_parameters": PARTIAL}, rope="interleaved partial"),
    decoder("glm4", "Glm4", "rope", {**HEADED, "rope_parameters": PARTIAL}, rope="interleaved partial"),
    decoder(
        "smollm3", "SmolLM3", "rope", {**GROUPED, "no_rope_layers": [1, 0]}, rope="half", notes="layer 1: no rotation"
    ),
    decoder("nemotron", "Nemotron", "rope", {**HEADED, "rope_parameters": PARTIAL}, rope="half partial"),
    decoder("persimmon", "Persimmon", "rope", {**COMMON, "rope_parameters": PARTIAL}, rope="half partial"),
    decoder("codegen", "CodeGen", "rope", {**GPT, "rotary_dim": 8}, rope="interleaved partial", attention="eager"),
    decoder("gpt_bigcode", "GPTBigCode", "learned", {**GPT, "multi_query": True}),
    decoder(
        "gpt_neo",
        "GPTNeo",
        "learned",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "attention_types": [[["local", "global"], 1]],
            "window_size": 5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        attention="eager",
        gain=0.8,
        notes="no scale; local attention",
    ),
    decoder(
        "deepseek_v3",
        "DeepseekV3",
        "rope",
        {
            **COMMON,
            "num_key_value_heads": HEADS,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 4,  # the row of whole models, which is twice as deep, uses it too
            "num_mtp_layers": 0,
        },
        rope="interleaved partial",
        notes="latent keys and values; values smaller than keys",
    ),
    decoder("helium", "Helium", "rope", HEADED, rope="interleaved"),
    decoder("ernie4_5", "Ernie4_5", "rope", HEADED, rope="interleaved"),
    decoder("xglm", "XGLM", "sinusoidal", {**XGLM, "attention_heads": HEADS, "num_layers": LAYERS}, attention="eager"),
    decoder("llama_llama3", "Llama", "rope", {**HEADED, "rope_parameters": LLAMA3}, rope="half"),
    decoder("llama_yarn", "Llama", "rope", {**HEADED, "rope_parameters": YARN}, rope="half"),
    decoder("llama_eager", "Llama", "rope", HEADED, rope="half", attention="eager"),
    decoder("diffllama", "DiffLlama", "rope", HEADED, rope="half", attention="eager", notes="two halves subtracted"),
    decoder("olmo", "Olmo", "rope", {**GROUPED, "clip_qkv": 2.0}, rope="half", notes="clipped projections"),
    decoder("exaone4", "Exaone4", "rope", {**HEADED, **WINDOWED}, rope="half"),
    decoder("phimoe", "Phimoe", "rope", {**GROUPED, "num_local_experts": 2, "sliding_window": 5}, rope="half"),
    decoder("mixtral", "Mixtral", "rope", {**HEADED, "num_local_experts": 2, "sliding_window": 5}, rope="half"),
    decoder("qwen3_moe", "Qwen3Moe", "rope", {**HEADED, "num_experts": 2, "num_experts_per_tok": 1}, rope="half"),
    decoder("biogpt", "BioGpt", "learned", COMMON),
    decoder("arcee", "Arcee", "rope", HEADED, rope="half"),
    decoder("seed_oss", "SeedOss", "rope", HEADED, rope="half"),
    decoder("apertus", "Apertus", "rope", {**GROUPED, "rope_parameters": LLAMA3}, rope="half"),
    decoder("hunyuan_v1_dense", "HunYuanDenseV1", "rope", HEADED, rope="half", notes="norms behind the rotation"),
    decoder("vaultgemma", "VaultGemma", "rope", {**GEMMA2, "layer_types": HALF_LAYERS}, rope="half", attention="eager"),
    decoder("llama4_text", "Llama4Text", "rope", LLAMA4, model="Llama4ForCausalLM", rope="interleaved"),
    decoder(
        "openai_gpt_causal", "OpenAIGPT", "learned", GPT, model="OpenAIGPTLMHeadModel", kind="bare", attention="eager"
    ),
    decoder(
        "ctrl_causal",
        "CTRL",
        "sinusoidal",
        {**GPT, "dff": 96},
        model="CTRLLMHeadModel",
        kind="causal",
        attention="eager",
    ),
    # The same models with other inputs: positions counted in the graph, or no cache, or half precision.
    decoder("llama_counted", "Llama", "rope", HEADED, rope="half", positions=False),
    decoder("qwen3_counted", "Qwen3", "rope", HEADED, rope="half", positions=False),
    decoder("gptj_counted", "GPTJ", "rope", GPTJ, rope="interleaved partial", attention="eager", positions=False),
    decoder("gpt2_counted", "GPT2", "learned", GPT, model="GPT2LMHeadModel", positions=False),
    decoder("llama_causal", "Llama", "rope", HEADED, rope="half", kind="causal"),
    decoder("gptj_causal", "GPTJ", "rope", GPTJ, rope="interleaved partial", attention="eager", kind="causal"),
    decoder("gpt2_causal", "GPT2", "learned", GPT, model="GPT2LMHeadModel", kind="causal"),
    decoder("bloom_causal", "Bloom", "alibi", BLOOM, attention="eager", kind="causal"),
    decoder("gemma3_causal", "Gemma3Text", "rope", GEMMA3, model="Gemma3ForCausalLM", rope="half", kind="causal"),
    decoder("llama_fp16", "Llama", "rope", HEADED, rope="half", dtype="float16"),
    decoder("gpt_neox_fp16", "GPTNeoX", "rope", NEOX, rope="half partial", dtype="float16", attention="eager"),
]
