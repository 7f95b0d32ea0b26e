"""The tensors of a checkpoint folder; each is read by its name when it is looked up, and nothing else is loaded.

A folder has `model.safetensors`, or shards and `model.safetensors.index.json`, which maps tensors to shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport.errors import RequestError
from posexport.files import TEXT_LIMIT, check_regular, read_bytes
from posexport.models.weights import check_values

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_file(folder: Path) -> str:
    """The file that gives the tensors of a folder, SINGLE or INDEX; RequestError where neither is there."""
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return name
    raise RequestError(
        f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}: give a folder with .safetensors, "
        "or its config.json for the shape alone."
    )


class Tensors:
    """Name to tensor. Raises RequestError that names the file or tensor that is missing or wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if weights_file(folder) == SINGLE:
            with self._open(SINGLE) as file:
                self._files: Mapping[str, str] = dict.fromkeys(file.keys(), SINGLE)
        else:
            self._files = self._index()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def path(self, candidates: Sequence[str]) -> str:
        """The first of these modules that has tensors here."""
        for path in candidates:
            if any(name.startswith(f"{path}.") for name in self._files):
                return path
        raise RequestError(f"{str(self.folder)!r} has no tensor below {' or '.join(candidates)}: is a shard missing?")

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, in float32 (float64 where it is stored so), every value finite."""
        import torch

        if name not in self._files:
            raise RequestError(f"{str(self.folder)!r} lacks the tensor {name!r} {list(shape)}: is a shard missing?")
        tensor, label = self._read(name), f"{str(self.folder)!r}: tensor {name!r}"
        if tuple(tensor.shape) != shape:
            raise RequestError(f"{label} has shape {list(tensor.shape)}, by config.json it must have {list(shape)}.")
        check_values(tensor, label, ": give the checkpoint that it was quantized from")
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def _read(self, name: str) -> Tensor:
        with self._open(self._files[name]) as file:
            try:
                tensor: Tensor = file.get_tensor(name)
            except Exception as error:  # safetensors raises errors of several classes
                raise RequestError(
                    f"{str(self.folder / self._files[name])!r} doesn't give the tensor {name!r} ({error}): fetch it "
                    "again."
                ) from None
        return tensor

    def _open(self, file: str) -> Any:
        import safetensors

        try:
            check_regular(self.folder / file)
            return safetensors.safe_open(self.folder / file, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            raise RequestError(
                f"{str(self.folder / file)!r} can't be read as .safetensors ({why}): fetch the file again."
            ) from None

    def _index(self) -> Mapping[str, str]:
        try:
            files = json.loads(read_bytes(self.folder / INDEX, TEXT_LIMIT))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            files = None
        # shards are beside the index: a path with folders could lead anywhere
        if not isinstance(files, dict) or not all(isinstance(at, str) and Path(at).name == at for at in files.values()):
            raise RequestError(
                f"{str(self.folder / INDEX)!r} is no index of shards: its weight_map must give the file of each tensor."
            )
        return files
