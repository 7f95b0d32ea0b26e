"""Features whose dimensions have meaningless names: the products of attention distinguish tokens from rows.

scores [rows * HEADS, tokens, tokens] = queries keys,   features [tokens, rows, WIDTH] or [rows, tokens, WIDTH]
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_graphs import Writer
from descriptions import described
from onnx import TensorProto, helper
from onnx_ir import from_proto

from posexport.graphs.attention.layouts import snapped
from posexport.graphs.view import view_of

HEADS, SIZE, ROWS_OF_TABLE = 4, 8, 40
WIDTH = HEADS * SIZE


def encoder(dims: tuple[str | None, str | None], *, tokens_first: bool, table: int = 0) -> onnx.ModelProto:
    """One attention. If `table` is 2 or 3, the graph first adds a position table with so many axes to the tokens."""
    g, rng = Writer(), np.random.default_rng(0)
    order = [1, 0, 2] if tokens_first else [0, 1, 2]
    x, tokens = "hidden_states", 0 if tokens_first else 1
    if table:
        rows = g.floats(rng.standard_normal((ROWS_OF_TABLE, WIDTH)))
        if table == 3:
            rows = g.op("Unsqueeze", rows, g.const([1 - tokens]))
        axis = tokens if table == 3 else 0
        length = g.op("Shape", x, start=tokens, end=tokens + 1)
        places = g.op("Slice", rows, g.const([0]), length, g.const([axis]))
        x = g.op("Add", x, g.op("Unsqueeze", places, g.const([1])) if table == 2 and tokens_first else places)
    rows_first = g.op("Transpose", x, perm=order)
    q, k, v = (
        g.op(
            "Transpose",
            g.op(
                "Reshape",
                g.op("MatMul", rows_first, g.floats(rng.standard_normal((WIDTH, WIDTH)) / WIDTH)),
                g.const([0, 0, HEADS, SIZE]),
            ),
            perm=[0, 2, 1, 3],
        )
        for _ in range(3)
    )
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    merged = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.const([0, 0, WIDTH]))
    g.nodes.append(helper.make_node("Transpose", [merged], ["y"], perm=order))
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [*dims, WIDTH])] for name in ("hidden_states", "y")
    )
    graph = helper.make_graph(g.nodes, "main_graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize("dims", [("s0", "s1"), (None, None)], ids=str)
def test_products_tell_tokens_from_rows(dims: tuple[str | None, str | None], tokens_first: bool) -> None:
    view = view_of(from_proto(encoder(dims, tokens_first=tokens_first)))
    expected = ("seq", "batch") if tokens_first else ("batch", "seq")
    assert view.roles["hidden_states"].axes == (*expected, WIDTH)


def test_what_names_say_is_not_overruled() -> None:
    view = view_of(from_proto(encoder(("batch", "seq"), tokens_first=True)))
    assert view.roles["hidden_states"].axes == ("batch", "seq", WIDTH)


@pytest.mark.parametrize(("tokens_first", "table"), [(True, 2), (True, 3), (False, 3)])
def test_learned_positions_of_tokens_that_stand_first(tokens_first: bool, table: int) -> None:
    dims = ("seq", "batch") if tokens_first else ("batch", "seq")
    found = described(encoder(dims, tokens_first=tokens_first, table=table))
    assert found["input_encoding"] == {"name": "learned", "max_positions": ROWS_OF_TABLE}
    assert described(encoder(dims, tokens_first=tokens_first))["input_encoding"] is None


def test_a_sum_adds_positions_too() -> None:
    model = encoder(("batch", "seq"), tokens_first=False, table=3)
    (added,) = (node for node in model.graph.node if node.op_type == "Add")
    added.op_type = "Sum"
    assert described(model)["input_encoding"] == {"name": "learned", "max_positions": ROWS_OF_TABLE}


@pytest.mark.parametrize("size", [8, 96, 128])
def test_fourth_roots_of_sizes_are_numbers(size: int) -> None:
    """torch multiplies queries and keys by the root of 1 / sqrt(size), which TorchScript computes at run time."""
    assert snapped((1 / size) ** 0.25) == pytest.approx((1 / size) ** 0.25, rel=1e-15)
    assert snapped((1 / size) ** 0.25 * (1 + 1e-9)) is None
