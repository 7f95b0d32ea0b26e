"""The layers of a model that is not posexport's: one of each kind is traced, and its nodes are copied for the others.

While one layer of each kind is traced, the others pass their hidden states on unchanged, so that every layer keeps its
index. Hidden states that enter a traced layer, and those after the last layer, are marked.

A node that depends on them, on a layer's weights or on its cache belongs to the layer. Sizes don't count: sizes of one
layer are those of all layers, except sizes that depend on values, such as the number of tokens of an expert.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import onnx_ir as ir
from torch import Tensor, nn

from posexport.export.layer_copies import TRACE_DOMAIN, enter
from posexport.export.layer_kinds import Layers, LayersDifferError, hidden_of

END = -1
"""The layer index of the marker after the last layer."""


class _Skipped(nn.Module):
    """Replaces a layer and passes its hidden states on, in the form that the traced layers return.

    It has the settings of the layer, which some models read.
    """

    def __init__(self, layer: nn.Module, returned: list[int | None]) -> None:
        super().__init__()
        self._layer, self._returned = (layer,), returned  # a tuple, so that it is not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer[0], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        behind = self._returned[-1]
        return hidden_states if behind is None else (hidden_states, *[None] * behind)


@contextmanager
def only_traced(model: nn.Module, layers: Layers) -> Iterator[None]:
    """A context in which the model has only the traced layers, which are marked."""
    modules = model.get_submodule(layers.path)
    assert isinstance(modules, nn.ModuleList)
    before = list(modules)
    returned: list[int | None] = []
    handles = []

    def entering(index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (enter(args[0], index, "hidden"), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], index, "hidden")}

        return hook

    def behind(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        returned.append(hidden_of(output)[1])

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        marked = enter(hidden_of(output)[0], END, "hidden")
        return marked if isinstance(output, Tensor) else (marked, *output[1:])

    try:
        for index, layer in enumerate(before):
            if index in layers.traced:
                handles.append(layer.register_forward_pre_hook(entering(index), with_kwargs=True))
                handles.append(layer.register_forward_hook(behind))
            else:
                modules[index] = _Skipped(layer, returned)
        handles.append(modules[len(before) - 1].register_forward_hook(leaving))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for index, layer in enumerate(before):
            modules[index] = layer


@attrs.frozen
class Boundaries:
    """The names of the values that enter the traced layers, by layer, and of the value after the last layer."""

    enter: Mapping[int, str]
    end: str


def without_markers(model: ir.Model, layers: Layers) -> Boundaries:
    """Remove the markers. The marked values get new names, except an output of the model.

    LayersDifferError if anything else reads the states between layers, such as a sum over all layers: between layers
    that were not traced, the states are those after another layer.
    """
    names: dict[int, str] = {}
    markers = [node for node in model.graph if node.domain == TRACE_DOMAIN]
    for node in markers:
        state = node.inputs[0]
        if node.attributes["layer"].as_int() and state is not None:
            readers = [use.node for use in state.uses() if use.node is not node and use.node.op_type not in _OF_SIZES]
            if readers or state.is_graph_output():
                raise LayersDifferError(f"{state.name}, the states between two layers, is read outside of them")
    for node in markers:
        index, value = node.attributes["layer"].as_int(), node.inputs[0]
        assert value is not None
        marked = node.outputs[0]
        output = marked.name if marked.is_graph_output() else None
        marked.replace_all_uses_with(value, replace_graph_outputs=True)
        if output is not None:
            value.name = output
        elif not value.is_graph_input():
            value.name = f"hidden_states.{index if index != END else len(layers.stands_for)}"
        names[index] = value.name or ""
        model.graph.remove(node, safe=True)
    model.opset_imports.pop(TRACE_DOMAIN, None)
    if {*names} != {*layers.traced, END}:
        raise LayersDifferError("hidden states do not go through all layers")
    return Boundaries({index: name for index, name in names.items() if index != END}, names[END])


Make = Callable[[str, ir.Value], ir.TensorProtocol]
"""Gives the tensor of a weight by its name, with the shape of another weight."""


def copy_layers(model: ir.Model, layers: Layers, boundaries: Boundaries, weights: Collection[str], make: Make) -> None:
    """Add the layers that were not traced, as copies of the layers that stand for them.

    `weights` are the names of all weights. Other initializers are constants and serve all layers of a kind.
    """
    _Copier(model.graph, layers, boundaries, weights, make).run()


def owners(
    model: ir.Model, layers: Layers, boundaries: Boundaries, weights: Collection[str], make: Make
) -> dict[str, int]:
    """The traced layers that nodes belong to, by the names of the nodes and of their outputs."""
    nodes = _Copier(model.graph, layers, boundaries, weights, make).nodes
    owned: dict[str, int] = {}
    for index, each in nodes.items():
        for node in each:
            owned |= dict.fromkeys([str(node.name), *(str(value.name) for value in node.outputs)], index)
    return owned


CACHE = re.compile(r"(?P<before>(past_key_values|present)\.)(?P<layer>\d+)(?P<behind>\..+)")
"""Names of the caches of layers among inputs and outputs."""


class _Copier:
    def __init__(
        self, graph: ir.Graph, layers: Layers, boundaries: Boundaries, weights: Collection[str], make: Make
    ) -> None:
        self.graph, self.layers, self.make = graph, layers, make
        self.weight = re.compile(rf"(?P<before>(model\.)?{re.escape(layers.path)}\.)(?P<layer>\d+)(?P<behind>\..+)")
        values = {value.name: value for value in (*graph.inputs, *(v for node in graph for v in node.outputs))}
        missing = [name for name in (*boundaries.enter.values(), boundaries.end) if name not in values]
        if missing:
            raise LayersDifferError(f"the value {missing[0]!r} is gone")
        self.enter = {index: values[name] for index, name in boundaries.enter.items()}
        self.end = values[boundaries.end]
        self.nodes: dict[int, list[ir.Node]] = {index: [] for index in layers.traced}
        self.weights: dict[int, list[ir.Value]] = {index: [] for index in layers.traced}
        self.inputs: dict[int, list[ir.Value]] = {index: [] for index in layers.traced}
        self.outputs: dict[int, list[ir.Value]] = {index: [] for index in layers.traced}
        self._divide([value for name, value in graph.initializers.items() if name in weights])

    def _layer(self, pattern: re.Pattern[str], value: ir.Value) -> int | None:
        match = pattern.fullmatch(str(value.name))
        return None if match is None else int(match["layer"])

    def _divide(self, weights: Sequence[ir.Value]) -> None:
        """Assign nodes, weights, inputs and outputs to the traced layers."""
        owner: dict[ir.Value, int] = {}
        for pattern, values, held in (
            (self.weight, weights, self.weights),
            (CACHE, self.graph.inputs, self.inputs),
            (CACHE, self.graph.outputs, self.outputs),
        ):
            for value in values:
                index = self._layer(pattern, value)
                if index is not None:
                    held[index].append(value)
                    if held is not self.outputs:
                        owner[value] = index
        owner |= {value: index for index, value in self.enter.items()}
        bounds = {*self.enter.values(), self.end}
        self.graph.sort()
        sizes = _sizes_of_all(self.graph)
        for node in self.graph:
            read = [value for value in _values_read(node) if value in owner]
            if not read or node in sizes:
                continue
            index = max(owner[value] for value in read)
            owner.update((value, index) for value in node.outputs if value not in bounds)
            self.nodes[index].append(node)
        for index, nodes in self.nodes.items():
            _check_closed(nodes, {*bounds, *self.outputs[index]}, sizes)

    def run(self) -> None:
        traced = self.layers.traced
        leave = {index: self.enter[behind] for index, behind in itertools.pairwise(traced)}
        leave[traced[-1]] = self.end
        owned = {node for nodes in self.nodes.values() for node in nodes}
        behind = [use.node for use in self.end.uses() if use.node not in owned]
        hidden = self.enter[0]
        entering: dict[int, ir.Value] = {}
        inputs, outputs = dict(self.inputs), dict(self.outputs)
        for index in range(len(self.layers.stands_for)):
            kind = self.layers.stands_for[index]
            if index == kind:
                entering[index], hidden = hidden, leave[index]
            else:
                copies = self._copy(kind, index, hidden)
                hidden = copies[leave[kind]]
                inputs[index] = [copies[value] for value in self.inputs[kind]]
                outputs[index] = [copies[value] for value in self.outputs[kind]]
        for kind, value in entering.items():
            if value is not self.enter[kind]:
                for node in self.nodes[kind]:
                    _replace(node, self.enter[kind], value)
        for node in behind:
            _replace(node, self.end, hidden)
        if hidden is not self.end and self.end.is_graph_output():
            hidden.name, self.end.name = self.end.name, f"hidden_states.{traced[-1] + 1}"
            self.graph.outputs[:] = [hidden if value is self.end else value for value in self.graph.outputs]
        _insert(self.graph.inputs, inputs)
        _insert(self.graph.outputs, outputs)
        for kind in traced:
            for node in self.nodes[kind]:
                node.name = f"layers.{kind}.{node.name}"
        self.graph.sort()

    def _copy(self, kind: int, index: int, hidden: ir.Value) -> dict[ir.Value, ir.Value]:
        copies: dict[ir.Value, ir.Value] = {self.enter[kind]: hidden}
        for value in self.weights[kind]:
            name = self._renamed(self.weight, value, index)
            tensor = self.make(name, value)
            copies[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
            self.graph.register_initializer(copies[value])
        for value in self.inputs[kind]:
            name = self._renamed(CACHE, value, index)
            copies[value] = ir.Value(name=name, type=value.type, shape=value.shape)
        results = {value: self._renamed(CACHE, value, index) for value in self.outputs[kind]}
        for node in self.nodes[kind]:
            made = []
            for value in node.outputs:
                name = results.get(value, f"layers.{index}.{value.name}" if value.name else "")
                copies[value] = ir.Value(name=name, type=value.type, shape=value.shape)
                made.append(copies[value])
            self.graph.append(
                ir.Node(
                    node.domain,
                    node.op_type,
                    [copies.get(value, value) if value is not None else None for value in node.inputs],
                    [_copied(attribute) for attribute in node.attributes.values()],
                    overload=node.overload,
                    outputs=made,
                    version=node.version,
                    name=f"layers.{index}.{node.name}",
                )
            )
        return copies

    def _renamed(self, pattern: re.Pattern[str], value: ir.Value, index: int) -> str:
        match = pattern.fullmatch(str(value.name))
        assert match is not None
        return f"{match['before']}{index}{match['behind']}"


def _check_closed(nodes: Sequence[ir.Node], ends: Collection[ir.Value], sizes: Collection[ir.Node]) -> None:
    """LayersDifferError if other nodes than the layer's own read what it computes, such as a sum over all layers.

    Any node may read its `ends`, and `sizes` nodes, which serve all layers, may read any value.
    """
    inside = {*nodes}
    for value in (value for node in nodes for value in node.outputs if value not in ends):
        readers = [use.node for use in value.uses() if use.node not in sizes]
        if value.is_graph_output() or not inside.issuperset(readers):
            raise LayersDifferError(f"{value.name} of a layer is read outside of it")


_OF_SIZES = ("Shape", "Size")
"""Operators that read the sizes of their input only."""

_SIZED_BY_VALUES = ("NonZero", "Compress", "Unique")
"""Operators whose outputs have sizes that depend on values."""

_SIZED_AS_FIRST = ("ScatterND", "ScatterElements")
"""Operators whose outputs have the sizes of their first input."""


def _sizes_of_all(graph: ir.Graph) -> set[ir.Node]:
    """The nodes of a sorted graph that read sizes which don't depend on values."""
    varying, sizes = set[ir.Value](), set[ir.Node]()
    for node in graph:
        inputs = node.inputs[:1] if node.op_type in _SIZED_AS_FIRST else node.inputs
        varies = not varying.isdisjoint(inputs) or node.op_type in _SIZED_BY_VALUES
        if varies:
            varying.update(node.outputs)
        elif node.op_type in _OF_SIZES and node.domain == "":
            sizes.add(node)
    return sizes


def _values_read(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of a node; LayersDifferError if its body reads values around it, because such a node is not copied."""
    for attribute in node.attributes.values():
        try:
            _copied(attribute)
        except ValueError:
            raise LayersDifferError(f"{node.name} holds a graph that reads values around it") from None
    yield from (value for value in node.inputs if value is not None)


def _copied(attribute: ir.Attr) -> ir.Attr:
    """An attribute for another node; ValueError for a graph that reads values around it."""
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, attribute.as_graph().clone())
    if attribute.type == ir.AttributeType.GRAPHS:
        return ir.AttrGraphs(attribute.name, [graph.clone() for graph in attribute.as_graphs()])
    return attribute


def _replace(node: ir.Node, old: ir.Value, new: ir.Value) -> None:
    for at, value in enumerate(node.inputs):
        if value is old:
            node.replace_input_with(at, new)


def _insert(values: Any, by_layer: Mapping[int, Sequence[ir.Value]]) -> None:
    """Put the values of all layers, in the order of the layers, at the place of the first one."""
    known = {value for each in by_layer.values() for value in each}
    if not known:
        return
    before = list(values)
    first = next(at for at, value in enumerate(before) if value in known)
    others = [value for value in before if value not in known]
    ordered = [value for index in sorted(by_layer) for value in by_layer[index]]
    values.clear()
    values.extend([*others[:first], *ordered, *others[first:]])
