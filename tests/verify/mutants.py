"""Faults to plant in an exported model, in the main graph or in the body of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from posexport.spec.spec import Spec

Array = np.ndarray[Any, Any]
Mutate = Callable[[onnx.ModelProto], None]
Find = Callable[[onnx.NodeProto], bool]


def find(model: onnx.ModelProto, op: str, reads: str = "", nth: int = 0) -> tuple[Any, int, onnx.NodeProto]:
    """The nth node with operator `op` that reads a value whose name starts with `reads`: (graph or function, index,
    node)."""
    found = [
        (holder, index, node)
        for holder in (model.graph, *model.functions)
        for index, node in enumerate(holder.node)
        if node.op_type == op and any(name.startswith(reads) for name in node.input)
    ]
    return found[nth]


def _put(holder: Any, index: int, nodes: Sequence[onnx.NodeProto]) -> None:
    """Insert nodes before `index`. (Protobuf's own insert copies.)"""
    after = [onnx.NodeProto.FromString(node.SerializeToString()) for node in holder.node[index:]]
    del holder.node[index:]
    holder.node.extend([*nodes, *after])


def _constant(name: str, value: Array) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], name=f"Constant {name}", value=numpy_helper.from_array(value, name))


def initializer(name: str, change: Callable[[Array], Array]) -> Mutate:
    """An initializer gets the numbers that `change` returns."""

    def mutate(model: onnx.ModelProto) -> None:
        tensor = next(each for each in model.graph.initializer if each.name == name)
        changed = np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy()))
        tensor.CopyFrom(numpy_helper.from_array(changed, name))

    return mutate


def constant_read(op: str, axis: int, value: Any, reads: str = "", nth: int = 0) -> Mutate:
    """A node reads another constant as its input number `axis`."""

    def mutate(model: onnx.ModelProto) -> None:
        holder, index, node = find(model, op, reads, nth)
        node.input[axis] = "planted"
        _put(holder, index, [_constant("planted", np.asarray(value))])

    return mutate


def before(op: str, axis: int, nodes: Callable[[str], list[onnx.NodeProto]], reads: str = "", nth: int = 0) -> Mutate:
    """`nodes` are inserted between a node and its input number `axis`. The last of them writes "planted"."""

    def mutate(model: onnx.ModelProto) -> None:
        holder, index, node = find(model, op, reads, nth)
        made = nodes(node.input[axis])
        node.input[axis] = "planted"
        _put(holder, index, made)

    return mutate


def bypassed(op: str, axis: int, reads: str = "", nth: int = 0) -> Mutate:
    """The readers of a node get the node's input number `axis` instead of its output."""

    def mutate(model: onnx.ModelProto) -> None:
        holder, index, node = find(model, op, reads, nth)
        for other in holder.node:
            for at, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[at] = node.input[axis]
        del holder.node[index]

    return mutate


def swapped(op: str, reads: str = "", nth: int = 0) -> Mutate:
    """A node gets its first two inputs in the other order."""

    def mutate(model: onnx.ModelProto) -> None:
        _, _, node = find(model, op, reads, nth)
        node.input[0], node.input[1] = node.input[1], node.input[0]

    return mutate


def operator(op: str, other: str) -> Mutate:
    """The first node with operator `op` gets the operator `other`."""

    def mutate(model: onnx.ModelProto) -> None:
        find(model, op)[2].op_type = other

    return mutate


def last(nodes: Callable[[str], list[onnx.NodeProto]], elem_type: int | None = None) -> Mutate:
    """`nodes` are inserted between the block's result and the output. The last of them writes "output"."""

    def mutate(model: onnx.ModelProto) -> None:
        holder, index, node = next(
            (model.graph, index, node) for index, node in enumerate(model.graph.node) if "output" in node.output
        )
        node.output[0] = "result"
        _put(holder, index + 1, nodes("result"))
        if elem_type is not None:
            model.graph.output[0].type.tensor_type.elem_type = elem_type

    return mutate


def bias_after_softmax(model: onnx.ModelProto) -> None:
    """The bias is added to the weights instead of the logits."""
    holder, _, softmax = find(model, "Softmax")
    index, add = next((at, node) for at, node in enumerate(holder.node) if node.output[0] == softmax.input[0])
    assert add.op_type == "Add"
    softmax.input[0], bias = add.input[0], add.input[1]
    del holder.node[index]
    _, index, product = next(
        (holder, at, node) for at, node in enumerate(holder.node) if softmax.output[0] in node.input
    )
    product.input[0] = "planted"
    _put(holder, index, [helper.make_node("Add", [softmax.output[0], bias], ["planted"], name="late bias")])


def other_spec(spec: Spec) -> Mutate:
    """The metadata of the file contain another spec."""

    def mutate(model: onnx.ModelProto) -> None:
        next(each for each in model.metadata_props if each.key == "posexport.spec").value = spec.to_json()

    return mutate


def later(name: str) -> list[onnx.NodeProto]:
    """Positions are one larger than given."""
    return [_constant("one", np.int64(1)), helper.make_node("Add", [name, "one"], ["planted"], name="late")]


def columns_for_rows(name: str) -> list[onnx.NodeProto]:
    """The x and y of positions are exchanged."""
    order = _constant("order", np.array([1, 0]))
    return [order, helper.make_node("Gather", [name, "order"], ["planted"], name="axes", axis=-1)]


def through(elem_type: int) -> Callable[[str], list[onnx.NodeProto]]:
    """Positions are rounded to a type of half precision, as if angles were computed in it."""

    def nodes(name: str) -> list[onnx.NodeProto]:
        half = helper.make_node("Cast", [name], ["half"], name="to half", to=elem_type)
        return [half, helper.make_node("Cast", ["half"], ["planted"], name="from half", to=TensorProto.FLOAT)]

    return nodes


def cast_to(elem_type: int) -> Callable[[str], list[onnx.NodeProto]]:
    """A last node that casts to a type."""
    return lambda name: [helper.make_node("Cast", [name], ["output"], name="cast", to=elem_type)]


def transposed(name: str) -> list[onnx.NodeProto]:
    """The output becomes [seq, batch, hidden]."""
    return [helper.make_node("Transpose", [name], ["output"], name="turned", perm=[1, 0, 2])]


def pooled(name: str) -> list[onnx.NodeProto]:
    """The output becomes [batch, 1, hidden], which broadcasts against the right shape."""
    axes = _constant("axes", np.array([1]))
    return [axes, helper.make_node("ReduceMean", [name, "axes"], ["output"], name="pooled", keepdims=1)]


def zeroed(name: str) -> list[onnx.NodeProto]:
    """The output becomes zeros."""
    return [_constant("nil", np.float32(0)), helper.make_node("Mul", [name, "nil"], ["output"], name="nothing")]


def output_under(name: str) -> Mutate:
    """The output gets another name."""

    def mutate(model: onnx.ModelProto) -> None:
        last(lambda result: [helper.make_node("Identity", [result], ["output"], name="renamed")])(model)
        model.graph.node[-1].output[0] = model.graph.output[0].name = name

    return mutate


def input_under(name: str) -> Mutate:
    """The input `hidden_states` gets another name."""

    def mutate(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = [name if each == "hidden_states" else each for each in node.input]
        next(each for each in model.graph.input if each.name == "hidden_states").name = name

    return mutate


def second_output(model: onnx.ModelProto) -> None:
    """The graph gets a second output, equal to the first."""
    model.graph.node.append(helper.make_node("Identity", ["output"], ["again"], name="again"))
    again = model.graph.output.add()
    again.CopyFrom(model.graph.output[0])
    again.name = "again"


def no_output(model: onnx.ModelProto) -> None:
    """The graph gets no output."""
    del model.graph.output[:]


def inner_names(model: onnx.ModelProto) -> None:
    """Every node and inner value gets another name, and every node a comment. The graph computes the same function."""
    for holder in (model.graph, *model.functions):
        inner = {name for node in holder.node for name in node.output}
        inner -= {each if isinstance(each, str) else each.name for each in holder.output}
        for node in holder.node:
            node.name, node.doc_string = f"other {node.name}", "a comment"
            node.input[:] = [f"other_{name}" if name in inner else name for name in node.input]
            node.output[:] = [f"other_{name}" if name in inner else name for name in node.output]


def nan_at(values: Array) -> Array:
    """The values with one NaN among them."""
    values.flat[1] = np.nan
    return values
