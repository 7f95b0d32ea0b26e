"""Writes a decoder with caches as a folder that onnxruntime-genai loads: the model, genai_config.json, the tokenizer.

    <folder>/genai_config.json   names of inputs and outputs, sizes, ids of special tokens, how tokens are chosen
    <folder>/model.onnx          the bytes of the file, its external data beside it
    <folder>/model.onnx.json     its manifest, if it has one
    <folder>/tokenizer.json ...  the tokenizer's files, if they are beside the model

The type of model is "decoder" for every architecture: names and sizes then tell onnxruntime-genai all that it needs.
Source: https://onnxruntime.ai/docs/genai/reference/config.html.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from posexport.artifact.manifest import write_manifest
from posexport.artifact.paths import check_onnx
from posexport.artifact.signing import SigningKey, TrustedKey
from posexport.errors import RequestError, shown
from posexport.export.triton.reading import read_served
from posexport.export.triton.served_artifact import BACKENDS, ServedArtifact, copy_file
from posexport.files import TEXT_LIMIT, check_name, is_there, read_bytes, write_folder
from posexport.jsondata import is_whole
from posexport.models.whole import CONVOLUTION, STATES, cached_layers
from posexport.progress import Progress, silent
from posexport.runtimes import tokens

CONFIG = "genai_config.json"

_MODEL = BACKENDS["onnxruntime"][1]

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

_CACHE_DTYPES = ("fp32", "fp16", "bf16")


@attrs.frozen(kw_only=True)
class GenaiPackage:
    """What was written: `files` are the sha256 of the model's own files, `tokenizer` the names of the tokenizer's."""

    kind: Literal["package"] = "package"
    version: Literal[1] = 1
    folder: str
    layers: int
    context_length: int
    buffers: Literal["grown", "shared"]
    files: Mapping[str, str]
    tokenizer: tuple[str, ...]


def package_genai(
    path: Path,
    folder: Path,
    *,
    gpu: bool = False,
    force: bool = False,
    progress: Progress = silent,
    key: SigningKey | None = None,
    trusted: Sequence[TrustedKey] = (),
) -> GenaiPackage:
    """Write the decoder at `path` into a new `folder`, which is replaced with `force`; returns what was written.

    config.json must be beside the model, where `posexport export --model` puts it. RequestError for a file that
    onnxruntime-genai can't run, or if something is in the way; nothing is changed then.
    """
    check_onnx(path)
    check_name(folder)
    if folder.exists() and not (force and folder.is_dir()):
        raise _is_there(folder)
    progress(f"reading {path.name}")
    served = read_served(path, gpu, trusted, key)
    config = _config(path, served, gpu)
    beside = {name: path.with_name(name) for name in tokens.FILES if path.with_name(name).is_file()}
    texts = {name: read_bytes(file, TEXT_LIMIT) for name, file in beside.items()}
    if taken := served.files.keys() & {CONFIG, *texts}:
        raise RequestError(
            f"{str(path)!r} keeps weights in {min(taken)!r}, which onnxruntime-genai reads as another file: write it "
            "anew with 'posexport rewrite'."
        )
    hashes: dict[str, str] = {}

    def fill(made: Path) -> None:
        for name, (source, sha256) in served.files.items():
            progress(f"copying {source.name}")
            hashes[name] = copy_file(source, made / name, sha256)
        if served.manifest is not None:
            write_manifest(made / _MODEL, served.manifest, key)
        for name, data in texts.items():
            (made / name).write_bytes(data)
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    if not write_folder(folder, fill, replace=force):  # another process has created it meanwhile
        raise _is_there(folder)
    return GenaiPackage(
        folder=str(folder),
        layers=config["model"]["decoder"]["num_hidden_layers"],
        context_length=config["model"]["context_length"],
        buffers="shared" if config["search"]["past_present_share_buffer"] else "grown",
        files=hashes,
        tokenizer=tuple(texts),
    )


def _is_there(folder: Path) -> RequestError:
    advice = "give another --output, or --force to replace it" if folder.is_dir() else "give another --output"
    return RequestError(f"{str(folder)!r} is there: {advice}.")


def _config(path: Path, served: ServedArtifact, gpu: bool) -> dict[str, Any]:
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
    caches = _caches(path, served)
    numbers = {name: _number(path, values, name) for name in _NAMES}
    ends = tokens.some_stop_tokens(path.parent)
    if not ends:
        raise RequestError(
            f"{str(path.with_name('config.json'))!r} has no eos_token_id, the token that ends a text, which "
            "onnxruntime-genai must know: add it."
        )
    begin, pad = (_token(name, generation, values) for name in ("bos_token_id", "pad_token_id"))
    vocabulary = _vocabulary(path, served)
    for name, one in (("bos_token_id", begin), ("pad_token_id", pad), *(("eos_token_id", end) for end in ends)):
        if one is not None and one >= vocabulary:  # rows are padded with it, or no text ends
            raise RequestError(
                f"the {name} beside {str(path)!r} is {one}, and the model has {vocabulary} tokens: correct it in "
                "config.json or generation_config.json, or leave it out."
            )
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
                "filename": _MODEL,
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


@attrs.frozen(kw_only=True)
class _Caches:
    """The caches of a decoder: the numbers of layers and of key heads, the head size, and whether keys are in buffers.

    `states` are the kinds of states that some layers have. `of_convolutions` are settings for models with only states
    of convolutions, which onnxruntime-genai doesn't find by itself.
    """

    layers: int
    heads: int
    size: int
    are_buffers: bool
    states: tuple[str, ...]
    of_convolutions: Mapping[str, Any]


def _caches(path: Path, served: ServedArtifact) -> _Caches:
    """The caches of a file; RequestError if onnxruntime-genai can't bind them."""

    def refused(text: str) -> RequestError:
        return RequestError(f"{str(path)!r} {text}: give a decoder that 'posexport export --model' made.")

    layers = cached_layers(served.inputs)
    if any(".encoder." in name for name in served.inputs):
        raise refused("is of an encoder-decoder, which is not packaged for onnxruntime-genai")
    found = {
        kind: [layer for layer in layers if f"past_key_values.{layer}.{kind}" in served.inputs]
        for kind in ("key", "value", *STATES)
    }
    states = tuple(kind for kind in STATES if found[kind])
    keyed = sorted({*found["key"], *found["value"]})
    if not keyed:
        raise refused("has no caches past_key_values.N.key and past_key_values.N.value, which onnxruntime-genai needs")
    if not states and layers != list(range(len(layers))):
        missing = next(at for at, layer in enumerate(layers) if at != layer)
        raise refused(f"has no cache for layer {missing}, and onnxruntime-genai gives one to each")
    keys = {f"past_key_values.{layer}.{kind}" for layer in keyed for kind in ("key", "value")}
    pasts = keys | {f"past_key_values.{layer}.{kind}" for kind in states for layer in found[kind]}
    known = {"input_ids", "attention_mask", "position_ids", *pasts}
    unknown = sorted(served.inputs.keys() - known)
    if unknown:
        raise refused(f"has the input {shown(unknown[0])}, which onnxruntime-genai does not give")
    presents = {name.replace("past_key_values", "present", 1) for name in pasts}
    lacking = sorted(({"input_ids", "attention_mask"} - served.inputs.keys()) | (pasts - served.inputs.keys()))
    lacking += sorted({"logits", *presents} - served.outputs.keys())
    if lacking:
        raise refused(f"lacks {shown(lacking[0])}")
    lengths = []
    for name in sorted(keys):
        past, present = served.inputs[name][0], served.outputs[name.replace("past_key_values", "present", 1)][0]
        if len(past) != 4 or len(present) != 4:
            raise refused(f"has caches {shown(name)} of other than 4 dimensions")
        lengths.append((past[2], present[2]))
    kinds = {(served.inputs[name][0][1], served.inputs[name][0][3], served.inputs[name][1]) for name in sorted(keys)}
    if len(kinds) > 1:
        raise refused("has caches of several sizes, and onnxruntime-genai has one for all layers")
    heads, size, dtype = kinds.pop()
    if not isinstance(heads, int) or not isinstance(size, int) or dtype not in _CACHE_DTYPES:
        raise refused(f"has caches of {shown([heads, size])} {dtype}, not of fixed heads and sizes in a float dtype")
    of_convolutions: dict[str, Any] = {}
    if states == (CONVOLUTION,):
        alone = [at for at in range(max(layers) + 1) if (at in keyed) == (at in found[CONVOLUTION])]
        if alone:
            kinds_of = "both keys and a state" if alone[0] in keyed else "neither keys nor a state"
            raise refused(f"has {kinds_of} in layer {alone[0]}, and onnxruntime-genai takes one beside convolutions")
        of_convolutions["layer_types"] = ["full_attention" if at in keyed else "conv" for at in range(max(layers) + 1)]
        of_convolutions["conv_cache_size"] = served.inputs[f"past_key_values.{found[CONVOLUTION][0]}.{CONVOLUTION}"][0][
            -1
        ]
    return _Caches(
        layers=max(layers) + 1,
        heads=heads,
        size=size,
        are_buffers=all(past == present != "?" for past, present in lengths),
        states=states,
        of_convolutions=of_convolutions,
    )


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
