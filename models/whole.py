"""Whole models of transformers as modules whose inputs and outputs are tensors with the names that loaders expect.

A decoder takes `input_ids`, `attention_mask`, `position_ids` if it has them, and the keys and values of
`past_key_values`. It returns `logits` and the keys and values of `present`. These are the names of Hugging Face's
optimum and of onnxruntime-genai.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.whole_both_ways import check_causal
from posexport.models.whole_hidden_states import last_hidden_states
from posexport.models.whole_masks import check_mask
from posexport.spec.contract import split_layer

_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
"""The types of layers, as configurations list them, whose caches are keys and values."""

Caches = list[dict[str, Tensor]]
"""A dictionary for each layer with what it keeps between steps. It is empty for a layer that keeps nothing.

Keys and values: `key` and `value` [batch, key heads, tokens, size], `indexer.key` [batch, 1, tokens, size]. States of a
fixed size: `conv_state` [batch, channels, size] and `recurrent_state` [batch, heads, ...]. The name of a second state
ends with `_1`.
"""

INDEXER = "indexer.key"
"""The name of the keys by which sparse attention selects the tokens that a query sees."""

KEYS = ("key", "value", INDEXER)
"""The names of caches that grow with the number of tokens."""

CONVOLUTION = "conv_state"
"""The name of the state of a convolution."""

STATES = {CONVOLUTION: "conv_states", "recurrent_state": "recurrent_states"}
"""States of linear attention by name, with the name of transformers' attribute."""

SCAN_WITHOUT_STATE = "mamba_selective_scan"
"""transformers' function of linear attention that takes no state of earlier tokens."""

BATCH, SEQUENCE, PAST, TOTAL = "batch", "sequence", "past", "total"
"""Names of dimensions that vary: rows, new tokens, cached tokens, and the sum of both."""

TRACED = {BATCH: 2, SEQUENCE: 3, PAST: 5, TOTAL: 8}
"""Sizes of the inputs that a model is traced with. No two are equal, and none is 1."""


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model has an input of this name."""
    return name in inspect.signature(model.forward).parameters


def _cache_argument(model: nn.Module) -> str | None:
    """Return the name of the input, and output, for what layers keep between steps. None if the model has none."""
    names = ("past_key_values", "cache_params")  # the second is for models that have only states
    return next((name for name in names if takes(model, name)), None)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of the model and its modules after the block. Some modules keep results that they computed
    from weights, which have other values or no values afterwards."""
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
                if isinstance(value, dict) and held is not None:  # in place, because hooks refer to this object
                    value.clear()
                    value.update(held)
                elif isinstance(value, list) and held is not None:
                    value[:] = held


def _held(value: Any) -> Any:
    return copy(value) if isinstance(value, dict | list) else None


@attrs.frozen
class Cached:
    """A cache or a state of a layer. Sizes in `shape` that vary are names. `dtype` None means the model's."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype | None = None

    def example(self, dtype: torch.dtype) -> Tensor:
        """Return zeros of the sizes that a model is traced with. `dtype` is the model's."""
        sizes = [TRACED[size] if isinstance(size, str) else size for size in self.shape]
        return torch.zeros(sizes, dtype=self.dtype or dtype)


Layers = Mapping[int, Mapping[str, Cached]]
"""What layers keep between steps, by layer and name. Layers that keep nothing are missing."""


def _count(layers: Layers) -> int:
    """Return the number of layers up to the last that keeps something."""
    return max(layers) + 1


class Decoder(nn.Module):
    """A causal language model with its caches as inputs and outputs. `cached` is what its layers keep between steps,
    None without caches. `hidden` adds the hidden states that enter the head."""

    def __init__(self, model: nn.Module, cached: Layers | None = None, hidden: bool = False) -> None:
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
        """Return `logits` [batch, sequence, vocabulary], `present` if the model has caches, and `last_hidden_state`
        [batch, sequence, size] if it was requested."""
        options: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            options["position_ids"] = position_ids
        cache, argument = None, _cache_argument(self.model)
        if self.cached is not None and argument is not None:
            cache = _empty_cache(self.model)
            for layer in self.cached:
                fill(cache, layer, (past_key_values or [])[layer])
            options[argument] = cache
        with last_hidden_states(self.model) as hidden:
            made: dict[str, Any] = {"logits": self.model(**options, use_cache=self.cached is not None).logits}
        if self.hidden:
            made["last_hidden_state"] = hidden[-1]
        if self.cached is not None and cache is not None:
            made["present"] = [
                _remembered(layer) if at in self.cached else {}
                for at, layer in enumerate(cache.layers[: _count(self.cached)])
            ]
        return made


def _empty_cache(model: Any) -> Any:
    """Return a cache of transformers whose attention layers keep all keys. Layers of linear attention keep states.
    RequestError if a layer keeps something else."""
    from transformers import DynamicCache, cache_utils

    if not _has_states(model):
        return DynamicCache()
    allowed = {
        "DynamicLayer": cache_utils.DynamicLayer,
        "DynamicSlidingWindowLayer": cache_utils.DynamicLayer,
        "DynamicIndexedLayer": cache_utils.DynamicIndexedLayer,
        "LinearAttentionLayer": cache_utils.LinearAttentionLayer,
        "LinearAttentionAndFullAttentionLayer": cache_utils.LinearAttentionAndFullAttentionLayer,
        "LinearAttentionAndSlidingWindowAttentionLayer": cache_utils.LinearAttentionAndFullAttentionLayer,
        "DummyLayer": cache_utils.DummyLayer,
    }
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        kind: Any = allowed.get(type(layer).__name__)
        if kind is None:
            raise _refusal(model)
        cache.layers[index] = kind(number_of_states=getattr(layer, "number_of_states", 1))
    if getattr(model, "_is_stateful", False) and not any(hasattr(layer, "conv_states") for layer in cache.layers):
        raise _refusal(model)
    return cache


def _has_states(model: Any) -> bool:
    """Whether some layers keep states instead of all keys and values."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or not _ATTENTION.issuperset(kinds)


def _refusal(model: nn.Module) -> RequestError:
    return RequestError(
        f"{type(model).__name__} has no attention with caches, or remembers something that can't be handed on by name: "
        "give --kv-cache none for the model without caches."
    )


def fill(cache: Any, layer: int, past: Mapping[str, Tensor]) -> None:
    """Fill an empty cache with what a layer kept. The cache then refers to the given keys and values; `update` alone
    would leave a concatenation with an empty tensor in the graph. States are copied, because layers overwrite them."""
    if "key" in past:
        cache.update(past["key"], past["value"], layer)
        cache.layers[layer].keys, cache.layers[layer].values = past["key"], past["value"]
    if not past:
        return
    held = cache.layers[layer]
    if INDEXER in past:
        held.lazy_initialization_indexer(past[INDEXER])
        held.indexer_keys = past[INDEXER].squeeze(1)
    for name, state in past.items():
        kind, index = _state(name)
        if kind is not None:
            getattr(held, STATES[kind])[index] = state.clone()
            getattr(held, f"is_{STATES[kind]}_initialized")[index] = held.has_previous_state[index] = True
            held.dtype, held.device = state.dtype, state.device
            if kind == CONVOLUTION:
                held.conv_kernel_size[index] = state.shape[-1]


def _state(name: str) -> tuple[str | None, int]:
    """Return the kind of state of a name and its number in the layer. The kind is None for keys and values."""
    for kind in STATES:
        if name.startswith(kind):
            return kind, int(name.removeprefix(kind).lstrip("_") or 0)
    return None, 0


def _remembered(layer: Any) -> dict[str, Tensor]:
    """Return the contents of a layer of a cache, by name."""
    held = {"key": getattr(layer, "keys", None), "value": getattr(layer, "values", None)}
    if getattr(layer, "indexer_keys", None) is not None:  # [batch, tokens, size]
        held[INDEXER] = layer.indexer_keys.unsqueeze(1)
    for kind, attribute in STATES.items():
        for index, state in getattr(layer, attribute, {}).items():
            held[f"{kind}_{index}" if index else kind] = state
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _runs(model: nn.Module, input_ids: Tensor) -> bool:
    """Whether a model runs without a cache."""
    with suppress(Exception), torch.no_grad(), unchanged(model):
        model(input_ids=input_ids, use_cache=False)
        return True
    return False


def _cached_by_layer(model: nn.Module) -> dict[int, dict[str, Cached]]:
    """Return what each layer of a model keeps between steps, by layer index. Runs the model.

    RequestError for a model without caches, and for one whose layers keep something that cannot be an input or output.
    """
    name = type(model).__name__
    uncached = RequestError(f"{name} has no caches in transformers: give --kv-cache none.")
    argument = _cache_argument(model)
    if argument is None:
        raise _refusal(model) if getattr(model, "_is_stateful", False) else uncached
    if _has_states(model) and any(
        hasattr(sys.modules[type(each).__module__], SCAN_WITHOUT_STATE) for each in model.modules()
    ):
        raise RequestError(
            f"{name} forgets its state in transformers where several tokens follow others, so nothing says what a file "
            "with caches must compute: give --kv-cache none for the model without caches."
        )
    cache, input_ids = _empty_cache(model), torch.zeros(1, TRACED[SEQUENCE], dtype=torch.int64)
    try:
        with torch.no_grad(), unchanged(model):
            made = model(input_ids=input_ids, use_cache=True, **{argument: cache})
    except (ValueError, TypeError, AttributeError):
        if _has_states(model) or _runs(model, input_ids):  # in a cache class of its own
            raise _refusal(model) from None
        raise
    if getattr(made, argument, None) is None:  # for example BERT without is_decoder in its config
        raise uncached
    if any(getattr(layer, "indexer_position_ids", None) is not None for layer in cache.layers):
        raise _refusal(model)  # their positions have three dimensions
    cached: dict[int, dict[str, Cached]] = {}
    for index, layer in enumerate(cache.layers):
        held = _remembered(layer)
        for kind, tensor in held.items():
            shape = tuple(tensor.shape)
            if kind in KEYS and (len(shape) != 4 or shape[2] != input_ids.shape[1]):
                raise RequestError(
                    f"{name} has caches of the shape {list(shape)}: only those of keys and values [batch, heads, "
                    "tokens, size] are exported, so give --kv-cache none for the model without caches."
                )
        if held:
            cached[index] = {
                kind: Cached((BATCH, tensor.shape[1], PAST, tensor.shape[3]))
                if kind in KEYS
                else Cached((BATCH, *tensor.shape[1:]), tensor.dtype if kind.startswith("recurrent") else None)
                for kind, tensor in held.items()
            }
    if not cached:
        raise _refusal(model)
    check_mask(model, input_ids.shape[1], **{argument: cache})
    return cached


@attrs.frozen(kw_only=True)
class Signature:
    """Inputs and outputs of a module by name, with shapes of sizes and names. The shape of an output is None if it
    follows from tracing. `example` contains the inputs for tracing by argument. `shapes` says which of their axes
    vary."""

    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: Mapping[str, tuple[int | str, ...] | None]
    example: Mapping[str, Any]
    shapes: Mapping[str, Any]


def without_keys_of_others(signature: Signature, layers: Collection[int]) -> Signature:
    """Return the signature without the keys and values of layers that are not in `layers`. Nothing reads these if their
    layers are not traced, and torch would trace every size of them. States stay, because transformers asks the state of
    any layer whether there are earlier tokens."""

    def left(name: str) -> bool:
        before, layer, kind = split_layer(name) or ("", 0, "")
        return not (before in ("past_key_values", "present") and layer not in layers and kind in KEYS)

    def without(by_argument: Mapping[str, Any]) -> dict[str, Any]:
        past = by_argument.get("past_key_values")
        if past is None:
            return dict(by_argument)
        kept = [
            {kind: one for kind, one in held.items() if left(f"past_key_values.{layer}.{kind}")}
            for layer, held in enumerate(past)
        ]
        return {**by_argument, "past_key_values": kept}

    return Signature(
        inputs={name: shape for name, shape in signature.inputs.items() if left(name)},
        outputs={name: shape for name, shape in signature.outputs.items() if left(name)},
        example=without(signature.example),
        shapes=without(signature.shapes),
    )


def several_codes(model: nn.Module, count: int) -> RequestError:
    """Return the refusal of a model that reads several codes of sound for each token."""
    return RequestError(
        f"{type(model).__name__} reads {count} codes of sound for each token, and a file reads one: it is not exported."
    )


def decoder_of(
    model: nn.Module, dtype: torch.dtype, with_caches: bool = True, hidden: bool = False
) -> tuple[Decoder, Signature]:
    """Return the module of a causal language model, and its inputs and outputs. Runs the model once to find its caches.
    RequestError for a model that cannot be a decoder file, with or without caches."""
    check_causal(model, with_caches)
    tables = model.get_input_embeddings()  # type: ignore[operator]
    if isinstance(tables, nn.ModuleList):
        raise several_codes(model, len(tables))
    cached = _cached_by_layer(model) if with_caches else {}
    module = Decoder(model, cached or None, hidden)
    configuration: Any = model.config
    return module, _signature(module, cached, configuration.get_text_config().vocab_size, dtype)


def _signature(module: Decoder, cached: Layers, vocabulary: int, dtype: torch.dtype) -> Signature:
    tokens, total = (BATCH, SEQUENCE), TOTAL if cached else SEQUENCE
    inputs: dict[str, tuple[int | str, ...]] = {"input_ids": tokens, "attention_mask": (BATCH, total)}
    if module.takes_positions:
        inputs["position_ids"] = tokens
    outputs: dict[str, tuple[int | str, ...] | None] = {"logits": (*tokens, vocabulary)}
    if module.hidden:
        outputs["last_hidden_state"] = None
    for layer, held in cached.items():
        for kind, one in held.items():
            inputs[f"past_key_values.{layer}.{kind}"] = one.shape
            outputs[f"present.{layer}.{kind}"] = tuple(TOTAL if size == PAST else size for size in one.shape)
    rows, new, length = TRACED[BATCH], TRACED[SEQUENCE], TRACED[total]
    example: dict[str, Any] = {
        "input_ids": torch.zeros(rows, new, dtype=torch.int64),
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        "position_ids": torch.arange(length - new, length).expand(rows, new).contiguous(),
    }
    example = {name: value for name, value in example.items() if name in inputs}
    shapes: dict[str, Any] = {name: _varying(inputs[name]) for name in example}
    if cached:
        by_layer = [cached.get(layer, {}) for layer in range(_count(cached))]
        example["past_key_values"] = [{kind: one.example(dtype) for kind, one in held.items()} for held in by_layer]
        shapes["past_key_values"] = [{kind: _varying(one.shape) for kind, one in held.items()} for held in by_layer]
    return Signature(inputs=inputs, outputs=outputs, example=example, shapes=shapes)


def _varying(shape: tuple[int | str, ...]) -> dict[int, Any]:
    """Return the axes whose sizes vary."""
    return {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(shape) if isinstance(size, str)}


_GROWING = "|".join(map(re.escape, KEYS))
_KIND = re.compile(rf"{_GROWING}|(?:{'|'.join(STATES)})(?:_\d+)?")


def cached_layers(names: Iterable[str]) -> list[int]:
    """Return the layers whose caches are among these inputs."""
    found = filter(None, map(split_layer, names))
    return sorted({layer for before, layer, kind in found if before == "past_key_values" and _KIND.fullmatch(kind)})
