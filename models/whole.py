"""Whole models of transformers as modules whose inputs and outputs are tensors by the names that loaders expect.

A decoder takes `input_ids`, `attention_mask`, `position_ids` where it has them, and the keys and values of
`past_key_values`; it gives `logits` and those of `present`. These are the names of Hugging Face's optimum and of
onnxruntime-genai.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from posexport.errors import RequestError

_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
"""The kinds of layers, as configurations list them, whose caches are keys and values."""

Caches = list[dict[str, Tensor]]
"""A table of `key` and `value` [batch, key heads, tokens, size] for each layer that has a cache."""

BATCH, SEQUENCE, PAST, TOTAL = "batch", "sequence", "past", "total"
"""Names of dimensions that vary: rows, new tokens, cached ones, and both."""

TRACED = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8}
"""Sizes of the inputs that a model is traced with. No two are equal, and none is 1."""


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model has an input of this name."""
    return name in inspect.signature(model.forward).parameters


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model runs inside, and keeps nothing of it: some modules keep what they computed of their weights, which have
    other values or no values afterwards."""
    before = [
        (module, [(name, value, _held(value)) for name, value in vars(module).items()]) for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            for name, value, held in attributes:
                vars(module)[name] = value
                if isinstance(value, dict) and held is not None:  # in place: hooks know the table that they are in
                    value.clear()
                    value.update(held)
                elif isinstance(value, list) and held is not None:
                    value[:] = held


def _held(value: Any) -> Any:
    return copy(value) if isinstance(value, dict | list) else None


@contextmanager
def last_hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """The hidden states that the model gives to its head, each time it runs."""
    states: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _, __, made: states.append(made[0]))  # type: ignore[union-attr]
    try:
        yield states
    finally:
        hook.remove()


class Decoder(nn.Module):
    """A causal language model with its caches as inputs and outputs; `cached` are the layers that have one, and
    `hidden` asks for the hidden states that enter the head too."""

    def __init__(self, model: nn.Module, cached: Sequence[int] | None = None, hidden: bool = False) -> None:
        super().__init__()
        self.model, self.cached, self.hidden = model, cached, hidden
        self.takes_positions = takes(model, "position_ids")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Caches | None = None,
    ) -> dict[str, Any]:
        """`logits` [batch, sequence, vocabulary], `last_hidden_state` [batch, sequence, size] if it is asked for, and
        `present` where the model has caches."""
        from transformers import DynamicCache

        options: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            options["position_ids"] = position_ids
        cache = DynamicCache()
        if self.cached is not None:
            for layer, past in zip(self.cached, past_key_values or [], strict=True):
                fill(cache, layer, past)
            options["past_key_values"] = cache
        with last_hidden_states(self.model) as hidden:
            made: dict[str, Any] = {"logits": self.model(**options, use_cache=self.cached is not None).logits}
        if self.hidden:
            made["last_hidden_state"] = hidden[-1]
        if self.cached is not None:
            layers = cache.layers
            made["present"] = [{"key": layers[at].keys, "value": layers[at].values} for at in self.cached]
        return made


def fill(cache: Any, layer: int, past: Mapping[str, Tensor]) -> None:
    """Give an empty cache the keys and values of a layer. They are its own afterwards, not a concatenation of them and
    of nothing, which is what `update` leaves in the graph."""
    cache.update(past["key"], past["value"], layer)
    cache.layers[layer].keys, cache.layers[layer].values = past["key"], past["value"]


def cache_sizes(model: nn.Module, input_ids: Tensor) -> dict[int, tuple[int, int, int]]:
    """Key heads, size of keys and size of values of the cache of each layer, by its index.

    RequestError for a model whose layers remember something else than keys and values.
    """
    from transformers import DynamicCache

    name = type(model).__name__
    refusal = RequestError(
        f"{name} doesn't remember keys and values alone, as caches of a file do: give --kv-cache none for the model "
        "without caches."
    )
    config: Any = model.config
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    stateful = getattr(model, "_is_stateful", False)
    uncached = RequestError(f"{name} has no caches in transformers: give --kv-cache none.")
    if not stateful and not takes(model, "past_key_values"):
        raise uncached
    if stateful or not takes(model, "past_key_values") or not _ATTENTION.issuperset(kinds):
        raise refusal
    cache = DynamicCache()
    with torch.no_grad(), unchanged(model):
        made = model(input_ids=input_ids, past_key_values=cache, use_cache=True)
    if getattr(made, "past_key_values", None) is None:  # as with BERT whose config has no is_decoder
        raise uncached
    sizes = {}
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[2] != input_ids.shape[1]:
            raise RequestError(
                f"{name} has caches of the shape {list(keys.shape)}: only those of keys and values [batch, heads, "
                "tokens, size] are exported, so give --kv-cache none for the model without caches."
            )
        sizes[index] = (keys.shape[1], keys.shape[3], values.shape[3])
    if not sizes:
        raise refusal
    return sizes


@attrs.frozen(kw_only=True)
class Signature:
    """Inputs and outputs of a module by name, with shapes of sizes and names; those of outputs are None where they
    follow from tracing. The module is traced with `example`, by argument, whose axes vary as `shapes` says."""

    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: Mapping[str, tuple[int | str, ...] | None]
    example: Mapping[str, Any]
    shapes: Mapping[str, Any]


def decoder_signature(
    module: Decoder, sizes: Mapping[int, tuple[int, int, int]], vocabulary: int, dtype: torch.dtype
) -> Signature:
    """The inputs and outputs of a decoder."""
    tokens, total = (BATCH, SEQUENCE), TOTAL if sizes else SEQUENCE
    inputs: dict[str, tuple[int | str, ...]] = {"input_ids": tokens, "attention_mask": (BATCH, total)}
    if module.takes_positions:
        inputs["position_ids"] = tokens
    outputs: dict[str, tuple[int | str, ...] | None] = {"logits": (*tokens, vocabulary)}
    if module.hidden:
        outputs["last_hidden_state"] = None
    rows, new, past = TRACED[BATCH], TRACED[SEQUENCE], TRACED[PAST]
    length = TRACED[total]
    example: dict[str, Any] = {
        "input_ids": torch.zeros(rows, new, dtype=torch.int64),
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        "position_ids": torch.arange(length - new, length).expand(rows, new).contiguous(),
    }
    example = {name: value for name, value in example.items() if name in inputs}
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {name: {0: dynamic, 1: dynamic} for name in inputs}
    if sizes:
        example["past_key_values"], shapes["past_key_values"] = [], []
    for index, (heads, *widths) in sizes.items():
        for kind, width in zip(("key", "value"), widths, strict=True):
            inputs[f"past_key_values.{index}.{kind}"] = (BATCH, heads, PAST, width)
            outputs[f"present.{index}.{kind}"] = (BATCH, heads, TOTAL, width)
        made = [torch.zeros(rows, heads, past, width, dtype=dtype) for width in widths]
        example["past_key_values"].append(dict(zip(("key", "value"), made, strict=True)))
        shapes["past_key_values"].append({kind: {0: dynamic, 2: dynamic} for kind in ("key", "value")})
    return Signature(inputs=inputs, outputs=outputs, example=example, shapes=shapes)


_CACHE = re.compile(r"past_key_values\.(\d+)\.(?:key|value)")


def cached_layers(names: Iterable[str]) -> list[int]:
    """The layers whose caches are among the inputs of these names."""
    matches = (_CACHE.fullmatch(name) for name in names)
    return sorted({int(match[1]) for match in matches if match is not None})
