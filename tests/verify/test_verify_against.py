"""ONNX files compared with another file in float64: the same function passes, small faults fail and are located."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_files import foreign, one_layer
from helpers import cli, exported
from onnx import TensorProto, helper, numpy_helper

from posexport.artifact.onnx_artifact import write_onnx
from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.result import FAILED, INPUTS_REFUSED, PASSED, Verdict

pytestmark = pytest.mark.few_bands

ORT = {"ort-cpu": RUNTIMES["ort-cpu"]}
SPEC = one_layer(kv_cache="concat", vocab_size=23)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that others are compared with."""
    return foreign(tmp_path_factory.mktemp("other"), "other", SPEC)


def verdict_of(path: Path, other: Path, **options: Any) -> Verdict:
    report = verify([path], runtimes=ORT, against=other, **options)
    assert not report.unreadable, report.unreadable
    (verdict,) = report.verdicts
    assert verdict.reference == str(other)
    return verdict


def _weight(change: Callable[[Any], Any], shape: tuple[int, ...] | None = None, size: int | None = None) -> Any:
    """Change the first floating-point weight of this shape or size."""

    def mutate(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor)
            if values.dtype == np.float32 and (values.shape == shape or values.size == size):
                tensor.CopyFrom(numpy_helper.from_array(change(values.copy()), tensor.name))
                return
        raise AssertionError("there is no such weight")

    return mutate


def _row(values: Any) -> Any:
    values[17] *= 1.001
    return values


def _behind(op: str, *made: tuple[str, dict[str, Any]]) -> Any:
    """Insert nodes after the first node with an operator."""

    def mutate(model: onnx.ModelProto) -> None:
        at, node = next((at, node) for at, node in enumerate(model.graph.node) if node.op_type == op)
        end = node.output[0]
        names = [f"planted{number}" for number in range(len(made))]
        node.output[0] = names[0]
        new = [
            helper.make_node(kind, [name], [after], name=f"planted {kind} {number}", **attributes)
            for number, ((kind, attributes), name, after) in enumerate(zip(made, names, [*names[1:], end], strict=True))
        ]
        rest = [onnx.NodeProto.FromString(each.SerializeToString()) for each in model.graph.node[at + 1 :]]
        del model.graph.node[at + 1 :]
        model.graph.node.extend([*new, *rest])

    return mutate


FAULTS: dict[str, tuple[Any, str, str]] = {
    # name: (fault, text of the reason, text of the place)
    "one row of the vocabulary": (_weight(_row, (23, 32)), "off by", "Gather"),
    "a cast to half precision and back": (
        _behind("Softmax", ("Cast", {"to": TensorProto.FLOAT16}), ("Cast", {"to": TensorProto.FLOAT})),
        "off by",
        "planted Cast 0",
    ),
    "a sign": (_behind("Sin", ("Neg", {})), "off by", "planted Neg 0"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_near_misses_fail_and_are_found(name: str, other: Path, tmp_path: Path) -> None:
    fault, reason, where = FAULTS[name]
    verdict = verdict_of(foreign(tmp_path, "file", SPEC, change=fault), other)
    assert verdict.state == FAILED
    assert reason in str(verdict.reason)
    assert where in str(verdict.where), verdict.where
    assert verify([tmp_path / "file.onnx"], runtimes=ORT).exit_code() == 0  # it computes what it says


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["decomposed", "function", "native"])
def test_the_same_function_in_another_form_passes(form: str, other: Path, tmp_path: Path) -> None:
    verdict = verdict_of(foreign(tmp_path, form, SPEC, form), other)
    assert verdict.state == PASSED, verdict
    assert not verdict.inconclusive, verdict.not_shown
    assert any("both in float64 differ by" in note for note in verdict.notes)


@pytest.mark.slow
def test_less_than_rounding_is_told_where_it_is_no_rounding(other: Path, tmp_path: Path) -> None:
    """Rounding errors hide a small error of a constant, but float64 shows it."""

    def slightly(values: Any) -> Any:
        return values * np.float32(1 + 1e-6)

    verdict = verdict_of(foreign(tmp_path, "file", SPEC, change=_weight(slightly, (32, 32))), other)
    assert verdict.state == PASSED
    assert verdict.inconclusive
    assert "may be different functions" in verdict.not_shown[-1]


@pytest.mark.slow
def test_half_precision_may_round_as_it_does(other: Path, tmp_path: Path) -> None:
    verdict = verdict_of(foreign(tmp_path, "half", one_layer(kv_cache="concat", vocab_size=23, dtype="fp16")), other)
    assert verdict.worst is not None
    assert verdict.worst.max_error is not None
    assert verdict.worst.max_error > 1e-5


@pytest.mark.slow
def test_posexports_own_artifacts_on_either_side(other: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.onnx"
    write_onnx(exported(SPEC, "function"), own)
    assert verdict_of(own, other).state == PASSED
    assert verdict_of(other, own).state == PASSED


def _renamed(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        if value.name == "position_ids":
            value.name = "positions"
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = "positions" if name == "position_ids" else name


def _narrower(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim.add(dim_value=3)


def _one_output_more(model: onnx.ModelProto) -> None:
    model.graph.output.add(name=model.graph.node[0].output[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_renamed, "it lacks the input 'position_ids' of other.onnx: it has input_ids, positions"),
        (_narrower, r"its input 'input_ids' has shape"),
        (_one_output_more, "it has the output"),
    ],
)
def test_other_inputs_or_outputs_fail_without_a_run(change: Any, reason: str, other: Path, tmp_path: Path) -> None:
    verdict = verdict_of(foreign(tmp_path, "file", SPEC, change=change), other)
    assert (verdict.state, verdict.reason_code, verdict.cases) == (FAILED, "interface", 0)
    assert reason in str(verdict.reason)


@pytest.mark.slow
def test_a_file_of_fixed_sizes_is_held_against_one_of_any(other: Path, tmp_path: Path) -> None:
    def fixed(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[0].dim_value = 2

    verdict = verdict_of(foreign(tmp_path, "file", SPEC, change=fixed), other)
    assert verdict.state == PASSED
    assert verdict.reach is not None
    assert verdict.reach.batch == 2


def test_the_command(other: Path, tmp_path: Path) -> None:
    path = foreign(tmp_path, "file", SPEC)
    run = cli("verify", str(path), "--against", str(other), "--runtime", "ort-cpu")
    assert run.exit_code == 0
    assert "in float64" in run.stdout
    for arguments, message in (
        (("--against", str(other)), "--against was given without files"),
        ((str(path), "--against", str(tmp_path / "none.onnx")), "none.onnx"),
        ((str(path), "--against", str(tmp_path)), "give an ONNX file"),
    ):
        bad = cli("verify", *arguments)
        assert bad.exit_code == 2
        assert message in bad.stderr


def _features(name: str, nodes: list[onnx.NodeProto], weights: dict[str, Any], folder: Path) -> Path:
    """A file with input `features` [batch, seq, 4] and output `output` of the same shape."""
    values = [
        helper.make_tensor_value_info(each, TensorProto.FLOAT, ["batch", "seq", 4]) for each in ("features", "output")
    ]
    tensors = [numpy_helper.from_array(array, weight) for weight, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], tensors)
    path = folder / f"{name}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_a_file_that_refuses_inputs_that_the_other_takes_fails(tmp_path: Path) -> None:
    """The file has a table of 16 rows. The other file has no table."""
    other = _features("other", [helper.make_node("Relu", ["features"], ["output"])], {}, tmp_path)
    short = _features(
        "short",
        [
            helper.make_node("Shape", ["features"], ["length"], start=1, end=2),
            helper.make_node("Squeeze", ["length"], ["count"]),
            helper.make_node("Range", ["zero", "count", "one"], ["places"]),
            helper.make_node("Gather", ["table", "places"], ["rows"]),
            helper.make_node("Relu", ["features"], ["positive"]),
            helper.make_node("Add", ["positive", "rows"], ["output"]),
        ],
        {"zero": np.array(0), "one": np.array(1), "table": np.zeros((16, 4), np.float32)},
        tmp_path,
    )
    verdict = verdict_of(short, other)
    assert (verdict.state, verdict.reason_code) == (FAILED, INPUTS_REFUSED)
    assert "it doesn't take inputs that the other file takes" in str(verdict.reason)
    assert verdict_of(other, other).state == PASSED


def test_a_weight_that_nothing_reads_makes_no_file_half_precise(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["features", "weight"], ["output"])]
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    other = _features("other", nodes, {"weight": weight}, tmp_path)
    unused = {"unused": np.ones((400, 400), np.float16)}
    near = _features("near", nodes, {"weight": weight * np.float32(1.0001), **unused}, tmp_path)
    assert verdict_of(near, other).state == FAILED
    assert verdict_of(_features("same", nodes, {"weight": weight, **unused}, tmp_path), other).state == PASSED


@pytest.mark.slow
def test_buffers_are_not_held_against_caches_that_grow(other: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared.onnx"
    made = cli("rewrite", other, "-o", shared, "--form", "native", "--target", "ort", "--kv-cache", "shared")
    assert made.exit_code == 0, made.output
    verdict = verdict_of(shared, other)
    assert (verdict.state, verdict.reason_code) == (FAILED, "interface")
    assert "is a buffer of a fixed length, that of other.onnx is one that grows" in str(verdict.reason)
    assert "verify each file alone" in str(verdict.reason)


def _token_first(path: Path, window: int, tokens: str, rows: str) -> Path:
    """Self-attention of x [tokens, rows, 4] in which tokens see only tokens nearer than `window`. Only the outputs
    differ between windows."""
    ops: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Transpose", ["x"], "heads", {"perm": [1, 0, 2]}),
        ("Transpose", ["x"], "turned", {"perm": [1, 2, 0]}),
        ("MatMul", ["heads", "turned"], "scores", {}),
        ("Shape", ["x"], "length", {"start": 0, "end": 1}),
        ("Squeeze", ["length"], "count", {}),
        ("Range", ["zero", "count", "one"], "places", {}),
        ("Unsqueeze", ["places", "one axis"], "column", {}),
        ("Sub", ["column", "places"], "distance", {}),
        ("Abs", ["distance"], "far", {}),
        ("GreaterOrEqual", ["far", "window"], "hidden", {}),
        ("Where", ["hidden", "least", "scores"], "seen", {}),
        ("Softmax", ["seen"], "weights", {"axis": -1}),
        ("MatMul", ["weights", "heads"], "sums", {}),
        ("Transpose", ["sums"], "y", {"perm": [1, 0, 2]}),
    ]
    numbers = {"zero": 0, "one": 1, "one axis": [1], "window": window}
    weights = [numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    weights.append(numpy_helper.from_array(np.array(-1e9, np.float32), "least"))
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [output], **attributes) for kind, inputs, output, attributes in ops],
        "token first",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [tokens, rows, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None, 4])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", [("seq", "batch"), ("s0", "s1"), ("", "")], ids=str)
def test_tokens_on_the_first_axis_get_as_long_as_on_the_second(names: tuple[str, str], tmp_path: Path) -> None:
    """A window of 6 tokens shows with 7 tokens or more, regardless of the names of the dimensions."""
    whole, near = (_token_first(tmp_path / f"{window}.onnx", window, *names) for window in (10**6, 6))
    assert verdict_of(near, whole).state == FAILED
    assert verdict_of(whole, whole).state == PASSED


def test_tokens_on_the_first_axis_are_counted_as_tokens(tmp_path: Path) -> None:
    path = _token_first(tmp_path / "whole.onnx", 10**6, "seq", "batch")
    reach = verdict_of(path, path).reach
    assert reach is not None
    assert (reach.keys, reach.batch) == (600, 40)


FLAG = """<ir_version: 10, opset_import: ["": 18]>
g (float[batch, seq, 16] hidden_states, float[batch, seq] input_mask) => (float[batch, seq, 16] output)
 <float one = {1.0}, float scale = {SCALE}, int64[1] last = {2}> {
  seen = Equal(input_mask, one) number = Cast<to = 1>(seen) wide = Unsqueeze(number, last)
  y = Add(hidden_states, wide) output = Mul(y, scale)
}"""
"""The copies of its inputs contain no 1, so rounding errors seem to be as large as the flag."""


def test_a_fault_is_no_rounding_error_of_an_unstable_file(tmp_path: Path) -> None:
    for name, scale in (("truth", "1.0"), ("wrong", "1.005")):
        onnx.save(onnx.parser.parse_model(FLAG.replace("SCALE", scale)), tmp_path / f"{name}.onnx")
    assert verdict_of(tmp_path / "wrong.onnx", tmp_path / "truth.onnx").state == FAILED
    assert verdict_of(tmp_path / "truth.onnx", tmp_path / "truth.onnx").state == PASSED
