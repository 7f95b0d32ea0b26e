"""Decoders whose checkpoints `--from` reads: a case for each architecture and for each variant of it."""

from __future__ import annotations

from typing import Any

from checkpoint_cases import Case, Run, counted, offset, three_axes

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "vocab_size": 17,
    "pad_token_id": 0,
}


def decoder(name: str, *faults: dict[str, Any], layers: tuple[int, ...] = (0,), **sizes: Any) -> Case:
    """A decoder with a language-model head whose layers have the names of Llama."""
    first = sizes.pop("first", "q_proj")
    run = counted if sizes.pop("counts", False) else offset
    return Case(
        model=f"{name}ForCausalLM",
        config=sizes.pop("config", name),
        sizes={**TEXT, **sizes},
        run=run,
        faults=faults,
        inside="model",
        layers=layers,
        ends=(first, "o_proj"),
    )


def scaled(rope_type: str, **more: Any) -> Case:
    """Llama with scaled frequencies, at positions beyond the trained length."""
    table = {"rope_type": rope_type, "rope_theta": 100.0, **more}
    fault = {f"rope_parameters.{name}": value * 3 for name, value in more.items() if name == "factor"}
    return decoder(
        "Llama",
        fault or {"rope_parameters.rope_theta": 9.0},
        max_position_embeddings=8,
        head_dim=16,
        rope_parameters=table,
    )


def fused(name: str, path: str, ends: tuple[str, str], *faults: dict[str, Any], **sizes: Any) -> Case:
    """A decoder with a language-model head and one fused projection of queries, keys and values."""
    head, attention = sizes.pop("inside", "transformer"), sizes.pop("attention", "eager")
    run = counted if sizes.pop("counts", False) else offset
    return Case(
        model=f"{name}ForCausalLM",
        config=name,
        sizes={"vocab_size": 17, "bos_token_id": 1, "eos_token_id": 2, **sizes},
        run=run,
        faults=faults,
        inside=head,
        path=path,
        ends=ends,
        attention=attention,
    )


def pictured(
    name: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    run: Run,
    *faults: dict[str, Any],
    inside: str = "model.language_model",
) -> Case:
    """The language model of a vision-language model."""
    return Case(
        model=f"{name}ForConditionalGeneration",
        config=name,
        sizes={"text_config": {**TEXT, **text}, "vision_config": vision},
        run=run,
        faults=faults,
        inside=inside,
    )


def sections(theta: float) -> dict[str, Any]:
    """Rotary parameters of a vision-language model with heads of size 8."""
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": [2, 1, 1]}


TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "intermediate_size": 16}
SIGLIP = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
SIGLIP |= {"image_size": 16, "patch_size": 4}

FALCON = ("h.{}.self_attention", ("query_key_value", "dense"))
FALCON_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "bias": True}

CASES: dict[str, Case] = {
    "llama": decoder(
        "Llama",
        {"rope_parameters.rope_theta": 9.0},
        {"is_causal": False},
        layers=(1,),
        attention_bias=True,
        head_dim=16,
    ),
    "llama-both-ways": decoder("Llama", {"is_causal": True}, is_causal=False),
    "llama-linear": scaled("linear", factor=4.0),
    "llama-dynamic": scaled("dynamic", factor=4.0),
    "llama-yarn": scaled("yarn", factor=4.0, original_max_position_embeddings=4),
    "llama-yarn-truncate-null": scaled("yarn", factor=4.0, original_max_position_embeddings=512, truncate=None),
    "llama-longrope": scaled(
        "longrope", short_factor=[1.0 + i for i in range(8)], long_factor=[2.0 + i for i in range(8)], factor=4.0
    ),
    "llama-llama3": scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "llama-proportional": scaled("proportional", partial_rotary_factor=0.5),
    "mistral": decoder("Mistral", {"sliding_window": 5}, {"sliding_window": None}, sliding_window=3),
    "qwen2": decoder(
        "Qwen2",
        {"layer_types": ["full_attention"] * 2},
        layers=(0, 1),
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
    ),
    "qwen3": decoder("Qwen3", {"rms_norm_eps": 9.0}, head_dim=16, rms_norm_eps=0.05),
    "gemma": decoder("Gemma", {"rope_parameters.rope_theta": 9.0}, head_dim=16),
    "gemma2": decoder(
        "Gemma2",
        {"attn_logit_softcapping": None},
        {"query_pre_attn_scalar": 1},
        layers=(0, 1),
        head_dim=16,
        sliding_window=3,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=1.5,
    ),
    "gemma3_text": decoder(
        "Gemma3",
        {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 1},
        {"query_pre_attn_scalar": 1, "sliding_window": 1},
        config="Gemma3Text",
        layers=(0, 5),
        head_dim=16,
        num_hidden_layers=6,
        sliding_window=3,
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    ),
    "gemma3-both-ways": decoder(
        "Gemma3",
        {"use_bidirectional_attention": False},
        config="Gemma3Text",
        head_dim=16,
        sliding_window=4,
        use_bidirectional_attention=True,
    ),
    "gpt_oss": decoder(
        "GptOss",
        {"rope_parameters.factor": 2.0},
        layers=(0, 1),
        head_dim=16,
        sliding_window=3,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "smollm3": decoder(
        "SmolLM3",
        {"no_rope_layers": [0, 0, 0, 1]},
        layers=(0, 3),
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=3,
    ),
    "llama4_text": decoder(
        "Llama4",
        {"attention_chunk_size": 2, "attn_scale": 2.0},
        {"use_qk_norm": False, "floor_scale": 1},
        config="Llama4Text",
        counts=True,  # Its temperature depends on the length of the cache.
        layers=(0, 3),
        num_hidden_layers=4,
        head_dim=8,
        intermediate_size_mlp=16,
        num_local_experts=2,
        attention_chunk_size=4,
        floor_scale=3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2_vl": pictured(
        "Qwen2VL",
        {"rope_parameters": sections(50.0)},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4},
        three_axes,
        {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    ),
    "qwen2_5_vl": pictured(
        "Qwen2_5_VL",
        {"rope_parameters": sections(50.0)},
        {**TOWER, "fullatt_block_indexes": [0]},
        three_axes,
        {"text_config.rope_parameters.mrope_section": [1, 2, 1]},
    ),
    "qwen3_vl": pictured(
        "Qwen3VL",
        {"rope_parameters": sections(50.0), "head_dim": 8},
        {**TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        three_axes,
        {"text_config.rope_parameters.mrope_section": [4, 0, 0]},
    ),
    "gemma3": pictured(
        "Gemma3", {"head_dim": 16, "sliding_window": 3}, SIGLIP, offset, {"text_config.sliding_window": 2}
    ),
    "llama4": pictured(
        "Llama4",
        {"head_dim": 8, "intermediate_size_mlp": 16, "num_local_experts": 2},
        {
            **SIGLIP,
            "intermediate_size": 64,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        offset,
        {"text_config.rope_parameters.rope_theta": 9.0},
        inside="language_model.model",
    ),
    "phi3": decoder(
        "Phi3",
        {"rope_parameters.partial_rotary_factor": 0.5},
        {"sliding_window": 2},
        first="qkv_proj",
        sliding_window=4,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.75},
    ),
    "phi3-longrope": decoder(
        "Phi3",
        {"original_max_position_embeddings": 30},
        max_position_embeddings=32,
        original_max_position_embeddings=4,
        first="qkv_proj",
        num_attention_heads=2,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 50.0,
            "short_factor": [1.0 + i for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        },
    ),
    "gptj": fused(
        "GPTJ", "h.{}.attn", ("q_proj", "out_proj"), {"rotary_dim": 4}, n_embd=32, n_head=2, n_layer=1, rotary_dim=8
    ),
    "gpt_neox": fused(
        "GPTNeoX",
        "layers.{}.attention",
        ("query_key_value", "dense"),
        {"rope_parameters.partial_rotary_factor": 0.5},
        inside="gpt_neox",
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=16,
    ),
    "falcon-one-key-head": fused(
        "Falcon", *FALCON, {"rope_parameters.rope_theta": 9.0}, **FALCON_SIZES, multi_query=True
    ),
    "falcon-key-heads": fused(
        "Falcon",
        *FALCON,
        {"rope_parameters.rope_theta": 9.0},
        **FALCON_SIZES,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "falcon-alibi": fused(
        "Falcon",
        *FALCON,
        {"alibi": False},
        **FALCON_SIZES,
        multi_query=False,
        alibi=True,
        parallel_attn=False,
        attention="sdpa",  # In eager mode, transformers 5.23 adds the bias twice.
    ),
    "bloom": fused(
        "Bloom",
        "h.{}.self_attention",
        ("query_key_value", "dense"),
        {"n_head": 3},
        hidden_size=24,
        n_head=6,
        n_layer=1,
        counts=True,
    ),
    "mpt": fused(
        "Mpt", "blocks.{}.attn", ("Wqkv", "out_proj"), {"n_heads": 3}, d_model=24, n_heads=6, n_layers=1, counts=True
    ),
}
