"""The evaluator: values by name, replaced values, functions and bodies, dtypes, and errors for wrong graphs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from posexport.errors import RequestError
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.kernels import control, dtypes
from posexport.graphs.kernels.fallback import UnknownOperatorError

HEAD = '<ir_version: 10, opset_import: ["": 20, "own": 1]>'
X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
CHAIN = "g (float[N,3] x) => (float[N,3] y) { a = Exp(x) b = Neg(a) c = Add(a, b) d = Mul(b, c) y = Add(d, x) }"


def model(text: str, functions: str = "", weights: Sequence[onnx.TensorProto] = ()) -> ir.Model:
    proto = onnx.parser.parse_model(f"{HEAD} {text} {functions}")
    proto.graph.initializer.extend(weights)
    return ir.from_proto(proto)


def value(text: str, functions: str = "", **inputs: torch.Tensor) -> torch.Tensor:
    """The first output of a graph."""
    (result, *_) = Evaluator(model(text, functions)).run(inputs or {"x": X}).values()
    return result


# Values by name


def test_any_value_of_the_main_graph_can_be_asked_for() -> None:
    results = Evaluator(model(CHAIN)).run({"x": X}, ["b", "x", "y", "b"])
    assert list(results) == ["b", "x", "y"]
    torch.testing.assert_close(results["b"], -X.double().exp())
    torch.testing.assert_close(results["x"], X.double())


def test_only_what_is_needed_is_evaluated() -> None:
    text = "g (float[N,3] x, float[N,3] other) => (float[N,3] y, float[N,3] z) { y = Neg(x) z = own.Nobody(other) }"
    assert list(Evaluator(model(text)).run({"x": X}, ["y"])) == ["y"]
    with pytest.raises(RequestError, match="input 'other' of the graph is needed but was not given"):
        Evaluator(model(text)).run({"x": X})
    with pytest.raises(UnknownOperatorError, match=r"node 'z' \(own\.Nobody\)"):
        Evaluator(model(text)).run({"x": X, "other": X})


def test_nodes_may_stand_in_any_order() -> None:
    shuffled = model(CHAIN)
    nodes = list(shuffled.graph)
    shuffled.graph.remove(nodes)
    shuffled.graph.extend(reversed(nodes))
    torch.testing.assert_close(*(Evaluator(m).run({"x": X})["y"] for m in (model(CHAIN), shuffled)))


def test_a_value_between_nodes_can_be_given() -> None:
    """The evaluator does not need the nodes before it."""
    results = Evaluator(model(CHAIN)).run({"a": X, "x": X})
    torch.testing.assert_close(results["y"], X.double())


def test_a_given_value_stays_where_its_node_runs_for_another_output() -> None:
    text = "g (float[N,4] x) => (float[N,2] y) { a, b = Split <axis = 1, num_outputs = 2> (x) y = Add(a, b) }"
    zeros = torch.zeros(1, 2)
    assert torch.equal(Evaluator(model(text)).run({"x": torch.ones(1, 4), "b": zeros})["y"], torch.ones(1, 2).double())


# Replaced values


def test_a_replaced_value_is_the_one_that_all_readers_see() -> None:
    seen: list[torch.Tensor] = []

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return torch.ones(2, 3)

    results = Evaluator(model(CHAIN)).run({"x": X}, ["a", "c", "y"], overrides={"a": replace})
    torch.testing.assert_close(seen, [X.double().exp()])
    assert torch.equal(results["a"], torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(results["c"], torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("name", ["x", "w", "y"])
def test_inputs_weights_and_outputs_can_be_replaced(name: str) -> None:
    weights = [numpy_helper.from_array(np.full(3, 2.0, np.float32), "w")]
    text = "g (float[N,3] x) => (float[N,3] y) { a = Mul(x, w) y = Mul(a, w) }"
    calls: list[str] = []

    def negative(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return -tensor

    result = Evaluator(model(text, weights=weights)).run({"x": X}, overrides={name: negative})["y"]
    torch.testing.assert_close(result, X.double() * 4 * (1 if name == "w" else -1))
    assert calls == [name]


def test_a_weight_that_only_a_body_reads_can_be_replaced() -> None:
    text = """g (float[N,3] x, bool c) => (float[N,3] y)
        { y = If(c) <then_branch = t () => (float[N,3] p) { p = Mul(x, w) }, else_branch = e () => (float[N,3] q)
          { q = Neg(x) }> }"""
    weights = [numpy_helper.from_array(np.full(3, 2.0, np.float32), "w")]
    given = {"x": X, "c": torch.tensor(True)}
    result = Evaluator(model(text, weights=weights)).run(given, overrides={"w": lambda w: w * 5})["y"]
    torch.testing.assert_close(result, X.double() * 10)


def test_a_replaced_value_keeps_its_shape() -> None:
    with pytest.raises(RequestError, match=r"value 'a' has shape \[2, 3\], and one of \[3\] was put in its place"):
        Evaluator(model(CHAIN)).run({"x": X}, overrides={"a": lambda tensor: tensor[0]})


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    gone: list[bool] = []

    def keep_track(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        alive.append(weakref.ref(copy))
        return copy

    def look(tensor: torch.Tensor) -> torch.Tensor:
        gone.append(alive[0]() is None)
        return tensor

    overrides = {"a": keep_track, "c": look, "d": look}  # c is the last reader of a.
    Evaluator(model(CHAIN)).run({"x": X}, overrides=overrides)
    assert gone == [False, True]


# Functions and bodies

FUNCTION = """<domain: "own", opset_import: ["": 20, "own": 1]>
scaled <factor, shift: float = 1.0> (a, b) => (c)
{ k = Constant<value_float: float = @factor>() s = Constant<value_float: float = @shift>() d = Mul(a, k) c = Add(d, s) }
<domain: "own", opset_import: ["": 20, "own": 1]>
twice <factor> (a) => (c)
{ b = own.scaled<factor: float = @factor>(a) c = own.scaled<factor: float = @factor, shift = 0.0>(b) }
"""


def test_functions_of_the_file() -> None:
    """Attributes with and without defaults, references through two functions, and an omitted input."""
    text = "g (float[N,3] x) => (float[N,3] y) { y = own.twice<factor = 3.0>(x) }"
    torch.testing.assert_close(value(text, FUNCTION), (X.double() * 3 + 1) * 3)
    text = "g (float[N,3] x) => (float[N,3] y) { y = own.scaled<factor = 2.0, shift = 5.0>(x) }"
    torch.testing.assert_close(value(text, FUNCTION), X.double() * 2 + 5)


def test_a_function_that_calls_itself_is_refused() -> None:
    function = '<domain: "own", opset_import: ["own": 1]> again (a) => (b) { b = own.again(a) }'
    with pytest.raises(RequestError, match=r"node 'b' .*lies in more than 60 functions"):
        value("g (float[N,3] x) => (float[N,3] y) { y = own.again(x) }", function)


def test_a_function_stands_before_an_operator_of_its_name() -> None:
    proto = onnx.parser.parse_model(f"{HEAD} g (float[N,3] x) => (float[N,3] y) {{ y = com.microsoft.Gelu(x) }}")
    body, opsets = [helper.make_node("Neg", ["a"], ["b"])], [helper.make_opsetid("", 20)]
    proto.functions.append(helper.make_function("com.microsoft", "Gelu", ["a"], ["b"], body, opsets))
    assert torch.equal(Evaluator(ir.from_proto(proto)).run({"x": X})["y"], -X.double())


@pytest.mark.parametrize("chosen", [True, False])
def test_branches_read_outer_values_at_any_depth(chosen: bool) -> None:
    text = """g (float[N,3] x, bool c) => (float[N,3] y)
        { a = Neg(x) y = If(c) <
            then_branch = t () => (float[N,3] p) { u = Exp(a) p = If(c) <
                then_branch = tt () => (float[N,3] pp) { pp = Add(u, x) },
                else_branch = te () => (float[N,3] pq) { pq = Identity(x) }> },
            else_branch = e () => (float[N,3] q) { q = Mul(a, x) }> }"""
    x = X.double()
    expected = (-x).exp() + x if chosen else -x * x
    torch.testing.assert_close(value(text, x=X, c=torch.tensor(chosen)), expected)


def test_a_loop_carries_and_collects() -> None:
    text = """g (float[3] x, int64 n) => (float[3] y, float[M,3] all)
        { going = Constant<value_ints = [1]>() go = Cast<to = 9>(going) start = Identity(x)
          y, all = Loop(n, go, start) <body = b (int64 i, bool before, float[3] v) =>
            (bool after, float[3] w, float[3] o) { after = Identity(before) w = Add(v, x) o = Neg(w) }> }"""
    for count in (0, 1, 3):
        results = Evaluator(model(text)).run({"x": X[0], "n": torch.tensor(count)})
        torch.testing.assert_close(results["y"], X[0].double() * (count + 1))
        steps = torch.arange(count, dtype=torch.float64)[:, None] + 2
        torch.testing.assert_close(results["all"], -X[0].double() * steps)


def test_an_endless_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST_STEPS", 1_000)
    text = """g (float[3] x) => (float[3] y)
        { y = Loop(, , x) <body = b (int64 i, bool before, float[3] v) => (bool after, float[3] w)
            { after = Identity(before) w = Identity(v) }> }"""
    with pytest.raises(RequestError, match=r"node 'y' \(Loop\).*1,000 times"):
        value(text, x=X[0])


# Dtypes


def halves(dtype: int) -> tuple[ir.Model, torch.Tensor]:
    """A product with a weight in half precision, then a Cast; and the exact weight."""
    stored = helper.make_tensor("w", dtype, [3], [0.1, -0.7, 3.3])
    name = "float16" if dtype == TensorProto.FLOAT16 else "bfloat16"
    text = f"g ({name}[N,3] x) => (float[N,3] y) {{ a = Mul(x, w) y = Cast<to = 1>(a) }}"
    return model(text, weights=[stored]), torch.tensor([0.1, -0.7, 3.3]).to(getattr(torch, name))


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision(dtype: int) -> None:
    """In float64, the weight is the stored number and nothing is rounded; in the file's dtypes, products are."""
    graph, weight = halves(dtype)
    x = X.to(weight.dtype) / 3
    wide = Evaluator(graph).run({"x": x})["y"]
    assert torch.equal(wide, x.double() * weight.double())
    narrow = Evaluator(graph, wide=False).run({"x": x})["y"]
    assert narrow.dtype == torch.float32 and torch.equal(narrow, (x * weight).float())
    assert not torch.equal(narrow.double(), wide)


def test_casts_to_whole_numbers_truncate() -> None:
    result = value("g (float[N,3] x) => (int64[N,3] y) { y = Cast<to = 7>(x) }", x=X * 0.9)
    assert torch.equal(result, torch.tensor([[0, -1, 2], [3, 4, -5]]))


def test_masks_of_the_lowest_number_and_of_infinity() -> None:
    lowest = float(np.finfo(np.float32).min)
    text = "g (float[N,3] x, float[N,3] m) => (float[N,3] y) { a = Add(x, m) y = Softmax<axis = -1>(a) }"
    for hidden in (lowest, float("-inf")):
        mask = torch.tensor([[0.0, hidden, 0.0], [0.0, hidden, hidden]])
        expected = torch.softmax(X.double().masked_fill(mask != 0, float("-inf")), -1)
        torch.testing.assert_close(value(text, x=X, m=mask), expected)


def test_inputs_are_held_against_the_graph() -> None:
    evaluator = Evaluator(model("g (float[N,3] x) => (float[N,3] y) { y = Neg(x) }"))
    with pytest.raises(RequestError, match=r"input 'x' of the graph has shape \[N,3\], and \[2, 4\] was given"):
        evaluator.run({"x": torch.ones(2, 4)})
    with pytest.raises(RequestError, match=r"input 'x' of the graph is FLOAT, and a tensor of torch.int64 was given"):
        evaluator.run({"x": torch.ones(2, 3, dtype=torch.int64)})
    with pytest.raises(RequestError, match="the graph has no value 'z'"):
        evaluator.run({"z": X})
    with pytest.raises(RequestError, match="the graph has no value 'q'"):
        evaluator.run({"x": X}, ["q"])
    with pytest.raises(RequestError, match="input 't' of the graph can't be given"):
        Evaluator(model("g (string[N] t) => (int64[1] y) { y = Shape(t) }")).run({"t": X[0]})


# Weights


def with_external_weight(folder: Path, rows: int = 4) -> tuple[ir.Model, np.ndarray[Any, Any]]:
    weight = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    text = "g (int64[N] i) => (float[N,3] y) { y = Gather<axis = 0>(w, i) }"
    proto = onnx.parser.parse_model(f"{HEAD} {text}")
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return ir.load(folder / "m.onnx"), weight


def test_weights_in_external_data(tmp_path: Path) -> None:
    graph, weight = with_external_weight(tmp_path)
    result = Evaluator(graph).run({"i": torch.tensor([3, -4])})["y"]
    np.testing.assert_array_equal(result.numpy(), weight[[3, 0]])


def test_external_data_that_is_gone_is_an_error(tmp_path: Path) -> None:
    graph, _ = with_external_weight(tmp_path)
    (tmp_path / "m.data").unlink()
    with pytest.raises(RequestError, match="weight 'w' can't be read"):
        Evaluator(graph).run({"i": torch.tensor([3])})


def test_of_a_large_table_only_the_rows_that_are_taken_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weight = with_external_weight(tmp_path, 400_000)
    made: list[int] = []
    convert = dtypes.to_torch
    monkeypatch.setattr(dtypes, "to_torch", lambda *a: (made.append((t := convert(*a)).numel()), t)[1])
    result = Evaluator(graph).run({"i": torch.tensor([5, -1])})["y"]
    np.testing.assert_array_equal(result.numpy(), weight[[5, -1]])
    assert made == [6]
    with pytest.raises(RequestError, match=r"weight 'w' can't be read: .*out of bounds"):
        Evaluator(graph).run({"i": torch.tensor([400_000])})


# Wrong graphs

WRONG = {
    r"node 'y' \(MatMul\) can't be evaluated on float64\[2, 3\], float64\[2, 3\]": "y = MatMul(x, x)",
    r"node 'y' \(Concat\) .* different ranks": "s = Shape(x) f = Cast<to = 1>(s) y = Concat<axis = 0>(x, f)",
    r"node 'y' \(Gather\) .* outside a dimension of size 2": "i = Constant<value_ints = [2]>() y = Gather(x, i)",
    r"value 'nowhere' is read, but no node, input or weight defines it": "y = Add(x, nowhere)",
    r"node '\w' \(\w+\) depends on its own result": "a = Neg(b) b = Exp(a) y = Add(x, b)",
    r"node 'y' \(Transpose\)": "y = Transpose<perm = [0, 5]>(x)",
    r"node 'y' \(Relu\)": "y = Relu(x, x, x)",
    r"node 'y' \(Squeeze\) .* not all of size 1": "a = Constant<value_ints = [1]>() y = Squeeze(x, a)",
    r"node 'y' \(LayerNormalization\)": "y = LayerNormalization(x)",
    r"node 'y' \(If\)": "y = If(x)",
    r"output 'z' of node 'y' \(Neg\) can't be evaluated": "y, z = Neg(x) w = Exp(z)",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_graph_is_one_sentence_that_names_the_node(text: str) -> None:
    output = "w" if "w = " in WRONG[text] else "y"
    with pytest.raises(RequestError, match=text) as caught:
        value(f"g (float[N,3] x) => (float[N,M] {output}) {{ {WRONG[text]} }}")
    assert "\n" not in str(caught.value)


def test_an_operator_for_one_kind_of_cpu_says_how_to_save_the_file_without_it() -> None:
    text = "g (float[N,3] x) => (float[N,3] y) { y = com.microsoft.nchwc.ReorderInput(x) }"
    graph = model(text)
    with pytest.raises(UnknownOperatorError, match="save the file again with ORT_ENABLE_EXTENDED"):
        Evaluator(graph).run({"x": X})


def test_names_from_the_file_are_shown_safely() -> None:
    graph = model("g (float[N,3] x) => (float[N,3] y) { y = MatMul(x, x) }")
    graph.graph.node(0).name = "evil\x1b[31m\nname" + "x" * 5000
    with pytest.raises(RequestError) as caught:
        Evaluator(graph).run({"x": X})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


# Operators that onnx's own reference implementation evaluates


def test_operators_without_a_kernel_are_left_to_onnx() -> None:
    text = "g (int64 n) => (float[M] y) { y = BlackmanWindow(n) }"
    result = value(text, n=torch.tensor(8))
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, torch.blackman_window(8, dtype=torch.float64), atol=1e-3, rtol=0)
