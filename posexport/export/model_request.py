"""An export of a whole model: the options for a checkpoint are checked before anything is made; then it is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.paths import path_of_part
from posexport.errors import RequestError
from posexport.export.graph_options import GraphOptions, graph_options
from posexport.export.side_files import side_files
from posexport.files import check_output, real_path
from posexport.models.weights import TORCH_DTYPES
from posexport.progress import Progress, silent
from posexport.spec.fields import choice, flag, stated, text
from posexport.spec.spec import ANGLES, DTYPES

if TYPE_CHECKING:
    import torch

    from posexport.artifact.manifest import OnnxManifest
    from posexport.artifact.signing import SigningKey
    from posexport.export.whole_model import ExportedModel
    from posexport.models.pretrained import Pretrained


@attrs.frozen(kw_only=True)
class ModelOptions(GraphOptions):
    """Options of the export of the whole model of a `checkpoint`, a folder."""

    checkpoint: str = text(None, "the folder of a checkpoint")
    dtype: str | None = choice(None, DTYPES, "dtype of the weights")
    kv_cache: str = choice("concat", ("none", "concat", "shared"), "how a decoder's caches are")
    angles: str = choice("parity", ANGLES, "angles as the model computes them, or exact to position 2^24")
    hidden_states: bool = flag(False, "whether the states that enter the head are an output")
    require_all: bool = flag(False, "write nothing where an attention is left")

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(f"{real_path(Path(self.checkpoint)).name}.onnx" if self.output is None else self.output)

    def path_of(self, part: str) -> Path:
        """The file of a part of the model: `encoder_model.onnx` for an encoder if `model.onnx` is to be written."""
        return path_of_part(self.path, part)


@attrs.frozen(kw_only=True)
class WrittenModel:
    """A whole model in one file, or an encoder-decoder in two.

    `manifests` is empty if nothing was written, because an attention was left and that was not allowed. `unread` are
    the checkpoint's tensors that the model doesn't have. `left_out` is what the checkpoint's model, of the class
    `checkpoint_class`, reads besides tokens, such as "vision", and the file does not. `remarks` are sentences with
    further information about the file.
    """

    exported: tuple[ExportedModel, ...]
    manifests: tuple[OnnxManifest, ...]
    beside: tuple[str, ...]
    unread: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    checkpoint_class: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def attentions(self) -> list[Mapping[str, Any]]:
        """The records of all attentions."""
        return [one for each in self.exported for one in each.attentions]

    @property
    def left(self) -> list[Mapping[str, Any]]:
        """The records of the attentions that are not in the form."""
        return [one for each in self.exported for one in each.left()]


def model_options(given: Mapping[str, Any]) -> ModelOptions:
    """The options of a command line; None, False and () mean "not given". RequestError for what the checkpoint
    decides."""
    chosen = {name: value for name, value in stated(given).items() if value is not False}
    if "from" not in chosen:
        raise RequestError("--model was given without --from: give the folder of a checkpoint too.")
    chosen["checkpoint"] = chosen.pop("from")
    return graph_options(ModelOptions, chosen, "was given with --model: the checkpoint decides it, so drop it.")


def _dtype(options: ModelOptions, pretrained: Pretrained) -> torch.dtype | None:
    """The dtype that was given. None is the checkpoint's, but float32 for a checkpoint in float64: neither the kernels
    of attention nor loaders take float64."""
    import torch

    from posexport.models.pretrained import main_dtype

    if options.dtype is not None:
        given: torch.dtype = getattr(torch, TORCH_DTYPES[options.dtype])
        return given
    return torch.float32 if main_dtype(pretrained) == torch.float64 else None


def write_model(options: ModelOptions, progress: Progress = silent, key: SigningKey | None = None) -> WrittenModel:
    """Export the model of the checkpoint and write it with its manifest, which is signed if there is a `key`.

    The checkpoint's configurations and tokenizer are written beside it.
    """
    check_output(options.path, ".onnx")
    checkpoint = Path(options.checkpoint)
    beside = side_files(checkpoint, options.path)
    progress("loading torch")
    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.artifact.weight_source import model_weights
    from posexport.export.remarks import remarks
    from posexport.export.whole_model import HowToExport, export_whole
    from posexport.models.pretrained import open_pretrained

    progress("opening the checkpoint")
    pretrained = open_pretrained(checkpoint)
    how = HowToExport(
        form=options.form,
        target=options.target,
        opset=options.opset,
        dtype=_dtype(options, pretrained),
        kv_cache=options.kv_cache,
        angles=None if options.angles == "parity" else options.angles,
        hidden_states=options.hidden_states,
    )
    exported = tuple(export_whole(pretrained, how, progress))
    written = partial(
        WrittenModel,
        exported=exported,
        unread=pretrained.unread,
        left_out=pretrained.left_out,
        checkpoint_class=pretrained.checkpoint_class,
        remarks=remarks(pretrained, how.dtype, [*dict.fromkeys(name for one in exported for name in one.inputs)]),
    )
    if options.require_all and any(one.left() for one in exported):
        return written(manifests=(), beside=())
    progress("reading the weights")
    source = model_weights(pretrained.folder, pretrained.files)
    manifests = []
    for number, one in enumerate(exported):
        path = options.path_of(one.part)
        progress(f"writing {path.name}")
        files = {} if number else beside
        manifests.append(write_onnx(one.model, path, weights=source, key=key, attentions=one.attentions, beside=files))
    return written(manifests=tuple(manifests), beside=tuple(beside))
