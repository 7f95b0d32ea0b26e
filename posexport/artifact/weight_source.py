"""Where the weights of an artifact come from, as its manifest says it: names and hashes, never a path."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from posexport.files import sha256_of
from posexport.jsondata import OMITTED


@attrs.frozen(kw_only=True)
class WeightSource:
    """The key `weights` of a manifest. What doesn't belong to its `source` is None and is not written.

    random: `seed`. file: the name and sha256 of the .safetensors `file`. checkpoint: the name of its `folder`, the
    sha256 of its config.json, and the first `layer` that was taken.
    """

    source: Literal["random", "file", "checkpoint"]
    seed: int | None = attrs.field(default=None, metadata={OMITTED: True})
    file: str | None = attrs.field(default=None, metadata={OMITTED: True})
    sha256: str | None = attrs.field(default=None, metadata={OMITTED: True})
    folder: str | None = attrs.field(default=None, metadata={OMITTED: True})
    config_sha256: str | None = attrs.field(default=None, metadata={OMITTED: True})
    layer: int | None = attrs.field(default=None, metadata={OMITTED: True})

    def __str__(self) -> str:
        if self.source == "random":
            return f"random, seed {self.seed}"
        if self.source == "file":
            return f"file {self.file}"
        return f"checkpoint {self.folder}, layer {self.layer}"


def file_weights(path: Path) -> WeightSource:
    """The weights in a .safetensors file, which is read to hash it."""
    return WeightSource(source="file", file=path.name, sha256=sha256_of(path))


def checkpoint_weights(folder: Path, layer: int) -> WeightSource:
    """The weights of a checkpoint in a folder, from `layer` on."""
    name, config = folder.resolve().name, sha256_of(folder / "config.json")
    return WeightSource(source="checkpoint", folder=name, config_sha256=config, layer=layer)
