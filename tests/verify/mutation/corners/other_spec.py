"""Graphs of another block, as if a config was misread. The graph is right for a spec that differs in one number or
choice, and has the weights and metadata of the artifact."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from mutation.artifacts import ARTIFACTS, Artifact
from mutation.corners.family import Fault, Random, family, key_aims, log_uniform, most_keys
from mutation.inputs import Aim, broad_aims
from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import PosexportError
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import weight_shapes
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec

FACTORS = (0.5, 0.9, 1.1, 2.0)

INVENTED: dict[str, tuple[int, int]] = {"window": (16, 1000), "attention_chunk_size": (16, 1000), "softcap": (5, 60)}
"""Numbers that a spec may leave out, with the range of the values that a wrong spec gives them."""

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("interleaved", "half"),
    "norm": ("pre", "post"),
    "norm_type": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "gelu_tanh", "relu", "swiglu", "geglu"),
    "qk_norm_type": ("rms", "l2"),
    "kernel": ("power", "logarithmic", "log"),
    "scaling": ("linear", "ntk"),
}

SIZES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "layers", "vocab_size", "intermediate_size")
"""Numbers that change the shapes of weights."""

TRIES = 12


def _places(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(table, key) for each key of a spec, of its encodings and of its layers that may change."""
    layers = data["layer_pattern"]
    for table in (data, *layers, *([layer["encoding"] for layer in layers] or [data["encoding"]])):
        for key in table:
            if key not in (*SIZES, "name", "encoding", "layer_pattern", "dtype", "padding_mask", "kv_cache", "cross"):
                yield table, key


def _number(value: object, key: str, random: Random) -> object:
    """Another number for a key. None if the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return log_uniform(random, *INVENTED[key]) if value is None and key in INVENTED else None
    changed = value * float(random.choice(FACTORS))
    return round(changed) if isinstance(value, int) else changed


def _choice(value: object, key: str, random: Random) -> object:
    """Another choice for a key. None if there is no other."""
    if isinstance(value, bool):
        return not value
    others = [choice for choice in CHOICES.get(key, ()) if choice != value]
    return str(random.choice(others)) if value is not None and others else None


def _draw(artifact: Artifact, random: Random, numbers: bool) -> Fault | None:
    spec = artifact.spec
    for _ in range(TRIES):
        data = copy.deepcopy(spec.to_dict())
        places = list(_places(data))
        table, key = places[int(random.integers(len(places)))]
        before = table[key]
        after = (_number if numbers else _choice)(before, key, random)
        if after is None or after == before:
            continue
        table[key] = after
        try:
            other = read_spec(data)
            if weight_shapes(other) != weight_shapes(spec) or graph_inputs(other) != graph_inputs(spec):
                continue
            model = _exported(artifact, other)
        except PosexportError:
            continue
        aims = tuple(broad_aims(spec))
        if isinstance(after, int) and 1 < after < most_keys(artifact):
            aims = (*key_aims(artifact, max(after, int(before or 0))), Aim(start=(after, 2 * after)), *aims)

        def apply(mutant: onnx.ModelProto, model: onnx.ModelProto = model) -> bool:
            del model.metadata_props[:]
            model.metadata_props.extend(mutant.metadata_props)
            mutant.CopyFrom(model)
            return True

        return Fault(f"{key} {after} for {before}", apply, aims)
    return None


def _exported(artifact: Artifact, spec: Spec) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "other.onnx"
        write_onnx(export(spec, dict(artifact.weights), **ARTIFACTS[artifact.name][1]), path)
        return onnx.load(path)


@family("other_spec", "another number of the block")
def _other_number(artifact: Artifact, random: Random) -> Fault | None:
    return _draw(artifact, random, numbers=True)


@family("other_spec", "another choice of the block")
def _other_choice(artifact: Artifact, random: Random) -> Fault | None:
    return _draw(artifact, random, numbers=False)
