"""The tensors of a checkpoint folder. A tensor is read when it is looked up by its name. Nothing else is loaded.

A folder has `model.safetensors`, or shards and `model.safetensors.index.json`, which maps tensors to shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport.errors import RequestError
from posexport.files import check_regular
from posexport.jsondata import read_json
from posexport.models.checkpoints.other_weights import instead_of_weights
from posexport.models.weights import check_values

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"

_OTHER_PARTS = frozenset(("vision_tower", "vision_model", "vision_encoder", "visual", "audio_tower", "audio_model"))
"""Names in the paths of modules that belong to another part of a model than its text."""


def weights_file(folder: Path, whole: bool = False) -> str:
    """Return the file that lists the tensors of a folder, SINGLE or INDEX. RequestError if neither exists.

    The error says what else can be given: its config.json, unless a `whole` model is needed.
    """
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return name
    beside, advice = instead_of_weights(folder, (SINGLE, INDEX))
    again = "give " if beside else ""
    shape = "" if whole else f", or {again}its config.json for the shape alone"
    raise RequestError(f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}{beside}: {advice}{shape}.")


_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""The dtypes of weights, as .safetensors names them."""


def _end(name: str) -> tuple[str, ...]:
    """What the names of a tensor and of its parameter have in common, whatever their roots."""
    return tuple(name.split(".")[-2:])


def _is_bare(name: object) -> bool:
    """Whether this is the name of a file, without a folder."""
    return isinstance(name, str) and name != "" and Path(name).name == name


class Tensors:
    """Tensors by name, of a layer or a `whole` model. RequestError names a file or tensor that is missing or wrong."""

    def __init__(self, folder: Path, whole: bool = False) -> None:
        self.folder = folder
        self._looked_up: set[str] = set()
        if (folder / ADAPTER).exists():
            raise RequestError(f"{str(folder)!r} holds {ADAPTER}, an adapter to the weights: merge it into them first.")
        if weights_file(folder, whole) == SINGLE:
            with self._open(SINGLE) as file:
                self._files: Mapping[str, str] = dict.fromkeys(file.keys(), SINGLE)
        else:
            self._files = self._index()

    def __len__(self) -> int:
        """Return how many tensors the files contain, whatever the index lists."""
        return sum(map(len, self._held.values()))

    def path(self, candidates: Sequence[str]) -> str:
        """Return the one of these modules that has tensors here. RequestError if it is stored twice, under any root."""
        found = [path for path in candidates if any(name.startswith(f"{path}.") for name in self._files)]
        if not found:
            raise RequestError(
                f"{str(self.folder)!r} has no tensor below {' or '.join(candidates)}: is a shard missing?"
            )
        path, inside = found[0], f".{candidates[0]}."
        other_parts = _OTHER_PARTS.difference(path.split("."))
        for name in self._files:
            root, is_copy, _ = f".{name}".partition(inside)
            again = is_copy and other_parts.isdisjoint(root.split("."))
            if not name.startswith(f"{path}.") and (again or name.startswith(tuple(f"{other}." for other in found))):
                raise RequestError(
                    f"{str(self.folder)!r} holds {name!r} beside the tensors of the same layer below {path}: keep one "
                    "of them, and merge adapters first."
                )
        return path

    def has_module(self, name: str) -> bool:
        """Whether a module of this name, anywhere in the model, has tensors here."""
        return any(name in path.split(".")[:-1] for path in self._files)

    def files(self) -> tuple[str, ...]:
        """Return the names of all files of tensors. RequestError if a file is missing or cannot be read."""
        names = tuple(sorted({*self._files.values()}))
        for name in names:
            with self._open(name):
                pass
        return names

    def refuse_unread(self, path: str, model_type: str, ignored: Collection[str]) -> None:
        """RequestError for the first tensor of the module at `path` that was not looked up, unless its name in the
        module is `ignored` (patterns): it would change what the module computes. So would one that stands in another
        shard too: transformers takes the last of them, whatever the index says."""
        self._check_once(self._looked_up)
        for name in self._below(path):
            if name not in self._looked_up and not any(fnmatchcase(name[len(path) + 1 :], one) for one in ignored):
                raise RequestError(
                    f"{str(self.folder)!r} holds {name!r}, which the attention of {model_type} does not have by "
                    "config.json: fix config.json, give a checkpoint that is neither quantized nor has adapters, or "
                    "drop the tensor if it means nothing."
                )

    def check_stored(self, parameters: Iterable[str]) -> None:
        """RequestError for a tensor of a whole model's `parameters` that stands in two shards, or that is not
        floating-point: transformers makes floats of it, without the scales that its integers were quantized with.

        Tensors may have other roots than parameters, so the ends of names are compared. Other tensors are those of
        buffers, such as the position_ids of BERT, which are integers.
        """
        ends = {_end(name) for name in parameters}
        for file, names in self._held.items():
            with self._open(file) as opened:
                read = [name for name in names if _end(name) in ends]
                for name, dtype in ((name, opened.get_slice(name).get_dtype()) for name in read):
                    if dtype not in _FLOATS:
                        raise RequestError(
                            f"{str(self.folder)!r}: tensor {name!r} is {dtype}, it must be a floating-point tensor of "
                            "16 bits or more: give the checkpoint that it was quantized from."
                        )
        self._check_once(itertools.chain.from_iterable(self._held.values()))

    def _check_once(self, wanted: Iterable[str]) -> None:
        """RequestError for one of these tensors that stands in another shard too."""
        wanted = {*wanted}
        for file, names in self._held.items():
            for name in wanted.intersection(names):
                if self._files.get(name, file) != file:
                    raise RequestError(
                        f"{str(self.folder)!r} holds {name!r} both in {self._files[name]} and in {file}: keep one of "
                        "them."
                    )

    @cached_property
    def _held(self) -> Mapping[str, Sequence[str]]:
        """The names in each file, whatever the index lists. Shards that cannot be read are left out."""
        held = {}
        for file in sorted({*self._files.values()}):
            with suppress(RequestError), self._open(file) as opened:
                held[file] = opened.keys()
        return held

    def _below(self, path: str) -> Iterator[str]:
        names = {*self._files, *itertools.chain.from_iterable(self._held.values())}
        return (name for name in sorted(names) if name.startswith(f"{path}."))

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this shape in float32, or in float64 if it is stored so. Every value is finite."""
        import torch

        if name not in self._files:
            raise RequestError(f"{str(self.folder)!r} lacks the tensor {name!r} {list(shape)}: is a shard missing?")
        self._looked_up.add(name)
        tensor, label = self._read(name), f"{str(self.folder)!r}: tensor {name!r}"
        if tuple(tensor.shape) != shape:
            raise RequestError(f"{label} has shape {list(tensor.shape)}, by config.json it must have {list(shape)}.")
        check_values(tensor, label, ": give the checkpoint that it was quantized from")
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def of_shape(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Yield the names of the tensors of this shape."""
        for file in sorted({*self._files.values()}):
            with self._open(file) as opened:
                here = [name for name, at in self._files.items() if at == file]
                yield from [name for name in here if tuple(opened.get_slice(name).get_shape()) == shape]

    def parts(self, name: str, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor as it is stored in parts of `rows` rows. Each part comes with the number of its first row."""
        with self._open(self._files[name]) as opened:
            tensor = opened.get_slice(name)
            for start in range(0, tensor.get_shape()[0], rows):
                yield start, tensor[start : start + rows]

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
            files = read_json(self.folder / INDEX)["weight_map"]
        except (OSError, ValueError, KeyError, TypeError):
            files = None
        # shards are beside the index; a path with folders could lead anywhere
        if not isinstance(files, dict) or not all(map(_is_bare, files.values())):
            raise RequestError(
                f"{str(self.folder / INDEX)!r} is no index of shards: its weight_map must give the file of each tensor."
            )
        return files
