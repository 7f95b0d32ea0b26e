"""Models with large weights. A weight is converted when it is read, once for several sets of inputs, and stays a mapped
file. Verdicts are the same as for small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from helpers import cli
from onnx import TensorProto, helper, numpy_helper
from small_decoders import NATIVE, exported_model, small_checkpoint

from posexport.runtimes import torch_module
from posexport.runtimes.base import Arrays, GroupRunner
from posexport.runtimes.pool import Pool
from posexport.verify.graph import reference, subject
from posexport.verify.graph.cases import GraphCase, lay_on_disk
from posexport.verify.graph.reference import GROUP, GROUP_BYTES, Reference, starts_of

pytestmark = pytest.mark.few_inputs

pytest.importorskip("transformers")

OPTIONS = ("--form", "contrib", "--dtype", "fp16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a checkpoint, in a folder beside it."""
    folder = tmp_path_factory.mktemp("large")
    small_checkpoint(folder / "Llama")
    (folder / "file").mkdir()
    return exported_model(folder / "Llama", folder / "file" / "model.onnx", *OPTIONS)


def checkpoint_of(model: Path) -> str:
    return str(model.parent.parent / "Llama")


def inputs_of(model: Path, count: int) -> list[Arrays]:
    """Prompts of different lengths without a cache."""
    from posexport.verify.graph.cases import drawn_cases
    from posexport.verify.graph.subject import read_file, read_subject

    return [case.arrays for case in drawn_cases(read_subject(read_file(model)).roles(), 0)][:count]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"wide": False, "dtype": "fp16"}, {"wide": False, "dtype": "fp32"}])
def test_a_checkpoint_runs_several_inputs_as_one_by_one(
    model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_module, "LARGE", 64)
    monkeypatch.setattr(torch_module, "_kept", {})
    runner = torch_module.load(model, {"module": checkpoint_of(model), **options})
    assert isinstance(runner, GroupRunner)
    inputs = inputs_of(model, 5)
    alone = [runner.run(arrays) for arrays in inputs]
    for number, outputs in runner.run_all(inputs):
        for name, array in outputs.items():
            assert np.array_equal(array, alone[number][name]), (number, name)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
def test_large_weights_in_float64_are_those_of_a_copy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results with weights converted on reading are equal to those with a float64 copy."""
    inputs, results = inputs_of(model, 3), []
    for large in (2**16, 1):
        monkeypatch.setattr(torch_module, "LARGE", large)
        monkeypatch.setattr(torch_module, "_kept", {})
        runner = torch_module.load(model, {"module": checkpoint_of(model)})
        kinds = {weight.dtype for weight in runner._user.module.parameters()}
        assert kinds == {torch.float64 if large > 1 else torch.float32}
        results.append([runner.run(arrays) for arrays in inputs])
    for copied, read in zip(*results, strict=True):
        for name, array in copied.items():
            assert array.dtype == read[name].dtype == np.float64
            assert np.array_equal(array, read[name]), name


@pytest.mark.slow
def test_a_weight_is_converted_once_for_several_inputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_module, "LARGE", 64)
    monkeypatch.setattr(torch_module, "_kept", {})
    runner = torch_module.load(model, {"module": checkpoint_of(model)})
    converted: list[int] = []
    in_lockstep = torch_module.in_lockstep

    def counting(calculations: Any) -> Any:
        def counted(calculate: Any) -> Any:
            def count(key: Any, make: Any, get_weight: Any) -> Any:
                def make_once() -> torch.Tensor:
                    converted.append(id(key))
                    return make()  # type: ignore[no-any-return]

                return get_weight(key, make_once)

            return lambda get_weight: calculate(lambda key, make: count(key, make, get_weight))

        return in_lockstep([counted(each) for each in calculations])

    monkeypatch.setattr(torch_module, "in_lockstep", counting)
    assert len([*runner.run_all(inputs_of(model, 6))]) == 6
    products = {id(weight) for name, weight in runner._user.module.named_parameters() if "embed" not in name}
    assert len(converted) == len({*converted}) <= len(products)
    assert len(converted) > len(products) / 2


def test_weights_that_need_no_other_dtype_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoint(tmp_path / "Llama")
    model = exported_model(tmp_path / "Llama", tmp_path / "file" / "model.onnx", *NATIVE)
    monkeypatch.setattr(torch_module, "_kept", {})
    options = {"module": checkpoint_of(model), "wide": False}
    runners = [torch_module.load(model, {**options, "dtype": dtype}) for dtype in ("fp32", "fp16")]
    pairs = zip(*(runner._user.module.parameters() for runner in runners), strict=True)
    (original,) = (user for key, user in torch_module._kept.items() if key[1:] == (None, None))
    assert all(one.dtype != other.dtype for one, other in pairs)
    same = zip(runners[0]._user.module.parameters(), original.module.parameters(), strict=True)
    assert all(one is other for one, other in same)
    drawn = torch_module.load(model, {**options, "dtype": "fp32", "last_bits": 1})
    moved = zip(drawn._user.module.parameters(), original.module.parameters(), strict=True)
    assert all(one is not other and not torch.equal(one, other) for one, other in moved)


def verdicts(path: Path, checkpoint: str) -> tuple[int, dict[str, Any]]:
    result = cli("verify", path, "--from", checkpoint, "--runtime", "ort-cpu", "--json")
    return result.exit_code, {verdict["check"]: verdict for verdict in json.loads(result.stdout)["verdicts"]}


@pytest.mark.slow
def test_a_sound_file_passes_and_a_wrong_one_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "LARGE", 0)
    code, found = verdicts(model, checkpoint_of(model))
    assert (code, found["parity"]["state"], found["generation"]["state"]) == (0, "passed", "passed")
    monkeypatch.setattr(subject, "LARGE", 2**28)
    _, usual = verdicts(model, checkpoint_of(model))
    assert found["parity"]["worst"] == usual["parity"]["worst"]
    monkeypatch.setattr(subject, "LARGE", 0)
    wrong = onnx.load(model)
    (node,) = (node for node in wrong.graph.node if "logits" in node.output)
    node.output[0] = "small"
    wrong.graph.initializer.append(numpy_helper.from_array(np.float16(1.05).reshape(()), "factor"))
    wrong.graph.node.append(helper.make_node("Mul", ["small", "factor"], ["logits"]))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    code, found = verdicts(tmp_path / "wrong.onnx", checkpoint_of(model))
    assert (code, found["parity"]["state"]) == (1, "failed")


def test_where_one_of_several_inputs_fails_the_others_are_evaluated(tmp_path: Path) -> None:
    """The graph takes at most 9 tokens."""
    floats = TensorProto.FLOAT
    rows = numpy_helper.from_array(np.arange(9, dtype=np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        "table",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["tokens"])],
        [helper.make_tensor_value_info("y", floats, ["tokens"])],
        [rows],
    )
    path = tmp_path / "table.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    inputs: list[Arrays] = [{"x": np.arange(count)} for count in (3, 12, 9, 1)] * (GROUP // 2)
    with Pool(60) as pool:
        evaluations = Reference(pool, path, inputs, large=True)
        for number, arrays in enumerate(inputs):
            evaluation = evaluations.evaluation(number)
            assert (evaluation.failure is not None) == (len(arrays["x"]) > 9), number
            if evaluation.failure is None:
                assert np.array_equal(evaluation.exact["y"], arrays["x"])
                assert np.array_equal(evaluation.own[0]["y"], arrays["x"])


def test_groups_have_so_many_cases_or_bytes() -> None:
    part = GROUP_BYTES // 4
    assert starts_of([0] * 5, 2) == [0, 2, 4]
    assert starts_of([part, part, 3 * part, 9 * part, part, part], 16) == [0, 2, 3, 4]
    assert starts_of([], 16) == [0]


def test_each_case_of_groups_gets_its_own_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(model, 5)
    monkeypatch.setattr(reference, "GROUP_BYTES", 2 * sum(array.nbytes for array in inputs[0].values()))
    answers = []
    for large in (True, False):
        with Pool(120) as workers:
            truth = Reference(workers, model, inputs, own=False, large=large)
            answers.append([truth.evaluation(index).exact for index in (4, 0, 3, 1, 2)])
    for one, other in zip(*answers, strict=True):
        assert all(np.allclose(one[name], other[name], rtol=1e-12, atol=1e-12) for name in one)


def test_a_case_on_disk_is_the_same(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "seen": np.array([True, False])}
    case = GraphCase(name="one", arrays=arrays, sizes={}, visible={})
    cases = [case]
    lay_on_disk(cases, tmp_path)
    (kept,) = cases
    assert [*tmp_path.iterdir()] == [] and kept.name == "one"
    assert all(np.array_equal(kept.arrays[name], array) for name, array in arrays.items())
