"""What a folder without readable weights holds in their place, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_READABLE = "give a folder with .safetensors"
_SAVED_AGAIN = "save it with transformers' save_pretrained"

_INSTEAD: Sequence[tuple[tuple[str, ...], str, str]] = (
    (("pytorch_model.bin", "pytorch_model.bin.index.json"), "which is not opened since it may hold code", _SAVED_AGAIN),
    (("*.incomplete", "*.part", "*.crdownload", "*.aria2"), "an unfinished download", "fetch it again"),
    (("model-*-of-*.safetensors",), "a shard without its index", "fetch model.safetensors.index.json too"),
    (
        ("*.safetensors",),
        "which is not a name that transformers reads",
        "rename it to model.safetensors if its tensors have transformers' names",
    ),
    (("*.gguf",), "which is packed for llama.cpp", "give the checkpoint that it was made from"),
    (("tf_model.h5", "flax_model.msgpack"), "the weights of another framework", _SAVED_AGAIN),
)
"""Patterns of names, what such a file is, and what to do. The first that is there counts."""


def instead_of_weights(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    """Return what a folder holds in place of the files `names` ("" if nothing is known), and what to do."""
    for patterns, what, advice in _INSTEAD:
        for path in sorted(found for pattern in patterns for found in folder.glob(pattern) if found.is_file()):
            return f" but {path.name}, {what}", advice
    for path in sorted(folder.glob("*/config.json")):
        if any((path.parent / name).is_file() for name in names):
            return f" but the folder {path.parent.name}, which does", f"give {str(path.parent)!r}"
    return "", _READABLE
