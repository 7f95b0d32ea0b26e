"""Which nodes of a file make up an attention, by their names in the file.

Before attention is looked for, functions are inlined and operators for attention are expanded. Here each new node is
traced back to the call or the operator that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import onnx_ir as ir

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.products import WEIGHTED, product_of
from posexport.graphs.expand import domain_of
from posexport.graphs.view import View


@attrs.frozen(kw_only=True)
class Origin:
    """A node of the file: its name, its operator, and whether it is the call of a function.

    The operator includes its domain, unless that is ONNX's own.
    """

    name: str
    operator: str
    is_call: bool = False


@attrs.frozen(kw_only=True)
class CallSites:
    """The calls of functions in a graph before inlining, by the names of their outputs, and all nodes of that graph.

    The nodes are kept so that no new node is mistaken for one of them.
    """

    nodes: frozenset[ir.Node]
    calls: Mapping[str, Origin]


def call_sites(model: ir.Model) -> CallSites:
    """The calls of functions in the main graph of a model."""
    calls = [node for node in model.graph if node.op_identifier() in model.functions]
    origins = {
        value.name or "": _origin(call, _first_output(call), is_call=True) for call in calls for value in call.outputs
    }
    return CallSites(nodes=frozenset(model.graph), calls=origins)


def _first_output(node: ir.Node) -> str:
    return next((value.name for value in node.outputs if value.name), "")


def _origin(node: ir.Node, output: str, *, is_call: bool = False) -> Origin:
    """The origin that a node is. `output` is the name of its first output in the file, for a node without a name."""
    domain = domain_of(node)
    return Origin(
        name=node.name or output, operator=f"{domain}.{node.op_type}" if domain else node.op_type, is_call=is_call
    )


class Origins:
    """The origins of the nodes of a view. `sites` are the calls of the model before inlining."""

    def __init__(self, view: View, sites: CallSites | None = None) -> None:
        self._view, self._sites = view, sites
        self._operators = {name: one for one in view.expanded for name in one.nodes}
        self._by_node: dict[ir.Node, Origin] = {}
        if sites is not None:
            for output, call in sites.calls.items():
                self._trace(output, call, sites)

    def _trace(self, output: str, call: Origin, sites: CallSites) -> None:
        """Note a call as the origin of all nodes that replaced it."""
        value = self._view.flow.values.get(output)
        pending = [] if value is None else [value]
        while pending:
            node = pending.pop().producer()
            if node is None or node in sites.nodes or node in self._by_node:
                continue
            self._by_node[node] = call
            pending += [one for one in node.inputs if one is not None and one.name not in sites.calls]

    def of(self, node: ir.Node) -> Origin:
        """The node of the file that a node of the view comes from: itself, an expanded operator, or a function call."""
        if node in self._by_node:
            return self._by_node[node]
        operator = self._operators.get(node.name or "")
        if operator is None:
            return _origin(node, _first_output(node))
        return _origin(operator.node, operator.name)

    def core(self, attention: Attention) -> dict[str, str]:
        """The names of the softmax and the products of an attention; they are equal if one node computes all three."""
        names = {"softmax": self.of(attention.softmax).name}
        names["scores"] = self.of(attention.scores.node).name
        product = values_product(attention)
        names["values"] = "" if product is None else self.of(product).name
        return names


def values_product(attention: Attention) -> ir.Node | None:
    """The product of weights with values, also after casts and the like; None if it is not found."""
    value = attention.weights
    for _ in range(8):
        nodes = list(dict.fromkeys(use.node for use in value.uses()))
        for node in nodes:
            if product_of(node, WEIGHTED, weights=value) is not None:
                return node
        if not nodes:
            return None
        value = nodes[-1].outputs[0]
    return None
