"""What torch's exporter writes in more nodes than it takes, in fewer, of the standard's operators.

- `x * rsqrt(v)`, of which it makes x * (1 / sqrt(v)), is x / sqrt(v). ONNX Runtime makes one node of an RMS norm that
  divides (SimplifiedLayerNormalization), and leaves one that multiplies as it is.
- `arange(n) + k` of integers, the positions behind k tokens of a cache, is a Range from k to k + n: a number that is
  added to a tensor has to be copied to the GPU, one that begins a Range does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from posexport.graphs.nodes import Nodes
from posexport.rewrite.surgery import remove_unused


def with_fewer_nodes(model: ir.Model) -> None:
    """Write these nodes of the main graph anew, in place."""
    graph, replaced = model.graph, list[ir.Value]()
    taken = {value.name or "" for node in graph for value in node.outputs} | {node.name or "" for node in graph}
    for node in list(graph):
        rule, nodes = _RULES.get((node.domain, node.op_type)), Nodes(taken)
        new = None if rule is None else rule(node, nodes)
        if new is None:
            continue
        (old,) = node.outputs
        new.shape, new.type = old.shape, old.type
        graph.insert_before(node, nodes.nodes)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = new.name, old.name
        replaced.append(old)
    remove_unused(model, replaced)


def _quotient(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """x / sqrt(v) of a Mul of x and 1 / sqrt(v)."""
    for first, second in (node.inputs, reversed(node.inputs)):
        inverse = _maker(second, "Reciprocal")
        if inverse is not None and first is not None and _maker(inverse.inputs[0], "Sqrt") is not None:
            return nodes.one("Div", first, inverse.inputs[0])
    return None


def _moved_range(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """The Range from k to k + n of an Add of k and a Range to n that nothing else reads."""
    for steps, begin in (node.inputs, reversed(node.inputs)):
        counted = _maker(steps, "Range")
        if counted is None or steps is None or begin is None or len(steps.uses()) > 1 or steps.is_graph_output():
            continue
        start, end, step = counted.inputs
        if (_number(start), _number(step)) == (0, 1) and _is_one_integer(begin):
            return nodes.one("Range", begin, nodes.one("Add", begin, end), step)
    return None


def _maker(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def _is_one_integer(value: ir.Value) -> bool:
    """Whether a value is known to be one integer without axes, as the length of an axis is."""
    if value.dtype != ir.DataType.INT64:
        return False
    if value.shape is not None:
        return not value.shape
    squeezed = _maker(value, "Squeeze")
    source = None if squeezed is None else squeezed.inputs[0]
    lengths = _maker(source, "Shape")
    if lengths is not None:
        start, end = (lengths.attributes.get_int(name, default) for name, default in (("start", 0), ("end", 0)))
        return end - start == 1
    return source is not None and source.shape == [1]


def _number(value: ir.Value | None) -> object:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor.numpy().item() if tensor is not None and tensor.size == 1 else None


_RULES: Mapping[tuple[str, str], Callable[[ir.Node, Nodes], ir.Value | None]] = {
    ("", "Mul"): _quotient,
    ("", "Add"): _moved_range,
}
