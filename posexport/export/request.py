"""A requested export: options of every source, checked before anything is made; then it is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.manifest import OnnxManifest, WeightSource
from posexport.artifact.weight_source import checkpoint_weights, file_weights
from posexport.export import support
from posexport.export.block_options import HERE, BlockOptions, checkpoint_of, merge_options, spec_of, weights_of
from posexport.progress import Progress, silent
from posexport.spec.fields import integer, text
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from posexport.artifact.signing import SigningKey


@attrs.frozen(kw_only=True)
class ExportOptions(BlockOptions):
    """Options of an export that are not part of the spec, validated wherever they come from."""

    form: str = text("decomposed", "form of the graph")
    target: str = text("portable", "what the form is lowered for")
    opset: int | None = integer(None, "ONNX opset")


@attrs.frozen(kw_only=True)
class Request:
    """A checked export. `weights` are those of a checkpoint, None if they come from a file or a seed.

    `given` are the names of the options that were given on the command line, in a file or by a preset. `place` is the
    checkpoint's folder if weights are read from it.
    """

    spec: Spec
    options: ExportOptions
    given: frozenset[str]
    weights: Mapping[str, Tensor] | None = None
    checkpoint: WeightSource | None = None
    place: Path | None = None

    def original(self) -> dict[str, Any] | None:
        """What an export must equal, as fields of posexport.artifact.original.Original. None if weights are random."""
        if self.options.weights is not None:
            return {"weights": self.options.weights}
        if self.checkpoint is None:
            return None
        prefix = self.spec.prefix_tokens if "prefix_tokens" in self.given else None
        return {"checkpoint": self.place, "layer": self.checkpoint.layer or 0, "prefix_tokens": prefix}

    def weight_source(self) -> WeightSource:
        """Where the weights come from; a file of weights is read to hash it."""
        if self.checkpoint is not None:
            return self.checkpoint
        if self.options.weights is not None:
            return file_weights(Path(self.options.weights))
        return WeightSource(source="random", seed=self.options.seed or 0)


OPTIONS = (
    *(field.name for field in attrs.fields(Spec)),
    *(field.name for field in attrs.fields(ExportOptions)),
    *("from", "layer"),
)
"""The options that a config file may have, in addition to `set`."""


def read_request(
    config: str | None,
    preset: str | None,
    given_set: Mapping[str, Any],
    given: Mapping[str, Any],
    folder: Path = HERE,
    progress: Progress = silent,
) -> Request:
    """The request of a config file or a preset, with the options that are `given` in addition; None means "not given".

    Paths in it are relative to `folder`. Raises RequestError for anything wrong with the options.
    """
    options, encoding_set = merge_options(config, preset, given_set, given, OPTIONS, folder)
    for name in ("from", "weights"):
        if folder != HERE and isinstance(options.get(name), str):
            options[name] = str(folder / options[name])
    checkpoint = checkpoint_of(options, encoding_set, progress)
    spec = spec_of(options, encoding_set) if checkpoint is None else checkpoint.spec
    names = {field.name for field in attrs.fields(ExportOptions)}
    export_options = ExportOptions(**{name: value for name, value in options.items() if name in names})
    support.checked_opset(spec, export_options.form, export_options.target, export_options.opset)
    weights = None if checkpoint is None else checkpoint.weights
    place = None if weights is None else Path(options["from"])
    source = None if place is None else checkpoint_weights(place, int(options.get("layer") or 0))
    return Request(
        spec=spec, options=export_options, given=frozenset(options), weights=weights, checkpoint=source, place=place
    )


def write(request: Request, path: Path, progress: Progress = silent, key: SigningKey | None = None) -> OnnxManifest:
    """Export and write; returns the manifest, which is signed if there is a `key`."""
    spec, options, weights = request.spec, request.options, request.weights
    progress("loading torch")
    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.export.exporter import export as export_block
    from posexport.models.weights import seeded

    progress("weights")
    if options.weights is not None:
        spec, weights = weights_of(options.weights, spec, "bias" in request.given)
    elif weights is None:
        weights = seeded(spec, options.seed or 0)
    progress(f"exporting {spec.encoding.name}")
    model = export_block(
        spec,
        weights,
        form=options.form,
        target=options.target,
        opset=options.opset,
        batch=options.batch,
        seq=options.seq,
        max_seq=options.max_seq,
    )
    progress(f"writing {path.name}")
    return write_onnx(model, path, weights=request.weight_source(), key=key)
