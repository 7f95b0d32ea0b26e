"""Encoder-decoders as two modules.

The encoder also returns the keys and values of cross-attention. The decoder of new tokens takes them as inputs, so that
they are computed once for a text or a sound.

Caches have optimum's names: `past_key_values.N.decoder.key` for the tokens, `past_key_values.N.encoder.key` for
cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.whole import (
    BATCH,
    PAST,
    SEQUENCE,
    TOTAL,
    TRACED,
    Signature,
    fill,
    several_codes,
    takes,
    unchanged,
)
from posexport.models.whole_inputs import GLOBAL, encoder_example, encoder_inputs
from posexport.models.whole_outputs import HIDDEN

SOURCE = "encoder_sequence"
"""The name of the dimension of the encoder's sequence."""

_NEW = {**TRACED, SOURCE: 7}
_KINDS = ("key", "value")

Caches = list[dict[str, dict[str, Tensor]]]


class CrossEncoder(nn.Module):
    """The encoder of an encoder-decoder, and the keys and values of its decoder's cross-attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return `last_hidden_state` [batch, encoder sequence, size], and `present` of each layer of the decoder."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "input_values": input_values,
            "input_features": input_features,
            "pixel_values": pixel_values,
        }
        model: Any = self.model
        encoded = model.get_encoder()(
            **{name: value for name, value in given.items() if value is not None}, return_dict=True
        )
        states = encoded[0]
        cache = _cache()
        start = torch.zeros(states.shape[0], 1, dtype=torch.int64)
        model(decoder_input_ids=start, encoder_outputs=encoded, past_key_values=cache, use_cache=True, return_dict=True)
        layers = cache.cross_attention_cache.layers
        return {HIDDEN: states, "present": [{"encoder": {"key": one.keys, "value": one.values}} for one in layers]}


class CrossDecoder(nn.Module):
    """The decoder of an encoder-decoder. Its caches and those of its cross-attention are inputs.

    `encoded` is the class of the encoder's output. `width` is the size of the encoder's hidden states.
    """

    def __init__(self, model: nn.Module, width: int, encoded: type) -> None:
        super().__init__()
        self.model, self.width, self.encoded = model, width, encoded

    def forward(
        self, input_ids: Tensor, past_key_values: Caches, encoder_attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Return `logits` [batch, sequence, vocabulary], and `present` of each layer's own cache."""
        cache = _cache()
        for index, past in enumerate(past_key_values):
            fill(cache.self_attention_cache, index, past["decoder"])
            fill(cache.cross_attention_cache, index, past["encoder"])
            cache.is_updated[index] = True
        key = past_key_values[0]["encoder"]["key"]
        unread = torch.zeros(key.shape[0], key.shape[2], self.width, dtype=key.dtype)  # the cache replaces them
        options = {} if encoder_attention_mask is None else {"attention_mask": encoder_attention_mask}
        model: Any = self.model
        made = model(
            decoder_input_ids=input_ids,
            encoder_outputs=self.encoded(last_hidden_state=unread),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **options,
        )
        layers = cache.self_attention_cache.layers
        present = [{"decoder": {"key": one.keys, "value": one.values}} for one in layers]
        return {"logits": made.logits, "present": present}


def _cache() -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def translator_of(
    model: nn.Module, dtype: torch.dtype, folder: Path | None = None
) -> dict[str, tuple[nn.Module, Signature]]:
    """The modules "encoder" and "decoder" of a model, with their inputs and outputs; the model is run for the sizes of
    its caches. `folder` is that of its checkpoint, whose preprocessor may say how large images are. RequestError for a
    model whose caches are others."""
    encoder = CrossEncoder(model)
    whole: Any = model
    codes = getattr(whole.config, "delay_pattern", None)
    if codes is not None:
        raise several_codes(model, len(codes))
    # files that generate texts have no input for GLOBAL, and transformers has no global tokens without it
    inputs = {name: shape for name, shape in encoder_inputs(model, folder).items() if name != GLOBAL}
    if others := [name for name in inputs if not takes(encoder, name)]:
        raise RequestError(
            f"{type(model).__name__} reads {' and '.join(others)} besides its text, which the file of its encoder has "
            "no input for: it is not exported."
        )
    example = encoder_example(inputs, dtype)
    with torch.no_grad(), unchanged(model):
        made = encoder(**example)
        encoded = type(whole.get_encoder()(**example, return_dict=True))
    layers = [one["encoder"]["key"].shape for one in made["present"]]
    if not layers or any(len(shape) != 4 for shape in layers):
        raise RequestError(f"{type(model).__name__} has no keys and values of cross-attention: it is not exported.")
    if made[HIDDEN].ndim != 3:
        raise RequestError(
            f"the encoder of {type(model).__name__} gives states {list(made[HIDDEN].shape)}, and only states [batch, "
            "tokens, size] are exported: give --layer in place of --model for one layer of it."
        )
    width, length = made[HIDDEN].shape[-1], made[HIDDEN].shape[1]
    moves = any(isinstance(size, str) and size != BATCH for shape in inputs.values() for size in shape)
    source: int | str = SOURCE if moves else length
    inputs = {name: tuple(SOURCE if size == SEQUENCE else size for size in shape) for name, shape in inputs.items()}
    cross = {
        f"{index}.encoder.{kind}": (BATCH, shape[1], source, made["present"][index]["encoder"][kind].shape[3])
        for index, shape in enumerate(layers)
        for kind in _KINDS
    }
    own = {name.replace(".encoder.", ".decoder."): (*shape[:2], PAST, shape[3]) for name, shape in cross.items()}
    outputs: dict[str, Any] = {HIDDEN: (BATCH, source, width)}
    outputs |= {f"present.{name}": shape for name, shape in cross.items()}
    encoding = Signature(
        inputs=inputs, outputs=outputs, example=example, shapes={name: _moving(inputs[name]) for name in inputs}
    )
    return {
        "encoder": (encoder, encoding),
        "decoder": _decoder(model, own, cross, "attention_mask" in inputs, CrossDecoder(model, width, encoded), dtype),
    }


def _decoder(
    model: nn.Module,
    own: Mapping[str, tuple[int | str, ...]],
    cross: Mapping[str, tuple[int | str, ...]],
    source_mask: bool,
    decoder: CrossDecoder,
    dtype: torch.dtype,
) -> tuple[nn.Module, Signature]:
    tokens = (BATCH, SEQUENCE)
    config: Any = model.config
    inputs: dict[str, tuple[int | str, ...]] = {"input_ids": tokens}
    outputs: dict[str, Any] = {"logits": (*tokens, config.get_text_config(decoder=True).vocab_size)}
    past: Any = [{"decoder": {}, "encoder": {}} for _ in range(len(own) // 2)]
    moving: Any = [{"decoder": {}, "encoder": {}} for _ in past]
    for index, layer in enumerate(past):
        for part, caches in (("decoder", own), ("encoder", cross)):
            for kind in _KINDS:
                name = f"{index}.{part}.{kind}"
                shape = inputs[f"past_key_values.{name}"] = caches[name]
                layer[part][kind] = torch.zeros(_sizes(shape), dtype=dtype)
                moving[index][part][kind] = _moving(shape)
                if part == "decoder":
                    outputs[f"present.{name}"] = tuple(TOTAL if size == PAST else size for size in shape)
    example = {"input_ids": torch.zeros(_sizes(tokens), dtype=torch.int64), "past_key_values": past}
    shapes = {"input_ids": _moving(tokens), "past_key_values": moving}
    if source_mask:
        inputs["encoder_attention_mask"] = (BATCH, SOURCE)
        example["encoder_attention_mask"] = torch.ones(_sizes((BATCH, SOURCE)), dtype=torch.int64)
        shapes["encoder_attention_mask"] = _moving((BATCH, SOURCE))
    return decoder, Signature(inputs=inputs, outputs=outputs, example=example, shapes=shapes)


def _sizes(shape: tuple[int | str, ...]) -> list[int]:
    return [_NEW[size] if isinstance(size, str) else size for size in shape]


def _moving(shape: tuple[int | str, ...]) -> dict[int, Any]:
    return {axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if isinstance(size, str)}
