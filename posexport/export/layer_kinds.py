"""Which layers of a model are the same function except for the values of their weights: one of each kind is traced.

Layers of one kind have the same modules, settings and shapes, and the same values in lists by layer in the model's
configuration. Whether they compute the same is tested: with the same weights and hidden states, and with the other
inputs that the model gives each, they must return equal numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from posexport.models.whole import unchanged

INDEX = ("layer_idx", "layer_index", "layer_id", "idx")
"""Names of attributes with the index of a layer."""

_SETTINGS = (bool, int, float, str, tuple, type(None))
_SCALE = 0.05


class LayersDifferError(Exception):
    """The traced layers can't stand for the others, so all layers must be traced."""


@attrs.frozen
class Layers:
    """The list of layers of a model: the `path` of the module, and for each layer the layer that is traced for it."""

    path: str
    stands_for: tuple[int, ...]

    @property
    def traced(self) -> tuple[int, ...]:
        """The layers that are traced, one of each kind."""
        return tuple(dict.fromkeys(self.stands_for))


def find_layers(
    model: nn.Module, count: int, configs: Iterable[Any] = (), part: nn.Module | None = None
) -> Layers | None:
    """The list of `count` layers of a model, by kind; None if there is no such list, or no two layers are alike.

    `configs` are configurations of transformers; their lists of `count` values say what differs by layer. `part` is the
    module of the model that has the list, None for the whole model.
    """
    inside = {*(model if part is None else part).modules()}
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList) and each in inside]
    lists = [(path, each) for path, each in lists if len(each) == count and not path.rpartition(".")[0].isdigit()]
    if len(lists) != 1:
        return None
    path, layers = lists[0]
    kept = {*model.state_dict()}
    by_layer = list(_by_layer(configs, count))
    first: dict[Any, int] = {}
    stands_for = []
    for index, layer in enumerate(layers):
        kind = (*_kind(layer, {name.removeprefix(f"{path}.{index}.") for name in kept}), *(v[index] for v in by_layer))
        stands_for.append(first.setdefault(kind, index))
    return Layers(path, tuple(stands_for)) if len(first) < count else None


def _by_layer(configs: Iterable[Any], count: int) -> Iterator[list[str]]:
    """The lists of configurations that have a value for each layer, as text."""
    for config in configs:
        for value in vars(config).values():
            if isinstance(value, list | tuple) and len(value) == count:
                yield [repr(one) for one in value]


def _kind(layer: nn.Module, kept: set[str]) -> tuple[Any, ...]:
    """A key that is equal for layers of one kind.

    It has classes, settings except the index, shapes and dtypes, and the values of buffers that are not in a
    checkpoint.
    """
    parts: list[Any] = []
    for path, module in layer.named_modules():
        settings = tuple(
            (name, repr(value))
            for name, value in sorted(vars(module).items())
            if name not in INDEX and isinstance(value, _SETTINGS)
        )
        parts.append((path, type(module), settings))
    parts += [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in layer.named_parameters()]
    for name, tensor in layer.named_buffers():
        parts.append((name, tuple(tensor.shape), tensor.dtype, "" if name in kept else _digest(tensor)))
    return tuple(parts)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def check_alike(model: nn.Module, layers: Layers, run: Callable[[], Any]) -> None:
    """LayersDifferError unless each layer computes the same as the layer that stands for it. `run` calls the model."""
    modules = model.get_submodule(layers.path)
    assert isinstance(modules, nn.ModuleList)
    calls = _calls(model, modules, run)
    expected: dict[int, Any] = {}
    for kind in layers.traced:
        alike = [index for index, one in enumerate(layers.stands_for) if one == kind]
        if len(alike) == 1:
            continue
        with _same_weights([modules[index] for index in alike]):
            for index in alike:
                beside = calls[index]
                if not _are_the_same(beside, calls[kind]):
                    raise LayersDifferError(f"layer {index} is given other values than layer {kind}")
                result = beside.again(modules[index])
                if index == kind:
                    expected[kind] = result
                elif not torch.equal(result, expected[kind]):
                    raise LayersDifferError(f"layer {index} computes something else than layer {kind}")


def hidden_of(result: Any) -> tuple[Tensor, int | None]:
    """The hidden states that a layer returns, and the number of values after them; None if it returns no tuple.

    Other layers don't use these values: `check_alike` sees what layers get.
    """
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return result[0], len(result) - 1
    raise LayersDifferError("a layer returns no hidden states")


@attrs.frozen
class _Call:
    """The arguments of a layer, except its hidden states, which have this `shape` and `dtype`."""

    shape: torch.Size
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool

    def again(self, layer: nn.Module) -> Tensor:
        """The result for random hidden states, which are the same each time."""
        random = torch.Generator().manual_seed(1)
        hidden = torch.randn(self.shape, generator=random, dtype=torch.float32).to(self.dtype)
        with torch.no_grad(), unchanged(layer):
            given = {**self.kwargs, "hidden_states": hidden} if self.named else self.kwargs
            result = layer(*self.args, **given) if self.named else layer(hidden, *self.args, **given)
        return hidden_of(result)[0]


def _calls(model: nn.Module, modules: nn.ModuleList, run: Callable[[], Any]) -> list[_Call]:
    calls: dict[int, _Call] = {}
    returned: dict[int, Tensor] = {}

    def returning(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], result: Any) -> None:
            returned[index] = hidden_of(result)[0]

        return hook

    def recording(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, Tensor) or index in calls:
                raise LayersDifferError("a layer is not called with hidden states, or more than once")
            if index and hidden is not returned.get(index - 1):
                raise LayersDifferError(f"layer {index} is not given what the one before it returned")
            calls[index] = _Call(hidden.shape, hidden.dtype, args[1:], others, not args)

        return hook

    hooks = [layer.register_forward_pre_hook(recording(index), with_kwargs=True) for index, layer in enumerate(modules)]
    hooks += [layer.register_forward_hook(returning(index)) for index, layer in enumerate(modules)]
    try:
        with torch.no_grad(), unchanged(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(modules):
        raise LayersDifferError("a layer is not called")
    return [calls[index] for index in range(len(modules))]


def _are_the_same(one: _Call, other: _Call) -> bool:
    """Whether two layers get the same arguments, except hidden states.

    Tensors, such as masks, must be one object, because two kinds of masks can be equal for a few tokens.
    """
    return (one.shape, one.dtype, one.named) == (other.shape, other.dtype, other.named) and (
        _same(one.args, other.args) and _same(one.kwargs, other.kwargs)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is other or (isinstance(one, _SETTINGS) and one == other)


@contextmanager
def _same_weights(layers: list[nn.Module]) -> Iterator[None]:
    """A context in which the layers have the same random weights."""
    before = [(parameter, parameter.data) for layer in layers for parameter in layer.parameters()]
    random = torch.Generator().manual_seed(0)
    made = {
        name: torch.empty(parameter.shape, dtype=parameter.dtype).uniform_(-_SCALE, _SCALE, generator=random)
        for name, parameter in layers[0].named_parameters()
    }
    try:
        for layer in layers:
            for name, parameter in layer.named_parameters():
                parameter.data = made[name]
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
