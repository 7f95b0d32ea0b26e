"""Random numbers in the middle of a graph: what a value becomes if random features replace another value.

One run on drawn inputs gives every value that depends on them. A probe then runs only the nodes between two values.
Rotations, layouts, repeated heads and scales are found with such probes in float64 (posexport.graphs.evaluate).

In graphs of fixed sizes, the scores of every layer may take hundreds of megabytes. So only shapes and dtypes of large
content are kept. Numbers that are not kept are computed again when they are needed.
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
"""The most bytes of large values besides content, such as masks, that are kept.

Others are computed again when they are needed.
"""


class Probe:
    """A graph on one set of inputs.

    `values` contains every value that depends on the inputs, in float64, by name. Values whose numbers are not kept are
    on torch's device `meta`. `shapes` are the shapes of values on all inputs. Values in `fixed` are the same on all
    inputs.
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
        except RequestError:  # an output that can't be computed says nothing about the rest
            self._run(inputs, read)
        self.shapes = SymbolicShapes(flow, self.values, self.get, roles)
        self.fixed, self.computations = self.shapes.fixed, self.shapes.computations

    def _run(self, inputs: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        self.values: dict[str, torch.Tensor] = {**inputs}
        self._held = 0
        self._evaluator.run(inputs, names, see=self._note)

    def _note(self, name: str, value: Value) -> None:
        """Keep a computed value, or only its shape and dtype."""
        if isinstance(value, torch.Tensor):
            if value.numel() > SMALL and self._flow.values[name] in self._flow.content:
                value = value.to("meta")
            elif value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone()  # a view would keep the larger tensor in memory
            if value.numel() > SMALL and not value.is_meta:
                size = value.untyped_storage().nbytes()
                value = value.to("meta") if self._held + size > MOST_HELD else value
                self._held += 0 if value.is_meta else size
        self.values[name] = value

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value on these inputs."""
        return tuple(self._like(value).shape)

    def dtype(self, value: ir.Value) -> torch.dtype:
        """The dtype of a value; float64 for all floating-point values."""
        return self._like(value).dtype

    def _like(self, value: ir.Value) -> torch.Tensor:
        """A value, with or without its numbers. Raises RequestError for a sequence of tensors."""
        found = self.values.get(value.name or "")
        return found if isinstance(found, torch.Tensor) else self.get(value)

    def get(self, value: ir.Value) -> torch.Tensor:
        """A value on these inputs. Raises RequestError for a sequence of tensors."""
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
        """Those of the values that depend on the inputs, by name. Values that were not kept are computed again."""
        found = {name: self.values[name] for value in values if (name := value.name or "") in self.values}
        dropped = [name for name, tensor in found.items() if _is_dropped(tensor)]
        if dropped:
            kept = {name: tensor for name, tensor in self.values.items() if not _is_dropped(tensor)}
            found |= self._evaluator.run(kept, dropped)
        return found

    def random_like(self, value: ir.Value) -> torch.Tensor:
        """Normally distributed numbers in the shape of a value."""
        return torch.randn(self.shape(value), generator=self._generator, dtype=torch.float64)

    def random_truths(self, value: ir.Value) -> torch.Tensor:
        """Random zeros and ones in the shape and dtype of a value."""
        return self._whole(self._like(value), 2)

    def random(self, value: ir.Value) -> torch.Tensor:
        """Random numbers in the shape and of the kind of a value: normal, integers below 10,000, or truth values."""
        like = self._like(value)
        if like.is_floating_point():
            return self.random_like(value)
        return self._whole(like, 2 if like.dtype == torch.bool else 10_000)

    def _whole(self, like: torch.Tensor, end: int) -> torch.Tensor:
        """Random integers from 0 to `end` - 1 in the shape and dtype of `like`."""
        return torch.randint(0, end, like.shape, generator=self._generator).to(like.dtype)

    def replaced(
        self, others: Mapping[ir.Value, torch.Tensor], targets: Sequence[ir.Value], nodes: Collection[ir.Node]
    ) -> list[torch.Tensor]:
        """What `targets` become if `others` replace values, as far as they depend on these through `nodes`."""
        computed = {value for node in nodes for value in node.outputs}
        read = [value for node in nodes for value in values_read(node)]
        known = self._numbers(value for value in (*read, *targets) if value not in computed and value not in others)
        return self._results(known | {value.name or "": tensor for value, tensor in others.items()}, targets)

    def through(self, source: ir.Value, targets: Sequence[ir.Value], replaced: torch.Tensor) -> list[torch.Tensor]:
        """What `targets` become if `replaced` replaces `source`."""
        nodes = {node for target in targets for node in self._flow.between(source, target)}
        computed = {source, *(value for node in nodes for value in node.outputs)}
        read = [value for node in nodes for value in node.inputs if value is not None and value not in computed]
        return self._results(self._numbers(read) | {source.name or "": replaced}, targets)

    def _results(self, known: Mapping[str, torch.Tensor], targets: Sequence[ir.Value]) -> list[torch.Tensor]:
        """The targets, computed from known values."""
        results = self._evaluator.run(known, [target.name or "" for target in targets])
        return [results[target.name or ""] for target in targets]


def _is_dropped(value: Value) -> bool:
    """Whether the numbers of a value were not kept."""
    return isinstance(value, torch.Tensor) and value.is_meta
