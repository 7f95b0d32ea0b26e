"""Numbers put into the middle of a graph: what a value becomes when another one is replaced by random features.

One run on drawn inputs gives every value that depends on them; a probe then runs only the nodes between two values.
Rotations, layouts, repeated heads and scales are read off such probes in float64 (posexport.graphs.evaluate).

Graphs of fixed sizes have scores of hundreds of megabytes in every layer. Of content, shapes and dtypes are kept, and
numbers only where they are few: what few ask for is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir
import torch

from posexport.errors import RequestError, shown
from posexport.graphs.attention.dataflow import Dataflow, values_read
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.frames import SMALL
from posexport.graphs.kernels.registry import Value
from posexport.graphs.roles import Role
from posexport.graphs.symbolic_shapes import SymbolicShapes

MOST_HELD = 1 << 28
"""Bytes of numbers beside content that are kept, such as masks; others are computed again where they are asked for."""


class Probe:
    """A graph on one set of inputs. `values` has every value that depends on them, in float64, by name; those whose
    numbers are not kept are on torch's device `meta`.

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
            self._run(inputs, [*read, *given])
        except RequestError:  # an output that nobody can compute says nothing of the rest
            self._run(inputs, read)
        self.shapes = SymbolicShapes(flow, self.values, self.get, roles)
        self.fixed, self.computations = self.shapes.fixed, self.shapes.computations

    def _run(self, inputs: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        self.values: dict[str, torch.Tensor] = {**inputs}
        self._held = 0
        self._evaluator.run(inputs, names, see=self._note)

    def _note(self, name: str, value: Value) -> None:
        """Keep a value that was computed, or its shape and dtype."""
        if isinstance(value, torch.Tensor):
            if value.numel() > SMALL and self._flow.values[name] in self._flow.content:
                value = value.to("meta")
            elif value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone()  # a part of a larger tensor, which would stay for it
            if value.numel() > SMALL and not value.is_meta:
                size = value.untyped_storage().nbytes()
                value = value.to("meta") if self._held + size > MOST_HELD else value
                self._held += 0 if value.is_meta else size
        self.values[name] = value

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value on these inputs."""
        return tuple(self._like(value).shape)

    def dtype(self, value: ir.Value) -> torch.dtype:
        """The dtype of a value, float64 for any of floating-point numbers."""
        return self._like(value).dtype

    def _like(self, value: ir.Value) -> torch.Tensor:
        """A value with or without its numbers; RequestError for a sequence of tensors."""
        found = self.values.get(value.name or "")
        return found if isinstance(found, torch.Tensor) else self.get(value)

    def get(self, value: ir.Value) -> torch.Tensor:
        """A value on these inputs; RequestError for a sequence of tensors."""
        name = value.name or ""
        found = self._numbers([value]).get(name, self._constants.get(name))
        if found is None:
            found = self._evaluator.run({}, [name])[name]
        if not isinstance(found, torch.Tensor):
            raise RequestError(f"{shown(name)} is a sequence of tensors, where a tensor is needed.")
        if name not in self.values and found.numel() <= SMALL:
            self._constants[name] = found
        return found

    def _numbers(self, values: Iterable[ir.Value]) -> dict[str, torch.Tensor]:
        """Those of the values that depend on the inputs, by name, computed again where they were not kept."""
        found = {name: self.values[name] for value in values if (name := value.name or "") in self.values}
        dropped = [name for name, tensor in found.items() if _is_dropped(tensor)]
        if dropped:
            kept = {name: tensor for name, tensor in self.values.items() if not _is_dropped(tensor)}
            found |= self._evaluator.run(kept, dropped)
        return found

    def random_like(self, value: ir.Value) -> torch.Tensor:
        """Normal numbers of the shape of a value."""
        return torch.randn(self.shape(value), generator=self._generator, dtype=torch.float64)

    def random_truths(self, value: ir.Value) -> torch.Tensor:
        """Zeros and ones of the shape and the dtype of a value."""
        return self._whole(self._like(value), 2)

    def random(self, value: ir.Value) -> torch.Tensor:
        """Numbers of the shape and of the kind of a value: normal ones, whole ones of up to four digits, or truth."""
        like = self._like(value)
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
        computed = {value for node in nodes for value in node.outputs}
        read = [value for node in nodes for value in values_read(node)]
        known = self._numbers(value for value in (*read, *targets) if value not in computed and value not in others)
        return self._results(known | {value.name or "": tensor for value, tensor in others.items()}, targets)

    def through(self, source: ir.Value, targets: Sequence[ir.Value], replaced: torch.Tensor) -> list[torch.Tensor]:
        """What `targets` become when `source` is replaced."""
        nodes = {node for target in targets for node in self._flow.between(source, target)}
        computed = {source, *(value for node in nodes for value in node.outputs)}
        read = [value for node in nodes for value in node.inputs if value is not None and value not in computed]
        return self._results(self._numbers(read) | {source.name or "": replaced}, targets)

    def _results(self, known: Mapping[str, torch.Tensor], targets: Sequence[ir.Value]) -> list[torch.Tensor]:
        """The targets, computed from values that are known."""
        results = self._evaluator.run(known, [target.name or "" for target in targets])
        return [results[target.name or ""] for target in targets]


def _is_dropped(value: Value) -> bool:
    """Whether the numbers of a value were not kept."""
    return isinstance(value, torch.Tensor) and value.is_meta
