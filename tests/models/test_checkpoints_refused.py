"""`--from`: contents of a config.json that are refused, each in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import refusal, written
from safetensors.torch import save

from posexport.models.checkpoints import ARCHITECTURES, read_checkpoint
from posexport.models.checkpoints.config import COMMON, ignored_keys

TERMS = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c"}
NEEDED: dict[str, dict[str, Any]] = {"deberta": TERMS, "deberta-v2": TERMS}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_unknown_key_is_named(model_type: str, tmp_path: Path) -> None:
    data = {"model_type": model_type, **NEEDED.get(model_type, {})}
    file = written(tmp_path, **data)
    read_checkpoint(file, None, 1, {})
    written(tmp_path, **data, attention_twist=[1, 2])
    assert refusal(file) == (
        f"{file}: attention_twist is [1, 2], and posexport doesn't know what that means for the attention of "
        f"{model_type}: drop the key if it means nothing."
    )


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_key_that_is_known_says_nothing(model_type: str, tmp_path: Path) -> None:
    """No key is both read and ignored; that would hide its value."""
    data = {"model_type": model_type, **NEEDED.get(model_type, {})}
    plain = read_checkpoint(written(tmp_path, **data), None, 1, {}).spec
    for key in sorted(ignored_keys(model_type) - COMMON):
        assert read_checkpoint(written(tmp_path, **data, **{key: "twist"}), None, 1, {}).spec == plain, key


LONG = {"max_position_embeddings": 64}
IN_TABLES: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
    (
        {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3}, **LONG},
        "rope_scaling.alpha",
    ),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta"),
    ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"x": 1}}}, "full_attention.x is 1"),
    ({"model_type": "mpt", "attn_config": {"twist": 1}}, "attn_config.twist"),
    ({"model_type": "gemma3", "text_config": {"twist": 1}}, "text_config.twist"),
    ({"model_type": "gemma3", "text_config": {"head_dim": 8}, "twist": 1}, "json: twist is 1"),
    ({"model_type": "gemma3", "text_config": {"head_dim": 8}, "head_dim": 9}, "json: head_dim is 9"),
    ({"model_type": "bert", "pruned_heads": {"0": [1]}}, "pruned_heads"),
    ({"model_type": "llama", "is_decoder": True}, "is_decoder"),
]


@pytest.mark.parametrize(("data", "named"), IN_TABLES, ids=lambda value: str(value)[:40])
def test_an_unknown_key_of_a_table_is_named(data: dict[str, Any], named: str, tmp_path: Path) -> None:
    sentence = refusal(written(tmp_path, **data))
    assert named in sentence and "doesn't know what that means" in sentence


def test_what_stands_around_a_table_again_is_no_other_key(tmp_path: Path) -> None:
    data = {"model_type": "gemma3", "text_config": {"head_dim": 8, "num_attention_heads": 4}, "head_dim": 8}
    assert read_checkpoint(written(tmp_path, **data), None, 1, {}).spec.head_dim == 8


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, "did you mean 'llama'?"),
    ({"model_type": "llama", "hiden_size": 64}, "llama: did you mean 'hidden_size'? If not, drop the key if it means"),
    ({"model_type": "llama", "rope_parameters": {"rope_thet": 5.0}}, "did you mean 'rope_theta'? If not, drop"),
    ({"model_type": "mamba"}, "The whole model of another type is written by posexport export --model."),
    ({}, "unknown model_type"),
    ({"model_type": ["llama"]}, "unknown model_type"),
    ({"model_type": "llama", "hidden_size": "4096"}, 'hidden_size is "4096": it must be a whole number from 1'),
    ({"model_type": "llama", "hidden_size": 2**40}, "it must be a whole number from 1 to 2147483647"),
    ({"model_type": "llama", "hidden_size": None}, "hidden_size is null: it must be a whole number from 1"),
    ({"model_type": "llama", "num_attention_heads": 3}, "3 heads don't divide a width of 4096"),
    ({"model_type": "llama", "attention_bias": 1}, "attention_bias is 1: it must be true or false"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
        "full_attention.truncate is false: it must be true or left out",
    ),
    (
        {"model_type": "modernbert", "rope_scaling": {**YARN, "truncate": False}},
        "rope_scaling.truncate is false: it must be true or left out",
    ),
    ({"model_type": "bloom", "is_causal": False}, "is_causal is false: it must be true"),
    ({"model_type": "mpt", "is_causal": False}, "is_causal is false: it must be true"),
    ({"model_type": "falcon", "alibi": True, "is_causal": False}, "is_causal is false: it must be true"),
    ({"model_type": "llama", "rope_parameters": 5}, "rope_parameters is 5: it must be a table"),
    ({"model_type": "llama", "rope_theta": float("inf")}, "rope_theta is Infinity: it must be a number"),
    ({"model_type": "llama", "rope_theta": 10**400}, "a whole number of 401 digits"),
    ({"model_type": "llama", "rope_theta": -3}, "theta is -3"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, 'rope_type is "ntk"'),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "linear"}}, "scaling linear lacks factor"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0: it must be from 1 in layers that use it"),
    (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32},
        "layer_types has sliding_attention without use_sliding_window",
    ),
    (
        {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}},
        "it must be with rope_type, because transformers ignores type in it here",
    ),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: it must be null or 1"),
    ({"model_type": "llama", "rope_theta": float("nan")}, "rope_theta is NaN: it must be a number"),
    (
        {
            "model_type": "llama",
            "rope_parameters": {"rope_theta": 5.0},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        "rope_scaling is {",
    ),
    ({"model_type": "mistral", "is_causal": False}, "is_causal is false: it must be true for layers with a window"),
    (
        {"model_type": "gemma2", "sliding_window": 8, "sliding_window_size": 9},
        "sliding_window and sliding_window_size are names of one key and differ",
    ),
    ({"model_type": "gemma2", "layer_types": ["linear_attention"]}, "layer_types is"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 36}, "without use_sliding_window"),
    ({"model_type": "llama4_text", "no_rope_layers": ["a"]}, "no_rope_layers is"),
    ({"model_type": "qwen3_vl", "text_config": {"rope_scaling": {"mrope_interleaved": False}}}, "mrope_interleaved is"),
    ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "one of default, longrope, su, yarn"),
    ({"model_type": "phi3", "partial_rotary_factor": 0}, "partial_rotary_factor is 0: it must be above 0"),
    ({"model_type": "gptj", "rotary": False}, "rotary is false"),
    ({"model_type": "mpt", "attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv is 6: it must be null"),
    ({"model_type": "mpt", "attn_config": {"alibi": False}}, "attn_config.alibi is false"),
    ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type is"),
    ({"model_type": "deberta"}, "relative_attention is missing: it must be true"),
    ({"model_type": "deberta", **TERMS, "position_biased_input": True}, "position_biased_input is true"),
    ({"model_type": "deberta", **TERMS, "talking_head": True}, "talking_head is true"),
    ({"model_type": "deberta-v2", **TERMS, "pos_att_type": "p2p"}, "pos_att_type is"),
    ({"model_type": "xlnet", "clamp_len": 5}, "clamp_len is 5"),
    (
        {"model_type": "wav2vec2-conformer", "position_embeddings_type": "rotary"},
        'position_embeddings_type is "rotary"',
    ),
    ({"model_type": "wav2vec2-bert", "position_embeddings_type": None}, "position_embeddings_type is null"),
    ({"model_type": "vit", "image_size": "large"}, "image_size is"),
    ({"model_type": "swin", "image_size": 16}, "larger than its grid"),
    ({"model_type": "swin", "use_absolute_embeddings": True}, "use_absolute_embeddings is true"),
    (
        {"model_type": "swinv2", "image_size": 200, "depths": [0, 0, 1], "num_heads": [3, 3, 3]},
        "grid of 50 by 50 patches halves 2 times",
    ),
    ({"model_type": "swin", "num_heads": [3]}, "num_heads is [3]"),
    ({"model_type": "swinv2", "pretrained_window_sizes": []}, "pretrained_window_sizes is []"),
    ({"model_type": "pixtral", "rope_parameters": {"rope_type": "yarn"}}, "one of default, axial"),
    ({"model_type": "pixtral", "head_dim": 8}, "head_dim is 8: it must be null or 64"),
    (
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}},
        "pixtral, which posexport reads of llava",
    ),
    ({"model_type": "gemma3", "text_config": 3}, "text_config is 3: it must be a table"),
]


@pytest.mark.parametrize(("data", "said"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_value_is_named(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(written(tmp_path, **data))


def test_only_a_misspelt_name_is_guessed(tmp_path: Path) -> None:
    """Another model type is not a misspelling of a known one, nor is a key next to the similar one."""
    assert "'mamba': allowed: llama, " in refusal(written(tmp_path, model_type="mamba"))
    sentence = refusal(written(tmp_path, model_type="llama", hidden_size=64, hiden_size=64))
    assert sentence.endswith("attention of llama: drop the key if it means nothing.")


def test_a_layer_that_is_none_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, model_type="swin")
    assert "layer 1 shifts its windows" in refusal(file, layers=2)
    assert "describes 12 layers, 0 to 11: 12 is none of them" in refusal(tmp_path, 12)
    stages = written(tmp_path, model_type="swin", depths=[1, 1], num_heads=[3, 6], image_size=56)
    assert "hidden_size is 96 in one of these layers and 192 in another" in refusal(stages, layers=2)
    assert "depths" in refusal(written(tmp_path, model_type="swin", depths=[1, 1, 1], num_heads=[3]))
    assert "give the folder" in refusal(written(tmp_path, model_type="llama"), 0)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "can't be read (No such file or directory)" in refusal(tmp_path)
    assert "can't be read (No such file or directory)" in refusal(tmp_path / "org" / "model")
    assert "nothing is downloaded, so give the local folder of a checkpoint" in refusal(tmp_path / "org" / "model")
    for name, content in (("x.safetensors", save({})), ("layer.onnx", b"\x08\x07\xff"), ("layer.onnx", b"")):
        (tmp_path / name).write_bytes(content)
        sentence = refusal(tmp_path / name)
        assert f"{name}' is no config.json: give the checkpoint's folder, or its config.json" in sentence
    for content, said in (
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "holds no table"),
        (b'{"model_type": "llama", "rope_theta": 1e4, "rope_theta": 500.0}', "a key stands in it twice"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix_tokens": 3}, "prefix_tokens was given, but"),
        ({"window": 3}, "unknown option with a checkpoint 'window'"),
        ({"dtype": "fp8"}, "fp8"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(written(tmp_path, model_type="dinov3_vit"), **options)
