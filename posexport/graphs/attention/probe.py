"""Numbers put into the middle of a graph: what a value becomes when another one is replaced by random features.

One run on drawn inputs gives every value that depends on them; a probe then runs only the nodes between two values.
Rotations, layouts, repeated heads and scales are read off such probes in float64 (posexport.graphs.evaluate).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir
import torch

from posexport.errors import RequestError, shown
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.frames import SMALL
from posexport.graphs.roles import Role
from posexport.graphs.symbolic_shapes import SymbolicShapes


class Probe:
    """A graph on one set of inputs. `values` has every value that depends on them, in float64, by name.

    `shapes` are the shapes of values on all inputs; values in `fixed` are the same on all.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        flow: Dataflow,
        inputs: Mapping[str, torch.Tensor],
        roles: Mapping[str, Role],
        seed: int = 0,
    ) -> None:
        self._evaluator, self._flow = evaluator, flow
        self._generator = torch.Generator().manual_seed(seed)
        self._constants: dict[str, torch.Tensor] = {}
        values = [value for node in flow.graph for value in node.outputs if value.name and value not in flow.constant]
        read = [value.name or "" for value in values if value.uses()]
        given = [value.name or "" for value in values if value.is_graph_output() and not value.uses()]
        try:
            found = evaluator.run(inputs, [*read, *given])
        except RequestError:  # an output that nobody can compute says nothing of the rest
            found = evaluator.run(inputs, read)
        self.values: dict[str, torch.Tensor] = {**inputs, **found}
        self.shapes = SymbolicShapes(flow, self.values, self.get, roles)
        self.fixed, self.computations = self.shapes.fixed, self.shapes.computations

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value on these inputs."""
        return tuple(self.get(value).shape)

    def get(self, value: ir.Value) -> torch.Tensor:
        """A value on these inputs; RequestError for a sequence of tensors."""
        name = value.name or ""
        found = self.values.get(name, self._constants.get(name))
        if found is None:
            found = self._evaluator.run({}, [name])[name]
        if not isinstance(found, torch.Tensor):
            raise RequestError(f"{shown(name)} is a sequence of tensors, where a tensor is needed.")
        if name not in self.values and found.numel() <= SMALL:
            self._constants[name] = found
        return found

    def random_like(self, value: ir.Value) -> torch.Tensor:
        """Normal numbers of the shape of a value."""
        return torch.randn(self.shape(value), generator=self._generator, dtype=torch.float64)

    def random_truths(self, value: ir.Value) -> torch.Tensor:
        """Zeros and ones of the shape and the dtype of a value."""
        return self._whole(self.get(value), 2)

    def random(self, value: ir.Value) -> torch.Tensor:
        """Numbers of the shape and of the kind of a value: normal ones, whole ones of up to four digits, or truth."""
        like = self.get(value)
        if like.is_floating_point():
            return self.random_like(value)
        return self._whole(like, 2 if like.dtype == torch.bool else 10_000)

    def _whole(self, like: torch.Tensor, end: int) -> torch.Tensor:
        """Whole numbers below `end`."""
        return torch.randint(0, end, like.shape, generator=self._generator).to(like.dtype)

    def replaced(
        self, others: Mapping[ir.Value, torch.Tensor], targets: Sequence[ir.Value], nodes: Collection[ir.Node]
    ) -> list[torch.Tensor]:
        """What `targets` become when several values are replaced, as far as they depend on them through `nodes`."""
        computed = {value.name for node in nodes for value in node.outputs}
        known = {name: tensor for name, tensor in self.values.items() if name not in computed}
        known |= {value.name or "": tensor for value, tensor in others.items()}
        results = self._evaluator.run(known, [target.name or "" for target in targets])
        return [results[target.name or ""] for target in targets]

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
