"""An export of a whole model: the options that go with a checkpoint, checked before anything is made, then written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.export import support
from posexport.models.weights import TORCH_DTYPES
from posexport.progress import Progress, silent
from posexport.spec.fields import choice, integer, parsed, text

if TYPE_CHECKING:
    from posexport.artifact.manifest import OnnxManifest
    from posexport.artifact.signing import SigningKey
    from posexport.export.whole_model import ExportedModel

DTYPES = ("fp32", "fp16", "bf16")
"""The dtypes of a file of a whole model."""


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError
        return str(given)

    return read


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of the export of the whole model of a `checkpoint`, a folder."""

    checkpoint: str = text(None, "the folder of a checkpoint")
    form: str = text("decomposed", "form of the graph")
    target: str = text("portable", "what the form is lowered for")
    opset: int | None = integer(None, "ONNX opset")
    dtype: str | None = parsed("dtype of the weights", f"one of {', '.join(DTYPES)}", _one_of(*DTYPES))
    kv_cache: str = choice("concat", ("none", "concat", "shared"), "how a decoder's caches are")
    output: str | None = text(None, "the file to write")

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(f"{Path(self.checkpoint).resolve().name}.onnx" if self.output is None else self.output)


def model_options(given: Mapping[str, Any]) -> ModelOptions:
    """The options of a command line, of which None and () are not given; RequestError for what the checkpoint
    decides."""
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    chosen = {"checkpoint" if name == "from" else name: value for name, value in chosen.items()}
    if "checkpoint" not in chosen:
        raise RequestError("--model was given without --from: give the folder of a checkpoint too.")
    names = {field.name for field in attrs.fields(ModelOptions)}
    for name in chosen:
        if name not in names:
            option = f"--{name.replace('_', '-')}"
            raise RequestError(f"{option} was given with --model: the checkpoint decides it, so drop {option}.")
    options = ModelOptions(**chosen)
    support.checked_opset(None, options.form, options.target, options.opset)
    return options


def write_model(
    options: ModelOptions, progress: Progress = silent, key: SigningKey | None = None
) -> tuple[ExportedModel, OnnxManifest]:
    """Export the model of the checkpoint and write it with its manifest, which is signed with a `key`."""
    progress("loading torch")
    import torch

    from posexport.artifact.manifest import model_weights
    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.export.whole_model import export_decoder
    from posexport.models.pretrained import open_pretrained

    progress("opening the checkpoint")
    pretrained = open_pretrained(Path(options.checkpoint))
    dtype = None if options.dtype is None else getattr(torch, TORCH_DTYPES[options.dtype])
    exported = export_decoder(
        pretrained,
        form=options.form,
        target=options.target,
        opset=options.opset,
        dtype=dtype,
        kv_cache=options.kv_cache,
        progress=progress,
    )
    progress(f"writing {options.path.name}")
    source = model_weights(pretrained.folder, pretrained.files)
    return exported, write_onnx(exported.model, options.path, weights=source, key=key)
