"""Near misses of scores: scales, caps, the softmax, and operands of another layer or another order of heads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from near_miss_editor import Editor
from near_miss_graph import Site, below, find, number, score_path, sites

Change = Callable[[Editor], bool]
SCORES: dict[str, Change] = {}
CONSTANT_SCALES = ("Mul", "Div")


def site(change: Callable[[Editor, Site], bool]) -> Change:
    """Registers a fault at one drawn attention under the function's name."""

    def changed(editor: Editor) -> bool:
        places = [place for place in sites(editor.model) if place.product is not None]
        return bool(places) and change(editor, editor.rng.choice(places))

    SCORES[change.__name__] = changed
    return changed


def scales(place: Site) -> list[tuple[ir.Node, int]]:
    """Multiplications and divisions by one number on the way to the scores, as (node, index of the number)."""
    nodes = [node for node in score_path(place) if node.op_type in CONSTANT_SCALES]
    for value in place.product.inputs:  # type: ignore[union-attr]
        while (node := value.producer()) is not None and node.op_type in (*CONSTANT_SCALES, "Transpose", "Reshape"):
            scalars = [i for i, entry in enumerate(node.inputs) if _scalar(entry)]
            if node.op_type in CONSTANT_SCALES and not scalars:
                break
            nodes += [node] if node.op_type in CONSTANT_SCALES else []
            value = node.inputs[1 - scalars[0] if scalars and node.op_type in CONSTANT_SCALES else 0]
    found = [(node, i) for node in nodes for i, entry in enumerate(node.inputs) if _scalar(entry)]
    return [(node, i) for node, i in found if float(number(node.inputs[i]).reshape(())) != 1]  # type: ignore[union-attr]


def _scalar(value: ir.Value | None) -> bool:
    array = number(value)
    return array is not None and array.size == 1


def _draw_scale(editor: Editor, place: Site) -> tuple[ir.Node, int] | None:
    places = scales(place)
    return editor.rng.choice(places) if places else None


@site
def scale_changed(editor: Editor, place: Site) -> bool:
    """A scale of the queries, of the keys or of the scores is 10 % larger."""
    drawn = _draw_scale(editor, place)
    if drawn is None:
        return False
    old = number(drawn[0].inputs[drawn[1]])
    drawn[0].replace_input_with(drawn[1], editor.constant((old * 1.1).astype(old.dtype)))  # type: ignore[union-attr]
    return True


@site
def scale_missing(editor: Editor, place: Site) -> bool:
    drawn = _draw_scale(editor, place)
    if drawn is None or (drawn[0].op_type == "Div" and drawn[1] == 0):
        return False
    drawn[0].outputs[0].replace_all_uses_with(drawn[0].inputs[1 - drawn[1]])
    return True


@site
def scale_twice(editor: Editor, place: Site) -> bool:
    drawn = _draw_scale(editor, place)
    if drawn is None or (drawn[0].op_type == "Div" and drawn[1] == 0):
        return False
    node, index = drawn
    editor.wrap((node, 1 - index), node.op_type, node.inputs[index])
    return True


@site
def scale_behind_the_bias(editor: Editor, place: Site) -> bool:
    """(scores + bias) * scale in place of scores * scale + bias."""
    path = score_path(place)
    for join, scale in pairwise(path):
        if join.op_type == "Add" and scale.op_type in CONSTANT_SCALES:
            index = next((i for i, entry in enumerate(scale.inputs) if _scalar(entry)), None)
            if index is None or (scale.op_type == "Div" and index == 0):
                continue
            join.replace_input_with(list(join.inputs).index(scale.outputs[0]), scale.inputs[1 - index])
            for node, i in list(join.outputs[0].uses()):
                editor.wrap((node, i), scale.op_type, scale.inputs[index])
            return True
    return False


@site
def cap_changed(editor: Editor, place: Site) -> bool:
    """The number that multiplies the tanh is 10 % larger."""
    path = score_path(place)
    for later, tanh in pairwise(path):
        index = next((i for i, entry in enumerate(later.inputs) if _scalar(entry)), None)
        if tanh.op_type == "Tanh" and later.op_type in CONSTANT_SCALES and index is not None:
            old = number(later.inputs[index])
            later.replace_input_with(index, editor.constant((old * 1.1).astype(old.dtype)))  # type: ignore[union-attr]
            return True
    return False


@site
def cap_missing(editor: Editor, place: Site) -> bool:
    """There is no tanh; the numbers before and after it stay."""
    for node in score_path(place):
        if node.op_type == "Tanh":
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            return True
    return False


@site
def cap_behind_the_mask(editor: Editor, place: Site) -> bool:
    """The cap comes after the mask: hidden scores become minus the cap."""
    editor.wrap((place.node, 0), "Mul", editor.number(0.2, place.node.inputs[0]))
    editor.wrap((place.node, 0), "Tanh")
    editor.wrap((place.node, 0), "Mul", editor.number(5.0, place.node.inputs[0]))
    return True


@site
def softmax_over_queries(editor: Editor, place: Site) -> bool:
    place.node.attributes["axis"] = ir.AttrInt64("axis", -2)
    return True


@site
def softmax_over_heads(editor: Editor, place: Site) -> bool:
    shape = place.node.inputs[0].shape
    if shape is not None and len(shape) != 4:
        return False
    place.node.attributes["axis"] = ir.AttrInt64("axis", 1)
    return True


@site
def scores_clipped(editor: Editor, place: Site) -> bool:
    """Scores are clipped at 1 before a mask or bias joins them."""
    product = place.product
    scores = product.outputs[0]  # type: ignore[union-attr]
    for use in list(scores.uses()):
        editor.wrap(use, "Min", editor.number(1.0, scores))
    return True


@site
def scores_squared(editor: Editor, place: Site) -> bool:
    """Each score is reduced by 0.05 times its square."""
    scores = place.product.outputs[0]  # type: ignore[union-attr]
    for use in list(scores.uses()):
        square = editor.before(use[0], "Mul", scores, scores)
        editor.wrap(use, "Sub", editor.before(use[0], "Mul", square, editor.number(0.05, scores)))
    return True


@site
def weights_smaller(editor: Editor, place: Site) -> bool:
    """The weights of a query sum to 0.95."""
    weights = place.node.outputs[0]
    for use in list(weights.uses()):
        editor.wrap(use, "Mul", editor.number(0.95, weights))
    return True


@site
def weights_squared(editor: Editor, place: Site) -> bool:
    weights = place.node.outputs[0]
    for use in list(weights.uses()):
        editor.wrap(use, "Mul", weights)
    return True


@site
def scale_of_one_head(editor: Editor, place: Site) -> bool:
    """Queries of one head are 5 % larger."""
    query = place.product.inputs[0]  # type: ignore[union-attr]
    heads = query.shape[1] if query.shape is not None and len(query.shape) == 4 else 0
    if not isinstance(heads, int) or heads < 2:
        return False
    factors = np.ones((1, heads, 1, 1), np.float16 if query.dtype == ir.DataType.FLOAT16 else np.float32)
    factors[0, editor.rng.randrange(heads)] = 1.05
    editor.wrap((place.product, 0), "Mul", editor.constant(factors))  # type: ignore[arg-type]
    return True


def other_layer(name: str, role: str) -> Change:
    """An attention reads the queries, keys or values of an earlier one."""

    def changed(editor: Editor) -> bool:
        places = sites(editor.model)
        if len(places) < 2:
            return False
        later = editor.rng.randrange(1, len(places))
        earlier = editor.rng.randrange(later)
        node, index = places[later].operands[role]
        source, at = places[earlier].operands[role]
        mine, theirs = node.inputs[index], source.inputs[at]
        if mine is theirs or _shape(mine) != _shape(theirs):
            return False
        node.replace_input_with(index, theirs)
        return True

    SCORES[name] = changed
    return changed


def _shape(value: ir.Value | None) -> list[int | None] | None:
    """The sizes of the axes, None where a size is not a number."""
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]


other_layer("queries_of_another_layer", "query")
other_layer("keys_of_another_layer", "key")
other_layer("values_of_another_layer", "value")


@site
def heads_as_tokens(editor: Editor, place: Site) -> bool:
    """The result is reshaped without the Transpose of heads and tokens."""
    value, uses = below(place.context.outputs[0], {"Reshape", "Cast"})  # type: ignore[union-attr]
    for node, _ in uses:
        if node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == (0, 2, 1, 3):
            readers = list(node.outputs[0].uses())
            if all(reader.op_type == "Reshape" for reader, _ in readers):
                node.outputs[0].replace_all_uses_with(value)
                return True
    return False


def repeats(place: Site, role: str) -> ir.Node | None:
    """The Expand that repeats heads of keys or values: from (batch, heads, 1, tokens, size)."""
    node, index = place.operands[role]
    for expand in find(node.inputs[index], lambda n: n.op_type == "Expand", 10):
        unsqueeze = expand.inputs[0].producer() if expand.inputs[0] is not None else None
        axes = number(unsqueeze.inputs[1]) if unsqueeze is not None and unsqueeze.op_type == "Unsqueeze" else None
        if axes is not None and axes.reshape(-1).tolist() == [2]:
            return expand
    return None


def tiled(name: str, *roles: str) -> Change:
    """The list of heads is repeated (0, 1, 0, 1) instead of each head (0, 0, 1, 1)."""

    def changed(editor: Editor) -> bool:
        places = [place for place in sites(editor.model) if place.product is not None]
        if not places:
            return False
        place = editor.rng.choice(places)
        expands = [repeats(place, role) for role in roles]
        if None in expands:
            return False
        for expand in dict.fromkeys(expands):
            assert expand is not None
            source = expand.inputs[0].producer().inputs[0]  # type: ignore[union-attr]
            expand.replace_input_with(0, editor.before(expand, "Unsqueeze", source, editor.integers(1)))
            expand.inputs[0].shape = None  # type: ignore[union-attr]
            expand.outputs[0].shape = None
            editor.wrap((expand, 1), "Gather", editor.integers(0, 2, 1, 3, 4), axis=0)
        return True

    SCORES[name] = changed
    return changed


tiled("keys_tiled", "key")
tiled("values_tiled", "value")
tiled("keys_and_values_tiled", "key", "value")


@site
def norm_epsilon(editor: Editor, place: Site) -> bool:
    """The epsilon in a norm of queries, of keys or of the layer's input is 0.3."""
    node, index = place.operands[editor.rng.choice(["query", "key"])]
    for step in find(node.inputs[index], lambda n: True, 40):
        if "epsilon" in step.attributes:
            step.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.3)
            return True
        small = [i for i, entry in enumerate(step.inputs) if step.op_type == "Add" and _small(entry)]
        if small:
            step.replace_input_with(small[0], editor.number(0.3, step.inputs[small[0]]))
            return True
    return False


def _small(value: ir.Value | None) -> bool:
    return _scalar(value) and 0 < float(number(value).reshape(())) < 1e-3  # type: ignore[union-attr]


@site
def sinks_of_other_heads(editor: Editor, place: Site) -> bool:
    """Every head has the sink of the next one."""
    for node in score_path(place):
        steps = [step for entry in node.inputs for step in find(entry, lambda n: True, 6)]
        for step in steps if node.op_type == "Concat" else []:
            for index, value in enumerate(step.inputs):
                table = number(value)
                if table is not None and table.dtype.kind == "f" and table.size == max(table.shape, default=0) > 1:
                    rolled = np.roll(table.reshape(-1), 1).reshape(table.shape)
                    step.replace_input_with(index, editor.constant(rolled))
                    return True
    return False
