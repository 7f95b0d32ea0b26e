"""Near misses of rotations: wrong signs, halves, layouts and angles at one site."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from near_miss_editor import Editor
from near_miss_graph import Rotation, find, number, rotations

Change = Callable[[Editor], bool]
ROTATIONS: dict[str, Change] = {}
FAR = np.iinfo(np.int64).max


def rotation(change: Callable[[Editor, Rotation], bool]) -> Change:
    """Registers a fault at one drawn rotation under the function's name."""

    def changed(editor: Editor) -> bool:
        places = rotations(editor.model)
        return bool(places) and change(editor, editor.rng.choice(places))

    ROTATIONS[change.__name__] = changed
    return changed


@rotation
def rotation_sign_on_the_other_half(editor: Editor, place: Rotation) -> bool:
    """(x2, -x1) in place of (-x2, x1)."""
    negated = 0 if find(place.concat.inputs[0], lambda node: node is place.negation, 4) else 1
    place.negation.outputs[0].replace_all_uses_with(place.negation.inputs[0])
    editor.wrap((place.concat, 1 - negated), "Neg")
    return True


@rotation
def rotation_without_sign(editor: Editor, place: Rotation) -> bool:
    """(x2, x1) in place of (-x2, x1)."""
    place.negation.outputs[0].replace_all_uses_with(place.negation.inputs[0])
    return True


@rotation
def rotation_halves_swapped(editor: Editor, place: Rotation) -> bool:
    """(x1, -x2) in place of (-x2, x1)."""
    editor.swap((place.concat, 0), (place.concat, 1))
    return True


@rotation
def rotation_backwards(editor: Editor, place: Rotation) -> bool:
    """x cos - turned(x) sin."""
    editor.wrap(place.sin, "Neg")
    return True


@rotation
def rotation_half_the_sine(editor: Editor, place: Rotation) -> bool:
    editor.wrap(place.sin, "Mul", editor.number(0.5, place.sin[0].outputs[0]))
    return True


@rotation
def rotation_cosine_and_sine_swapped(editor: Editor, place: Rotation) -> bool:
    editor.swap(place.cos, place.sin)
    return True


@rotation
def rotation_cosine_for_sine(editor: Editor, place: Rotation) -> bool:
    place.sin[0].replace_input_with(place.sin[1], place.cos[0].inputs[place.cos[1]])
    return True


@rotation
def rotation_missing(editor: Editor, place: Rotation) -> bool:
    """Queries or keys are not rotated."""
    place.sum.outputs[0].replace_all_uses_with(place.x)
    return True


@rotation
def rotation_without_sine(editor: Editor, place: Rotation) -> bool:
    """Only x cos."""
    place.sum.outputs[0].replace_all_uses_with(place.cos[0].outputs[0])
    return True


@rotation
def rotation_sine_of_x(editor: Editor, place: Rotation) -> bool:
    """x cos + x sin."""
    node, index = place.sin
    node.replace_input_with(1 - index, place.x)
    return True


@rotation
def rotation_uneven(editor: Editor, place: Rotation) -> bool:
    """The cosine of one feature is a little larger."""
    width = _width(place.x) or _width(place.turned)
    if not width:
        return False
    factors = np.ones(width, np.float32)
    factors[editor.rng.randrange(width)] = 1.05
    factor = editor.constant(factors.astype(_dtype(place.cos[0])))
    editor.wrap(place.cos, "Mul", factor)
    return True


@rotation
def rotation_other_layout(editor: Editor, place: Rotation) -> bool:
    """Queries or keys have the other layout; the angles stay."""
    width = _width(place.x) or _width(place.turned)
    if not width or width % 2 or place.x.shape is None or len(place.x.shape) != 4:
        return False
    node, index = place.sin
    if place.layout == "half":
        pairs = editor.before(node, "Reshape", place.x, editor.integers(0, 0, 0, width // 2, 2))
        first = editor.before(node, "Gather", pairs, editor.integers(0), axis=-1)
        second = editor.before(node, "Gather", pairs, editor.integers(1), axis=-1)
    else:
        steps = (editor.integers(3), editor.integers(1))
        first = editor.before(node, "Slice", place.x, editor.integers(0), editor.integers(width // 2), *steps)
        second = editor.before(node, "Slice", place.x, editor.integers(width // 2), editor.integers(FAR), *steps)
    turned = editor.before(node, "Concat", editor.before(node, "Neg", second), first, axis=-1)
    if place.layout == "half":
        turned = editor.before(node, "Reshape", turned, editor.integers(0, 0, 0, width))
    node.replace_input_with(1 - index, turned)
    return True


@rotation
def theta_of_one_side(editor: Editor, place: Rotation) -> bool:
    """The angles of queries or of keys are 2 % larger."""
    return _with_angles(
        editor, place, lambda angle, node: editor.before(node, "Mul", angle, editor.number(1.02, angle))
    )


@rotation
def position_of_one_side(editor: Editor, place: Rotation) -> bool:
    """Queries or keys count positions from one."""
    source = _positions(place)
    if source is None:
        return False
    shifted = editor.before(first_reader(editor.model, source), "Add", source, editor.number(1, source))
    changed = [editor.with_source(use, source, shifted) for use in (place.cos, place.sin)]
    return any(changed)


@rotation
def positions_of_another_row(editor: Editor, place: Rotation) -> bool:
    """The rotation of queries or of keys reads the rows of position_ids in reverse order."""
    inputs = [value for value in editor.model.graph.inputs if value.name == "position_ids"]
    if not inputs:
        return False
    flipped = reversed_rows(editor, first_reader(editor.model, inputs[0]), inputs[0])
    changed = [editor.with_source(use, inputs[0], flipped) for use in (place.cos, place.sin)]
    return any(changed)


def one_frequency(editor: Editor) -> bool:
    """One frequency is 3 % larger for queries and keys, so that no formula gives this table."""
    for node in editor.model.graph:
        if node.op_type in ("Cos", "Sin"):
            for product in find(node.inputs[0], lambda n: n.op_type in ("Mul", "MatMul"), 6):
                for index, value in enumerate(product.inputs):
                    table = number(value)
                    if table is not None and table.size > 1 and table.dtype.kind == "f":
                        changed = table.copy()
                        changed.reshape(-1)[editor.rng.randrange(1, table.size)] *= 1.03
                        product.replace_input_with(index, editor.constant(changed))
                        return True
    return False


ROTATIONS["one_frequency"] = one_frequency


def reversed_rows(editor: Editor, node: ir.Node, value: ir.Value) -> ir.Value:
    """The rows of a batch in reverse order, computed before a node."""
    ends = (editor.integers(-1), editor.integers(-FAR), editor.integers(0), editor.integers(-1))
    return editor.before(node, "Slice", value, *ends)


def _with_angles(editor: Editor, place: Rotation, change: Callable[[ir.Value, ir.Node], ir.Value]) -> bool:
    for use in (place.cos, place.sin):
        waves = find(use[0].inputs[use[1]], lambda node: node.op_type in ("Cos", "Sin"), 10)
        if not waves:
            return False
        angle = waves[0].inputs[0]
        editor.with_source(use, angle, change(angle, first_reader(editor.model, angle)))
    return True


def _positions(place: Rotation) -> ir.Value | None:
    """Integers that the cosine depends on: they are cast to floats, or they are the indices of a Gather."""
    value = place.cos[0].inputs[place.cos[1]]
    for node in find(value, lambda node: node.op_type in ("Cast", "Gather", "GatherElements"), 20):
        source = node.inputs[0 if node.op_type == "Cast" else 1]
        if source is not None and source.dtype is not None and source.dtype.is_integer() and number(source) is None:
            return source
    return None


def first_reader(model: ir.Model, value: ir.Value) -> ir.Node:
    """The reader of a value that comes first in the graph."""
    readers = {node for node, _ in value.uses()}
    return next(node for node in model.graph if node in readers)


def _width(value: ir.Value | None) -> int:
    size = value.shape[-1] if value is not None and value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else 0


def _dtype(node: ir.Node) -> type:
    dtype = node.outputs[0].dtype
    return np.float16 if dtype == ir.DataType.FLOAT16 else np.float32
