"""The whole model of a checkpoint as the reference of a file that was exported from it: transformers' own module."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import attrs
import torch

from posexport.artifact.graph_file import GraphFile
from posexport.models.pretrained import main_dtype, open_pretrained
from posexport.models.whole import Decoder, cache_sizes, cached_layers, decoder_signature


@attrs.frozen(kw_only=True)
class CheckpointModule:
    """As posexport.runtimes.module_file.UserModule, of the checkpoint in the folder `reference`."""

    reference: str
    module: torch.nn.Module

    @property
    def label(self) -> str:
        """What ran, for people."""
        return f"{type(self.module.model).__name__} of transformers"

    def setting(self, name: str) -> Any:
        """The module's own example inputs and names of outputs."""
        value = getattr(self.module, name, None)
        return value() if callable(value) else value

    def running(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing of the user's runs, so nothing is caught."""
        return contextlib.nullcontext()


def load_checkpoint(folder: Path, graph: GraphFile) -> CheckpointModule:
    """The model of the checkpoint, with the inputs and outputs of the file; RequestError where it can't be opened."""
    pretrained = open_pretrained(folder)
    cached = cached_layers(graph.inputs())
    sizes = cache_sizes(pretrained.model, torch.zeros(1, 1, dtype=torch.int64)) if cached else {}
    module = Decoder(pretrained.model, tuple(sizes) if cached else None)
    signature = decoder_signature(module, sizes, pretrained.text_config.vocab_size, main_dtype(pretrained))
    module.example_inputs = lambda: dict(signature.example)  # type: ignore[assignment]
    module.output_names = lambda: list(signature.outputs)  # type: ignore[assignment]
    return CheckpointModule(reference=str(folder), module=module.eval())
