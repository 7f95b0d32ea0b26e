"""What each value of a graph is computed from, and the values that all of a computation passes through.

A value is *content* if it carries features of tokens: floating-point operators compute it from embeddings, images,
features or caches. Everything else is *auxiliary*: constants, shapes, positions, masks, and what is computed only from
these, such as cosines and biases. Attention multiplies content with content; rotations and masks multiply or add
auxiliary values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

LENGTHS = {"Shape", "Size"}
"""Operators that give only lengths."""

_TOKEN_OPS = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Clip", "Slice", "Concat"}
_TOKEN_OPS |= {"Expand", "Tile", "Pad", "Where", "ScatterND", "ScatterElements"}
"""Operators that keep token ids token ids."""

_ARITHMETIC = {"Add", "Sub", "Mul", "Mod", "Min", "Max"}
"""Operators that compute ids from ids, for example with an offset into a part of a table, or a hash."""


class Dataflow:
    """The kinds of all values in the main graph of a model, and the order of its nodes.

    `functions` are the functions of the model. `token_inputs` are the names of graph inputs with token ids.
    `content_inputs` are the names of graph inputs with features or caches, and of outputs of operators that are not
    read (posexport.graphs.unread). `learned` are the names of values that carry features although no input does
    (posexport.graphs.attention.learned).
    """

    def __init__(
        self,
        model: ir.Model,
        token_inputs: Collection[str],
        content_inputs: Collection[str],
        learned: Collection[str] = (),
    ) -> None:
        self.graph, self.functions = model.graph, frozenset(model.functions)
        self.order: dict[ir.Node, int] = {node: index for index, node in enumerate(model.graph)}
        self.values: dict[str, ir.Value] = {}
        self.content: set[ir.Value] = set()
        self.constant: set[ir.Value] = set()
        self._unread = {node for node in model.graph if any(value.name in content_inputs for value in node.outputs)}
        self._learned = frozenset(learned)
        self._whole: set[ir.Value] = set()  # integers that stand for features until they are scaled
        tokens: set[ir.Value] = set()
        for value in (*model.graph.inputs, *model.graph.initializers.values()):
            self.values[value.name or ""] = value
            if value.is_initializer() and not value.is_graph_input():
                self.constant.add(value)
            elif value.name in token_inputs:
                tokens.add(value)
            elif value.name in content_inputs:
                self.content.add(value)
        for node in model.graph:
            self._classify(node, tokens)

    def _classify(self, node: ir.Node, tokens: set[ir.Value]) -> None:
        inputs = values_read(node)
        for value in node.outputs:
            self.values[value.name or ""] = value
        if node in self._unread or any(value.name in self._learned for value in node.outputs):
            self.content.update(node.outputs)
            return
        if all(value in self.constant for value in inputs):
            self.constant.update(node.outputs)
            return
        if node.op_type in LENGTHS:
            return
        inputs = numbers_read(node, inputs)
        if any(value in tokens for value in inputs) and (
            node.op_type in _TOKEN_OPS or (node.op_type in _ARITHMETIC and _is_whole(node.outputs[0]))
        ):
            tokens.update(node.outputs)
            return
        embeds = node.op_type in ("Gather", "GatherND", "EmbedLayerNormalization") and any(v in tokens for v in inputs)
        if embeds or any(value in self.content or value in self._whole for value in inputs):
            self.content.update(value for value in node.outputs if _may_be_float(value))
            self._whole.update(value for value in node.outputs if _is_quantised(value))

    def depth(self, value: ir.Value) -> int:
        """The place in the graph's order of the node that computes a value; -1 for inputs and initializers."""
        node = value.producer()
        return -1 if node is None else self.order.get(node, -1)

    def content_inputs(self, node: ir.Node) -> list[ir.Value]:
        """The content values that a node reads, each once; none for an operator that is not read."""
        if node in self._unread:
            return []
        read = numbers_read(node, [value for value in node.inputs if value is not None])
        return list(dict.fromkeys(value for value in read if value in self.content))

    def feature_inputs(self, node: ir.Node) -> list[ir.Value]:
        """The content values that a node reads, and the integers that stand for content until they are scaled."""
        whole = [value for value in node.inputs if value is not None and value in self._whole]
        return list(dict.fromkeys([*self.content_inputs(node), *whole]))

    def dominators(self, value: ir.Value, limit: int = 80) -> Iterator[ir.Value]:
        """The tensors that all content of `value` passes through, from `value` itself up, within `limit` nodes."""
        yield value
        frontier = {value}
        for _ in range(limit):
            last = max(frontier, key=self.depth)
            node = last.producer()
            if node is None or not (sources := self.content_inputs(node)):
                return
            frontier = frontier - {last} | set(sources)
            (one, *others) = frontier
            if not others and not is_sequence(one):
                yield one

    def between(self, source: ir.Value, target: ir.Value) -> list[ir.Node]:
        """The nodes on paths of content from `source` to `target`, in the graph's order."""
        nodes: set[ir.Node] = set()
        pending = [target]
        while pending:
            value = pending.pop()
            node = value.producer()
            if value is source or node is None or node in nodes or node in self._unread:
                continue
            nodes.add(node)
            pending += self.content_inputs(node)
        return sorted(nodes, key=self.order.__getitem__)


def numbers_read(node: ir.Node, inputs: list[ir.Value]) -> list[ir.Value]:
    """The values of `inputs` whose numbers a node reads: CastLike reads only the dtype of its second input."""
    return inputs[:1] if node.op_type == "CastLike" else inputs


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The branches and bodies of a node, except those that refer to an attribute of the enclosing function."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            found.append(attribute.value)
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            found += attribute.value
    return found


def values_read(node: ir.Node, inner_weights: bool = False) -> list[ir.Value]:
    """The values that a node reads: its inputs, then the outer values that its bodies read.

    With `inner_weights`, the initializers of its bodies count too.
    """
    return [value for value in node.inputs if value is not None] + outer_values(node, inner_weights)


def outer_values(node: ir.Node, inner_weights: bool = False) -> list[ir.Value]:
    """The values of the surrounding graph that the bodies of a node read.

    With `inner_weights`, their own initializers count too.
    """
    outer: list[ir.Value] = []
    for body in bodies(node):
        inner = {*body.inputs, *(value for one in body for value in one.outputs)}
        if not inner_weights:
            inner.update(body.initializers.values())
        reads = (value for one in body for value in values_read(one, inner_weights))
        outer += [value for value in (*reads, *body.outputs) if value not in inner]
    return outer


_SEQUENCES = {"SplitToSequence", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceMap"}
"""Operators that give a sequence of tensors."""


def is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence of tensors."""
    node = value.producer()
    return node is not None and node.op_type in _SEQUENCES


def _may_be_float(value: ir.Value) -> bool:
    """Whether a value may hold floating-point numbers. If nothing states its dtype, it may."""
    node = value.producer()
    if node is not None and node.op_type in _NEVER_FLOAT:
        return False
    if value.dtype is not None:
        return value.dtype.is_floating_point()
    if node is not None and node.op_type in ("Cast", "ConstantOfShape"):
        to = node.attributes.get("to")
        return to is None or ir.DataType(to.as_int()).is_floating_point()
    return True


def _is_whole(value: ir.Value) -> bool:
    """Whether a value holds integers, even if the file doesn't state its dtype."""
    while value.dtype is None and (node := value.producer()) is not None:
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int()).is_integer()
        source = node.inputs[node.op_type == "Where"] if node.inputs else None
        if source is None:
            return False
        value = source
    return value.dtype is not None and value.dtype.is_integer()


def _is_quantised(value: ir.Value) -> bool:
    """Whether a value holds features as integers."""
    node = value.producer()
    return value.dtype in _QUANTISED or (node is not None and node.op_type in ("MatMulInteger", "ConvInteger"))


_QUANTISED = {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}

_NEVER_FLOAT = {
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"),
    *(*LENGTHS, "ArgMax", "ArgMin", "NonZero"),
}


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or a Constant node; None if the value is computed, or if callers may replace it."""
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    attribute = None if node is None or node.op_type != "Constant" else node.attributes.get("value")
    if attribute is not None and not attribute.is_ref():
        return attribute.as_tensor()  # get_const_tensor would rename it
    return ir.convenience.get_const_tensor(value)
