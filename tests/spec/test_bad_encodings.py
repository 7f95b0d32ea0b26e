"""What encodings refuse: each refusal is one sentence that says what was given and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import cli, refused, small_spec, weights_for

from posexport.errors import RequestError
from posexport.models import read_spec
from posexport.models.block import build_block
from posexport.spec.spec import Spec

LONG = {"factor": 4, "original_max_position_embeddings": 64}
LISTS = {"short_factor": [1] * 4, "long_factor": [2] * 4}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a scaling that isn't": ({"encoding": "rope", "scaling": "yarm"}, "'yarn'?"),
    "a factor without a scaling": ({"encoding": "rope", "factor": 4}, "factor was given with scaling none"),
    "no factor": ({"encoding": "rope", "scaling": "linear"}, "scaling linear lacks factor: it needs factor."),
    "no length": ({"encoding": "rope", "scaling": "yarn", "factor": 4}, "lacks original_max_position_embeddings"),
    "another's parameter": (
        {"encoding": "rope", "scaling": "llama3", **LONG, "beta_fast": 3},
        "beta_fast was given with scaling llama3: it belongs to yarn",
    ),
    "a factor that shortens": ({"encoding": "rope", "scaling": "linear", "factor": 0.5}, "factor is 0.5"),
    "more than all": (
        {"encoding": "rope", "scaling": "proportional", "partial_rotary_factor": 1.5},
        "partial_rotary_factor is 1.5",
    ),
    "betas the wrong way round": (
        {"encoding": "rope", "scaling": "yarn", **LONG, "beta_fast": 1, "beta_slow": 32},
        "beta_slow is 32",
    ),
    "llama3's factors the wrong way round": (
        {"encoding": "rope", "scaling": "llama3", **LONG, "low_freq_factor": 4, "high_freq_factor": 1},
        "low_freq_factor is 4",
    ),
    "half of mscale": ({"encoding": "rope", "scaling": "yarn", **LONG, "mscale": 1}, "give both or none"),
    "yarn's theta": ({"encoding": "rope", "scaling": "yarn", **LONG, "theta": 0.5}, "theta is 0.5 with scaling yarn"),
    "short lists": ({"encoding": "rope", "scaling": "longrope", **LONG, **LISTS, "long_factor": [2]}, "must have 4"),
    "no list": (
        {"encoding": "rope", "scaling": "longrope", **LONG, **LISTS, "long_factor": "a,b"},
        "a list of numbers",
    ),
    "an empty list": ({"encoding": "rope", "scaling": "longrope", **LONG, **LISTS, "long_factor": []}, "a list of"),
    "one pair": ({"encoding": "rope", "scaling": "ntk", "factor": 2, "head_dim": 2}, "it needs 4 or more"),
    "exact dynamic": ({"encoding": "rope", "scaling": "dynamic", **LONG, "angles": "exact"}, "depend on the length"),
    "exact beyond a radian": ({"encoding": "rope", "theta": 0.5, "angles": "exact"}, "theta is 0.5 with angles exact"),
    "exact without angles": ({"encoding": "alibi", "angles": "exact"}, "alibi, which has no angles"),
    "exact in a table": ({"encoding": "relative", "table": "learned", "angles": "exact"}, "has no angles of positions"),
    "a prefix of what does not turn": ({"encoding": "t5", "prefix_tokens": 1}, "prefix_tokens is 1 with t5"),
    "a prefix with a cache": ({"encoding": "rope", "prefix_tokens": 1, "kv_cache": "concat"}, "drop one of them"),
    "a grid with a cache": ({"encoding": "swin", "kv_cache": "concat"}, "positions on a grid have no order"),
    "thetas of one list": ({"encoding": "rope2d", "spacing": "alternate", "theta_y": 3}, "both axes share one list"),
    "an odd share": ({"encoding": "rope3d", "split": [3, 3, 2]}, "three even numbers"),
    "too wide a share": ({"encoding": "rope3d", "split": [4, 4, 4]}, "of at most head_dim together"),
    "sections that don't fit": ({"encoding": "mrope", "mrope_section": [1, 1, 1]}, "of 4 together"),
    "sections that don't interleave": (
        {"encoding": "mrope", "mrope_section": [0, 3, 1], "mrope_interleaved": True},
        "at most 1 and 1",
    ),
    "mrope by length": ({"encoding": "mrope", "scaling": "dynamic", **LONG}, "dynamic was given with mrope"),
    "shared heads of their own": ({"encoding": "rope-mixed", "num_kv_heads": 2}, "num_kv_heads is 2 with 4 heads"),
    "a grid of three": ({"encoding": "rope-dinov3", "grid": [3, 4, 5]}, "two numbers, rows and columns"),
    "a head of four": ({"encoding": "rope-vjepa2", "head_dim": 4}, "at least 6"),
    "xpos both ways": ({"encoding": "xpos"}, "keys ahead of a query would grow"),
    "cope both ways": ({"encoding": "cope"}, "it counts keys up to the query"),
    "slopes of other heads": ({"encoding": "alibi", "slopes": [1, 2]}, "one for each of 4 heads"),
    "slopes nobody sees": ({"encoding": "alibi", "slopes_ahead": [1] * 4, "causal": True}, "no query sees a key ahead"),
    "a negative slope": ({"encoding": "alibi", "slopes": [1, 1, 1, -1]}, "slopes is"),
    "odd sandwich": ({"encoding": "sandwich", "dim": 7}, "dim is 7"),
    "a scale beside a trained one": ({"encoding": "swinv2", "scale": 0.5}, "scale is 0.5 with swinv2"),
    "two norms": ({"encoding": "swinv2", "qk_norm": True}, "takes cosines of queries and keys"),
    "keys of several queries": ({"encoding": "deberta", "num_kv_heads": 2}, "deberta scores keys of each head"),
    "buckets beyond": (
        {"encoding": "deberta", "max_relative_positions": 8, "position_buckets": 16},
        "position_buckets is 16",
    ),
    "a grid of each step": ({"encoding": "rope-dinov3", "kv_cache": "concat"}, "set grid=ROWS,COLUMNS"),
    "a norm of a factor": ({"encoding": "temperature", "qk_norm": True, "qk_norm_type": "l2"}, "such a norm removes"),
    "a norm of a decay": (
        {"encoding": "xpos", "causal": True, "qk_norm": True, "qk_norm_type": "l2"},
        "such a norm removes",
    ),
    "a norm that isn't": ({"encoding": "rope", "qk_norm_type": "l2"}, "without qk_norm"),
    "chunks of an encoder": (
        {"encoding": "none", "cross": True, "attention_chunk_size": 4},
        "cross and attention_chunk",
    ),
    "rope of an encoder": ({"encoding": "xpos", "causal": False, "cross": True}, "cross was given with xpos"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_in_a_sentence(name: str) -> None:
    over, said = BAD[name]
    with pytest.raises(RequestError, match=re.escape(said)) as error:
        small_spec(**over)
    assert str(error.value).endswith((".", "?"))


PATTERNS: dict[str, tuple[str, str]] = {
    "an encoding that isn't": ("rope,ropes", "'rope'?"),
    "a parameter that isn't": ("rope:thta=3", "'theta'?"),
    "no pairs": ("rope:theta", "write NAME"),
    "no number": ("rope*x", "write NAME"),
    "nothing": ("rope*0", "N from 1 to 9999"),
    "a hole": ("rope,,none", "unknown encoding in layer_pattern"),
    "what every layer has": ("rope:theta=7,rope:theta=8", "every layer of layer_pattern has one of its own"),
    "at the input": ("learned,none", "acts once before the first layer"),
    "other axes": ("rope,rope2d", "one axis with those over several"),
    "a bad layer": ("rope,rope:scaling=linear", "lacks factor"),
    "too many": ("rope*99999", "N from 1 to 9999"),
    "an odd number": ("rope*²", "N from 1 to 9999"),
    "scales of their own": ("deberta,rope", "give scale"),
    "a window of nothing": ("rope:window=0", "window is"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_refused_on_the_command_line(name: str) -> None:
    pattern, said = PATTERNS[name]
    options = ("--hidden-size", "32", "--num-heads", "4", "--layers", "2", "--layer-pattern", pattern)
    if name == "what every layer has":
        options = (*options, "--set", "theta=5")
    refused(cli("export", *options), said)


def test_an_encoding_that_no_layer_has_is_refused() -> None:
    options = ("--hidden-size", "32", "--num-heads", "4", "--layers", "2", "--layer-pattern", "rope,none")
    refused(
        cli("export", "--encoding", "alibi", "--set", "slopes=1,2,3,4", *options), "no layer of layer_pattern has it"
    )


def test_fields_of_layers_are_read_like_those_of_a_spec() -> None:
    def one(window: object, norm: object) -> Spec:
        layer = {"encoding": {"name": "rope"}, "window": window, "qk_norm": norm}
        return read_spec({"encoding": {"name": "rope"}, "layer_pattern": [layer]})

    assert one("16", "False") == one(16, False)
    assert one("16", "False").to_json() == one(16, False).to_json()
    for wrong in (5, [5], [{"encoding": {"name": "rope"}, "heads": 3}]):
        with pytest.raises(RequestError, match="layer"):
            read_spec({"encoding": {"name": "rope"}, "layer_pattern": wrong})


def test_exact_angles_of_more_than_a_radian_are_refused_wherever_they_come_from() -> None:
    spec = small_spec("rope2d", factor=0.001, angles="exact")
    with pytest.raises(RequestError, match="radians per position"):
        build_block(spec, weights_for(spec))


def test_parameters_come_as_text_too() -> None:
    """As `--set` passes them."""
    length = {key: str(value) for key, value in LONG.items()}
    lists = {"short_factor": "1,1,1,1", "long_factor": "2, 2,2,2"}
    text = small_spec("rope", scaling="longrope", **length, **lists)
    assert text == small_spec("rope", scaling="longrope", **LONG, **LISTS)
    assert small_spec("rope3d", split="4,2,2") == small_spec("rope3d", split=[4, 2, 2])
    assert small_spec("mrope", mrope_section="2,1,1").encoding.mrope_section == (2, 1, 1)  # type: ignore[attr-defined]
