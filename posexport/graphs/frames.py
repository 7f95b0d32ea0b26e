"""One graph, body or function call during its evaluation: its values, and the steps that compute them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.errors import PosexportError, RequestError, shown
from posexport.graphs.attention.dataflow import values_read
from posexport.graphs.kernels import KERNELS, dtypes, fallback
from posexport.graphs.kernels.registry import Call, Value
from posexport.runtimes.lockstep import GetWeight, make_each

_DEEPEST = 60
"""The deepest nesting of bodies and functions: enough for any graph, and far from Python's limit."""

_LARGE = 1 << 20
"""From this number of elements of a table on, Gather converts only the rows that it needs."""

Override = Callable[[torch.Tensor], torch.Tensor]

SMALL = 4096
"""The most elements of a weight or constant that is kept after it was read. Keeping larger ones would waste memory."""

Plan = tuple[list[tuple[ir.Node, list[ir.Value]]], dict[ir.Value, int]]
"""Nodes in the order in which they run, each with what it reads, and the number of readers of each value."""


class NodeError(RequestError):
    """A node can't be evaluated on its inputs."""

    def __init__(self, node: ir.Node, text: str) -> None:
        super().__init__(text)
        self.node = node


@attrs.define(kw_only=True, eq=False)
class Frame:
    """The evaluation of one graph, body or function.

    `nodes` are those of the graph or function. `outer` are values of the graphs around a body. `references` are the
    attributes of a function call.
    """

    model: ir.Model
    wide: bool
    nodes: Iterable[ir.Node]
    opsets: Mapping[str, int]
    outer: MutableMapping[ir.Value, Value] = attrs.field(factory=dict)
    overrides: Mapping[ir.Value, Override] = attrs.field(factory=dict)
    references: Mapping[str, ir.Attr] = attrs.field(factory=dict)
    depth: int = 0
    values: dict[ir.Value, Value] = attrs.field(factory=dict)
    plans: dict[object, Plan] = attrs.field(factory=dict)
    """Plans of earlier runs."""
    weights: dict[ir.Value, torch.Tensor] = attrs.field(factory=dict)
    """Small weights that were read before."""
    get_weight: GetWeight = make_each
    """Gives large weights."""
    watch: Mapping[ir.Value, Callable[[Value], None]] = attrs.field(factory=dict)
    """Functions that get values as soon as these are known. `run` doesn't return these values."""

    def run(self, given: Mapping[ir.Value, Value], wanted: Sequence[ir.Value], key: object) -> list[Value]:
        """Evaluate what the wanted values need, and return those without a watcher.

        Values are freed after their last reader. `key` identifies a graph with these given and wanted values.
        """
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = _plan(self.nodes, given, wanted)
        nodes, uses = plan[0], dict(plan[1])
        for value, tensor in given.items():
            if value in uses:
                self._bind(value, tensor)
        for value in self.watch:
            if value in given or value.producer() is None:
                self._hand_over(value, uses)
        for node, reads in nodes:
            self._step(node, reads, uses, given)
            for value in node.outputs:
                if value in self.watch and value not in given:
                    self._hand_over(value, uses)
            for value in (*reads, *node.outputs):
                if value in uses and value not in node.outputs:
                    uses[value] -= 1
                if not uses.get(value):
                    self.values.pop(value, None)
        return [self._read(value) for value in wanted if value not in self.watch]

    def _hand_over(self, value: ir.Value, uses: dict[ir.Value, int]) -> None:
        """Give a value to its watcher, which may be its last reader."""
        self.watch[value](self._read(value))
        uses[value] -= 1

    def _bind(self, value: ir.Value, tensor: Value) -> None:
        override = self.overrides.get(value)
        if override is not None:
            what = f"value {shown(value.name)}"
            if not isinstance(tensor, torch.Tensor):
                raise RequestError(f"{what} is not a tensor, so it can't be replaced.")
            other = override(tensor)
            if other.shape != tensor.shape:
                has = f"has shape {list(tensor.shape)}, and one of {list(other.shape)} was put in its place"
                raise RequestError(f"{what} {has}.")
            tensor = other.to(tensor.dtype)
        self.values[value] = tensor

    def _read(self, value: ir.Value) -> Value:
        if value in self.values:
            return self.values[value]
        if value in self.outer:
            return self.outer[value]
        if value.const_value is not None:
            stored = value.const_value
            tensor = self.weights.get(value)
            if tensor is None and stored.size > SMALL:
                tensor = self.get_weight(value, lambda: self._weight(value, stored))
            elif tensor is None:
                tensor = self.weights[value] = self._weight(value, stored)
            if value not in self.overrides:
                return tensor
            self._bind(value, tensor)
            return self.values[value]
        maker = value.producer()
        if maker is not None:
            raise RequestError(f"output {shown(value.name)} of {place_of(maker)} can't be evaluated.")
        if value.is_graph_input():
            raise RequestError(f"input {shown(value.name)} of the graph is needed but was not given.")
        raise RequestError(f"value {shown(value.name)} is read, but no node, input or weight defines it.")

    def _weight(self, value: ir.Value, stored: ir.TensorProtocol, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A stored weight, or some of its rows."""
        try:
            return dtypes.to_torch(stored, self.wide, rows)
        except (OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RequestError(f"weight {shown(value.name)} can't be read: {reason}.") from error

    def _step(
        self, node: ir.Node, reads: Sequence[ir.Value], uses: Mapping[ir.Value, int], given: Container[ir.Value]
    ) -> None:
        """Run one node and bind its outputs, except those that were given."""
        inputs: list[Value] = []
        try:
            for value in reads[len(node.inputs) - node.inputs.count(None) :]:
                if value in self.overrides and value not in self.values:
                    self._read(value)  # a replaced weight that only a body reads
            results = self._rows_of_table(node)
            if results is None:
                inputs = [None if value is None else self._read(value) for value in node.inputs]
                results = self._compute(node, inputs)
        except PosexportError:
            raise
        except RecursionError:
            raise RequestError(f"{place_of(node)} lies in more than {_DEEPEST} functions and bodies.") from None
        except Exception as error:  # torch, numpy, onnx and kernels raise any error for a wrong graph
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            shapes = ", ".join(map(_described, inputs[:8])) or "no inputs"
            raise NodeError(node, f"{place_of(node)} can't be evaluated on {shapes}: {reason}") from error
        results = results if isinstance(results, tuple) else (results,)
        for value, result in zip(node.outputs, results, strict=False):
            if uses.get(value) and value not in given:
                self._bind(value, result)

    def _compute(self, node: ir.Node, inputs: list[Value]) -> Value:
        attributes = self._attributes(node)
        function = self.model.functions.get(node.op_identifier())
        if function is not None:
            return self._call(function, attributes, inputs)
        domain = "" if node.domain == "ai.onnx" else node.domain
        versions = {("" if name == "ai.onnx" else name): version for name, version in self.opsets.items()}
        call = Call(
            op_type=node.op_type,
            version=versions.get(domain) or self.model.opset_imports.get(domain) or 1,
            attributes={name: attribute.value for name, attribute in attributes.items()},
            wide=self.wide,
            wanted=tuple(value.name != "" for value in node.outputs),
            types=tuple(None if value is None else value.dtype for value in node.inputs),
            run_body=self._body,
        )
        while inputs and inputs[-1] is None:
            inputs.pop()
        kernel = KERNELS.get((domain, node.op_type))
        if kernel is None:
            return fallback.evaluate(call, domain, list(attributes.values()), inputs, place_of(node))
        return kernel(call, *inputs)

    def _rows_of_table(self, node: ir.Node) -> Value:
        """What a Gather takes of a large weight, with only those rows converted; None for any other node."""
        if node.op_type != "Gather" or node.domain not in ("", "ai.onnx") or len(node.inputs) != 2:
            return None
        axis = node.attributes.get("axis")
        if axis is not None and (axis.is_ref() or axis.value != 0):
            return None
        table, indices = node.inputs
        stored = None if table is None or table in self.values or table in self.outer else table.const_value
        if table is None or indices is None or stored is None or table in self.overrides or stored.size < _LARGE:
            return None
        return self._weight(table, stored, self._read(indices))

    def _attributes(self, node: ir.Node) -> dict[str, ir.Attr]:
        """The node's attributes. A reference to an attribute that the function did not get is left out."""
        found: dict[str, ir.Attr] = {}
        for name, attribute in node.attributes.items():
            if not attribute.is_ref():
                found[name] = attribute
            elif str(attribute.ref_attr_name) in self.references:
                other = self.references[str(attribute.ref_attr_name)]
                found[name] = ir.Attr(name, other.type, other.value)
        return found

    def _body(self, graph: ir.Graph, inputs: Sequence[Value]) -> list[Value]:
        """Run the body of If, Loop or Scan, which may read the values around it."""
        if len(inputs) != len(graph.inputs):
            raise ValueError(f"its body takes {len(graph.inputs)} inputs, and {len(inputs)} are there")
        outer = ChainMap(self.values, self.outer)
        inner = attrs.evolve(self, nodes=graph, outer=outer, overrides={}, watch={}, depth=self._deeper(), values={})
        return inner.run(dict(zip(graph.inputs, inputs, strict=True)), list(graph.outputs), graph)

    def _call(self, function: ir.Function, attributes: Mapping[str, ir.Attr], inputs: list[Value]) -> tuple[Value, ...]:
        """Run a function's body, which reads only its inputs and attributes."""
        if len(inputs) > len(function.inputs):
            raise ValueError(f"its function takes {len(function.inputs)} inputs, and {len(inputs)} are given")
        inputs = inputs + [None] * (len(function.inputs) - len(inputs))
        defaults = {name: attribute for name, attribute in function.attributes.items() if attribute.value is not None}
        inner = Frame(
            model=self.model,
            wide=self.wide,
            nodes=function,
            opsets=function.opset_imports,
            references={**defaults, **attributes},
            depth=self._deeper(),
            plans=self.plans,
            weights=self.weights,
            get_weight=self.get_weight,
        )
        return tuple(inner.run(dict(zip(function.inputs, inputs, strict=True)), list(function.outputs), function))

    def _deeper(self) -> int:
        if self.depth >= _DEEPEST:
            raise RecursionError
        return self.depth + 1


def _plan(nodes: Iterable[ir.Node], given: Mapping[ir.Value, Value], wanted: Sequence[ir.Value]) -> Plan:
    """The nodes that the wanted values need, each after those that it needs."""
    ours = set(nodes)
    order: list[tuple[ir.Node, list[ir.Value]]] = []
    reads: dict[ir.Node, list[ir.Value]] = {}
    uses: dict[ir.Value, int] = {}
    finished: dict[ir.Node, bool] = {}
    stack: list[tuple[ir.Node, bool]] = []

    def need(values: Iterable[ir.Value]) -> None:
        for value in values:
            uses[value] = uses.get(value, 0) + 1
            maker = value.producer()
            if maker in ours and value not in given:
                stack.append((maker, False))

    need(reversed(wanted))
    while stack:
        node, done = stack.pop()
        if done:
            finished[node] = True
            order.append((node, reads[node]))
        elif node not in finished:
            finished[node] = False
            stack.append((node, True))
            reads[node] = values_read(node, inner_weights=True)
            need(reversed(reads[node]))
        elif not finished[node]:
            raise RequestError(f"{place_of(node)} depends on its own result: the graph has a cycle.")
    return order, uses


def place_of(node: ir.Node) -> str:
    """A node for a message: its name, or that of its first output, and its operator."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return f"node {shown(name)} ({shown(operator)[1:-1]})"


def _described(value: Value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else "a sequence"
