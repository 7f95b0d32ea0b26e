"""Evaluates any ONNX graph with torch, in float64 or in the file's own dtypes, and lets values be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.errors import PosexportError, RequestError, shown
from posexport.graphs import kernels
from posexport.graphs.kernels import dtypes, fallback
from posexport.graphs.kernels.registry import Call, Value

_DEEPEST = 60
"""Nested functions and bodies: enough for any graph, and far from Python's limit."""

Override = Callable[[torch.Tensor], torch.Tensor]


class Evaluator:
    """Evaluates an onnx_ir model with torch.

    By default every floating-point value is float64, whatever dtype the graph says: constants keep their stored,
    already rounded values; Cast to a floating-point dtype does nothing; Cast to whole numbers truncates. A graph that
    relies on overflow in its own dtype (finfo.min + finfo.min = -inf) therefore gives other values. With `wide=False`
    dtypes are those of the file.
    """

    def __init__(self, model: ir.Model, *, wide: bool = True) -> None:
        self._model, self._wide = model, wide
        graph = model.graph
        self._names: dict[str, ir.Value] = {str(value.name): value for value in graph.inputs}
        self._names |= graph.initializers
        for node in graph:
            self._names |= {value.name: value for value in node.outputs if value.name}

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Sequence[str] | None = None,
        *,
        overrides: Mapping[str, Override] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Values by name, of the graph's outputs by default; only what they need is evaluated.

        `outputs` and `overrides` name any values of the main graph. An override gets the evaluated tensor and gives
        the one of the same shape that all readers see instead. RequestError where the graph, an operator or an input
        is wrong.
        """
        graph = self._model.graph
        wanted = [self._value(name) for name in outputs] if outputs is not None else list(graph.outputs)
        replaced = {self._value(name): override for name, override in (overrides or {}).items()}
        given = {self._value(name): self._given(name, tensor) for name, tensor in inputs.items()}
        frame = _Frame(self._model, graph.opset_imports, {}, replaced, self._wide)
        with torch.no_grad():
            results = frame.run(given, wanted)
        return {str(value.name): result for value, result in zip(wanted, results, strict=True)}

    def _value(self, name: str) -> ir.Value:
        if name not in self._names:
            raise RequestError(
                f"the graph has no value {shown(name)}: name one of its inputs, weights or nodes' outputs."
            )
        return self._names[name]

    def _given(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An input, checked against what the graph says of it."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        value = self._names[name]
        if value.shape is not None:
            sizes = [dim if isinstance(dim, int) else None for dim in value.shape]
            fits = len(sizes) == tensor.dim() and all(a in (None, b) for a, b in zip(sizes, tensor.shape, strict=False))
            if not fits:
                raise RequestError(
                    f"input {shown(name)} of the graph has shape {value.shape}, and {list(tensor.shape)} was given."
                )
        if value.dtype is None:
            return dtypes.widened(tensor, self._wide)
        expected = dtypes.torch_dtype(value.dtype, self._wide)
        if expected.is_floating_point != tensor.is_floating_point():
            raise RequestError(f"input {shown(name)} of the graph is {value.dtype.name}, and {tensor.dtype} was given.")
        return tensor.to(expected)


@attrs.define
class _Frame:
    """Values of one graph, body or function call; `outer` holds those of the graphs around it."""

    model: ir.Model
    opsets: Mapping[str, int]
    outer: Mapping[ir.Value, Value]
    overrides: Mapping[ir.Value, Override]
    wide: bool
    references: Mapping[str, ir.Attr] = attrs.field(factory=dict)
    depth: int = 0
    values: dict[ir.Value, Value] = attrs.field(factory=dict)

    def run(self, given: Mapping[ir.Value, Value], wanted: Sequence[ir.Value]) -> list[Value]:
        """Evaluate what the wanted values need, and give those back."""
        nodes, uses = _needed(given, wanted, self.outer)
        for value, tensor in given.items():
            if uses.get(value):
                self._bind(value, tensor)
        for node in nodes:
            self._step(node)
            for value in _reads(node):
                if value in uses:
                    uses[value] -= 1
                    if not uses[value]:
                        self.values.pop(value, None)
            for value in node.outputs:
                if not uses.get(value):
                    self.values.pop(value, None)
        return [self._read(value) for value in wanted]

    def _bind(self, value: ir.Value, tensor: Value) -> None:
        override = self.overrides.get(value)
        if override is not None:
            other = dtypes.widened(override(tensor), self.wide)
            if other.shape != tensor.shape:
                raise RequestError(
                    f"value {shown(value.name)} has shape {list(tensor.shape)}, "
                    f"and {list(other.shape)} was put in its place."
                )
            tensor = other
        self.values[value] = tensor

    def _read(self, value: ir.Value) -> Value:
        if value in self.values:
            return self.values[value]
        if value in self.outer:
            return self.outer[value]
        if value.const_value is not None:
            self._bind(value, dtypes.to_torch(value.const_value, self.wide))
            return self.values[value]
        if value.is_graph_input():
            raise RequestError(f"input {shown(value.name)} of the graph is needed and was not given.")
        raise RequestError(f"value {shown(value.name)} of the graph has no node, input or weight that makes it.")

    def _step(self, node: ir.Node) -> None:
        place = _place(node)
        try:
            inputs = [None if value is None else self._read(value) for value in node.inputs]
            for value in _reads(node)[len(inputs) - inputs.count(None) :]:  # weights that only a body reads
                if value.const_value is not None and value not in self.outer:
                    self._read(value)
            results = self._compute(node, inputs)
        except PosexportError:
            raise
        except RecursionError:
            raise RequestError(f"{place} is nested too deeply to be evaluated.") from None
        except Exception as error:  # whatever torch, numpy or a kernel says of a graph that is wrong
            text = str(error).strip().splitlines() or [type(error).__name__]
            shapes = ", ".join(_described(value) for value in inputs)
            raise RequestError(f"{place} can't be evaluated with inputs {shapes}: {text[0]}") from error
        results = results if isinstance(results, tuple) else (results,)
        for at, value in enumerate(node.outputs):
            if at < len(results) and value.name:
                self._bind(value, results[at])

    def _compute(self, node: ir.Node, inputs: list[Value]) -> Value:
        attributes = self._attributes(node)
        function = self.model.functions.get(node.op_identifier())
        if function is not None:
            return self._call(function, attributes, inputs)
        domain = "" if node.domain == "ai.onnx" else node.domain
        call = Call(
            op_type=node.op_type,
            version=self.opsets.get(domain, self.opsets.get("ai.onnx", 1) if not domain else 1),
            attributes={name: attribute.value for name, attribute in attributes.items()},
            wide=self.wide,
            wanted=tuple(bool(value.name) for value in node.outputs),
            types=tuple(None if value is None else value.dtype for value in node.inputs),
            run_body=self._body,
        )
        kernel = kernels.KERNELS.get((domain, node.op_type))
        if kernel is None:
            return fallback.evaluate(call, domain, list(attributes.values()), inputs, _place(node))
        while inputs and inputs[-1] is None:
            inputs.pop()
        return kernel(call, *inputs)

    def _attributes(self, node: ir.Node) -> dict[str, ir.Attr]:
        """The node's attributes; references to those of the function are resolved, or left out where it has none."""
        found: dict[str, ir.Attr] = {}
        for name, attribute in node.attributes.items():
            if not attribute.is_ref():
                found[name] = attribute
            elif str(attribute.ref_attr_name) in self.references:
                other = self.references[str(attribute.ref_attr_name)]
                found[name] = ir.Attr(name, other.type, other.value)
        return found

    def _body(self, graph: ir.Graph, inputs: Sequence[Value]) -> list[Value]:
        if len(inputs) != len(graph.inputs):
            raise ValueError(f"its body takes {len(graph.inputs)} inputs, and {len(inputs)} are there")
        inner = _Frame(
            self.model, self.opsets, _Layers(self.values, self.outer), {}, self.wide, self.references, self._deeper()
        )
        return inner.run(dict(zip(graph.inputs, inputs, strict=True)), list(graph.outputs))

    def _call(self, function: ir.Function, attributes: Mapping[str, ir.Attr], inputs: list[Value]) -> tuple[Value, ...]:
        if len(inputs) > len(function.inputs):
            raise ValueError(f"its function takes {len(function.inputs)} inputs, and {len(inputs)} are given")
        inputs = inputs + [None] * (len(function.inputs) - len(inputs))
        defaults = {name: a for name, a in function.attributes.items() if a.value is not None}
        inner = _Frame(
            self.model, function.opset_imports, {}, {}, self.wide, defaults | dict(attributes), self._deeper()
        )
        return tuple(inner.run(dict(zip(function.inputs, inputs, strict=True)), list(function.outputs)))

    def _deeper(self) -> int:
        if self.depth >= _DEEPEST:
            raise RecursionError
        return self.depth + 1


class _Layers(Mapping[ir.Value, Value]):
    """Two mappings read as one, without copying either."""

    def __init__(self, first: Mapping[ir.Value, Value], second: Mapping[ir.Value, Value]) -> None:
        self._first, self._second = first, second

    def __getitem__(self, key: ir.Value) -> Value:
        return self._first[key] if key in self._first else self._second[key]

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from self._first
        yield from self._second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)


def _reads(node: ir.Node) -> list[ir.Value]:
    """What a node reads: its inputs, and what its bodies read from around them."""
    found = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        bodies = {ir.AttributeType.GRAPH: [attribute.value], ir.AttributeType.GRAPHS: attribute.value}
        for body in bodies.get(attribute.type, ()):
            inside: set[ir.Value] = set(body.inputs)
            for inner in body:
                inside.update(inner.outputs)
            reads = [value for inner in body for value in _reads(inner)]
            found += [value for value in (*reads, *body.outputs) if value not in inside]
    return found


def _needed(
    given: Mapping[ir.Value, Value], wanted: Sequence[ir.Value], outer: Mapping[ir.Value, Value]
) -> tuple[list[ir.Node], dict[ir.Value, int]]:
    """The nodes that the wanted values need, each after those it needs, and how often each value is read."""
    order: list[ir.Node] = []
    uses: dict[ir.Value, int] = {}
    state: dict[ir.Node, bool] = {}
    stack: list[tuple[ir.Value | ir.Node, bool]] = [(value, False) for value in reversed(wanted)]
    for value in wanted:
        uses[value] = uses.get(value, 0) + 1
    while stack:
        item, done = stack.pop()
        if isinstance(item, ir.Value):
            maker = item.producer()
            if item in given or item in outer or maker is None or state.get(maker):
                continue
            item = maker
        if done:
            state[item] = True
            order.append(item)
        elif item not in state:
            state[item] = False
            reads = _reads(item)
            for value in reads:
                uses[value] = uses.get(value, 0) + 1
            stack.append((item, True))
            stack += [(value, False) for value in reversed(reads)]
        elif not state[item]:
            raise RequestError(f"{_place(item)} needs its own result: the graph has a circle.")
    return order, uses


def _place(node: ir.Node) -> str:
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return f"node {shown(name)} ({shown(operator)[1:-1]})"


def _described(value: Value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else "a sequence"
