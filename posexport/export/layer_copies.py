"""Stacks of layers: each kind of layer is traced once, and its nodes are copied for every layer of that kind.

torch's exporter takes about a second for a layer, a copy takes milliseconds. The hidden states and caches that enter a
traced layer pass through a marker node. A node that depends on marked values or on a layer's weights belongs to that
layer and is copied. The other nodes, which depend only on positions and masks, serve all layers. The result is the
graph of a trace of all layers, except that names of a layer's nodes and values begin with `layers.N.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import onnx.defs
import onnx_ir as ir
import torch
from onnxscript.values import Op, Opset
from torch import Tensor, nn

from posexport.spec.spec import Spec

TRACE_DOMAIN, MARKER = "posexport.trace", "Enter"
_NAMED = re.compile(r"layers\.(?P<layer>\d+)\.(?P<weight>.+)|(?P<role>(?:past|present)_(?:key|value))\.(?P<cache>\d+)")
_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]

Make = Callable[[str], ir.TensorProtocol]
"""Gives the tensor of a weight by its public name."""


@torch.library.custom_op("posexport_trace::enter", mutates_args=())
def enter(x: Tensor, layer: int, role: str) -> Tensor:
    """A copy of `x`, which is the "hidden", "past_key" or "past_value" of a layer."""
    return x.clone()


@enter.register_fake
def _(x: Tensor, layer: int, role: str) -> Tensor:
    return torch.empty_like(x)


def mark(layers: nn.ModuleList) -> None:
    """Make the inputs of each layer pass through markers."""
    for index, layer in enumerate(layers):

        def entering(_: nn.Module, inputs: Any, index: int = index) -> Any:
            hidden, shared, past = inputs
            if past is not None:
                past = tuple(enter(x, index, role) for x, role in zip(past, ("past_key", "past_value"), strict=True))
            return enter(hidden, index, "hidden"), shared, past

        layer.register_forward_pre_hook(entering)


def translations() -> dict[Any, Callable[..., Any]]:
    """How torch's exporter writes markers: rows of its custom_translation_table."""
    make = onnx.defs.OpSchema
    schema = make(
        MARKER,
        TRACE_DOMAIN,
        1,
        inputs=[make.FormalParameter("x", "T")],
        outputs=[make.FormalParameter("y", "T")],
        type_constraints=[("T", _TYPES, "")],
        attributes=[make.Attribute("layer", make.AttrType.INT, ""), make.Attribute("role", make.AttrType.STRING, "")],
    )

    def translate(x: Any, layer: int, role: str) -> Any:
        return Op(Opset(TRACE_DOMAIN, 1), MARKER, schema)(x, layer=layer, role=role)

    return {torch.ops.posexport_trace.enter.default: translate}


def layer_of(name: str) -> int | None:
    """The layer of a weight or cache by its public name in a stack; None for other names."""
    match = _NAMED.fullmatch(name)
    return None if match is None else int(match["layer"] or match["cache"])


def instantiate(model: ir.Model, spec: Spec, weights: set[str], make: Make) -> None:
    """Turn a marked graph with one layer of each kind into the graph of all layers of `spec`, without markers.

    `weights` are the public names of all weights; `make` gives the tensors of the copied layers.
    """
    graph = model.graph
    markers = [node for node in graph if node.domain == TRACE_DOMAIN]
    kinds = _kinds(graph, markers, weights)
    for index, kind in enumerate(kinds):
        for node in kind.nodes:
            node.name = f"layers.{index}.{node.name}"
            for value in node.outputs:
                if not value.is_graph_output():
                    value.name = f"layers.{index}.{value.name}"
    hidden = kinds[-1].leave["hidden"]
    for index in range(len(kinds), spec.layers):
        hidden = _copy(graph, kinds[index % len(kinds)], index % len(kinds), index, hidden, make)
    if hidden is not graph.outputs[0]:
        name = graph.outputs[0].name
        graph.outputs[0].name, hidden.name = f"layers.{len(kinds) - 1}.{name}", name
        graph.outputs[0] = hidden
    for node in markers:
        node.outputs[0].replace_all_uses_with(_entering(node))
        graph.remove(node, safe=True)
    model.opset_imports.pop(TRACE_DOMAIN, None)
    for name in [name for name in graph.initializers if name not in weights]:
        graph.initializers[name] = graph.initializers.pop(name)  # constants follow the weights of all layers


@attrs.frozen
class _Kind:
    """One kind of layer in the graph: its nodes, and the values that enter and leave it.

    The values are by role ("hidden", "past_key", "q_proj.weight", ...).
    """

    nodes: list[ir.Node] = attrs.field(factory=list)
    enter: dict[str, ir.Value] = attrs.field(factory=dict)
    leave: dict[str, ir.Value] = attrs.field(factory=dict)


def _kinds(graph: ir.Graph, markers: list[ir.Node], weights: set[str]) -> list[_Kind]:
    """The layers of a marked graph, in order."""
    kinds = [_Kind() for node in markers if node.attributes["role"].as_string() == "hidden"]
    owner: dict[ir.Value, int] = {}
    for node in markers:
        index, role = node.attributes["layer"].as_int(), node.attributes["role"].as_string()
        owner[node.outputs[0]] = index
        kinds[index].enter[role] = node.outputs[0]
        if role == "hidden" and index:
            kinds[index - 1].leave[role] = _entering(node)
    kinds[-1].leave["hidden"] = graph.outputs[0]
    for value in (*graph.initializers.values(), *graph.outputs):
        match = _NAMED.fullmatch(str(value.name))
        if match is None:
            continue
        if value.is_graph_output():
            kinds[int(match["cache"])].leave[match["role"]] = value
        elif value.name in weights:
            owner[value] = int(match["layer"])
            kinds[int(match["layer"])].enter[match["weight"]] = value
    for node in graph:
        owners = {owner[value] for value in node.inputs if value in owner}
        if node.domain == TRACE_DOMAIN or not owners:
            continue
        (index,) = owners  # values of other layers reach it only through markers
        owner.update(dict.fromkeys(node.outputs, index))
        kinds[index].nodes.append(node)
    return kinds


def _copy(graph: ir.Graph, kind: _Kind, traced: int, index: int, hidden: ir.Value, make: Make) -> ir.Value:
    """Append layer `index` as a copy of layer `traced`, which is of the same kind; returns its hidden states."""
    copies: dict[ir.Value, ir.Value] = {}
    for role, value in kind.enter.items():
        if role == "hidden":
            copies[value] = hidden
        elif value.is_initializer():
            name = f"layers.{index}.{role}"
            copies[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=make(name))
            graph.register_initializer(copies[value])
        else:
            cache = ir.Value(name=f"{role}.{index}", type=value.type, shape=_entering(value.producer()).shape)
            graph.inputs.append(cache)
            copies[value] = cache
    for node in kind.nodes:
        outputs = []
        for value in node.outputs:
            name = str(value.name).removeprefix(f"layers.{traced}.")
            copies[value] = ir.Value(name=f"layers.{index}.{name}", type=value.type, shape=value.shape)
            outputs.append(copies[value])
        copy = ir.Node(
            node.domain,
            node.op_type,
            [copies.get(value, value) if value is not None else None for value in node.inputs],
            node.attributes.values(),
            overload=node.overload,
            outputs=outputs,
            version=node.version,
            name=f"layers.{index}.{str(node.name).removeprefix(f'layers.{traced}.')}",
        )
        graph.append(copy)
    for role, value in kind.leave.items():
        if role != "hidden":
            copies[value].name = f"{role}.{index}"
            graph.outputs.append(copies[value])
    return copies[kind.leave["hidden"]]


def _entering(marker: ir.Node | None) -> ir.Value:
    """The input of a marker, which always has one."""
    value = None if marker is None else marker.inputs[0]
    if value is None:
        raise AssertionError("a value of a traced layer does not come from a marker")
    return value
