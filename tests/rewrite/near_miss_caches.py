"""Near misses of caches: past and new keys in the wrong order, of another layer, of another row."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from near_miss_editor import Editor
from near_miss_graph import caches
from near_miss_rotations import reversed_rows

Change = Callable[[Editor], bool]
CACHES: dict[str, Change] = {}


def cache(change: Callable[[Editor, tuple[ir.Node, int]], bool]) -> Change:
    """Registers a fault at one drawn cache under the function's name."""

    def changed(editor: Editor) -> bool:
        places = caches(editor.model)
        return bool(places) and change(editor, editor.rng.choice(places))

    CACHES[change.__name__] = changed
    return changed


@cache
def past_behind_new(editor: Editor, place: tuple[ir.Node, int]) -> bool:
    """New keys or values come before the past ones, in the output too."""
    editor.swap((place[0], 0), (place[0], 1))
    return True


@cache
def past_behind_new_inside(editor: Editor, place: tuple[ir.Node, int]) -> bool:
    """The attention reads new keys or values before past ones. The output has the right order."""
    node = place[0]
    readers = list(node.outputs[0].uses())
    if not readers:
        return False
    turned = ir.node("Concat", [node.inputs[1], node.inputs[0]], {"axis": node.attributes["axis"].as_int()})
    turned.outputs[0].name = editor.name()
    turned.outputs[0].shape, turned.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    node.graph.insert_after(node, turned)
    for reader, index in readers:
        reader.replace_input_with(index, turned.outputs[0])
    return True


@cache
def past_of_another_row(editor: Editor, place: tuple[ir.Node, int]) -> bool:
    """Past keys or values have the rows of the batch in reverse order."""
    node, index = place
    node.replace_input_with(index, reversed_rows(editor, node, node.inputs[index]))  # type: ignore[arg-type]
    return True


@cache
def past_smaller(editor: Editor, place: tuple[ir.Node, int]) -> bool:
    """Past keys or values are multiplied by 0.9."""
    editor.wrap(place, "Mul", editor.number(0.9, place[0].inputs[place[1]]))
    return True


def pasts_exchanged(editor: Editor) -> bool:
    """Two caches exchange their past inputs: those of two layers, or the keys and values of one layer."""
    places = caches(editor.model)
    if len(places) < 2:
        return False
    one, other = editor.rng.sample(places, 2)
    if [str(size) for size in _sizes(one)] != [str(size) for size in _sizes(other)]:
        return False
    editor.swap(one, other)
    return True


def present_of_another_layer(editor: Editor) -> bool:
    """Two cache outputs are exchanged. The attentions are correct."""
    outputs = editor.model.graph.outputs
    present = [
        i for i, value in enumerate(outputs) if any(value is node.outputs[0] for node, _ in caches(editor.model))
    ]
    if len(present) < 2:
        return False
    one, other = editor.rng.sample(present, 2)
    first, second = outputs[one], outputs[other]
    if [str(size) for size in first.shape or ()][1::2] != [str(size) for size in second.shape or ()][1::2]:
        return False
    # The outputs keep their names: an Identity of the other tensor replaces each.
    names = first.name, second.name
    first.name, second.name = editor.name(), editor.name()
    for place, source, name in ((one, second, names[0]), (other, first, names[1])):
        identity = ir.node("Identity", [source])
        identity.outputs[0].name, identity.outputs[0].shape = name, source.shape
        identity.outputs[0].type = source.type
        editor.model.graph.append(identity)
        outputs[place] = identity.outputs[0]
    return True


def _sizes(place: tuple[ir.Node, int]) -> list[object]:
    value = place[0].inputs[place[1]]
    return list(value.shape or ())[1::2] if value is not None else []


CACHES |= {"pasts_exchanged": pasts_exchanged, "present_of_another_layer": present_of_another_layer}
