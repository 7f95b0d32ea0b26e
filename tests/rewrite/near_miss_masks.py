"""Near misses of masks and biases: windows off by one, masks of another row, biases of other heads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from near_miss_editor import Editor
from near_miss_graph import Site, find, masks, number, sites
from near_miss_rotations import first_reader, reversed_rows

Change = Callable[[Editor], bool]
MASKS: dict[str, Change] = {}
STRICT = {"LessOrEqual": "Less", "Less": "LessOrEqual", "GreaterOrEqual": "Greater", "Greater": "GreaterOrEqual"}


def masked(change: Callable[[Editor, tuple[ir.Node, int]], bool]) -> Change:
    """Registers a fault at a drawn mask or bias, under the function's name."""

    def changed(editor: Editor) -> bool:
        joins = [join for place in sites(editor.model) for join in masks(place)]
        return bool(joins) and change(editor, editor.rng.choice(joins))

    MASKS[change.__name__] = changed
    return changed


def _value(join: tuple[ir.Node, int]) -> ir.Value | None:
    return join[0].inputs[join[1]]


def _comparisons(join: tuple[ir.Node, int]) -> list[ir.Node]:
    return find(_value(join), lambda node: node.op_type in STRICT and _integers(node.inputs[0]), 60)


def _integers(value: ir.Value | None) -> bool:
    return value is not None and (value.dtype is None or value.dtype.is_integer())


@masked
def comparison_strict(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """Uses < for <=, or the other way round: causal masks and windows allow one key more or fewer."""
    nodes = _comparisons(join)
    if not nodes:
        return False
    node = editor.rng.choice(nodes)
    node.op_type = STRICT[node.op_type]
    return True


@masked
def comparison_shifted(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """One side of a comparison is larger by one or two."""
    nodes = _comparisons(join)
    if not nodes:
        return False
    node, index = editor.rng.choice(nodes), editor.rng.randrange(2)
    editor.wrap((node, index), "Add", editor.number(editor.rng.choice([1, 2]), node.inputs[index]))
    return True


@masked
def comparison_of_one_layer(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """The mask of only one layer is shifted by one."""
    nodes = _comparisons(join)
    if not nodes:
        return False
    node = editor.rng.choice(nodes)
    first, second = node.inputs
    shifted = editor.before(node, "Add", second, editor.number(editor.rng.choice([-1, 1]), second))
    compared = editor.before(node, node.op_type, first, shifted)
    compared.shape, compared.type = node.outputs[0].shape, node.outputs[0].type
    editor.model.graph.sort()
    return editor.with_source(join, node.outputs[0], compared)


@masked
def trilu_shifted(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A triangular mask starts one diagonal later."""
    nodes = find(_value(join), lambda node: node.op_type == "Trilu", 60)
    if not nodes:
        return False
    node = editor.rng.choice(nodes)
    start = number(node.inputs[1]) if len(node.inputs) > 1 else np.array(0)
    if start is None:
        return False
    node.resize_inputs(2)
    node.replace_input_with(1, editor.constant(np.array(int(start.reshape(())) + 1, np.int64)))
    return True


@masked
def mask_weak(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """The mask has -3 in place of a large negative number."""
    nodes = find(_value(join), lambda node: any(_large(entry) for entry in node.inputs), 60)
    if join[0].op_type == "Where" and any(_large(entry) for entry in join[0].inputs):
        nodes = [join[0]]
    if not nodes:
        return False
    node = editor.rng.choice(nodes)
    index = next(i for i, entry in enumerate(node.inputs) if _large(entry))
    node.replace_input_with(index, editor.number(-3.0, node.inputs[index]))
    return True


def _large(value: ir.Value | None) -> bool:
    array = number(value)
    return array is not None and array.dtype.kind == "f" and array.size == 1 and float(array.reshape(())) < -1e3


@masked
def mask_of_another_row(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """One attention reads the padding mask with its rows in reverse order."""
    inputs = [value for value in editor.model.graph.inputs if value.name == "attention_mask"]
    if not inputs:
        return False
    flipped = reversed_rows(editor, first_reader(editor.model, inputs[0]), inputs[0])
    return editor.with_source(join, inputs[0], flipped)


@masked
def mask_of_any(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A key is visible if either of two masks allows it."""
    nodes = find(_value(join), lambda node: node.op_type == "And", 60)
    if not nodes:
        return False
    editor.rng.choice(nodes).op_type = "Or"
    return True


@masked
def mask_missing(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """One attention has no mask or no bias."""
    node, index = join
    if node.op_type in ("Add", "Sub"):
        node.outputs[0].replace_all_uses_with(node.inputs[1 - index])
        return True
    if node.op_type == "Attention":
        node.replace_input_with(3, None)
        return True
    return False


@masked
def bias_twice(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A mask or bias is added to the scores twice."""
    node, index = join
    if node.op_type not in ("Add", "Sub"):
        return False
    editor.wrap((node, 1 - index), node.op_type, node.inputs[index])
    return True


@masked
def bias_smaller(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A mask or bias is multiplied by 0.9."""
    node, index = join
    value = node.inputs[index]
    if node.op_type not in ("Add", "Sub") or value is None:
        return False
    editor.wrap(join, "Mul", editor.number(0.9, value))
    return True


@masked
def bias_of_the_other_direction(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A difference of positions has the other sign."""
    nodes = find(_value(join), lambda node: node.op_type == "Sub" and _integers(node.inputs[0]), 60)
    nodes = [node for node in nodes if not any(number(entry) is not None for entry in node.inputs)]
    nodes = [node for node in nodes if (shape := node.outputs[0].shape) is None or len(shape)]
    if not nodes:
        return False
    node = editor.rng.choice(nodes)
    editor.swap((node, 0), (node, 1))
    return True


@masked
def bias_of_another_head(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """Every head has the bias of the next one."""
    value = _value(join)
    shape = value.shape if value is not None else None
    heads = shape[-3] if shape is not None and len(shape) >= 3 else 0
    if not isinstance(heads, int) or heads < 2 or shape is None:
        return False
    order = [(head + 1) % heads for head in range(heads)]
    editor.wrap(join, "Gather", editor.integers(*order), axis=len(shape) - 3)
    return True


@masked
def slopes_of_another_head(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A constant with one number for each head is rolled by one."""
    for node in find(_value(join), lambda node: node.op_type in ("Mul", "Gather"), 60):
        for index, entry in enumerate(node.inputs):
            table = number(entry)
            if table is not None and table.dtype.kind == "f" and table.size > 1 and table.size == max(table.shape):
                rolled = np.roll(table.reshape(-1), 1).reshape(table.shape)
                node.replace_input_with(index, editor.constant(rolled))
                return True
    return False


@masked
def table_backwards(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """A table of biases by distance has its rows in reverse order."""
    for node in find(_value(join), lambda node: node.op_type == "Gather", 60):
        table = number(node.inputs[0])
        if table is not None and table.dtype.kind == "f" and table.ndim == 2 and table.shape[0] > 2:
            node.replace_input_with(0, editor.constant(table[::-1].copy()))
            return True
    return False


@masked
def bucket_later(editor: Editor, join: tuple[ir.Node, int]) -> bool:
    """An integer in the computation of buckets or windows is larger by one."""
    places = []
    for node in find(_value(join), lambda node: node.op_type in ("Add", "Sub", "Less", "Greater", "Min", "Max"), 60):
        for index, entry in enumerate(node.inputs):
            array = number(entry)
            if array is not None and array.dtype.kind == "i" and array.size == 1 and abs(int(array.reshape(()))) > 1:
                places.append((node, index, array))
    if not places:
        return False
    node, index, array = editor.rng.choice(places)
    node.replace_input_with(index, editor.constant(array + 1))
    return True


def mask_of_another_layer(editor: Editor) -> bool:
    """Two attentions exchange their masks."""
    rows = list(zip(*(masks(place) for place in sites(editor.model)), strict=False))
    rows = [{_value(join): join for join in row} for row in rows]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        return False
    one, other = editor.rng.sample(list(editor.rng.choice(rows).values()), 2)
    editor.swap(one, other)
    return True


MASKS["mask_of_another_layer"] = mask_of_another_layer


def sites_with_masks(model: ir.Model) -> list[Site]:
    """Attentions that have a mask or a bias."""
    return [place for place in sites(model) if masks(place)]
