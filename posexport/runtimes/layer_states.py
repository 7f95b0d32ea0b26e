"""What the layers of a module return while it runs. It shows in which layer an exported file begins to differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def layer_states(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context that collects the hidden states of a run, by name.

    They are the states that enter a list of layers (`model.layers`), and those that each layer returns
    (`model.layers.0`). Lists inside layers of other lists are left out, and so are lists whose layers don't follow one
    another.
    """
    model = next((each for each in module.modules() if hasattr(each, "base_model_prefix")), module)
    chains = [_Chain(path, layers) for path, layers in _lists(model)]
    states: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for chain in chains:
            chain.hook(hooks)
        yield states
    for chain in chains:
        states.update(chain.states())


def _lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        of_child = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield of_child, child
        else:
            yield from _lists(child, of_child)


class _Chain:
    """The states of a list of layers in which each layer gets what the one before it returned."""

    def __init__(self, path: str, layers: nn.ModuleList) -> None:
        self._path, self._layers = path, layers
        self._states: list[Tensor] = []
        self._follows = True

    def hook(self, hooks: ExitStack) -> None:
        for index, layer in enumerate(self._layers):
            hooks.callback(layer.register_forward_pre_hook(self._entering(index), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(self._leaving).remove)

    def _entering(self, index: int) -> Any:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if index == 0 and not self._states and isinstance(given, Tensor):
                self._states.append(given)
            self._follows &= len(self._states) == index + 1 and given is self._states[-1]

        return enter

    def _leaving(self, _: nn.Module, __: tuple[Any, ...], returned: Any) -> None:
        state = returned[0] if isinstance(returned, tuple) and returned else returned
        if isinstance(state, Tensor):
            self._states.append(state)

    def states(self) -> dict[str, Tensor]:
        """The states by name, in order; empty unless each layer was called once, directly after the one before."""
        if not self._follows or len(self._states) != len(self._layers) + 1:
            return {}
        names = (self._path, *(f"{self._path}.{index}" for index in range(len(self._layers))))
        return dict(zip(names, self._states, strict=True))
