"""The runtime tensorrt-import: sound artifacts pass. Graphs that TensorRT's parser changes without an error fail on any
machine."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import attrs
import mutants
import numpy as np
import onnx
import pytest
import verify_helpers as plant
from helpers import case, cli, refused, small_spec
from onnx import helper
from trt_helpers import needs_rtx
from trt_import_helpers import causal_truth, graph, imported, inputs_for, on_ort

from posexport.bench.candidates import CANDIDATES, DEFAULT
from posexport.errors import RequestError, RuntimeMissingError
from posexport.report.verdicts import to_markdown
from posexport.runtimes import ORT, RUNTIMES, Runtime
from posexport.runtimes.installation import install_command
from posexport.runtimes.tensorrt import interpreter
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES, Spec
from posexport.verify import verify
from posexport.verify.result import FAILED, NOT_RUN, PASSED, Report, Verdict

pytestmark = pytest.mark.few_inputs

IMPORT = "tensorrt-import"
ROWS = {name: RUNTIMES[name] for name in ("ort-cpu", IMPORT)}
SOME = ["deberta"]
SOUND: dict[str, Spec] = {
    **{name: case(name, dtype=dtype) for name, dtype in zip(SOME, itertools.cycle(DTYPES), strict=False)},
    "padding": small_spec("t5", padding_mask=True, sinks=True, dtype="bf16"),
    "shared cache": small_spec("alibi", kv_cache="shared", causal=True, dtype="fp16"),
    "cross": small_spec("learned", cross=True, qk_norm=True),
}
FORM = dict(zip(SOUND, itertools.cycle(FORMS), strict=False))
"""The form of each sound artifact; forms take turns. The matrix and the slow sweep of verify have all combinations."""


def _last(op: str, domain: str, functions: list[onnx.FunctionProto], *calls: str, **attributes: Any) -> Any:
    """Append one or more nodes after the output, which call a function or an operator."""

    def mutate(model: onnx.ModelProto) -> None:
        (writer,) = [node for node in model.graph.node if "output" in node.output]
        names = ["plain", *(f"after{index}" for index in range(len(calls) - 1)), "output"]
        writer.output[list(writer.output).index("output")] = "plain"
        for overload, (before, after) in zip(calls, itertools.pairwise(names), strict=True):
            node = helper.make_node(op, [before], [after], name=f"planted {after}", domain=domain, **attributes)
            node.overload = overload
            model.graph.node.append(node)
        model.functions.extend(functions)
        if domain and domain not in [entry.domain for entry in model.opset_import]:
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return mutate


def _resized(model: onnx.ModelProto) -> None:
    """Resize the output to its own size, which TensorRT imports as a layer that posexport does not know."""
    _last("Resize", "", [], "")(model)
    model.graph.node[-1].input.extend(["", "same"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "same"))


def _function(name: str, body: list[onnx.NodeProto], overload: str = "") -> onnx.FunctionProto:
    made = helper.make_function("posexport", name, ["x"], ["y"], body, [helper.make_opsetid("", 18)])
    made.overload = overload
    return made


def _times(factor: float) -> list[onnx.NodeProto]:
    constant = helper.make_node("Constant", [], ["factor"], value_float=factor)
    return [constant, helper.make_node("Mul", ["x", "factor"], ["y"])]


SAME = [helper.make_node("Identity", ["x"], ["y"])]
TRAPS: dict[str, Any] = {
    "a function with an operator's name": _last("Softmax", "posexport", [_function("Softmax", SAME)], ""),
    "two overloads of a function": _last(
        "Scale",
        "posexport",
        [_function("Scale", _times(2.0), "up"), _function("Scale", _times(0.5), "down")],
        "up",
        "down",
    ),
}
"""Changes that are valid in ONNX and right on ONNX Runtime, but that TensorRT computes differently."""

OTHERS = {"unknown operator": _last("NoSuchOperator", "", [], ""), "unknown layer": _resized}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, dict[tuple[str, str], Verdict]]:
    """Sound and planted artifacts, verified together."""
    folder = tmp_path_factory.mktemp("import")
    for stem, spec in SOUND.items():
        plant.write(folder, stem, spec, FORM[stem])
    for stem, mutate in {**TRAPS, **OTHERS}.items():
        plant.plant(folder, stem, case("none"), mutate)
    report = verify([folder], runtimes=ROWS, reach={"seq": 64})
    assert report.unreadable == ()
    return report, {(Path(verdict.artifact).stem, verdict.runtime): verdict for verdict in report.verdicts}


@needs_rtx
@pytest.mark.parametrize("stem", SOUND)
def test_sound_artifacts_pass(found: tuple[Report, dict[tuple[str, str], Verdict]], stem: str) -> None:
    verdict = found[1][stem, IMPORT]
    assert (verdict.state, verdict.reason) == (PASSED, None)
    assert verdict.cases >= 8
    assert verdict.notes == ("import only: kernels were not run",)
    assert verdict.describe["device"] == "import only, evaluated in float64 on the CPU: kernels were not run"
    assert verdict.describe["engine"] in ("tensorrt-rtx parser", "tensorrt parser")


@needs_rtx
@pytest.mark.parametrize("stem", TRAPS)
def test_what_the_parser_changes_in_silence_fails(
    found: tuple[Report, dict[tuple[str, str], Verdict]], stem: str
) -> None:
    assert found[1][stem, "ort-cpu"].state == PASSED
    verdict = found[1][stem, IMPORT]
    assert verdict.state == FAILED
    assert "off by" in str(verdict.reason)


@needs_rtx
@pytest.mark.parametrize("to", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_positions_that_a_cast_rounds_to_half_precision_fail(tmp_path: Path, to: int) -> None:
    """Without a GPU, nothing else runs the form native in bf16."""
    rounded = mutants.before("Unsqueeze", 0, mutants.through(to), "v_Cast_0")
    path = plant.plant(tmp_path, "rounded", case("rope-half", dtype="bf16"), rounded, "native")
    (verdict,) = verify([path], runtimes={IMPORT: RUNTIMES[IMPORT]}, reach={"seq": 64}).verdicts
    assert verdict.state == FAILED


@needs_rtx
def test_what_the_parser_refuses_fails_with_its_node(found: tuple[Report, dict[tuple[str, str], Verdict]]) -> None:
    verdict = found[1]["unknown operator", IMPORT]
    assert verdict.state == FAILED
    assert "tensorrt-import can't take" in str(verdict.reason)
    assert "(operator NoSuchOperator)" in str(verdict.reason)
    assert "it has no such operator" in str(verdict.reason)


@needs_rtx
def test_a_layer_that_is_not_known_is_not_run_and_named(found: tuple[Report, dict[tuple[str, str], Verdict]]) -> None:
    assert found[1]["unknown layer", "ort-cpu"].state == PASSED
    verdict = found[1]["unknown layer", IMPORT]
    assert verdict.state == NOT_RUN
    assert str(verdict.reason).endswith("(RESIZE): its kind is not known.")


@needs_rtx
def test_reports_say_that_kernels_were_not_run(found: tuple[Report, dict[tuple[str, str], Verdict]]) -> None:
    lines = [line for line in to_markdown(found[0]).splitlines() if f"| {IMPORT} | passed" in line]
    assert len(lines) == len(SOUND)
    assert all("import only: kernels were not run" in line for line in lines)


WINDOW = (
    "(float[b,4,s,8] q, float[b,4,s,8] k, float[b,4,s,8] v) => (float[i,j,l,m] y) "
    "{ y = Attention<left_window_size = 2, right_window_size = 0>(q, k, v) }"
)
LENGTHS = (
    "(float[b,4,s,8] q, float[b,4,t,8] k, float[b,4,t,8] v, int64[b] n) => (float[i,j,l,m] y) "
    "{ y = Attention(q, k, v, , , , n) }"
)
NEGATIVE = (
    "(float[b,4,s,8] q, float[b,4,s,8] k, float[b,4,s,8] v) => (float[i,j,l,m] y) "
    "{ y = Attention<scale = -0.5>(q, k, v) }"
)
DECODE = (
    "(float[b,4,s,8] q, float[b,4,s,8] k, float[b,4,s,8] v, float[b,4,p,8] x, float[b,4,p,8] z) => (float[i,j,l,m] y) "
    "{ a = Concat<axis = 2>(x, k) c = Concat<axis = 2>(z, v) y = Attention<is_causal = 1>(q, a, c) }"
)


@needs_rtx
def test_windows_of_attention_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "check_read", lambda *_: None)
    model = graph(WINDOW, opset=25)
    inputs = inputs_for(model, {"b": 1, "s": 9}, {})
    got = imported(model, tmp_path).run(inputs)["y"]
    (truth,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    assert np.abs(got - truth).max() > 0.1
    scaled = inputs["q"] / np.sqrt(8)
    np.testing.assert_allclose(got, causal_truth(scaled, inputs["k"], inputs["v"], 99), rtol=1e-5, atol=1e-6)


@needs_rtx
def test_lengths_of_keys_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "check_read", lambda *_: None)
    model = graph(LENGTHS, opset=24)
    inputs = inputs_for(model, {"b": 2, "s": 3, "t": 7}, {"n": [7, 4]})
    got, truth = imported(model, tmp_path).run(inputs)["y"], on_ort(model, inputs)["y"]
    np.testing.assert_allclose(got[0], truth[0], rtol=1e-5, atol=1e-6)
    assert np.abs(got[1] - truth[1]).max() > 0.1


@needs_rtx
def test_a_negative_scale_gives_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "check_read", lambda *_: None)
    model = graph(NEGATIVE)
    assert np.isnan(imported(model, tmp_path).run(inputs_for(model, {"b": 1, "s": 3}, {}))["y"]).all()


@needs_rtx
@pytest.mark.parametrize(
    ("text", "opset", "what"),
    [(WINDOW, 25, "left_window_size"), (LENGTHS, 24, "nonpad_kv_seqlen"), (NEGATIVE, 23, "negative scale")],
)
def test_what_would_be_passed_over_is_refused(text: str, opset: int, what: str, tmp_path: Path) -> None:
    """By the import and by the builder, also where it is in a branch."""
    model = graph(text, opset=opset)
    with pytest.raises(RequestError, match=f"without its {what}, and compute something else: write its attention anew"):
        imported(model, tmp_path)
    sizes = [f"--profile={name}=1:2:3" for name in ("b", "s", "t") if re.search(rf"[\[,]{name}[\],]", text)]
    refused(cli("compile", tmp_path / "made.onnx", "-o", tmp_path / "made.plan", *sizes), f"without its {what}")
    assert not (tmp_path / "made.plan").exists()
    branch = helper.make_graph([*model.graph.node], "branch", [], [*model.graph.output])
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    condition = helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    whole = helper.make_graph([chosen], "graph", [*model.graph.input, condition], [*model.graph.output])
    with pytest.raises(RequestError, match=f"without its {what}"):
        imported(helper.make_model(whole, opset_imports=[*model.opset_import]), tmp_path)


@needs_rtx
def test_a_causal_step_sees_the_oldest_key_only(tmp_path: Path) -> None:
    model = graph(DECODE)
    inputs = inputs_for(model, {"b": 2, "s": 1, "p": 6}, {})
    got = imported(model, tmp_path).run(inputs)["y"]
    keys, values = (np.concatenate([inputs[a], inputs[c]], 2) for a, c in (("x", "k"), ("z", "v")))
    truth = causal_truth(inputs["q"] / np.sqrt(8), keys, values, 6)
    assert np.abs(got - truth).max() > 0.1
    np.testing.assert_allclose(got, values[:, :, :1], rtol=1e-6)


@needs_rtx
def test_a_vector_times_a_stack_of_matrices_loses_the_wrong_axis(tmp_path: Path) -> None:
    model = graph("(float[8] x, float[b,8,s] w) => (float[i,j] y) { y = MatMul(x, w) }")
    with pytest.raises(RuntimeError, match=r"\(SQUEEZE\) can't take its inputs: sizes \[2, 1, 5\] are not 1 at \[0\]"):
        imported(model, tmp_path).run(inputs_for(model, {"b": 2, "s": 5}, {}))


@needs_rtx
def test_an_index_whose_meaning_is_not_defined_is_not_guessed(tmp_path: Path) -> None:
    model = graph("(float[b,6] x, int64[s] n) => (float[i,j] y) { y = Gather<axis = 0>(x, n) }")
    runner = imported(model, tmp_path)
    inputs = inputs_for(model, {"b": 4, "s": 2}, {"n": [3, 0]})
    np.testing.assert_array_equal(runner.run(inputs)["y"], inputs["x"][[3, 0]])
    with pytest.raises(RuntimeMissingError, match=r"\(GATHER\): a negative index .* is not defined"):
        runner.run({**inputs, "n": np.array([3, -1])})


@needs_rtx
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": np.zeros((2, 5), np.float32)}, r"'x' must be FLOAT \[-1, 6\]"),
        ({"x": np.zeros((2, 6), np.int64)}, "'x' must be FLOAT"),
        ({"x": None}, "'x' is missing"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    runner = imported(graph("(float[b,6] x) => (float[b,6] y) { y = Neg(x) }"), tmp_path)
    with pytest.raises(ValueError, match=said):
        runner.run({name: array for name, array in change.items() if array is not None})


@needs_rtx
def test_tensors_are_kept_only_as_long_as_they_are_read(tmp_path: Path) -> None:
    """Values are dropped after their last use. A value that is read late or twice, or is also an output, must still be
    there."""
    body = "a = Neg(x) c = Mul(a, a) y = Add(c, a) d = Mul(y, a) z = Sub(d, c)"
    runner = imported(graph(f"(float[b] x) => (float[b] y, float[b] z) {{ {body} }}"), tmp_path)
    x = np.array([1.0, -2.0, 3.0], np.float32)
    for _ in range(2):
        got = runner.run({"x": x})
        np.testing.assert_allclose(got["y"], x * x - x)
        np.testing.assert_allclose(got["z"], (x * x - x) * -x - x * x)


@needs_rtx
def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    model = graph("(float[b,8] x, float[8,6] w) => (float[b,6] y) { y = MatMul(x, w) }")
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="external.data", size_threshold=0)
    x = np.ones((2, 8), np.float32)
    np.testing.assert_allclose(interpreter.load(path, {}).run({"x": x})["y"], x @ weight, rtol=1e-5)


@needs_rtx
def test_it_times_nothing_and_opens_no_plan(tmp_path: Path) -> None:
    runner = imported(graph("(float[b] x) => (float[b] y) { y = Neg(x) }"), tmp_path)
    with pytest.raises(RequestError, match="nothing to time"):
        runner.prepare({})
    with pytest.raises(RequestError, match=r"runs \.onnx files.*it came from"):
        interpreter.load(tmp_path / "a.plan", {})
    with pytest.raises(RequestError, match="unknown option"):
        interpreter.load(tmp_path / "made.onnx", {"module": "tensorrt"})


def test_bench_does_not_time_it(tmp_path: Path) -> None:
    assert IMPORT not in CANDIDATES
    assert IMPORT not in DEFAULT
    refused(cli("bench", tmp_path / "a.onnx", "--runtime", IMPORT), "runs no kernels to be timed", "tensorrt-rtx")


def test_either_package_will_do() -> None:
    row = Runtime(name="x", summary="", module=ORT, package="no_such_package", install="posexport[x]", instead="onnx")
    assert row.missing() is None
    missing = attrs.evolve(row, instead="no_such_package_either").missing()
    assert str(missing) == f"not installed: {install_command('posexport[x]')}"
    assert {RUNTIMES[IMPORT].package, RUNTIMES[IMPORT].instead} == {"tensorrt", "tensorrt_rtx"}


def test_where_neither_is_there_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None)
    with pytest.raises(RuntimeMissingError, match="not installed"):
        interpreter.load(tmp_path / "made.onnx", {})


@needs_rtx
def test_a_builder_that_can_not_start_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorRT's own builder can't start without a GPU."""
    name, trt = interpreter._engine()

    def fail(log: Any) -> None:
        log.log(trt.ILogger.ERROR, "no CUDA-capable device is detected")
        raise TypeError("factory function returned nullptr")

    monkeypatch.setattr(trt, "Builder", fail)
    with pytest.raises(RuntimeMissingError, match=f"{name} can't start here: no CUDA-capable device"):
        interpreter.load(tmp_path / "made.onnx", {})
