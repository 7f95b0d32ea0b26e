"""Which axes of a module's inputs are dynamic in its graph, and the names of these dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch.export import Dim

from posexport.errors import RequestError, shown
from posexport.runtimes.module_values import Bound, tensors_of

_SUM = re.compile(r"\w+( \+ \w+)+")
_WORD, _UNUSUAL = re.compile(r"[A-Za-z_]\w*"), re.compile(r"\W")


class Axes:
    """The axes of a call's tensors. `shapes` is what torch.export takes, made from a user's `dynamic_shapes`.

    In `dynamic_shapes`, a name may stand for a torch.export.Dim. Without `dynamic_shapes`, torch finds out which axes
    can vary (`found`). `fixed` are those that can't because they have size 1 in the call, as `name[axis]`.
    """

    def __init__(self, bound: Bound, dynamic_shapes: Any = None) -> None:
        self._names: dict[str, dict[int, str]] = {}
        self.found = dynamic_shapes is None
        given = dynamic_shapes
        if isinstance(given, list | tuple):
            if len(given) != len(bound.arguments):
                raise RequestError(
                    f"dynamic_shapes has {len(given)} entries: give one for each of {', '.join(bound.arguments)}."
                )
            given = dict(zip(bound.arguments, given, strict=True))
        self.shapes: dict[str, Any] = self._walk(dict(bound.arguments), given, "")
        self._tensors = tensors_of(bound)
        sizes = {(name, axis): t.shape[axis] for name, t in self._tensors.items() for axis in range(t.dim())}
        self.fixed = tuple(f"{name}[{axis}]" for (name, axis), size in sizes.items() if size == 1 and self.found)

    def _walk(self, value: Any, shape: Any, name: str) -> Any:
        """The shapes of a value: the given ones, or otherwise each tensor's default."""
        if isinstance(value, torch.Tensor):
            if shape is None:
                return dict.fromkeys(range(value.dim()), Dim.AUTO) if self.found else None
            return self._axes(value, shape, name)
        if isinstance(value, Mapping):
            if shape is not None and (not isinstance(shape, Mapping) or not {*shape} <= {*value}):
                keys = ", ".join(map(str, value))
                raise RequestError(f"dynamic_shapes has {shown(shape)} for {name or 'forward'}: its keys are {keys}.")
            return {key: self._walk(each, (shape or {}).get(key), _inside(name, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            if shape is not None and (not isinstance(shape, list | tuple) or len(shape) != len(value)):
                raise RequestError(f"dynamic_shapes has {shown(shape)} for {name}, a list of {len(value)}.")
            shapes = [None] * len(value) if shape is None else shape
            pairs = enumerate(zip(value, shapes, strict=True))
            return type(value)([self._walk(each, one, _inside(name, at)) for at, (each, one) in pairs])
        return None

    def _axes(self, tensor: torch.Tensor, shape: Any, name: str) -> dict[int, Any] | None:
        axes = dict(enumerate(shape)) if isinstance(shape, list | tuple) else shape
        known = range(tensor.dim())
        if not isinstance(axes, Mapping) or not all(isinstance(axis, int) and axis in known for axis in axes):
            raise RequestError(
                f"dynamic_shapes has {shown(shape)} for {name} {list(tensor.shape)}: give a table from axis to "
                "torch.export.Dim or a name."
            )
        names = {axis: dim if isinstance(dim, str) else getattr(dim, "__name__", None) for axis, dim in axes.items()}
        self._names[name] = {axis: dim for axis, dim in names.items() if dim is not None}
        return {axis: Dim.DYNAMIC if isinstance(dim, str) else dim for axis, dim in axes.items()}

    def name_dimensions(self, model: ir.Model) -> None:
        """Give the dimensions of a graph the user's names, or `<input>_axis<number>` of the first input that has it."""
        names: dict[str, str] = {}
        for given in (True, False):
            for tensor, value in zip(self._tensors, model.graph.inputs, strict=True):
                for axis, dim in enumerate(value.shape or ()):
                    if isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim.value.isidentifier():
                        own = self._names.get(tensor, {}).get(axis)
                        other = None if given else f"{_UNUSUAL.sub('_', tensor)}_axis{axis}"
                        if (name := own or other) is not None:
                            names.setdefault(dim.value, name)
        for value in (*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([_named(dim, names) for dim in value.shape])


def _inside(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _named(dim: Any, names: Mapping[str, str]) -> int | str | None:
    """A dimension in the new names. torch writes a dimension that turned out to be fixed as a name of digits."""
    if isinstance(dim, int):
        return dim
    if dim.value is None or dim.value.isdigit():
        return None if dim.value is None else int(dim.value)
    text = _WORD.sub(lambda word: names.get(word[0], word[0]), dim.value)
    return " + ".join(sorted(text.split(" + "))) if _SUM.fullmatch(text) else text
