"""Writes patterns of torch's exporter in fewer nodes of the standard domain.

- `x * rsqrt(v)`, which torch's exporter writes as x * (1 / sqrt(v)), becomes x / sqrt(v). ONNX Runtime fuses an RMS
  norm that divides (SimplifiedLayerNormalization), but not one that multiplies.
- `arange(n) + k` of integers, the positions after k tokens of a cache, becomes a Range from k to k + n. A number that
  is added to a tensor has to be copied to the GPU; the start of a Range does not.
- `Unsqueeze` and then `Squeeze` of the same axes are removed. The first half of cosines of angles that were
  concatenated with themselves becomes the cosines of the angles: rotations with equal halves read only one of them.
- A mask that is looked up by the numbers of all rows and columns (posexport.export.looked_up_masks) becomes the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from posexport.export.looked_up_masks import looked_up
from posexport.graphs.node_arguments import maker_of, numbers_of
from posexport.graphs.nodes import Nodes
from posexport.rewrite.surgery import remove_unused


def with_fewer_nodes(model: ir.Model) -> None:
    """Rewrite these patterns of the main graph in place, until none is left."""
    while replaced := _replaced(model.graph):
        remove_unused(model, replaced)


def _replaced(graph: ir.Graph) -> list[ir.Value]:
    """Replace patterns once. Returns the values that were replaced."""
    replaced = list[ir.Value]()
    taken = {value.name or "" for node in graph for value in node.outputs} | {node.name or "" for node in graph}
    for node in list(graph):
        rule, nodes = _RULES.get((node.domain, node.op_type)), Nodes(taken)
        new = None if rule is None else rule(node, nodes)
        old = node.outputs[0]
        if new is None or (not nodes.nodes and old.is_graph_output()):  # another value can't have its name
            continue
        if nodes.nodes:
            new.shape, new.type = old.shape, old.type
        graph.insert_before(node, nodes.nodes)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if nodes.nodes:
            old.name, new.name = new.name, old.name
        replaced.append(old)
    return replaced


def _quotient(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """x / sqrt(v) for a Mul of x and 1 / sqrt(v)."""
    for first, second in (node.inputs, reversed(node.inputs)):
        inverse = maker_of(second, "Reciprocal")
        if inverse is not None and first is not None and maker_of(inverse.inputs[0], "Sqrt") is not None:
            return nodes.one("Div", first, inverse.inputs[0])
    return None


def _moved_range(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """The Range from k to k + n for an Add of k and a Range to n that nothing else reads."""
    for steps, begin in (node.inputs, reversed(node.inputs)):
        counted = maker_of(steps, "Range")
        if counted is None or steps is None or begin is None or len(steps.uses()) > 1 or steps.is_graph_output():
            continue
        start, end, step = counted.inputs
        if (numbers_of(start), numbers_of(step)) == ([0], [1]) and _is_one_integer(begin):
            return nodes.one("Range", begin, nodes.one("Add", begin, end), step)
    return None


def _unsqueezed(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """x for the Squeeze of an Unsqueeze of x, both with the same axes, counted from the front."""
    before = maker_of(node.inputs[0], "Unsqueeze")
    axes = None if before is None or len(node.inputs) < 2 else numbers_of(node.inputs[1])
    if before is None or axes is None or min(axes, default=-1) < 0 or axes != numbers_of(before.inputs[1]):
        return None
    return before.inputs[0]


def _half(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """f(a) for the first half of f(Concat(a, a)), if f is elementwise and nothing else reads its values."""
    value, functions = node.inputs[0], list[ir.Node]()
    while value is not None and (function := value.producer()) is not None and _is_of_each_number(function):
        if len(value.uses()) > 1 or value.is_graph_output():
            return None
        functions.append(function)
        value = function.inputs[0]
    joined = maker_of(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or joined.inputs[0] is not joined.inputs[1]:
        return None
    half, rank = joined.inputs[0], _rank(joined.inputs[0])
    last = (-1, None if rank is None else rank - 1)
    starts, ends, axes, steps = (numbers_of(value) for value in (*node.inputs[1:], None, None)[:4])
    width = _last_length(half)
    if half is None or width is None or (starts, ends, steps or [1]) != ([0], [width], [1]):
        return None
    if joined.attributes.get_int("axis", 0) not in last or axes is None or len(axes) != 1 or axes[0] not in last:
        return None
    for function in reversed(functions):
        half = nodes.one(function.op_type, half, *function.inputs[1:])
    return half


def _is_of_each_number(node: ir.Node) -> bool:
    """Whether a node is an elementwise function of its first input."""
    if node.domain or node.op_type not in ("Cos", "Sin", "Mul"):
        return False
    factor = ir.convenience.get_const_tensor(node.inputs[1]) if node.op_type == "Mul" and node.inputs[1] else None
    return node.op_type != "Mul" or (factor is not None and not tuple(factor.shape))


def _last_length(value: ir.Value | None) -> int | None:
    """The length of the last axis of a product, if a constant factor has that axis."""
    product = maker_of(value, "Mul")
    factors = () if product is None else (ir.convenience.get_const_tensor(one) for one in product.inputs if one)
    lengths = {tensor.shape.numpy()[-1] for tensor in factors if tensor is not None and tensor.shape.numpy()} - {1}
    return lengths.pop() if len(lengths) == 1 else None


def _rank(value: ir.Value | None) -> int | None:
    """The number of axes of a value; None if it is not known."""
    if value is None:
        return None
    tensor, node = ir.convenience.get_const_tensor(value), value.producer()
    if tensor is not None:
        return len(tensor.shape)
    if node is None:
        return None if value.shape is None else len(value.shape)
    if node.domain or node.op_type not in ("Mul", "Cast", "Unsqueeze"):
        return None
    ranks = [_rank(one) for one in (node.inputs if node.op_type == "Mul" else node.inputs[:1])]
    more = numbers_of(node.inputs[1]) if node.op_type == "Unsqueeze" else []
    known = [rank for rank in ranks if rank is not None]
    return None if more is None or len(known) < len(ranks) else max(known) + len(more)


def _is_one_integer(value: ir.Value) -> bool:
    """Whether a value is known to be one integer without axes, like the length of an axis."""
    if value.dtype != ir.DataType.INT64:
        return False
    if value.shape is not None:
        return not value.shape
    squeezed = maker_of(value, "Squeeze")
    source = None if squeezed is None else squeezed.inputs[0]
    lengths = maker_of(source, "Shape")
    if lengths is not None:
        start, end = (lengths.attributes.get_int(name, default) for name, default in (("start", 0), ("end", 0)))
        return end - start == 1
    return source is not None and source.shape == [1]


_RULES: Mapping[tuple[str, str], Callable[[ir.Node, Nodes], ir.Value | None]] = {
    ("", "Mul"): _quotient,
    ("", "Add"): _moved_range,
    ("", "GatherND"): looked_up,
    ("", "Squeeze"): _unsqueezed,
    ("", "Slice"): _half,
}
