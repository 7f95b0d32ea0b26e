"""Attention that reads the number of its own keys after a cache, and scores that are not finite under a mask.

The oracle is ONNX Runtime with the original graph, at sizes that the rewrite did not try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import HEADS, SIZE, Writer
from descriptions import described
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import run

from posexport.rewrite import key_lengths
from posexport.rewrite.rewriter import REWRITTEN

Array = np.ndarray[Any, Any]
FARTHEST = 40
"""Keys at this distance or farther are hidden."""


def arrays(batch: int, seq: int, past: int | None = None) -> dict[str, Array]:
    rng = np.random.default_rng(batch + seq)
    shapes = {"hidden_states": (batch, seq, HEADS * SIZE)}
    if past is not None:
        shapes |= dict.fromkeys(("past_key", "past_value"), (batch, HEADS, past, SIZE))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def check(model: onnx.ModelProto, form: str, sizes: list[tuple[int, ...]], **more: Callable[..., Array]) -> None:
    """Asserts that the attention is rewritten and that both graphs give the same results.

    `more` makes further inputs from the numbers of rows and tokens.
    """
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    for size in sizes:
        given = arrays(*size) | {name: make(*size[:2]) for name, make in more.items()}
        expected, actual = run(model, given), run(proto, given)
        for name, want in expected.items():
            assert actual[name].shape == want.shape and np.isfinite(want).all()
            np.testing.assert_allclose(actual[name], want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


def sharp_in_the_distance(inverse: bool) -> graphs.Add:
    """Adds a bias that is NaN or infinite at distances where a mask hides keys."""

    def add(g: Writer, scores: str) -> str:
        far = graphs.distances(g, scores)
        left = g.op("Sub", g.floats(FARTHEST), g.op("Cast", far, to=TensorProto.FLOAT))
        bias = g.op("Div", g.floats(1.0), left) if inverse else g.op("Log", left)
        seen = g.op("And", g.op("GreaterOrEqual", far, g.const(0)), g.op("Less", far, g.const(FARTHEST)))
        return g.op("Where", seen, g.op("Add", scores, bias), g.floats(-1e30))

    return add


@pytest.mark.parametrize("form", ["native", "contrib", "function"])
@pytest.mark.parametrize("inverse", [False, True])
def test_what_a_mask_hides_may_be_no_number(form: str, inverse: bool) -> None:
    model = graphs.attention(add=[sharp_in_the_distance(inverse)])
    check(model, form, [(2, 9), (1, FARTHEST), (2, FARTHEST + 1), (1, 300)])


def pairwise(dims: tuple[str | int, str | int], boolean: bool) -> graphs.Add:
    def add(g: Writer, scores: str) -> str:
        mask = g.input("attn_mask", TensorProto.BOOL if boolean else TensorProto.FLOAT, *dims)
        return g.op("Where", mask, scores, g.floats(-1e30)) if boolean else g.op("Add", scores, mask)

    return add


def some_pairs(boolean: bool) -> Callable[..., Array]:
    def made(batch: int, seq: int) -> Array:
        seen: Array = np.random.default_rng(seq).random((seq, seq)) < 0.6
        seen |= np.eye(seq, dtype=bool)
        return seen if boolean else np.where(seen, 0, -1e9).astype(np.float32)

    return made


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("dims", [("seq", "seq"), ("queries", "keys")])
def test_a_mask_of_tokens_and_keys(dims: tuple[str, str], boolean: bool) -> None:
    """A mask for all rows, like torch's `attn_mask`."""
    model = graphs.attention(add=[pairwise(dims, boolean)])
    check(model, "native", [(2, 9), (1, 1), (4, 30)], attn_mask=some_pairs(boolean))
    mask = described(model)["mask"]
    assert (mask["kind"], mask["inputs"]) == ("input", ["attn_mask"])


def by_positions(packed: bool) -> graphs.Add:
    """Hides keys at later positions; if `packed`, later keys and keys of other texts, which start at position 0."""

    def add(g: Writer, scores: str) -> str:
        given = g.input("position_ids", TensorProto.INT64, "batch", "seq")
        place = g.op("CumSum", g.op("Cast", g.op("Equal", given, g.const(0)), to=TensorProto.INT64), g.const(1))
        one = place if packed else given
        keys, queries = (g.op("Unsqueeze", one, g.const([1, axis])) for axis in (2, 3))
        seen = g.op("Equal" if packed else "LessOrEqual", keys, queries)
        if packed:
            seen = g.op("And", seen, g.op("GreaterOrEqual", graphs.distances(g, scores), g.const(0)))
        return g.op("Where", seen, scores, g.floats(-1e30))

    return add


@pytest.mark.parametrize("packed", [False, True])
def test_positions_may_decide_what_is_seen(packed: bool) -> None:
    """With consecutive positions, the mask looks like a causal mask."""
    model = graphs.attention(add=[by_positions(packed)])
    mask = described(model)["mask"]
    assert (mask["kind"], mask["inputs"]) == ("input", ["position_ids"])
    texts = {"position_ids": lambda batch, seq: np.arange(seq)[None] % 4 + np.zeros((batch, 1), np.int64)}
    check(model, "native", [(2, 9), (1, 1), (3, 30)], **texts)


def by_length(of: str, side: int) -> onnx.ModelProto:
    """Multiplies queries, new keys or new values (`side` 0, 1 or 2) by the logarithm of the length of present `of`."""
    model = graphs.attention(cached=True)
    nodes = [*model.graph.node]
    (present,) = (node.input[0] for node in nodes if list(node.output) == [f"present_{of}"])
    joined = {node.output[0]: node for node in nodes if node.op_type == "Concat"}
    product = next(node for node in nodes if node.op_type == "MatMul" and node.input[1].startswith("transpose"))
    owner = product if side == 0 else [*joined.values()][side - 1]
    g = Writer()
    g.nodes = [helper.make_node("Shape", [present], ["length"], start=2, end=3)]
    g.nodes.append(helper.make_node("Cast", ["length"], ["wide"], to=TensorProto.FLOAT))
    g.nodes.append(helper.make_node("Log", ["wide"], ["log"]))
    at = 0 if side == 0 else 1
    g.nodes.append(helper.make_node("Mul", [owner.input[at], "log"], ["scaled"]))
    owner.input[at] = "scaled"
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *g.nodes])
    after = ir.from_proto(model)
    after.graph.sort()
    return ir.to_proto(after)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["native", "contrib", "function"])
@pytest.mark.parametrize(("of", "side"), [("key", 0), ("value", 0), ("key", 2)], ids=["keys", "values", "into values"])
def test_features_by_the_number_of_keys(of: str, side: int, form: str) -> None:
    """Like the queries of Qwen, which are multiplied by the logarithm of the number of keys."""
    model = by_length(of, side)
    check(model, form, [(2, 3, 4), (1, 7, 0), (3, 1, 50)])
    _, proto = rewritten_model(model, form="native", target="ort")
    assert [len(node.input) > 4 for node in proto.graph.node if node.op_type == "Attention"] == [True]


@pytest.mark.parametrize("form", ["native", "contrib", "function"])
def test_keys_by_the_number_of_their_values_stay_behind_a_cache_of_the_graph(form: str) -> None:
    """Otherwise the new operator would need its own output, which gives the number of values."""
    model = by_length("value", 1)
    check(model, form, [(2, 3, 4), (1, 7, 0), (3, 1, 50)])
    _, proto = rewritten_model(model, form="native", target="ort")
    assert [len(node.input) > 4 for node in proto.graph.node if node.op_type == "Attention"] == [False]


def test_a_circle_that_is_found_late_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault, so that only the sort of the nodes finds the cycle."""
    monkeypatch.setattr(key_lengths, "_needs_itself", lambda *_: False)
    check(by_length("value", 1), "native", [(2, 3, 4), (1, 7, 0)])


def branch(name: str, keys: str, length: str, seen: str) -> onnx.GraphProto:
    """A branch of an If that computes a causal mask from the number of keys."""
    names = ("turned", "total", "t", "length", "s", "zero", "one", "at", "first", "row", "rows", "columns", "seen")
    inner = {one: f"{name}_{one}" for one in names}
    return onnx.parser.parse_graph(
        """{name} () => (bool[rows, columns] {seen}) {{
            {counted}
            {t} = Squeeze ({total})
            {length} = Shape <start = 1, end = 2> (hidden_states)
            {s} = Squeeze ({length})
            {zero} = Constant <value_int = 0> ()
            {one} = Constant <value_int = 1> ()
            {at} = Constant <value_ints = [1]> ()
            {first} = Sub ({t}, {s})
            {row} = Range ({first}, {t}, {one})
            {rows} = Unsqueeze ({row}, {at})
            {columns} = Range ({zero}, {t}, {one})
            {seen} = {seen_by}
        }}""".format(name=name, counted=length.format(keys=keys, **inner), seen_by=seen.format(**inner), **inner)
    )


def by_branches(length: str) -> onnx.ModelProto:
    """Attention with a cache and a mask that an If returns."""

    def add(g: Writer, scores: str) -> str:
        (keys,) = (node.output[0] for node in g.nodes if node.op_type == "Concat" and node.input[0] == "past_key")
        then = branch("long", keys, length, "LessOrEqual ({columns}, {rows})")
        other = branch("short", keys, length, "GreaterOrEqual ({rows}, {columns})")
        is_long = g.op("Greater", g.length("hidden_states", 1), g.const(4))
        g.nodes.append(helper.make_node("If", [is_long], ["seen"], then_branch=then, else_branch=other, name="choice"))
        return g.op("Where", "seen", scores, g.floats(-1e30))

    model = graphs.attention(cached=True, add=[add])
    model.graph.value_info.append(helper.make_tensor_value_info("seen", TensorProto.BOOL, ["seq", "keys"]))
    onnx.checker.check_model(model)
    return model


LENGTHS = {
    "keys": "{total} = Shape <start = 2, end = 3> ({keys})",
    "turned keys": "{turned} = Transpose <perm = [0, 1, 3, 2]> ({keys}) "
    "{total} = Shape <start = 3, end = 4> ({turned})",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib", "function"])
@pytest.mark.parametrize("of", LENGTHS)
def test_the_number_of_keys_in_branches(of: str, form: str) -> None:
    """The outer values that a branch reads count as inputs of the If."""
    check(by_branches(LENGTHS[of]), form, [(2, 3, 4), (1, 7, 0), (3, 1, 50)])
