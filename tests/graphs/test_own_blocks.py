"""Blocks of every encoding, exported without metadata: their descriptions must agree with their specs.

The block, its export and the spec come from other parts of posexport. The tested code sees only the graph.
"""

from __future__ import annotations

from typing import Any

import pytest

from posexport.export import export
from posexport.graphs.attention.describe import Describer
from posexport.graphs.view import view_of
from posexport.models import read_encoding, read_spec
from posexport.models.weights import seeded_weights

LENGTH = "original_max_position_embeddings"
LISTS = {"short_factor": [1, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], "long_factor": [1, 2, 3, 4, 5, 6, 7, 8]}

QUICK: list[dict[str, Any]] = [
    {"name": "rope", "layout": "half", "theta": 500_000.0, "scaling": "llama3", "factor": 8.0, LENGTH: 8192},
    {"name": "rope2d", "layout": "half-head", "order": "yx", "factor": 2.0},
    {"name": "t5", "num_buckets": 16, "max_distance": 40},
]

RECOGNISED: list[dict[str, Any]] = [
    *QUICK,
    {"name": "none"},
    {"name": "learned", "max_positions": 64},
    {"name": "sinusoidal"},
    {"name": "sinusoidal", "order": "cos-sin", "layout": "half", "theta": 500.0},
    {"name": "temperature"},
    {"name": "temperature", "floor_scale": 100, "attn_scale": 0.25},
    {"name": "rope"},
    {"name": "rope", "layout": "half", "theta": 1e6},
    {"name": "rope", "rotary_dim": 8},
    {"name": "rope", "layout": "half", "scaling": "linear", "factor": 4.0},
    {"name": "rope", "scaling": "dynamic", "factor": 4.0, LENGTH: 64},
    {"name": "rope", "layout": "half", "scaling": "yarn", "factor": 4.0, LENGTH: 4096},
    {"name": "rope", "layout": "half", "scaling": "longrope", "factor": 4.0, LENGTH: 64, **LISTS},
    {"name": "xpos"},
    {"name": "xpos", "layout": "half", "scale_base": 256, "gamma": 0.3},
    {"name": "rope2d"},
    {"name": "rope2d", "spacing": "alternate", "theta": 10_000.0},
    {"name": "rope3d"},
    {"name": "mrope"},
    {"name": "mrope", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
    {"name": "rope-dinov3"},
    {"name": "rope-dinov3", "grid": [14, 16]},
    {"name": "alibi"},
    {"name": "alibi", "slopes": [0.1, 0.2, 0.3, 0.4], "slopes_ahead": [0.5, 0.5, 0.1, 0.1]},
    {"name": "t5"},
    {"name": "kerple"},
    {"name": "kerple", "kernel": "power"},
    {"name": "sandwich"},
    {"name": "alibi2d"},
    {"name": "alibi2d", "distance": "manhattan"},
    {"name": "swin"},
    {"name": "swinv2"},
]

NO_NAME: list[dict[str, Any]] = [
    {"name": name} for name in ("relative", "fire", "shaw", "deberta", "cope", "rope-mixed", "rope-vjepa2")
]


def said_of(encoding: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The description of the attention of an exported block with this encoding, without its metadata."""
    block = {"hidden_size": 64, "num_heads": 4, **options}
    if encoding["name"] in ("xpos", "cope"):
        block["causal"] = True
    spec = read_spec({**block, "encoding": encoding})
    model = export(spec, seeded_weights(spec, 0))
    model.metadata_props.clear()
    view = view_of(model)
    (one,) = view.attentions
    return Describer(view).describe(one)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "encoding",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in RECOGNISED],
    ids=lambda one: " ".join(map(str, one.values())),
)
def test_the_encoding_comes_back_with_its_parameters(encoding: dict[str, Any]) -> None:
    found = said_of(encoding)
    assert read_encoding(found["encoding"]) == read_encoding(encoding)
    assert found["mask"]["kind"] == ("causal" if encoding["name"] == "xpos" else "none")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", NO_NAME, ids=lambda one: one["name"])
def test_encodings_that_are_not_recognised_have_a_reason_and_no_other_name(encoding: dict[str, Any]) -> None:
    found = said_of(encoding)["encoding"]
    assert found["name"] in ("unknown", "rotary") and found["reason"]["text"]


@pytest.mark.slow
def test_static_ntk_is_rope_with_its_larger_theta() -> None:
    found = said_of({"name": "rope", "scaling": "ntk", "factor": 4.0})["encoding"]
    assert found["theta"] == pytest.approx(10_000.0 * 4.0 ** (16 / 14), rel=1e-6)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True, "window": 5}, {"mask": ("window", 5, [])}),
    ({"window": 5}, {"mask": ("local", 5, [])}),
    ({"causal": True, "attention_chunk_size": 4, "kv_cache": "concat"}, {"mask": ("chunk", 4, []), "cache": "grown"}),
    ({"causal": True, "padding_mask": True, "num_kv_heads": 2}, {"mask": ("causal", None, ["attention_mask"])}),
    ({"causal": True, "kv_cache": "shared"}, {"mask": ("causal", None, []), "cache": "shared"}),
    ({"prefix_tokens": 2}, {"prefix_tokens": 2}),
    ({"qk_norm": True}, {"qk_norm": "rms"}),
    ({"softcap": 20.0}, {"softcap": 20.0}),
    ({"angles": "exact"}, {}),
    ({"dtype": "bf16"}, {"dtype": "bf16", "softmax_dtype": "fp32"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "expected"), OPTIONS, ids=str)
def test_options_of_a_block(options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = said_of({"name": "rope"}, **options)
    assert found["encoding"] == {"name": "rope", "layout": "interleaved", "theta": 10_000.0}
    mask = found["mask"]
    said = {
        **found,
        "mask": (mask["kind"], mask["window"] or mask["chunk"], mask["padding"]),
        "cache": found["cache"] and found["cache"]["kind"],
        "qk_norm": found["qk_norm"] and found["qk_norm"]["queries"]["kind"],
    }
    assert {key: said[key] for key in expected} == expected
