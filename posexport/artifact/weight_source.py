"""Where the weights of an artifact come from, as its manifest says it, with the sha256 of their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posexport.artifact.manifest import WeightSource
from posexport.files import real_path, sha256_of


def file_weights(path: Path) -> WeightSource:
    """Return the source of weights in a .safetensors file, which is read to hash it."""
    return WeightSource(source="file", file=path.name, sha256=sha256_of(path))


def checkpoint_weights(folder: Path, layer: int) -> WeightSource:
    """Return the source of weights of a checkpoint in a folder, from `layer` on."""
    name, config = real_path(folder).name, sha256_of(folder / "config.json")
    return WeightSource(source="checkpoint", folder=name, config_sha256=config, layer=layer)


def model_weights(folder: Path, files: Iterable[str]) -> WeightSource:
    """Return the source of weights of a whole model in these files of a folder, which are read to hash them."""
    hashes = {name: sha256_of(folder / name) for name in sorted(files)}
    config = sha256_of(folder / "config.json")
    return WeightSource(source="checkpoint", folder=real_path(folder).name, config_sha256=config, files=hashes)
