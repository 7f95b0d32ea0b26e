"""Numbers put into the middle of a graph: what a value becomes when another one is replaced by random features.

One run on drawn inputs gives every value that depends on them; a probe then runs only the nodes between two values.
Rotations, layouts, repeated heads and scales are read off such probes in float64 (posexport.graphs.evaluate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from posexport.errors import RequestError, shown
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.fixed import FixedNumbers
from posexport.graphs.evaluate import Evaluator


class Probe:
    """A graph on one set of inputs. `values` has every value that depends on them, in float64, by name; what depends on
    none is in `fixed`."""

    def __init__(
        self,
        evaluator: Evaluator,
        flow: Dataflow,
        inputs: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
        seed: int = 0,
    ) -> None:
        """`others` are inputs of other sizes, which the graph may take or not."""
        self._evaluator, self._flow = evaluator, flow
        self._generator = torch.Generator().manual_seed(seed)
        values = [value for node in flow.graph for value in node.outputs if value.name and value not in flow.constant]
        read = [value.name or "" for value in values if value.uses()]
        given = [value.name or "" for value in values if value.is_graph_output() and not value.uses()]
        try:
            found = evaluator.run(inputs, [*read, *given])
        except RequestError:  # an output that nobody can compute says nothing of the rest
            found = evaluator.run(inputs, read)
        self.values: dict[str, torch.Tensor] = {**inputs, **found}
        self.fixed = FixedNumbers(evaluator, flow, self.values, others)

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value on these inputs."""
        return tuple(self.get(value).shape)

    def get(self, value: ir.Value) -> torch.Tensor:
        """A value on these inputs; RequestError for a sequence of tensors."""
        name = value.name or ""
        # a constant would take its memory for nothing
        found = self.values[name] if name in self.values else self._evaluator.run({}, [name])[name]
        if not isinstance(found, torch.Tensor):
            raise RequestError(f"{shown(name)} is a sequence of tensors, where a tensor is needed.")
        return found

    def random_like(self, value: ir.Value) -> torch.Tensor:
        """Normal numbers of the shape of a value."""
        return torch.randn(self.shape(value), generator=self._generator, dtype=torch.float64)

    def through(self, source: ir.Value, targets: Sequence[ir.Value], replaced: torch.Tensor) -> list[torch.Tensor]:
        """What `targets` become when `source` is replaced."""
        nodes = {node for target in targets for node in self._flow.between(source, target)}
        computed = {value for node in nodes for value in node.outputs}
        known = {
            value.name: self.values[value.name]
            for node in nodes
            for value in node.inputs
            if value is not None and value not in computed and value.name in self.values
        }
        known[source.name or ""] = replaced
        results = self._evaluator.run(
            {name or "": tensor for name, tensor in known.items()}, [t.name or "" for t in targets]
        )
        return [results[target.name or ""] for target in targets]
