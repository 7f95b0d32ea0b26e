"""The inputs and outputs of a torch module as named tensors, with the names that they have in its exported graph.

An input has the name of its parameter in `forward`. Tensors in lists and dictionaries have their index or key after it
(`past_key_values.0.key`). Outputs of a dictionary have its keys; a single output is `output`, several are `output_0`,
...
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from posexport.errors import RequestError, shown

Bound = inspect.BoundArguments

Leaf = tuple[str, Any]
"""The name of a tensor, and the tensor."""


def bind(module: torch.nn.Module, example: Any) -> Bound:
    """The arguments of `forward`: a tensor, a tuple or list by position, or a dictionary by parameter.

    RequestError for arguments that `forward` doesn't take, and for what is not a tensor.
    """
    signature = inspect.signature(module.forward)
    example = (example,) if isinstance(example, Tensor) else example
    if not isinstance(example, tuple | list | dict):
        raise RequestError(f"example inputs are {type(example).__name__}: give a tuple, or a dictionary by parameter.")
    try:
        bound = signature.bind(**example) if isinstance(example, dict) else signature.bind(*example)
    except TypeError as error:
        raise RequestError(f"example inputs don't fit forward{signature}: {error}.") from None
    if not tensors_of(bound):
        raise RequestError("example inputs hold no tensor: give one for each input.")
    return bound


def tensors_of(bound: Bound) -> dict[str, Tensor]:
    """The tensors of a call by name."""
    return {name: tensor for argument, value in bound.arguments.items() for name, tensor in leaves(value, argument)}


def leaves(value: Any, name: str) -> Iterator[Leaf]:
    """The tensors in a value, with names. None contains no tensors; RequestError for anything else."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, f"{name}.{index}" if name else str(index))
    elif value is not None:
        raise RequestError(
            f"{shown(name)} is {type(value).__name__}: inputs and outputs are tensors, or lists of them."
        )


def replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """A value of the same structure, with the next of `tensors` in place of each tensor."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: replaced(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([replaced(each, tensors) for each in value])
    return value


def outputs_of(value: Any) -> dict[str, Tensor]:
    """What `forward` returned, by name."""
    if isinstance(value, Tensor):
        return {"output": value}
    named = dict(leaves(value, "" if isinstance(value, Mapping) else "output"))
    if not isinstance(value, Mapping):
        named = {name.replace(".", "_", 1): tensor for name, tensor in named.items()}
    if not named:
        raise RequestError("forward returned no tensor: a graph needs an output.")
    return named
