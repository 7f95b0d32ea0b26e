"""Evaluates any ONNX graph with torch, in float64 or in the file's own dtypes, and can replace values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import onnx_ir as ir
import torch

from posexport.errors import RequestError, shown
from posexport.graphs.frames import Frame, Override, Plan
from posexport.graphs.kernels import dtypes
from posexport.graphs.kernels.registry import Value
from posexport.runtimes.lockstep import GetWeight, make_each


class Evaluator:
    """Evaluates an onnx_ir model with torch.

    By default every floating-point value is float64, whatever dtype the graph says. Constants keep their stored,
    already rounded values. Cast to a floating-point dtype does nothing; Cast to integers truncates. So a graph that
    relies on overflow in its own dtype (finfo.min + finfo.min = -inf) gives other values. With `wide=False`, dtypes are
    those of the file.

    The model must not change: the order of its nodes and its small weights are kept from run to run.
    """

    def __init__(self, model: ir.Model, *, wide: bool = True) -> None:
        self._model, self._wide = model, wide
        self._names = _values_by_name(model.graph)
        self._plans: dict[object, Plan] = {}
        self._weights: dict[ir.Value, torch.Tensor] = {}

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Sequence[str] | None = None,
        *,
        overrides: Mapping[str, Override] | None = None,
        get_weight: GetWeight = make_each,
        see: Callable[[str, Value], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Values by name, by default the graph's outputs. Only what they need is evaluated.

        `outputs` and `overrides` name any values of the main graph. An override gets the evaluated tensor and returns a
        tensor of the same shape, which all readers see instead. `get_weight` gives the large weights. With `see`,
        nothing is returned: `see` gets each of the values as soon as it is known, and the value is freed if nothing
        else reads it.
        RequestError if the graph, an operator or an input is wrong; UnknownOperatorError (a RequestError) if an
        operator has no kernel.
        """
        graph = self._model.graph
        names = self._names
        wanted = [_named(names, name) for name in outputs] if outputs is not None else list(graph.outputs)
        replaced = {_named(names, name): override for name, override in (overrides or {}).items()}
        given = {_named(names, name): self._given(names[name], tensor) for name, tensor in inputs.items()}
        frame = Frame(
            model=self._model,
            wide=self._wide,
            nodes=graph,
            opsets=graph.opset_imports,
            overrides=replaced,
            plans=self._plans,
            weights=self._weights,
            get_weight=get_weight,
            watch={} if see is None else {value: partial(see, str(value.name)) for value in wanted},
        )
        with torch.no_grad():
            results = frame.run(given, wanted, (frozenset(given), tuple(wanted)))
        return {} if see else {str(value.name): result for value, result in zip(wanted, results, strict=True)}

    def _given(self, value: ir.Value, tensor: torch.Tensor) -> torch.Tensor:
        """An input, checked against the graph, in the dtype that it is evaluated in."""
        what = f"input {shown(value.name)} of the graph"
        if not isinstance(tensor, torch.Tensor):  # a sequence
            return tensor
        if value.shape is not None and value.is_graph_input():
            sizes = [dim if isinstance(dim, int) and dim >= 0 else None for dim in value.shape]  # some files write -1
            fits = len(sizes) == tensor.dim() and all(a in (None, b) for a, b in zip(sizes, tensor.shape, strict=True))
            if not fits:
                raise RequestError(f"{what} has shape {value.shape}, and {list(tensor.shape)} was given.")
        if value.dtype is None:
            return dtypes.widened(tensor, self._wide)
        try:
            expected = dtypes.torch_dtype(value.dtype, self._wide)
        except ValueError as error:
            raise RequestError(f"{what} can't be given: {error}.") from None
        if expected.is_floating_point != tensor.is_floating_point():
            raise RequestError(f"{what} is {value.dtype.name}, and a tensor of {tensor.dtype} was given.")
        return tensor.to(expected)


def _values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value of the main graph that has a name."""
    names: dict[str, ir.Value] = dict(graph.initializers)
    names |= {value.name: value for value in graph.inputs if value.name}
    for node in graph:
        names |= {value.name: value for value in node.outputs if value.name}
    return names


def _named(names: Mapping[str, ir.Value], name: str) -> ir.Value:
    if name not in names:
        raise RequestError(f"the graph has no value {shown(name)}: name an input, a weight or a node's output.")
    return names[name]
