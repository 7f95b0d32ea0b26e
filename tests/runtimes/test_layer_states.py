"""The states between the layers of a module. A file's states are equal to them up to the first wrong layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posexport.runtimes.layer_states import layer_states


class Layer(nn.Module):
    """Adds a number. Its branches are not layers of the model."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.branches = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        for branch in self.branches:
            hidden_states = branch(hidden_states)
        return hidden_states + self.number, None


class Stack(nn.Module):
    """Layers that run as `order` says, with `between` added before each one."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), between: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(1.0), Layer(10.0), Layer(100.0)])
        self.order, self.between = order, between

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](hidden_states=x + self.between if self.between else x)[0]
        return x


def states_of(module: nn.Module) -> dict[str, float]:
    with layer_states(module) as states:
        module(torch.zeros(1))
    return {name: float(state) for name, state in states.items()}


def test_states_have_the_names_of_layers() -> None:
    assert states_of(Stack()) == {"layers": 0, "layers.0": 1, "layers.1": 11, "layers.2": 111}
    assert states_of(nn.Sequential(Stack())) == {"0.layers": 0, "0.layers.0": 1, "0.layers.1": 11, "0.layers.2": 111}


def test_names_begin_at_the_model_of_transformers() -> None:
    model = Stack()
    model.base_model_prefix = "model"  # type: ignore[assignment]
    assert list(states_of(nn.Sequential(model))) == ["layers", "layers.0", "layers.1", "layers.2"]


def test_layers_that_do_not_follow_one_another_have_none() -> None:
    assert states_of(Stack((0, 2, 1))) == {}
    assert states_of(Stack((0, 1))) == {}
    assert states_of(Stack((0, 1, 2, 0))) == {}
    assert states_of(Stack(between=1.0)) == {}


def test_hooks_are_gone_afterwards() -> None:
    model = Stack()
    states_of(model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
