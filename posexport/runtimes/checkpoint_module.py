"""The whole model of a checkpoint, transformers' own module, as the reference of a file that was exported from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from posexport import machine
from posexport.artifact.graph_file import GraphFile
from posexport.errors import RequestError, said, shown
from posexport.models.pretrained import (
    DECODER,
    ENCODER,
    Pretrained,
    buffers_in,
    constants_of,
    main_dtype,
    open_pretrained,
    set_buffer,
)
from posexport.models.weights import TORCH_DTYPES
from posexport.models.whole import KEYS, Caches, Decoder, Signature, cached_layers, decoder_of
from posexport.models.whole_encoder import encoder_of
from posexport.models.whole_outputs import HIDDEN
from posexport.models.whole_translator import translator_of
from posexport.runtimes.generation import BUFFER
from posexport.runtimes.trace_errors import chain_of, place_of
from posexport.spec.contract import Values


@attrs.frozen(kw_only=True)
class CheckpointModule:
    """The model of the checkpoint in the folder `reference`, used like posexport.runtimes.module_file.UserModule.

    `constants` are the names of buffers, such as frequencies, that keep their dtype if the weights get another.
    """

    reference: str
    module: nn.Module
    name: str
    signature: Signature
    constants: frozenset[str]

    @property
    def label(self) -> str:
        """What ran, for people."""
        return f"{self.name} of transformers"

    def setting(self, name: str) -> Any:
        """The module's own example inputs and names of outputs."""
        values = {"example_inputs": dict(self.signature.example), "output_names": list(self.signature.outputs)}
        return values.get(name)

    @contextlib.contextmanager
    def running(self, what: str) -> Iterator[None]:
        """A context in which transformers' code runs. What it raises becomes a RequestError, `what` begins it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RequestError) or machine.is_short(error):
                raise
            chain = chain_of(error)
            raise RequestError(f"{what} {self.label} fails ({said(chain[-1])}{place_of(chain)}).") from error


class BufferDecoder(nn.Module):
    """A decoder whose caches are buffers: places after the tokens that the mask counts are not read, and stay zero."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Caches | None = None,
    ) -> dict[str, Any]:
        """The decoder's outputs, with `present` of the size of `past_key_values`."""
        pasts = past_key_values or []
        length = attention_mask.shape[1] - input_ids.shape[1]
        held: Caches = [
            {kind: cache[:, :, :length] if kind in KEYS else cache for kind, cache in past.items()} for past in pasts
        ]
        made: dict[str, Any] = self.decoder(input_ids, attention_mask, position_ids, held)
        for present, past in zip(made["present"], pasts, strict=True):
            for kind, cache in [(kind, present[kind]) for kind in KEYS if kind in present]:
                present[kind] = nn.functional.pad(cache, (0, 0, 0, past[kind].shape[2] - cache.shape[2]))
        return made


def load_checkpoint(folder: Path, graph: GraphFile) -> CheckpointModule:
    """The model of the checkpoint, with the inputs and outputs of the file.

    RequestError if it can't be opened, and for a file of a model with other sizes.
    """
    pretrained = open_pretrained(folder)
    inputs, outputs = graph.inputs(), graph.outputs()
    module, signature = _module(pretrained, inputs, outputs)
    for name, shape in signature.inputs.items():
        _check_sizes(folder, name, shape, inputs)
    for name, dims in signature.outputs.items():
        _check_sizes(folder, name, dims, outputs)
    constants = constants_of(pretrained.model)
    dtype = next((TORCH_DTYPES[dtype] for _, dtype in outputs.values() if dtype in ("fp32", "fp16", "bf16")), None)
    if dtype is not None:
        for name, buffer in buffers_in(pretrained, getattr(torch, dtype)).items():
            set_buffer(pretrained.model, name, buffer)
    buffers = {id(buffer) for name, buffer in pretrained.model.named_buffers() if name in constants}
    return CheckpointModule(
        reference=str(folder),
        module=module.eval(),
        name=pretrained.architecture,
        signature=signature,
        constants=frozenset(name for name, buffer in module.named_buffers() if id(buffer) in buffers),
    )


def _module(pretrained: Pretrained, inputs: Values, outputs: Values) -> tuple[nn.Module, Signature]:
    """The part of the model that has these inputs and outputs."""
    model, dtype = pretrained.model, main_dtype(pretrained)
    if pretrained.kind == ENCODER:
        return encoder_of(model, dtype, HIDDEN in outputs, pretrained.folder)
    if pretrained.kind != DECODER:
        parts = translator_of(model, dtype, pretrained.folder)
        return parts["decoder" if any(name.startswith("past_key_values.") for name in inputs) else "encoder"]
    decoder, signature = decoder_of(model, dtype, bool(cached_layers(inputs)), HIDDEN in outputs)
    buffers = any(BUFFER in shape for shape, _ in inputs.values())
    return BufferDecoder(decoder) if buffers else decoder, signature


def _check_sizes(folder: Path, name: str, own: tuple[int | str, ...] | None, values: Values) -> None:
    """RequestError if the file has another size than the checkpoint's model."""
    shape = values[name][0] if name in values else None
    if own is None or shape is None:  # names are compared when the module runs
        return
    if len(own) != len(shape) or any(
        size != other
        for size, other in zip(own, shape, strict=True)
        if isinstance(size, int) and isinstance(other, int)
    ):
        raise RequestError(
            f"{shown(name)} of the file is {list(shape)}, and {list(own)} of the model in {str(folder)!r}: give the "
            "checkpoint that the file was exported from"
        )
