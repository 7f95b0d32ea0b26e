"""Decoders whose angles depend on the length of the rows. This file does not import posexport."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import small_graphs
from exact_graphs import frequencies, table
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

LONG = 200
"""Rows with more tokens are long."""


def _put(model: onnx.ModelProto, before: int, nodes: list[onnx.NodeProto], **weights: Array) -> onnx.ModelProto:
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for offset, node in enumerate(nodes):
        model.graph.node.insert(before + offset, node)
    onnx.checker.check_model(model)
    return model


def _op(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=f"made_{output}", **attributes)


def _long() -> list[onnx.NodeProto]:
    """Nodes that compute `is_long`, a bool [1]: whether the row is long."""
    return [_op("Shape", "input_ids", "many", start=1, end=2), _op("Greater", "many limit", "is_long")]


def _at(model: onnx.ModelProto, kind: str) -> tuple[int, onnx.NodeProto]:
    return next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == kind)


def chosen_frequencies() -> onnx.ModelProto:
    """Other frequencies if a row is long."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    node.input[1] = "chosen"
    chosen = [*_long(), _op("Where", "is_long others inv_freq", "chosen")]
    return _put(model, place, chosen, limit=np.array([LONG]), others=frequencies(100.0))


def scaled_cosines() -> onnx.ModelProto:
    """Cosines that are larger if a row is long."""
    model = small_graphs.decoder()
    place, node = _at(model, "Cos")
    output, node.output[0] = node.output[0], "plain_cosines"
    new = [*_long(), _op("Where", "is_long larger one", "factor"), _op("Mul", "plain_cosines factor", output)]
    return _put(model, place + 1, new, limit=np.array([LONG]), larger=np.float32(1.5), one=np.float32(1.0))


def taken_variant() -> onnx.ModelProto:
    """Frequencies sliced from a table of two rows; a long row takes the second."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    node.input[1] = "chosen"
    both = np.concatenate([frequencies().reshape(1, 1, -1), frequencies(100.0).reshape(1, 1, -1)])
    new = [
        *_long(),
        _op("Cast", "is_long", "first", to=TensorProto.INT64),
        _op("Add", "first single", "last"),
        _op("Slice", "both first last outer", "chosen"),
    ]
    return _put(model, place, new, limit=np.array([LONG]), both=both, single=np.array([1]), outer=np.array([0]))


def interpolated() -> onnx.ModelProto:
    """Positions multiplied by LONG / length if a row is long."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    places, node.input[0] = node.input[0], "pressed"
    new = [
        _op("Shape", "input_ids", "many", start=1, end=2),
        _op("Cast", "many", "many_f", to=TensorProto.FLOAT),
        _op("Div", "limit many_f", "part"),
        _op("Min", "part one", "factor"),
        _op("Mul", f"{places} factor", "pressed"),
    ]
    return _put(model, place, new, limit=np.array([LONG], np.float32), one=np.array([1.0], np.float32))


def _frequencies_divided(new: list[onnx.NodeProto], **weights: Array) -> onnx.ModelProto:
    """Frequencies divided by the value `divisor`, which the new nodes compute from the length `many`."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    node.input[1] = "divided"
    nodes = [_op("Shape", "input_ids", "many", start=1, end=2), *new, _op("Div", "inv_freq divisor", "divided")]
    return _put(model, place, nodes, **weights)


def divided_by_a_shape() -> onnx.ModelProto:
    """Frequencies divided by the length of a value that has one element for every LONG tokens, and at least one."""
    new = [
        _op("Div", "many limit", "parts"),
        _op("Max", "parts single", "at_least_one"),
        _op("ConstantOfShape", "at_least_one", "filled"),
        _op("Shape", "filled", "length"),
        _op("Cast", "length", "divisor", to=TensorProto.FLOAT),
    ]
    return _frequencies_divided(new, limit=np.array([LONG]), single=np.array([1]))


def divided_by_a_sum(op: str) -> onnx.ModelProto:
    """Frequencies divided by 1, or by more if the sum of all places of a row is large.

    `op` computes the sum: MatMul or Einsum.
    """
    summed = (
        _op("Einsum", "places_f ones", "sum", equation="s,p->p")
        if op == "Einsum"
        else _op("MatMul", "places_f counted_ones", "sum")
    )
    new = [
        _op("Squeeze", "many", "how_many"),
        _op("Range", "none how_many single", "places"),
        _op("Cast", "places", "places_f", to=TensorProto.FLOAT),
        _op("Expand", "one_column many_by_one", "counted_ones"),
        summed,
        _op("Div", "sum limit", "part"),
        _op("Floor", "part", "whole"),
        _op("Add", "whole one", "divisor"),
    ]
    new.insert(0, _op("Concat", "many one_more", "many_by_one", axis=0))
    return _frequencies_divided(
        new,
        none=np.array(0),
        single=np.array(1),
        one=np.array([1.0], np.float32),
        ones=np.ones(1, np.float32),
        one_column=np.ones((1, 1), np.float32),
        one_more=np.array([1]),
        limit=np.array([LONG * LONG / 2], np.float32),
    )


def _angles_times(new: list[onnx.NodeProto], **weights: Array) -> onnx.ModelProto:
    """Angles [batch, seq, pairs] times the value `factor`, which the new nodes compute."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    angles, node.output[0] = node.output[0], "plain_angles"
    return _put(model, place + 1, [*new, _op("Mul", "plain_angles factor", angles)], **weights)


def _factor(compared: str) -> list[onnx.NodeProto]:
    """Nodes that compute `factor`: 2 if the value `compared` is above `limit`, otherwise 1."""
    return [
        _op("Greater", f"{compared} limit", "is_above"),
        _op("Cast", "is_above", "above", to=TensorProto.FLOAT),
        _op("Add", "above one", "factor"),
    ]


MANY_ROWS = 6
"""In `faster_rows`, rows from this one on have other angles."""


def faster_rows() -> onnx.ModelProto:
    """Other frequencies in rows from MANY_ROWS on."""
    return _faster(0, behind=MANY_ROWS - 1, added=[1, 2])


def faster_tokens() -> onnx.ModelProto:
    """Other frequencies for tokens after the first ones, whatever their positions are."""
    return _faster(1, behind=LONG, added=[1])


def _faster(axis: int, *, behind: int, added: list[int]) -> onnx.ModelProto:
    """Twice the angles at places above `behind` on an axis of the tokens.

    `added` are the axes of the angles that follow this axis.
    """
    new = [
        _op("Shape", "input_ids", "many", start=axis, end=axis + 1),
        _op("Squeeze", "many", "how_many"),
        _op("Range", "none how_many single", "places"),
        _op("Unsqueeze", "places added", "places_column"),
        *_factor("places_column"),
    ]
    weights = {"none": np.array(0), "single": np.array(1), "added": np.array(added)}
    return _angles_times(new, **weights, limit=np.array(behind), one=np.float32(1))


def counted_below(op: str) -> onnx.ModelProto:
    """Twice the angles if there are more than LONG positions.

    The graph counts positions as the sum of `angle == angle`; `op` computes it: ReduceSum, CumSum or MatMul.
    """
    counted = {
        "ReduceSum": _op("ReduceSum", "ones row_axis", "count", keepdims=1),
        "CumSum": _op("CumSum", "ones place_axis", "count"),
        "MatMul": _op("MatMul", "ones_of_row ones", "count"),
    }
    new = [
        _op("Equal", "plain_angles plain_angles", "is_equal"),
        _op("Cast", "is_equal", "ones", to=TensorProto.FLOAT),
        _op("Transpose", "ones", "ones_of_row", perm=[0, 2, 1]),
        counted[op],
        *([_op("ReduceMax", "count last_two", "most", keepdims=1)] if op == "MatMul" else []),
        *_factor("most" if op == "MatMul" else "count"),
    ]
    weights = {"row_axis": np.array([1]), "place_axis": np.array(1), "last_two": np.array([1, 2])}
    return _angles_times(new, **weights, limit=np.float32(LONG), one=np.float32(1))


def turned_round() -> onnx.ModelProto:
    """Positions in reverse order after the first LONG tokens."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    places, node.input[0] = node.input[0], "turned"
    new = [
        _op("Shape", "input_ids", "many", start=1, end=2),
        _op("Min", "many limit", "first_ones"),
        _op("Slice", f"{places} begin first_ones row_axis", "front"),
        _op("Sub", "first_ones many", "others"),
        _op("Sub", "others single", "end"),
        _op("Slice", f"{places} minus end row_axis minus", "back"),
        _op("Concat", "front back", "turned", axis=1),
    ]
    weights = {"begin": np.array([0]), "row_axis": np.array([1]), "single": np.array([1]), "minus": np.array([-1])}
    return _put(model, place, new, limit=np.array([LONG]), **weights)


def doubled_positions() -> onnx.ModelProto:
    """Integer positions that are doubled if a row is long. Nothing else depends on the length."""
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "position_ids" in one.input)
    node.input[0] = "far_positions"
    new = [*_long(), _op("Where", "is_long two one", "factor"), _op("Mul", "position_ids factor", "far_positions")]
    return _put(model, place, new, limit=np.array([LONG]), two=np.array(2), one=np.array(1))


def cut_table(rows: int, edited: int | None = None) -> onnx.ModelProto:
    """Float64 tables from which the graph slices one row for each key before it looks rows up.

    The row `edited` of both tables is negated.
    """
    model = table(rows)
    angles = np.arange(rows)[:, None] * 10_000.0 ** (-np.arange(0, small_graphs.SIZE, 2) / small_graphs.SIZE)
    for weight in model.graph.initializer:
        if weight.name.endswith("_table"):
            array = np.tile(np.cos(angles) if weight.name == "Cos_table" else np.sin(angles), 2)
            if edited is not None:
                array[edited] = -array[edited]
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    place = next(at for at, one in enumerate(model.graph.node) if one.op_type == "Gather" and "table" in one.input[0])
    new = [_op("Shape", "attention_mask", "keys", start=1, end=2)]
    for node in [one for one in model.graph.node if one.op_type == "Gather" and one.input[0].endswith("_table")]:
        name = node.input[0]
        new.append(_op("Slice", f"{name} begin keys begin", f"{name}_cut"))
        new.append(_op("Cast", f"{name}_cut", f"{name}_f", to=TensorProto.FLOAT))
        node.input[0] = f"{name}_f"
    return _put(model, place, new, begin=np.array([0]))


def made_table(edited: int | None = None) -> onnx.ModelProto:
    """A table of angles that the graph computes, with one row for each key.

    The row `edited` has the angles of position 0.
    """
    model = small_graphs.decoder()
    place, node = next((at, one) for at, one in enumerate(model.graph.node) if "inv_freq" in one.input)
    angles = node.output[0]
    model.graph.node.remove(node)
    new = [
        _op("Shape", "attention_mask", "keys", start=1, end=2),
        _op("Squeeze", "keys", "how_many"),
        _op("Range", "none how_many single", "places"),
        _op("Equal", "places edited", "is_edited"),
        _op("Where", "is_edited none places", "moved"),
        _op("Cast", "moved", "moved_f", to=TensorProto.FLOAT),
        _op("Unsqueeze", "moved_f last", "moved_column"),
        _op("Mul", "moved_column flat", "table"),
        _op("Gather", "table position_ids", angles),
    ]
    return _put(
        model,
        place,
        new,
        none=np.array(0),
        single=np.array(1),
        last=np.array([1]),
        flat=frequencies().reshape(1, -1),
        edited=np.array(-1 if edited is None else edited),
    )


def counted(*, spread: bool) -> onnx.ModelProto:
    """A decoder that counts its positions itself. With `spread`, it repeats its cosines and sines for each row."""
    model = small_graphs.decoder(cache=False)
    graph = model.graph
    graph.input.remove(next(one for one in graph.input if one.name == "position_ids"))
    place, node = next((at, one) for at, one in enumerate(graph.node) if "position_ids" in one.input)
    node.input[0] = "own_positions"
    new = [
        _op("Shape", "input_ids", "many", start=1, end=2),
        _op("Squeeze", "many", "how_many"),
        _op("Range", "none how_many single", "places"),
        _op("Unsqueeze", "places outer", "own_positions"),
    ]
    _put(model, place, new, none=np.array(0), single=np.array(1), outer=np.array([0]))
    if spread:
        for kind in ("Cos", "Sin"):
            place, node = _at(model, kind)
            output, node.output[0] = node.output[0], f"{kind}_of_one"
            shape = [
                _op("Shape", "input_ids", f"{kind}_rows", start=0, end=1),
                _op("Concat", f"{kind}_rows {kind}_ones", f"{kind}_shape", axis=0),
                _op("Expand", f"{kind}_of_one {kind}_shape", output),
            ]
            _put(model, place + 1, shape, **{f"{kind}_ones": np.array([1, 1, 1])})
    return model
