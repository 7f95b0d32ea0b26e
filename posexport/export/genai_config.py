"""genai_config.json, which tells onnxruntime-genai the names and sizes of a decoder and how its tokens are chosen.

The type of model is "decoder" for every architecture: names and sizes then tell onnxruntime-genai all that it needs.
Source: https://onnxruntime.ai/docs/genai/reference/config.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posexport.errors import RequestError, shown
from posexport.export.genai_caches import caches_of
from posexport.export.triton.served_artifact import BACKENDS, ServedArtifact
from posexport.files import is_there
from posexport.jsondata import is_whole
from posexport.runtimes import tokens

CONFIG = "genai_config.json"

MODEL = BACKENDS["onnxruntime"][1]
"""The name of the ONNX file in the folder."""

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
"""Keys in config.json for values that onnxruntime-genai needs; architectures use different keys."""

_UNBOUNDED = 2048
"""The context length of a model without one in config.json, because its positions are unlimited (ALiBi)."""


def _is_number(value: object) -> bool:
    return (isinstance(value, float) or is_whole(value)) and math.isfinite(value)


_SEARCH: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": (_is_number, "a finite number"),
    "top_k": (is_whole, "a whole number"),
    "top_p": (_is_number, "a finite number"),
    "repetition_penalty": (_is_number, "a finite number"),
}
"""Settings of generation_config.json that onnxruntime-genai has under the same names.

For each setting: whether a value is valid, and the valid values in words.
"""


def genai_config(path: Path, served: ServedArtifact, gpu: bool) -> dict[str, Any]:
    """genai_config.json of a file; RequestError if it isn't a decoder, or has no config.json beside it."""
    config = tokens.read_config(path.with_name("config.json"))
    if config is None:
        wrong = "can't be read as a JSON object" if is_there(path.with_name("config.json")) else "is not there"
        raise RequestError(
            f"{str(path.with_name('config.json'))!r} {wrong}, and onnxruntime-genai needs what it says: "
            "put the checkpoint's there."
        )
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    generation = tokens.read_config(path.with_name("generation_config.json")) or {}
    caches = caches_of(path, served)
    numbers = {name: _number(path, values, name) for name in _NAMES}
    ends = tokens.some_stop_tokens(path.parent)
    if not ends:
        raise RequestError(
            f"{str(path.with_name('config.json'))!r} has no eos_token_id, the token that ends a text, which "
            "onnxruntime-genai must know: add it."
        )
    vocabulary = _vocabulary(path, served)
    begin, pad = (_token(name, generation, values) for name in ("bos_token_id", "pad_token_id"))
    _check_tokens(path, {"bos_token_id": [begin], "pad_token_id": [pad], "eos_token_id": ends}, vocabulary)
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids") if name in served.inputs}
    kinds = ("key", "value", *(kind.removesuffix("_state") for kind in caches.states))
    names = dict(zip(kinds, ("key", "value", *caches.states), strict=True))
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": ends[0] if begin is None else begin,
            "eos_token_id": list(ends) if len(ends) > 1 else ends[0],
            "pad_token_id": ends[0] if pad is None else pad,
            "context_length": numbers["context_length"],
            "vocab_size": vocabulary,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": [{"cuda": {}}] if gpu else []},
                "filename": MODEL,
                "head_size": caches.size,
                "hidden_size": numbers["hidden_size"],
                "num_attention_heads": numbers["num_attention_heads"],
                "num_hidden_layers": caches.layers,
                "num_key_value_heads": caches.heads,
                "inputs": inputs | {f"past_{kind}_names": f"past_key_values.%d.{name}" for kind, name in names.items()},
                "outputs": {"logits": "logits"}
                | {f"present_{kind}_names": f"present.%d.{name}" for kind, name in names.items()},
                **caches.of_convolutions,
            },
        },
        "search": {
            "max_length": numbers["context_length"],
            "past_present_share_buffer": caches.are_buffers,
            **_search(path, generation),
        },
    }


def _check_tokens(path: Path, ids: Mapping[str, Sequence[int | None]], vocabulary: int) -> None:
    """RequestError for ids of special tokens that the model doesn't have."""
    for name, one in ((name, one) for name, ones in ids.items() for one in ones):
        if one is not None and one >= vocabulary:  # rows are padded with it, or no text ends
            raise RequestError(
                f"the {name} beside {str(path)!r} is {one}, and the model has {vocabulary} tokens: correct it in "
                "config.json or generation_config.json, or leave it out."
            )


def _search(path: Path, generation: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for choosing tokens that are given; RequestError for a value of a wrong type."""
    settings = {name: generation[name] for name in _SEARCH if generation.get(name) is not None}
    for name, value in settings.items():
        fits, what = _SEARCH[name]
        if not fits(value):
            raise RequestError(
                f"{str(path.with_name('generation_config.json'))!r} has the {name} {shown(value)}, not {what}: "
                "correct it, or leave it out."
            )
    return settings


def _vocabulary(path: Path, served: ServedArtifact) -> int:
    shape = served.outputs["logits"][0]
    size = shape[-1] if shape else None
    if not isinstance(size, int):
        raise RequestError(f"{str(path)!r} has logits without a fixed number of tokens: export it again.")
    return size


def _number(path: Path, values: Mapping[str, Any], name: str) -> int:
    found = next((values[key] for key in _NAMES[name] if _is_count(values.get(key))), None)
    if found is None and name == "context_length":
        return _UNBOUNDED
    if found is None:
        raise RequestError(
            f"{str(path.with_name('config.json'))!r} has none of {', '.join(_NAMES[name])}, which onnxruntime-genai "
            "needs: add it."
        )
    return int(found)


def _is_count(value: object) -> bool:
    return is_whole(value) and 0 < value < 2**31


def _token(name: str, *sources: Mapping[str, Any]) -> int | None:
    """The id of a special token in the first source that has one; None if none has."""
    ids = (source.get(name) for source in sources)
    return next((one for one in ids if is_whole(one) and one >= 0), None)
