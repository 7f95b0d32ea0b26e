"""New nodes in place of a node of a graph, which keep the name of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir


def new_node(op_type: str, name: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Node:
    """A node with one output; both have this name."""
    return ir.node(op_type, inputs, attributes, name=name, outputs=[ir.Value(name=name)])


def replace_node(node: ir.Node, made: Sequence[ir.Node]) -> None:
    """Put new nodes in place of a node with one output: the last of them gives this output, under its name."""
    graph, old, new = node.graph, node.outputs[0], made[-1].outputs[0]
    assert graph is not None
    graph.insert_before(node, made)
    name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name, new.name = f"{name}/replaced", name
    graph.remove(node, safe=True)
