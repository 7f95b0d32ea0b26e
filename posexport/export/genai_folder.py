"""Writes a decoder with caches as a folder that onnxruntime-genai loads: the model, genai_config.json, the tokenizer.

<folder>/genai_config.json   names of inputs and outputs, sizes, ids of special tokens, how tokens are chosen
<folder>/model.onnx          the bytes of the file, its external data beside it
<folder>/model.onnx.json     its manifest, if it has one
<folder>/tokenizer.json ...  the tokenizer's files, if they are beside the model
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs

from posexport.artifact.manifest import write_manifest
from posexport.artifact.paths import check_onnx
from posexport.artifact.signing import SigningKey, TrustedKey
from posexport.errors import RequestError
from posexport.export.genai_config import CONFIG, MODEL, genai_config
from posexport.export.triton.reading import read_served
from posexport.export.triton.served_artifact import copy_file
from posexport.files import TEXT_LIMIT, check_name, read_bytes, write_folder
from posexport.progress import Progress, silent
from posexport.runtimes import tokens


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
    config = genai_config(path, served, gpu)
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
            write_manifest(made / MODEL, served.manifest, key)
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
