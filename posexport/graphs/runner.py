"""The evaluator as a worker's engine: any ONNX file in float64, or in its own dtypes with torch's rounding.

Options:

- `wide` (default true): float64, except the roundings of posexport.graphs.roundings.
- `outputs`: names of the values to return (default: the graph's outputs).
- `last_bits`: a seed. Weights differ in their last bits, which shows the possible effect of rounding.
- `decisions`: in float64, but integers and booleans that the graph computes from floats are those of an evaluation in
  its own dtypes.

Functions are inlined, so that every node has a unique name. The last file is kept, because cases come one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.frames import Override
from posexport.graphs.load import model_at
from posexport.graphs.node_arguments import ROUNDING
from posexport.graphs.roundings import roundings
from posexport.runtimes.base import Arrays, check_onnx_file
from posexport.runtimes.lockstep import GetWeight, in_lockstep, make_each
from posexport.runtimes.tensors import to_numpy, to_tensors

OPTIONS = ("wide", "outputs", "last_bits", "decisions")

DECISIONS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "ArgMax", "ArgMin", "TopK", "Floor", "Ceil"}
DECISIONS |= {"Round", "Sign", "IsInf", "IsNaN", "NonZero", "Cast", "Trunc", "Mod", "NonMaxSuppression"}
DECISIONS |= ROUNDING
"""Operators whose results jump if a float changes a little; of Cast, only casts to integers or bool."""

ROUNDED_BITS = 8.0
"""By how many last bits values move that are rounded to integers.

It is more than one: a runtime multiplies by one over the scale, which rounds once more.
"""

_INTEGERS = {int(kind) for kind in ir.DataType if kind.is_integer() or kind == ir.DataType.BOOL}


class GraphRunner:
    """One file in the evaluator."""

    def __init__(self, model: ir.Model, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        self._wide = bool(options.get("wide", True))
        self._roundings = roundings(model) if self._wide else {}

    def run(self, inputs: Arrays) -> Arrays:
        """Values by name: floats in float64 or in the file's dtypes, others in the file's dtypes."""
        tensors = to_tensors(inputs)
        seed = self._options.get("last_bits")
        overrides: dict[str, Override] = {}
        if self._options.get("decisions"):
            names = decisions(self._model)
            values = Evaluator(self._model, wide=False).run(tensors, names)
            overrides = {name: _instead(values[name]) for name in names}
        elif seed is not None:
            overrides = last_bits(self._model, int(seed))
        return self._evaluated(tensors, Evaluator(self._model, wide=self._wide), make_each, overrides)

    def run_all(self, inputs: Sequence[Arrays]) -> Iterator[tuple[int, Arrays]]:
        """The number and the outputs of each set of inputs as it ends. All share the converted large weights."""
        if self._options.get("decisions") or self._options.get("last_bits") is not None:
            yield from enumerate(map(self.run, inputs))
            return
        evaluator = Evaluator(self._model, wide=self._wide)
        yield from in_lockstep([partial(self._evaluated, to_tensors(arrays), evaluator) for arrays in inputs])

    def _evaluated(
        self,
        tensors: Mapping[str, torch.Tensor],
        evaluator: Evaluator,
        get_weight: GetWeight,
        overrides: Mapping[str, Override] | None = None,
    ) -> Arrays:
        wanted: Sequence[str] | None = self._options.get("outputs")
        overrides = {**self._roundings, **(overrides or {})}
        results = evaluator.run(tensors, wanted, overrides=overrides, get_weight=get_weight)
        for name, value in results.items():
            if not isinstance(value, torch.Tensor):
                raise RequestError(
                    f"the output {name!r} is not a tensor and can't be compared: cut the graph before it."
                )
        return {name: to_numpy(value) for name, value in results.items()}

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        raise RequestError("the evaluator is no engine, so there is nothing to time: time a runtime.")

    def describe(self) -> dict[str, str]:
        dtypes = "float64" if self._wide else "the file's own dtypes"
        return {"engine": f"posexport's evaluator, in {dtypes}", "version": str(torch.__version__), "device": "CPU"}


def decisions(model: ir.Model) -> list[str]:
    """The names of the values that DECISIONS compute."""
    return [
        str(value.name)
        for node in model.graph
        if node.op_type in DECISIONS and (node.op_type != "Cast" or node.attributes.get_int("to", 1) in _INTEGERS)
        for value in node.outputs
        if value.name
    ]


def _instead(other: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: other.to(tensor.dtype)


def last_bits(model: ir.Model, seed: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Functions that randomly change the last bits of values, by the values' names.

    The values are floating-point weights with more than one dimension, and values that are rounded to integers.
    """

    def changed(number: int, bits: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed * 65_537 + number)
            step = torch.rand(tensor.shape, generator=generator).sub_(0.5).mul_(bits * torch.finfo(tensor.dtype).eps)
            return tensor.double().mul_(step.add_(1)).to(tensor.dtype)  # in place: weights may be large

        return change

    rounded = {node.inputs[0] for node in model.graph if node.op_type in ROUNDING}
    names = [str(value.name) for value in rounded if value is not None and value.const_value is None]

    floats = (
        (name, value.const_value)
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.dtype.is_floating_point()
    )
    large = [name for name, tensor in floats if len(tensor.shape) > 1 and tensor.size > 1]
    weights = {name: changed(number) for number, name in enumerate(large)}
    return weights | {name: changed(number, ROUNDED_BITS) for number, name in enumerate(sorted(names), len(large))}


def load(path: Path, options: Mapping[str, Any]) -> GraphRunner:
    """Open an `.onnx` file; RequestError for another or damaged file, and for wrong options."""
    check_onnx_file("the evaluator", path, options, OPTIONS)
    return GraphRunner(model_at(Path(os.path.realpath(path.parent)) / path.name), options)
