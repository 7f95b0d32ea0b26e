"""Random config.json files of small models.

Every key about attention is drawn: in its old or new place, with values at a limit, as null, or left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Data = dict[str, Any]
MISSING = object()
"""A key that is left out."""

TEXT: Data = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
    "vocab_size": 17,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Drawer:
    """Draws random values and keys; the seed decides all of them."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def keys(self, candidates: dict[str, tuple[Any, ...]], part: float = 0.4) -> Data:
        """Each key with probability `part`, with one of its candidates as the value."""
        drawn = {key: self.one(*values) for key, values in candidates.items() if self.chance(part)}
        return {key: value for key, value in drawn.items() if value is not MISSING}

    def factors(self, count: int) -> list[float]:
        return [round(self.random.uniform(1, 6), 3) for _ in range(count)]

    def table(self, width: int, parts: bool, kinds: tuple[str, ...]) -> Data:
        """A table of rotary parameters for heads of `width` features."""
        kind = self.one(*kinds)
        part = self.one(0.25, 0.5, 0.75, 1.0) if parts and self.chance(0.5) else None
        table: Data = {self.one("rope_type", "rope_type", "type"): kind}
        if kind == "default" and self.chance(0.3):
            table = {}
        if self.chance(0.1):
            table["type"] = self.one("default", kind)
            table["rope_type"] = kind
        table |= self.keys({"rope_theta": (50.0, 500, 1e4)}, 0.5)
        table |= {} if part is None else {"partial_rotary_factor": part}
        if kind in ("linear", "dynamic", "yarn", "llama3"):
            table["factor"] = self.one(1.0, 2, 2.5, 8.0)
        if kind in ("yarn", "longrope", "llama3"):
            table |= self.keys({"original_max_position_embeddings": (4, 16, 64, 2048)}, 0.6)
        if kind == "yarn" and "su" not in kinds:  # Phi-3's yarn is longrope
            table |= self.keys(
                {
                    "attention_factor": (0.5, 1.5, None),
                    "beta_fast": (4, 32.0, 0, None),
                    "beta_slow": (1, 0.5, 2, 0, None),
                    "mscale": (0.7, 1.0, 0, None),
                    "mscale_all_dim": (0.5, 1.0, 0, None),
                    "truncate": (True, False, None),
                }
            )
            table |= {"factor": None} if self.chance(0.1) else {}
        if kind == "longrope" or (kind in ("su", "yarn") and "su" in kinds):
            count = int(width * (part or 1.0)) // 2
            table |= {"short_factor": self.factors(count), "long_factor": self.factors(count)}
            table |= self.keys({"factor": (1.0, 4.0, None), "attention_factor": (1.25, 1, None)})
        if kind == "llama3":
            table |= {"low_freq_factor": self.one(1.0, 2), "high_freq_factor": self.one(4.0, 8)}
        if kind == "proportional":
            table |= self.keys({"factor": (1.0, 4.0), "partial_rotary_factor": (0.5, 1.0)})
        return table


KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
LENGTHS = (MISSING, 8, 9, 32, 4096)


def rotary(draw: Drawer, width: int, kinds: tuple[str, ...] = KINDS, parts: bool = False) -> Data:
    """Rotary keys of a flat config, in the new or the old form."""
    data = draw.keys({"rope_theta": (100.0, 5e5, 10), "max_position_embeddings": LENGTHS}, 0.5)
    if draw.chance(0.75):
        data[draw.one("rope_parameters", "rope_scaling")] = draw.one(None, {}, *[draw.table(width, parts, kinds)] * 8)
    return data


def heads(draw: Drawer, grouped: bool = True, wide: bool = True) -> tuple[Data, int]:
    """The sizes of a model, and the size of a head."""
    data = {**TEXT, "num_attention_heads": draw.one(2, 4)}
    width = 32 // data["num_attention_heads"]
    if grouped:
        data["num_key_value_heads"] = draw.one(1, 2, data["num_attention_heads"])
    if wide and draw.chance(0.6):
        width = data["head_dim"] = draw.one(8, 12, 16)
    return data, width


def kinds_of_layers(draw: Drawer, data: Data, local: str, part: float = 0.4) -> Data:
    if not draw.chance(part):
        return {}
    return {"layer_types": [draw.one("full_attention", local) for _ in range(data["num_hidden_layers"])]}


WINDOWS = (MISSING, None, 0, 1, 2, 5, 4096)


def llama(draw: Drawer) -> Data:
    data, width = heads(draw)
    return {
        **data,
        **rotary(draw, width),
        **draw.keys({"attention_bias": (True, False), "is_causal": (True, False)}, 0.2),
    }


def mistral(draw: Drawer) -> Data:
    data, width = heads(draw)
    return {**data, **rotary(draw, width), **draw.keys({"sliding_window": WINDOWS}, 0.7)}


def qwen(draw: Drawer, wide: bool) -> Data:
    data, width = heads(draw, wide=wide)
    if wide and "head_dim" not in data:
        width = data["head_dim"] = 16
    data |= rotary(draw, width)
    windows = {"sliding_window": WINDOWS, "use_sliding_window": (True, True, False), "max_window_layers": (0, 1, 3)}
    return {**data, **draw.keys(windows, 0.6), **kinds_of_layers(draw, data, "sliding_attention", 0.2)}


def qwen2(draw: Drawer) -> Data:
    return qwen(draw, wide=False)


def qwen3(draw: Drawer) -> Data:
    return {**qwen(draw, wide=True), **draw.keys({"rms_norm_eps": (0.05, 1e-6), "attention_bias": (True, False)}, 0.3)}


def gemma(draw: Drawer) -> Data:
    data, width = heads(draw)
    if "head_dim" not in data:
        width = data["head_dim"] = 16
    return {**data, **rotary(draw, width), **draw.keys({"attention_bias": (True, False)}, 0.2)}


def gemma2(draw: Drawer) -> Data:
    data = gemma(draw)
    more = {
        "sliding_window": (MISSING, 0, 1, 2, 5),
        "query_pre_attn_scalar": (4, 16, 24),
        "attn_logit_softcapping": (None, 1.5, 50.0),
    }
    return {**data, **draw.keys(more, 0.6), **kinds_of_layers(draw, data, "sliding_attention")}


def nested(draw: Drawer, width: int, local: str, global_theta: str) -> Data:
    """Rotary keys of a config that can have a table for each layer type."""
    kinds = ("default", "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
    data = draw.keys({global_theta: (500.0, 1e4), local: (50.0, 1e3), "max_position_embeddings": LENGTHS}, 0.4)
    if draw.chance(0.4):
        both = {name: draw.table(width, False, kinds) for name in ("full_attention", "sliding_attention")}
        data["rope_parameters"] = both
    elif draw.chance(0.4):
        data["rope_scaling"] = draw.table(width, False, kinds)
    return data


def gemma3(draw: Drawer) -> Data:
    data, width = heads(draw)
    if "head_dim" not in data:
        width = data["head_dim"] = 16
    more = {
        "sliding_window": (MISSING, 0, 1, 2, 5),
        "query_pre_attn_scalar": (4, 16, 24),
        "use_bidirectional_attention": (True, False),
        "sliding_window_pattern": (1, 2, 3),
    }
    data |= draw.keys(more, 0.5) | kinds_of_layers(draw, data, "sliding_attention", 0.3)
    return {**data, **nested(draw, width, "rope_local_base_freq", "rope_theta")}


def gpt_oss(draw: Drawer) -> Data:
    data, width = heads(draw)
    if "head_dim" not in data:
        width = data["head_dim"] = 16
    data |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    more = {"sliding_window": (MISSING, 0, 1, 2, 5), "attention_bias": (True, False)}
    return {**data, **rotary(draw, width), **draw.keys(more), **kinds_of_layers(draw, data, "sliding_attention")}


def llama4_text(draw: Drawer) -> Data:
    data, width = heads(draw)
    if "head_dim" not in data:
        width = data["head_dim"] = 16
    data |= {"num_local_experts": 2, "intermediate_size_mlp": 16}
    more = {
        "attention_chunk_size": (1, 2, 5, 8192),
        "use_qk_norm": (True, False),
        "no_rope_layers": ([], [1, 0, 1], [0, 0, 1], None),
        "no_rope_layer_interval": (1, 2, 3),
        "attn_temperature_tuning": (True, False),
        "floor_scale": (1, 3),
        "attn_scale": (0.5, 2.0),
        "rms_norm_eps": (0.05, 1e-5),
    }
    return {**data, **rotary(draw, width), **draw.keys(more), **kinds_of_layers(draw, data, "chunked_attention", 0.2)}


def smollm3(draw: Drawer) -> Data:
    data, width = heads(draw, wide=False)
    more = {
        "sliding_window": WINDOWS,
        "use_sliding_window": (True, True, False),
        "no_rope_layers": ([1, 0, 1], [0, 0, 1], None),
        "no_rope_layer_interval": (1, 2, 3),
        "attention_bias": (True, False),
    }
    data |= draw.keys(more, 0.6)
    return {**data, **rotary(draw, width), **kinds_of_layers(draw, data, "sliding_attention", 0.2)}


def phi3(draw: Drawer) -> Data:
    data, width = heads(draw, wide=False)
    kinds = ("default", "default", "longrope", "su", "yarn")
    data |= rotary(draw, width, kinds, parts=True)
    more = {
        "sliding_window": WINDOWS,
        "original_max_position_embeddings": (4, 16, 4096),
        "partial_rotary_factor": (0.5, 1.0),
    }
    return {**data, **draw.keys(more, 0.5)}


def gpt_neox(draw: Drawer) -> Data:
    data, width = heads(draw, grouped=False, wide=False)
    data |= rotary(draw, width, parts=True)
    more = {"rotary_pct": (0.5, 1.0), "rotary_emb_base": (50, 500.0), "partial_rotary_factor": (0.5, 1.0)}
    return {**data, **draw.keys({**more, "attention_bias": (True, False)}, 0.3)}


def falcon(draw: Drawer) -> Data:
    data, width = heads(draw, grouped=False, wide=False)
    more = {
        "alibi": (False, False, True),
        "bias": (True, False),
        "multi_query": (True, False),
        "new_decoder_architecture": (True, False),
        "num_kv_heads": (1, 2, None),
    }
    return {**data, **rotary(draw, width), **draw.keys(more)}


def modernbert(draw: Drawer) -> Data:
    data, width = heads(draw, grouped=False, wide=False)
    more = {
        "local_attention": (0, 1, 2, 3, 8),
        "global_attn_every_n_layers": (1, 2, 3),
        "attention_bias": (True, False),
    }
    data |= draw.keys(more, 0.5) | kinds_of_layers(draw, data, "sliding_attention", 0.3)
    return {**data, **nested(draw, width, "local_rope_theta", "global_rope_theta")}


DRAWN: dict[str, Callable[[Drawer], Data]] = {
    function.__name__: function
    for function in (llama, mistral, qwen2, qwen3, gemma, gemma2, gpt_oss, llama4_text, smollm3, phi3, gpt_neox, falcon)
}
DRAWN |= {"gemma3_text": gemma3, "modernbert": modernbert}


def drawn(model_type: str, seed: int) -> Data:
    """A random config.json of a model type."""
    return {"model_type": model_type, **DRAWN[model_type](Drawer(f"{model_type} {seed}"))}


def pictured(draw: Drawer, section: list[int], wide: bool) -> Data:
    """The text config of a vision-language model, with mrope_section in its rotary table."""
    data, width = heads(draw, wide=False)
    if wide:
        width = data["head_dim"] = 16
    data |= rotary(draw, width, ("default", "default", "linear", "dynamic", "yarn", "llama3"))
    table = next((data[key] for key in ("rope_parameters", "rope_scaling") if data.get(key)), None)
    if table is None:
        table = data["rope_parameters"] = {"rope_type": "default"}
        data.pop("rope_scaling", None)
    table["mrope_section"] = [width // 2 - 2 * (width // 8), width // 8, width // 8] if section else [width // 2, 0, 0]
    return data


def qwen2_vl(draw: Drawer) -> Data:
    windows = {"sliding_window": WINDOWS, "use_sliding_window": (True, False), "max_window_layers": (0, 1, 3)}
    return {**pictured(draw, draw.one([], [1]), wide=False), **draw.keys(windows)}


def qwen3_vl(draw: Drawer) -> Data:
    return {**pictured(draw, [1], wide=True), **draw.keys({"rms_norm_eps": (0.05,), "attention_bias": (True, False)})}


def simple(base: Data, **candidates: tuple[Any, ...]) -> Callable[[Drawer], Data]:
    """Draws a config of single keys, without rotary tables."""
    return lambda draw: {**base, **draw.keys(candidates, 0.5)}


SIZES: Data = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
HEADS = {"num_attention_heads": (1, 2, 4), "hidden_size": (48, 64)}
TERMS: Data = {**SIZES, "relative_attention": True, "position_biased_input": False}
DISENTANGLED = {
    **HEADS,
    "pos_att_type": ("c2p", "p2c", "c2p|p2c", ["p2c", "c2p"]),
    "max_relative_positions": (-1, 0, 16, 129),
    "max_position_embeddings": (64, 513),
}
SWIN: Data = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
SWINS = {"window_size": (2, 4, 8, 16), "image_size": (32, 64, [64, 32]), "qkv_bias": (True, False), "embed_dim": (32,)}

SIMPLE: dict[str, Callable[[Drawer], Data]] = {
    "bert": simple(SIZES, **HEADS, max_position_embeddings=(16, 100), is_decoder=(True, False)),
    "t5": simple(
        {"num_layers": 2},
        **{"d_model": (32,), "d_kv": (8, 6), "num_heads": (2, 4), "is_decoder": (True, False)},
        **{"relative_attention_num_buckets": (8, 16), "relative_attention_max_distance": (20, 300)},
    ),
    "deberta": simple({**TERMS, "pos_att_type": "c2p"}, **DISENTANGLED),
    "deberta-v2": simple(
        {**TERMS, "pos_att_type": "c2p"},
        **DISENTANGLED,
        **{"position_buckets": (-1, 0, 4, 16, 20), "share_att_key": (True, False), "norm_rel_ebd": ("layer_norm",)},
    ),
    "xlnet": simple({"n_layer": 2, "d_inner": 16}, d_model=(32, 64), n_head=(2, 4), attn_type=("bi", "uni")),
    "wav2vec2-bert": simple(SIZES, **HEADS, left_max_position_embeddings=(3, 64), right_max_position_embeddings=(0, 8)),
    "wav2vec2-conformer": simple({**SIZES, "position_embeddings_type": "relative"}, **HEADS),
    "vit": simple(SIZES, **HEADS, image_size=(32, 48), patch_size=(8, 16), qkv_bias=(True, False)),
    "swin": simple(SWIN, **SWINS),
    "swinv2": simple(SWIN, **SWINS, pretrained_window_sizes=([0, 0], [6, 12])),
    "dinov3_vit": simple(
        SIZES,
        **HEADS,
        **{"rope_theta": (10.0, 100), "num_register_tokens": (0, 4), "key_bias": (True, False)},
        **{"query_bias": (True, False), "value_bias": (True, False), "proj_bias": (True, False)},
    ),
    "pixtral": simple(SIZES, **HEADS, rope_theta=(50.0, 1e4), rope_parameters=({"rope_theta": 20.0}, None)),
    "vjepa2": simple({}, hidden_size=(96, 192), num_attention_heads=(2, 4), qkv_bias=(True, False)),
    "sam2_video": simple(
        {},
        memory_attention_rope_theta=(50.0, 1e4),
        memory_attention_num_layers=(1, 3),
        memory_attention_hidden_size=(256,),
    ),
    "gptj": simple({"n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8}, rotary_dim=(4, 16), n_head=(1, 2)),
    "bloom": simple({"n_layer": 2}, n_head=(4, 16), hidden_size=(48, 96)),
    "mpt": simple(
        {"n_layers": 2},
        d_model=(48, 96),
        n_heads=(4, 8),
        attn_config=({"alibi": True, "softmax_scale": 0.5}, {"alibi": True}),
    ),
    "qwen2_vl_text": qwen2_vl,
    "qwen2_5_vl_text": qwen2_vl,
    "qwen3_vl_text": qwen3_vl,
}
DRAWN |= {"qwen2_vl_text": qwen2_vl, "qwen2_5_vl_text": qwen2_vl, "qwen3_vl_text": qwen3_vl}
DRAWN |= SIMPLE
