"""The sound artifacts that are mutated. They cover every encoding, and each kind of mask, cache, stack, form and dtype.

They are small (hidden size 32 or 48), so that long sequences are cheap. Their windows, chunks, tables and trained
lengths are those of real models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import onnx
import torch

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.export.layer_pattern import read_pattern
from posexport.models import ENCODINGS, read_spec
from posexport.models.weights import seeded_weights
from posexport.spec.spec import Spec


@attrs.frozen
class Artifact:
    """One sound file: its spec, its graph, and its weights by their public names."""

    name: str
    spec: Spec
    form: str
    model: onnx.ModelProto
    weights: Mapping[str, torch.Tensor]


def make_spec(encoding: str, pattern: str | None = None, **fields: Any) -> Spec:
    """A spec with hidden size 32 and 4 heads unless `fields` say otherwise. `fields` may be of the encoding or of the
    spec."""
    own = {field.name for field in attrs.fields(ENCODINGS[encoding])}
    parameters = {"name": encoding, **{key: value for key, value in fields.items() if key in own}}
    others = {"hidden_size": 32, "num_heads": 4, **{key: value for key, value in fields.items() if key not in own}}
    if pattern is not None:
        others["layer_pattern"] = read_pattern(pattern, parameters)
        parameters = others["layer_pattern"][0]["encoding"]
    return read_spec({"encoding": parameters, **others})


DECODER: dict[str, Any] = {"causal": True, "kv_cache": "concat"}
PADDED: dict[str, Any] = {**DECODER, "padding_mask": True}
SHARED: dict[str, Any] = {"causal": True, "kv_cache": "shared"}
IN_ORDER: dict[str, Any] = {"positions": "consecutive"}
LLAMA: dict[str, Any] = {"block": "transformer", "norm_type": "rmsnorm", "mlp": "swiglu", "intermediate_size": 48}

ARTIFACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (arguments of make_spec, arguments of export)
    "none-padded": ({"encoding": "none", "padding_mask": True}, {}),
    "none-cross": ({"encoding": "none", "cross": True, "padding_mask": True}, {"form": "contrib"}),
    "none-fp16": ({"encoding": "none", "softcap": 20.0, "sinks": True, "dtype": "fp16", **DECODER}, {}),
    "learned-encoder": (
        {
            **{"encoding": "learned", "max_positions": 2048, "padding_mask": True, "vocab_size": 97, "bias": True},
            **{"block": "transformer", "norm": "post", "intermediate_size": 48},
        },
        {},
    ),
    "learned-decoder": ({"encoding": "learned", "max_positions": 2048, **DECODER}, {"form": "function"}),
    "sinusoidal-cross": ({"encoding": "sinusoidal", "cross": True, "padding_mask": True}, {}),
    "sinusoidal-fp16": ({"encoding": "sinusoidal", "layout": "half", "causal": True, "dtype": "fp16"}, {}),
    "relative": ({"encoding": "relative", "padding_mask": True}, {"form": "function"}),
    "relative-table": ({"encoding": "relative", "table": "learned", "max_distance": 700, **DECODER}, {}),
    "t5-encoder": ({"encoding": "t5", "padding_mask": True}, {}),
    "t5-decoder": ({"encoding": "t5", **DECODER}, {"form": "function"}),
    "rope-padded": ({"encoding": "rope", "layout": "half", "num_kv_heads": 2, **PADDED}, {}),
    "rope-encoder": ({"encoding": "rope", "padding_mask": True}, {"form": "function"}),
    "rope-causal": ({"encoding": "rope", "causal": True, "padding_mask": True}, {"form": "contrib"}),
    "rope-shared": ({"encoding": "rope", "num_kv_heads": 2, "padding_mask": True, **SHARED}, {"form": "function"}),
    "rope-shared-native": ({"encoding": "rope", "layout": "half", **SHARED}, {"form": "native", "target": "ort"}),
    "rope-window": ({"encoding": "rope", "window": 1100, "num_kv_heads": 1, **DECODER}, {}),
    "rope-chunks": ({"encoding": "rope", "attention_chunk_size": 512, **DECODER}, {"form": "native"}),
    "rope-exact": ({"encoding": "rope", "angles": "exact", **DECODER}, {}),
    "rope-dynamic": (
        {"encoding": "rope", "scaling": "dynamic", "factor": 4, "original_max_position_embeddings": 640, **DECODER},
        {},
    ),
    "rope-longrope": (
        {
            **{"encoding": "rope", "scaling": "longrope", "factor": 4, "original_max_position_embeddings": 500},
            **{"short_factor": [1, 1.1, 1.5, 2], "long_factor": [1, 2, 5, 9], **SHARED},
        },
        {"form": "function"},
    ),
    "llama": (
        {
            **{"encoding": "rope", "layout": "half", "scaling": "llama3", "factor": 8, "low_freq_factor": 1},
            **{"high_freq_factor": 4, "original_max_position_embeddings": 256, "head_dim": 16, "qk_norm": True},
            **{"num_kv_heads": 2, "layers": 2, "vocab_size": 101, **LLAMA, **PADDED},
        },
        {},
    ),
    "gemma": (
        {
            **{"encoding": "rope", "layout": "half", "layers": 3, "softcap": 30.0, "num_kv_heads": 2, **LLAMA},
            **{"pattern": "rope:window=128:theta=10000*2,rope:theta=1000000", **DECODER},
        },
        {"opset": 18},
    ),
    "llama4": (
        {
            **{"encoding": "rope", "layers": 4, "qk_norm": True, "qk_norm_type": "l2", **LLAMA, **DECODER},
            **{"pattern": "rope:attention_chunk_size=96*3,temperature:qk_norm=false:floor_scale=64"},
        },
        {"form": "function"},
    ),
    "rope-prenorm": ({"encoding": "rope", "block": "transformer", "intermediate_size": 48, "padding_mask": True}, {}),
    "none-postnorm": (
        {"encoding": "none", "block": "transformer", "norm": "post", "intermediate_size": 48, **DECODER},
        {"form": "function"},
    ),
    "alibi-padded": ({"encoding": "alibi", **PADDED}, {"form": "native"}),
    "alibi-shared": ({"encoding": "alibi", **SHARED}, {}),
    "rope2d": ({"encoding": "rope2d", "prefix_tokens": 1}, {}),
    "rope3d": ({"encoding": "rope3d", "head_dim": 12, "hidden_size": 48}, {"form": "native"}),
    "mrope": ({"encoding": "mrope", "num_kv_heads": 2, "head_dim": 16, **PADDED}, {"form": "function"}),
    "rope-mixed": ({"encoding": "rope-mixed", "layout": "half"}, {}),
    "rope-dinov3": ({"encoding": "rope-dinov3", "grid": [14, 14], "prefix_tokens": 1}, {}),
    "rope-vjepa2": ({"encoding": "rope-vjepa2", "head_dim": 14}, {"form": "function"}),
    "xpos": ({"encoding": "xpos", **DECODER}, {}),
    "alibi2d": ({"encoding": "alibi2d"}, {"form": "function"}),
    "kerple": ({"encoding": "kerple", "kernel": "power", **DECODER}, {}),
    "sandwich": ({"encoding": "sandwich", "padding_mask": True}, {"form": "native"}),
    "fire": ({"encoding": "fire", "init_L": 64, **DECODER}, {"form": "function"}),
    "shaw": ({"encoding": "shaw", "max_distance": 64, "max_distance_ahead": 8, "padding_mask": True}, {}),
    "deberta": (
        {
            **{"encoding": "deberta", "max_relative_positions": 512, "position_buckets": 64, "padding_mask": True},
            **{"bias": True},
        },
        {},
    ),
    "cope": ({"encoding": "cope", "npos_max": 64, **DECODER}, {}),
    "swin": ({"encoding": "swin", "window_size": 7}, {}),
    "swinv2": ({"encoding": "swinv2", "window_size": 8, "bias": ["q_proj", "v_proj", "o_proj"]}, {"form": "function"}),
    "temperature": ({"encoding": "temperature", "floor_scale": 512, **DECODER}, {}),
    "learned-in-order": ({"encoding": "learned", "max_positions": 2048, **PADDED, **IN_ORDER}, {}),
    "rope-in-order": (
        {"encoding": "rope", "layout": "half", **SHARED, **IN_ORDER},
        {"form": "contrib", "target": "ort"},
    ),
    "t5-in-order": ({"encoding": "t5", **PADDED, **IN_ORDER}, {"form": "function", "target": "ort"}),
    "relative-in-order": ({"encoding": "relative", "padding_mask": True, **IN_ORDER}, {"form": "function"}),
    "relative-table-in-order": (
        {"encoding": "relative", "table": "learned", "max_distance": 700, **SHARED, **IN_ORDER},
        {"form": "function", "target": "ort"},
    ),
    "shaw-in-order": ({"encoding": "shaw", "max_distance": 64, **DECODER, **IN_ORDER}, {"form": "function"}),
    "deberta-in-order": (
        {"encoding": "deberta", "max_relative_positions": 512, "position_buckets": 64, **PADDED, **IN_ORDER},
        {"form": "native", "target": "ort"},
    ),
    "cope-in-order": (
        {"encoding": "cope", "npos_max": 64, **DECODER, **IN_ORDER},
        {"form": "function", "target": "ort"},
    ),
    "fire-in-order": ({"encoding": "fire", "init_L": 64, **DECODER, **IN_ORDER}, {"form": "function", "target": "ort"}),
    "swin-in-order": ({"encoding": "swin", "window_size": 7, **IN_ORDER}, {"form": "function"}),
}
"""The artifacts by name."""


def write_artifact(name: str, folder: Path) -> Artifact:
    """Export one of ARTIFACTS to `folder / sound-NAME.onnx` and read it back."""
    arguments, how = ARTIFACTS[name]
    spec = make_spec(**arguments)
    weights = seeded_weights(spec, 0)
    path = folder / f"sound-{name}.onnx"
    write_onnx(export(spec, weights, **how), path)
    return Artifact(name, spec, str(how.get("form", "decomposed")), onnx.load(path), weights)
