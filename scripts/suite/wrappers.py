"""Wraps models so that they take plain tensors: the module to export, its example inputs, and the names of inputs and
outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from architecture import HIDDEN, VOCABULARY, Architecture
from transformers import DynamicCache

Tensors = dict[str, torch.Tensor]


def filled_cache(past: list[torch.Tensor]) -> DynamicCache:
    """A cache with the keys and values of all layers, given as key, value, key, value, ..."""
    cache = DynamicCache()
    for layer, (key, value) in enumerate(zip(past[::2], past[1::2], strict=True)):
        cache.update(key, value, layer)
    return cache


class Decoder(torch.nn.Module):
    """Maps input_ids, attention_mask, position_ids and past keys and values to logits and present keys and values."""

    def __init__(self, model: torch.nn.Module, positions: bool) -> None:
        super().__init__()
        self.model = model
        self.positions = positions

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        cache = filled_cache(past)
        more = {"position_ids": position_ids} if self.positions else {}
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **more
        )
        return (out.logits, *(tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)))


class Encoder(torch.nn.Module):
    """Maps inputs in order to the logits, or to the last hidden state if the model has no logits."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...], caching: bool = False) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.options = {"use_cache": False} if caching else {}

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = self.model(**dict(zip(self.names, inputs, strict=True)), **self.options)
        result: torch.Tensor = out.logits if "logits" in out else out.last_hidden_state
        return result


@attrs.frozen(kw_only=True)
class Wrapped:
    """A module to export. `draw(batch, seq, past, seed)` makes inputs by name in the file's order. `arguments` packs
    them for the module. `axes` names the dynamic dimensions of each input and output."""

    module: torch.nn.Module
    draw: Callable[[int, int, int, int], Tensors]
    arguments: Callable[[Tensors], tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: dict[str, dict[int, str]]
    caches: tuple[str, ...] = ()
    keywords: Callable[[Tensors], dict[str, Any]]
    """Named arguments of the bare model of transformers, for its own exporter."""


def wrap(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    """The wrapped module of an architecture."""
    wrapped = WRAPPERS[architecture.kind](architecture, model)
    wrapped.module.eval()  # the TorchScript exporter sets all modules to the mode of the outermost one afterwards
    return wrapped


def cache_shapes(model: torch.nn.Module) -> list[tuple[int, int]]:
    """The heads and features of every past tensor, in the order key, value, key, value, ... Runs the model once."""
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, 2, dtype=torch.int64), use_cache=True).past_key_values
    return [(tensor.shape[1], tensor.shape[3]) for layer in cache.layers for tensor in (layer.keys, layer.values)]


def padded_mask(batch: int, total: int) -> torch.Tensor:
    """A mask of ones in which the first third of the second row is 0 (padding to the left)."""
    mask = torch.ones(batch, total, dtype=torch.int64)
    mask[1:2, : total // 3] = 0
    return mask


def _decoder(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    shapes = cache_shapes(model)
    caches = [f"past_key_values.{i // 2}.{'value' if i % 2 else 'key'}" for i in range(len(shapes))]
    presents = [name.replace("past_key_values", "present") for name in caches]
    names = ["input_ids", "attention_mask", *(["position_ids"] if architecture.positions else [])]
    dtype = getattr(torch, architecture.dtype)

    def draw(batch: int, seq: int, past: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        mask = padded_mask(batch, past + seq)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        drawn = {
            "input_ids": torch.randint(3, VOCABULARY, (batch, seq), generator=generator),
            "attention_mask": mask,
            "position_ids": positions,
        }
        pasts = (torch.randn(batch, heads, past, size, generator=generator).to(dtype) for heads, size in shapes)
        return {**{name: drawn[name] for name in names}, **dict(zip(caches, pasts, strict=True))}

    def arguments(tensors: Tensors) -> tuple[Any, ...]:
        past = [tensors[name] for name in caches]
        return (tensors["input_ids"], tensors["attention_mask"], tensors.get("position_ids"), past)

    def keywords(tensors: Tensors) -> dict[str, Any]:
        cache = filled_cache([tensors[name] for name in caches])
        return {**{name: tensors[name] for name in names}, "past_key_values": cache, "use_cache": True}

    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "total"},
        **({"position_ids": {0: "batch", 1: "sequence"}} if architecture.positions else {}),
        **{name: {0: "batch", 2: "past"} for name in caches},
        "logits": {0: "batch", 1: "sequence"},
        **{name: {0: "batch", 2: "total"} for name in presents},
    }
    return Wrapped(
        module=Decoder(model, architecture.positions),
        draw=draw,
        arguments=arguments,
        inputs=(*names, *caches),
        outputs=("logits", *presents),
        axes=axes,
        caches=tuple(caches),
        keywords=keywords,
    )


def _encoder(
    model: torch.nn.Module, draw: Callable[[int, int, int, int], Tensors], axes: dict[str, Any], caching: bool = False
) -> Wrapped:
    names = tuple(draw(1, 4, 0, 0))
    return Wrapped(
        module=Encoder(model, names, caching),
        draw=draw,
        arguments=lambda tensors: tuple(tensors[name] for name in names),
        inputs=names,
        outputs=("output",),
        axes={**axes, "output": {0: "batch", **({1: "sequence"} if 1 in axes[names[0]] else {})}},
        keywords=lambda tensors: {**tensors, **({"use_cache": False} if caching else {})},
    )


def _tokens(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    def draw(batch: int, seq: int, past: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCABULARY, (batch, seq), generator=generator)
        mask = padded_mask(batch, seq).flip(1)
        return {"input_ids": ids, "attention_mask": mask}

    axes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}
    return _encoder(model, draw, axes, caching=architecture.kind == "causal")


def _seq2seq(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    def draw(batch: int, seq: int, past: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        mask = padded_mask(batch, seq + past).flip(1)
        source, target = (
            torch.randint(3, VOCABULARY, (batch, length), generator=generator) for length in (seq + past, seq)
        )
        return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}

    source = {0: "batch", 1: "source"}
    axes = {"input_ids": source, "attention_mask": source, "decoder_input_ids": {0: "batch", 1: "sequence"}}
    return _encoder(model, draw, axes, caching=True)


def _numbers(
    architecture: Architecture, model: torch.nn.Module, name: str, shape: Callable[[int], tuple[int, ...]], axis: str
) -> Wrapped:
    """An encoder with one input of random numbers. `shape` gives its shape after the batch dimension for a number of
    tokens. `axis` names the first of these dimensions; it is "" if that dimension is fixed."""

    def draw(batch: int, seq: int, past: int, seed: int) -> Tensors:
        numbers = torch.randn(batch, *shape(seq), generator=torch.Generator().manual_seed(seed))
        return {name: numbers.to(getattr(torch, architecture.dtype))}

    return _encoder(model, draw, {name: {0: "batch", **({1: axis} if axis else {})}})


def _image(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    size = architecture.options.get("image_size", 32)
    sides = size if isinstance(size, list) else [size, size]
    return _numbers(architecture, model, "pixel_values", lambda seq: (3, *sides), "")


def _audio(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    return _numbers(architecture, model, "input_values", lambda seq: (160 + 40 * seq,), "samples")


def _bare(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    def draw(batch: int, seq: int, past: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        return {"input_ids": torch.randint(3, VOCABULARY, (batch, seq), generator=generator)}

    return _encoder(model, draw, {"input_ids": {0: "batch", 1: "sequence"}})


def _frames(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    options = architecture.options
    size = options.get("feature_projection_input_dim") or options["num_mel_bins"]
    return _numbers(architecture, model, "input_features", lambda seq: (8 + 4 * seq, size), "frames")


def _features(architecture: Architecture, model: torch.nn.Module) -> Wrapped:
    frames = 2 * architecture.options["max_source_positions"]
    return _numbers(architecture, model, "input_features", lambda seq: (HIDDEN, frames), "")


WRAPPERS: dict[str, Callable[[Architecture, torch.nn.Module], Wrapped]] = {
    "decoder": _decoder,
    "tokens": _tokens,
    "causal": _tokens,
    "seq2seq": _seq2seq,
    "image": _image,
    "audio": _audio,
    "features": _features,
    "frames": _frames,
    "bare": _bare,
}
