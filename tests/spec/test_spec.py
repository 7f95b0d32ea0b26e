"""The spec: conversion from and to plain data, explicit defaults, and refusal of fields without meaning."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from helpers import CASES, case, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.errors import RequestError
from posexport.models import ENCODINGS, read_encoding, read_spec
from posexport.models.scaling import parameters
from posexport.models.weights import seeded_weights, weight_shapes
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.forms import FORMS
from posexport.spec.spec import Spec


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any allowed spec."""
    name = draw(st.sampled_from(list(ENCODINGS)))
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    over: dict[str, Any] = {
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": 4 * draw(st.integers(1, 64)),
        "hidden_size": 2 * draw(st.integers(1, 4096)),
        "scale": draw(st.none() | st.floats(1e-6, 6e4)),
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 2**31 - 1)),
        "layers": draw(st.integers(1, 96)),
        "vocab_size": draw(st.none() | st.integers(1, 10**6)),
        "dtype": draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        "bias": draw(st.booleans() | st.lists(st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj"]), unique=True)),
    }
    if draw(st.booleans()):
        over |= {
            "block": "transformer",
            "norm": draw(st.sampled_from([None, "pre", "post"])),
            "norm_type": draw(st.sampled_from([None, "layernorm", "rmsnorm"])),
            "mlp": draw(st.sampled_from([None, "gelu", "swiglu"])),
            "intermediate_size": draw(st.none() | st.integers(1, 2**20)),
        }
    if name in ("xpos", "cope"):
        over["causal"] = True
    if name == "swinv2":
        over["scale"] = None
    if name in ("rope-mixed", "deberta"):
        over["num_kv_heads"] = over["num_heads"]
    if name == "rope-vjepa2":
        over["head_dim"] += 4
    if name in ("rope", "rope2d", "sinusoidal"):
        over["theta"] = draw(st.floats(1e-3, 1e9))
        over["layout"] = draw(st.sampled_from(["interleaved", "half"]))
    if name == "t5":
        over["num_buckets"] = 4 * draw(st.integers(1, 64))
        over["max_distance"] = over["num_buckets"] + draw(st.integers(0, 10**6))
    return small_spec(name, **over)


@given(spec=specs())
@settings(max_examples=200)
def test_json_round_trip(spec: Spec) -> None:
    again = read_spec(json.loads(spec.to_json()))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.to_json() == spec.to_json()
    assert read_spec(spec.to_dict()) == spec


@given(spec=specs())
@settings(max_examples=50)
def test_numbers_may_be_text(spec: Spec) -> None:
    """As they come from the command line. Values that are not numbers stay as they are."""

    def text(value: Any) -> Any:
        return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    data = {key: text(value) for key, value in spec.to_dict().items()}
    data["encoding"] = {key: text(value) for key, value in spec.to_dict()["encoding"].items()}
    assert read_spec(data) == spec


@given(spec=specs())
@settings(max_examples=50)
def test_every_weight_has_a_shape_and_a_place(spec: Spec) -> None:
    shapes = weight_shapes(spec)
    prefixed = [name for name in shapes if name.startswith("layers.")]
    assert bool(prefixed) == (spec.layers > 1)
    assert sum(name.endswith("q_proj.weight") for name in shapes) == spec.layers
    own = [name for name in shapes if name.endswith(".bias") and "norm" not in name and "encoding." not in name]
    assert len(own) == spec.layers * len(spec.bias)
    assert all(size > 0 for shape in shapes.values() for size in shape)


def test_defaults_are_spelled_out() -> None:
    assert json.loads(read_spec({"encoding": {"name": "rope"}}).to_json()) == {
        "encoding": {
            **{"name": "rope", "theta": 10000.0, "layout": "interleaved", "rotary_dim": None},
            **dict.fromkeys(("scaling", *parameters())),
        },
        "hidden_size": 768,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_dim": 64,
        "scale": 0.125,
        "causal": False,
        "window": None,
        "attention_chunk_size": None,
        "kv_cache": None,
        "angles": "parity",
        "prefix_tokens": 0,
        "padding_mask": False,
        "cross": False,
        "qk_norm": False,
        "qk_norm_type": None,
        "softcap": None,
        "sinks": False,
        "bias": [],
        "block": "attention",
        "norm": None,
        "norm_type": None,
        "norm_eps": None,
        "mlp": None,
        "intermediate_size": None,
        "layers": 1,
        "layer_pattern": [],
        "vocab_size": None,
        "scale_embedding": False,
        "dtype": "fp32",
    }
    block = read_spec({"encoding": {"name": "none"}, "block": "transformer", "bias": True}).to_dict()
    assert [block[key] for key in ("norm", "norm_type", "norm_eps", "mlp", "intermediate_size")] == [
        "pre", "layernorm", 1e-6, "gelu", 3072,
    ]  # fmt: skip
    assert block["bias"] == ["q_proj", "k_proj", "v_proj", "o_proj", "mlp.fc1", "mlp.fc2"]
    assert small_spec("relative", table="learned").to_dict()["encoding"]["max_distance"] == 128


def test_the_encodings_and_their_parameters() -> None:
    """Frozen, because pipelines may use these names."""
    assert {name: [field.name for field in attrs.fields(cls)] for name, cls in ENCODINGS.items()} == {
        "none": [],
        "learned": ["max_positions"],
        "sinusoidal": ["theta", "order", "layout"],
        "relative": ["table", "theta", "max_distance"],
        "t5": ["num_buckets", "max_distance"],
        "rope": [
            "theta",
            "layout",
            "rotary_dim",
            "scaling",
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "short_factor",
            "long_factor",
            "low_freq_factor",
            "high_freq_factor",
            "partial_rotary_factor",
        ],
        "rope2d": ["theta", "theta_y", "layout", "order", "spacing", "factor"],
        "alibi": ["slopes", "slopes_ahead"],
        "xpos": ["theta", "layout", "scale_base", "gamma"],
        "mrope": [
            "theta",
            "rotary_dim",
            "scaling",
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "short_factor",
            "long_factor",
            "low_freq_factor",
            "high_freq_factor",
            "partial_rotary_factor",
            "layout",
            "mrope_section",
            "mrope_interleaved",
        ],
        "rope3d": ["theta", "theta_y", "theta_t", "layout", "order", "split"],
        "rope-mixed": ["layout"],
        "rope-dinov3": ["theta", "grid"],
        "rope-vjepa2": ["theta"],
        "alibi2d": ["slopes", "distance"],
        "kerple": ["kernel"],
        "sandwich": ["theta", "dim"],
        "fire": ["mlp_width", "init_L"],
        "shaw": ["max_distance", "max_distance_ahead", "relative_values"],
        "deberta": ["max_relative_positions", "position_buckets", "pos_att_type", "pos_bias"],
        "cope": ["npos_max"],
        "swin": ["window_size"],
        "swinv2": ["window_size", "pretrained_window_size"],
        "temperature": ["floor_scale", "attn_scale"],
    }
    axes = {name: cls.axes for name, cls in ENCODINGS.items() if cls.axes != 1}
    assert axes == {
        "none": 0,
        "rope2d": 2,
        "mrope": 3,
        "rope3d": 3,
        "rope-mixed": 2,
        "rope-dinov3": 2,
        "rope-vjepa2": 3,
        "alibi2d": 2,
        "cope": 0,
        "swin": 2,
        "swinv2": 2,
    }
    assert read_encoding({"name": "rope2d"}).theta == 100.0  # type: ignore[attr-defined]
    assert list(FORMS) == ["decomposed", "function", "native", "contrib"]


def test_inputs_and_outputs() -> None:
    assert graph_inputs(small_spec("rope2d", dtype="fp16")) == {
        "hidden_states": (("batch", "seq", 32), "fp16"),
        "position_ids": (("batch", "seq", 2), "int64"),
    }
    assert graph_inputs(small_spec("none", vocab_size=9)) == {"input_ids": (("batch", "seq"), "int64")}
    hidden, positions = (("batch", "seq", 32), "fp32"), (("batch", "seq"), "int64")
    grown, shared = ((("batch", 2, dim, 8), "fp32") for dim in ("past_seq", "max_seq"))
    spec = small_spec("rope", kv_cache="concat", padding_mask=True, num_kv_heads=2)
    assert list(graph_inputs(spec).items()) == [
        ("hidden_states", hidden),
        ("position_ids", positions),
        ("attention_mask", (("batch", "total_seq"), "int64")),
        ("past_key", grown),
        ("past_value", grown),
    ]
    present = (("batch", 2, "past_seq + seq", 8), "fp32")
    assert list(graph_outputs(spec).items()) == [
        ("output", hidden),
        ("present_key", present),
        ("present_value", present),
    ]
    spec = small_spec("none", kv_cache="shared", padding_mask=True, num_kv_heads=2, layers=2)
    assert graph_inputs(spec) == {
        "hidden_states": hidden,
        "attention_mask": (("batch", "max_seq"), "int64"),
        "write_indices": (("batch",), "int64"),
        **{f"past_{kind}.{layer}": shared for layer in (0, 1) for kind in ("key", "value")},
    }
    assert [*graph_outputs(spec)][1:] == ["present_key.0", "present_value.0", "present_key.1", "present_value.1"]
    assert graph_inputs(small_spec("learned", cross=True, padding_mask=True)) == {
        "hidden_states": hidden,
        "encoder_hidden_states": (("batch", "encoder_seq", 32), "fp32"),
        "position_ids": positions,
        "attention_mask": (("batch", "encoder_seq"), "int64"),
    }
    assert "position_ids" not in graph_inputs(small_spec("t5", cross=True))
    assert graph_outputs(small_spec("alibi")) == {"output": (("batch", "seq", 32), "fp32")}


@pytest.mark.parametrize("key", ["norm", "norm_type", "norm_eps", "mlp", "intermediate_size"])
def test_fields_of_a_transformer_block_mean_nothing_for_attention(key: str) -> None:
    value = {"norm": "pre", "norm_type": "rmsnorm", "norm_eps": 1e-5, "mlp": "gelu", "intermediate_size": 64}[key]
    with pytest.raises(RequestError, match=f"{key} is .* but block is 'attention'"):
        small_spec("none", **{key: value})
    assert getattr(small_spec("none", block="transformer", **{key: value}), key) == value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "encoding is None"),
        ({"encoding": "rope"}, "encoding is 'rope': it must be a table"),
        ({"encoding": {}}, "unknown encoding 'None'"),
        ({"encoding": {"name": 3}}, "unknown encoding '3'"),
        ({"encoding": {"name": "rope"}, "heads": 3}, "unknown field of a spec 'heads'"),
        ({"encoding": {"name": "rope"}, "causal": 1}, "causal is 1: it must be true or false"),
        ({"encoding": {"name": "rope"}, "hidden_size": True}, "hidden_size is True"),
        ({"encoding": {"name": "rope"}, "hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"encoding": {"name": "rope"}, "hidden_size": None}, "hidden_size is None"),
        ({"encoding": {"name": "rope", "theta": True}}, "theta is True"),
        ({"encoding": {"name": "rope"}, "bias": "q_proj"}, "bias is 'q_proj'"),
        ({"encoding": {"name": "rope"}, "bias": [1]}, r"bias is \[1\]"),
    ],
)
def test_data_of_wrong_types(data: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_spec(data)


def test_a_spec_is_frozen() -> None:
    spec = small_spec("rope")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.hidden_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", CASES)
def test_seeded_weights(name: str) -> None:
    spec = case(name)
    weights = seeded_weights(spec, 0)
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == weight_shapes(spec)
    assert all(bool(tensor.isfinite().all()) and float(tensor.std()) > 0 for tensor in weights.values())
    again, other = seeded_weights(spec, 0), seeded_weights(spec, 1)
    assert all(tensor.equal(again[key]) and not tensor.equal(other[key]) for key, tensor in weights.items())
    # a weight does not depend on the other weights
    deeper = seeded_weights(attrs.evolve(spec, vocab_size=5), 0)
    assert all(deeper[key].equal(tensor) for key, tensor in weights.items())


@pytest.mark.parametrize(
    ("dtype", "scale", "said"),
    [
        ("fp16", 65505, "the largest number in fp16"),
        ("bf16", 3.39e38, "a number from 1e-30 to 1e\\+30"),
        ("fp32", 1e300, "a number from 1e-30 to 1e\\+30"),
        ("fp32", 1e-50, "a number from 1e-30 to 1e\\+30"),
    ],
)
def test_a_scale_beyond_the_dtype_is_refused(dtype: str, scale: float, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_spec({"encoding": {"name": "none"}, "dtype": dtype, "scale": scale})
