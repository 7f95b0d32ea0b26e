"""The original with which a file is compared: the weights in a .safetensors file, or layers of a checkpoint with their
spec.

The file must equal an export of the original: the same function by its spec, and the same weights after rounding to the
file's dtype. Only what the exporter chooses may differ: the dtype, caches, a padding mask, how angles are computed,
what positions are, the form, and fixed sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import Reason, RequestError
from posexport.files import real_path
from posexport.models.checkpoints import Checkpoint, read_checkpoint
from posexport.models.weights import Shapes, read_weights, stored_shapes, weight_shapes
from posexport.spec import fields
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

OTHER_SPEC, OTHER_WEIGHTS = "other-spec", "other-weights"
"""Failure codes of a file that differs from its original."""

_SHOWN = 4
"""How many differences a sentence lists. The others are counted."""

_FREE = ("dtype", "kv_cache", "padding_mask", "angles", "positions")
"""Fields of a spec that the exporter of a checkpoint chooses. No config.json sets them."""


@attrs.frozen(kw_only=True)
class Original:
    """Weights in the .safetensors file `weights`, or the layers of the folder `checkpoint` from `layer` on.

    `prefix_tokens` is for a checkpoint whose config.json does not give their number.
    """

    weights: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    checkpoint: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    layer: int = fields.integer(0, "the first layer", at_least=0)
    prefix_tokens: int | None = fields.integer(None, "number of first tokens without a position", at_least=0)

    def __attrs_post_init__(self) -> None:
        if (self.weights is None) == (self.checkpoint is None):
            raise RequestError("a file is compared with one original: give weights, or the folder of a checkpoint.")

    def to_options(self) -> dict[str, Any]:
        """Return the fields as plain data, for the process that computes the reference."""
        paths = {"weights": self.weights, "checkpoint": self.checkpoint}
        absolute = {name: None if path is None else str(path.absolute()) for name, path in paths.items()}
        return {**absolute, "layer": self.layer, "prefix_tokens": self.prefix_tokens}

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"weights {self.weights.name}" if self.weights is not None else "nothing"
        return f"checkpoint {real_path(self.checkpoint).name}, layer {self.layer}"

    def check(self) -> None:
        """Raise RequestError if the original cannot be read, for any file."""
        if self.weights is not None:
            stored_shapes(self.weights)
        else:
            self._read(1)

    def tensors(self, spec: Spec) -> Mapping[str, Tensor]:
        """Return its weights by public names, rounded to the dtype of `spec`, which must be the spec of an export of
        it.

        Raises RequestError if they cannot be read.
        """
        if self.weights is not None:
            return read_weights(self.weights, spec)[1]
        found = self._read(spec.layers, spec.dtype).weights
        assert found is not None
        return found

    def mismatch(self, spec: Spec, weights: Mapping[str, Tensor]) -> Reason | None:
        """Return how a file with this spec and weights differs from the original, as a clause. None if it is an export
        of it.

        Raises RequestError if either cannot be read.
        """
        of_spec: list[str] = []
        if self.weights is not None:
            shapes = stored_shapes(self.weights)
        else:
            try:
                original = self._read(spec.layers).spec
            except RequestError as error:  # one layer can be read, so the problem is their number or mixture
                return self._reason(OTHER_SPEC, [f"the file has {spec.layers} layers, but {str(error).rstrip('.')}"])
            of_spec, shapes = list(_spec_differences(spec, original)), weight_shapes(original)
        of_weights = _shape_differences(weight_shapes(spec), shapes) or self._weight_differences(spec, weights)
        if not of_spec and not of_weights:
            return None
        return self._reason(OTHER_SPEC if of_spec else OTHER_WEIGHTS, [*of_spec, *of_weights])

    def _reason(self, code: str, differences: list[str]) -> Reason:
        shown, more = differences[:_SHOWN], len(differences) - _SHOWN
        counted = [f"and {more} more differences"] if more > 0 else []
        return Reason(code, f"it is not an export of {self}: {'; '.join([*shown, *counted])}")

    def _read(self, layers: int, dtype: str | None = None) -> Checkpoint:
        """Read `layers` layers of the checkpoint, with their weights if a dtype is given."""
        assert self.checkpoint is not None
        options = {"dtype": dtype, "prefix_tokens": self.prefix_tokens}
        given = fields.stated(options)
        return read_checkpoint(self.checkpoint, self.layer, layers, given, weights=dtype is not None)

    def _weight_differences(self, spec: Spec, weights: Mapping[str, Tensor]) -> list[str]:
        import torch

        originals, differences = self.tensors(spec), []
        for name in originals:
            ours, theirs = weights[name], originals[name]
            if ours.dtype != theirs.dtype:
                differences.append(f"{name} is {ours.dtype} in the file, whose spec says {theirs.dtype}")
            elif torch.equal(ours, theirs):
                if not torch.equal(ours.signbit(), theirs.signbit()):
                    differences.append(f"{name} has -0.0 in place of 0.0, or 0.0 in place of -0.0")
            elif not torch.equal(_bits(ours), _bits(theirs)):  # NaN is not equal to itself
                apart = float((ours.double() - theirs.double()).abs().max())
                largest = float(theirs.double().abs().max())
                differences.append(
                    f"{name} has different weights: the largest difference is {apart:.3g}, the largest weight "
                    f"{largest:.3g}"
                )
        return differences


def _bits(values: Tensor) -> Tensor:
    import torch

    return values.contiguous().reshape(-1).view(torch.uint8)


def _shape_differences(shapes: Shapes, originals: Shapes) -> list[str]:
    """Return the weights that only one of both has, or that have different shapes."""
    return [
        f"{name} is {_shape(shapes.get(name))} in the file and {_shape(originals.get(name))} in the original"
        for name in {**shapes, **originals}
        if shapes.get(name) != originals.get(name)
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _spec_differences(spec: Spec, original: Spec) -> Iterator[str]:
    """Yield where two specs with the same number of layers are different functions, field by field.

    Equal differences of several layers are listed once.
    """
    seen = dict[str, list[int]]()
    for index in range(spec.layers):
        for text in _of_layer(spec.layer(index), original.layer(index)):
            seen.setdefault(text, []).append(index)
    for text, layers in seen.items():
        yield text if len(layers) == spec.layers else f"in layer {', '.join(map(str, layers[:_SHOWN]))} {text}"


def _of_layer(spec: Spec, original: Spec) -> Iterator[str]:
    ours, theirs = (json.loads(one.to_json()) for one in (spec, original))
    for name in (name for name in ours if name not in _FREE):
        a, b = ours[name], theirs[name]
        if name == "encoding" and a["name"] == b["name"]:
            yield from (_difference(f"{key} of {a['name']}", a[key], b[key]) for key in a if a[key] != b[key])
        elif a != b:
            yield _difference(name, *((a["name"], b["name"]) if name == "encoding" else (a, b)))


def _difference(name: str, ours: Any, theirs: Any) -> str:
    """Return two values of a field in one clause. For long lists, the first numbers that differ."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        at = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        name, ours, theirs = f"{name}[{at}]", ours[at], theirs[at]
    return f"{name} is {_text(ours)} in the file and {_text(theirs)} in the original"


def _text(value: Any) -> str:
    text = "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return (text if len(text) <= 60 else f"{text[:57]}...") or "none"
