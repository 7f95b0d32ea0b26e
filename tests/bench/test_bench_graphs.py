"""bench with files from other tools: timings and messages, for one file and for pairs of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_files import foreign, one_layer
from graph_signatures import model_of
from helpers import cli, refused
from manifest_data import onnx_manifest, plan_manifest, write_manifest_data
from onnx import helper, numpy_helper
from small_graphs import decoder, no_attention

from posexport import runtimes
from posexport.artifact.graph_file import read_graph
from posexport.artifact.onnx_artifact import read_onnx
from posexport.bench import comparisons
from posexport.bench.benchmark import BenchRun
from posexport.bench.loading import load_timed
from posexport.bench.options import BenchOptions
from posexport.bench.result import read_benchmark
from posexport.bench.results import Result
from posexport.bench.worker import Worker
from posexport.errors import RequestError
from posexport.files import sha256_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder, a much slower copy, a graph without attention, an artifact, and the artifact without its metadata."""
    folder = tmp_path_factory.mktemp("graphs")
    names = ("decoder", "slow", "plain", "foreign", "own")
    paths = {name: folder / f"{name}.onnx" for name in names}
    onnx.save(decoder(), paths["decoder"])
    onnx.save(slower(decoder()), paths["slow"])
    onnx.save(no_attention(), paths["plain"])
    foreign(folder, "foreign", one_layer())
    from helpers import exported

    from posexport.artifact.onnx_artifact import write_onnx

    write_onnx(exported(one_layer()), paths["own"])
    return paths


def slower(model: onnx.ModelProto, side: int = 700) -> onnx.ModelProto:
    """The model with a large product that its logits depend on but that does not change them."""
    graph = model.graph
    table = np.zeros((side, side), np.float32)
    graph.initializer.extend(
        [numpy_helper.from_array(table, "large"), numpy_helper.from_array(np.float32(0), "nothing")]
    )
    graph.node[-1].output[0] = "fast"
    nodes = [
        helper.make_node("ReduceMax", ["fast"], ["most"], keepdims=0),
        helper.make_node("Add", ["large", "most"], ["filled"]),
        helper.make_node("MatMul", ["filled", "filled"], ["product"]),
        helper.make_node("ReduceMax", ["product"], ["peak"], keepdims=0),
        helper.make_node("Mul", ["peak", "nothing"], ["zero"]),
        helper.make_node("Add", ["fast", "zero"], ["logits"]),
    ]
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return model


QUICK = ("--runtime", "ort-cpu", "--rounds", 2, "--warmup", 1)


def test_a_graph_is_timed_beside_its_products_and_says_why_not_beside_torch(
    files: dict[str, Path], tmp_path: Path
) -> None:
    saved = tmp_path / "now.json"
    result = cli("bench", files["decoder"], *QUICK, "--scenario", "decode:64", "--processes", 1, "--save", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "torch is not known: the file has no spec of posexport" in result.stdout
    assert "x lower bound" in result.stdout and "x torch eager" not in result.stdout
    data, found = json.loads(saved.read_bytes()), read_benchmark(saved)
    assert {name: data[name] for name in ("file", "encoding", "form", "opset", "dtype", "spec")} == {
        "file": "decoder.onnx",
        "encoding": None,
        "form": None,
        "opset": 18,
        "dtype": "fp32",
        "spec": {},
    }
    (shape,) = found.shapes
    assert (shape.scenario, shape.batch, shape.seq, shape.past_seq) == ("decode:64", 1, 1, 64)
    bound, timing = shape.results
    assert (bound.runtime, bound.state, timing.runtime, timing.state) == ("lower_bound", "timed", "ort-cpu", "timed")
    assert {*timing.ratios} == {"lower_bound"} and timing.ratios["lower_bound"].median > 1
    assert timing.seconds is not None and timing.tokens_per_second == 1 / timing.seconds.median


def test_a_graph_without_tokens_has_rows_and_no_rate(files: dict[str, Path]) -> None:
    result = cli("bench", files["plain"], *QUICK, "--shape", "batch=3", "--json")
    assert result.exit_code == 0, result.output
    (shape,) = json.loads(result.stdout)["shapes"]
    assert shape["batch"] == 3 and "seq" not in shape
    assert shape["results"][0]["tokens_per_second"] is None


def test_references_that_were_named_are_not_run_with_the_reason(files: dict[str, Path]) -> None:
    result = cli("bench", files["plain"], *QUICK, "--runtime", "torch", "--json")
    states = {
        each["runtime"]: (each["state"], each["reason"]) for each in json.loads(result.stdout)["shapes"][0]["results"]
    }
    assert states["torch"] == ("not run", "the file has no spec of posexport that says what it computes")
    assert set(states) == {"torch", "ort-cpu", "lower_bound"} and states["lower_bound"] == ("timed", "")
    required = cli("bench", files["plain"], *QUICK, "--require", "torch-compile")
    assert required.exit_code == 3
    assert required.stderr.startswith("Error: required runtime torch-compile was not run: the file has no spec")


def test_products_that_are_not_counted_leave_the_lower_bound_out_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "recurrent.onnx"
    weights = {name: np.ones(shape, np.float32) for name, shape in {"w": (1, 9, 4), "r": (1, 9, 3)}.items()}
    nodes = [helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=3)]
    model = model_of({"x": (["s", "b", 4], "fp32")}, {"y": (["s", 1, "b", 3], "fp32")}, nodes, weights)
    path.write_bytes(model.SerializeToString())
    result = cli("bench", path, *QUICK, "--input", "x=features", "--shape", "seq=4")
    assert result.exit_code == 0, result.output
    assert "lower_bound: the graph has the operator GRU, whose work is not counted" in result.stdout
    assert "x lower bound" not in result.stdout
    saved, options = tmp_path / "base.json", (*QUICK, "--input", "x=features", "--shape", "seq=4", "--processes", 1)
    assert cli("bench", path, *options, "--save", saved).exit_code == 0
    compared = cli("bench", path, "--input", "x=features", "--baseline", saved)
    refused(compared, "the baseline has no ratios to compare: the lower bound is not known, nor torch")


def test_nothing_timed_is_no_success(files: dict[str, Path]) -> None:
    result = cli("bench", files["decoder"], "--runtime", "torch", "--shape", "seq=4")
    assert result.exit_code == 3
    assert "nothing was timed: the file has no spec of posexport" in result.stderr


WRONG = {
    ("--peers",): "--peers was given with",
    ("--input", "y=features"): "--input gives a role to 'y', which is no input of the file: it has x.",
    ("--input", "x=feature"): "unknown role 'feature' of the input 'x': did you mean 'features'",
    ("--input", "x"): "--input 'x' is not NAME=ROLE",
    ("--input", "x=images"): "--input x=images doesn't fit",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_that_a_graph_cannot_have_are_refused(files: dict[str, Path], options: tuple[str, ...]) -> None:
    result = cli("bench", files["plain"], *QUICK, *options)
    assert result.exit_code == 2
    assert WRONG[options] in result.stderr


def test_roles_of_an_artifact_are_known(files: dict[str, Path]) -> None:
    result = cli("bench", files["own"], *QUICK, "--input", "hidden_states=features")
    assert result.exit_code == 2
    assert "is posexport's own, so the roles of its inputs are known: drop --input" in result.stderr


def test_a_role_that_cannot_be_guessed_is_asked_for_and_taken(tmp_path: Path) -> None:
    path = tmp_path / "odd.onnx"
    path.write_bytes(model_of({"x": (["b", "s", 4], "fp32"), "foo": (["b"], "int64")}).SerializeToString())
    asked = cli("bench", path, *QUICK)
    assert asked.exit_code == 2
    assert "what the input 'foo' ['b'] (int64) is for can't be guessed: say it with --input foo=ROLE" in asked.stderr
    given = cli("bench", path, *QUICK, "--input", "foo=index", "--shape", "seq=3")
    assert given.exit_code == 0, given.output


def test_a_saved_result_of_a_graph_is_a_baseline_by_its_lower_bound(files: dict[str, Path], tmp_path: Path) -> None:
    saved = tmp_path / "base.json"
    options = ("--rounds", 3, "--shape", "batch=2", "--processes", 3)
    assert cli("bench", files["plain"], *options, "--runtime", "ort-cpu", "--save", saved).exit_code == 0
    result = cli("bench", files["plain"], *options[:2], "--baseline", saved, "--max-regression", "900%", "--json")
    assert result.exit_code == 0, result.output
    (change,) = json.loads(result.stdout)["gate"]["changes"]
    assert (change["runtime"], change["reference"]) == ("ort-cpu", "lower_bound")


PAIRS = {
    "graphs": ("decoder", "decoder", ()),
    "graph and artifact": ("foreign", "own", ()),
    "artifact and graph": ("own", "foreign", ()),
    "others": ("decoder", "plain", ("logits", "position_ids", "x", "y")),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PAIRS)
def test_any_two_files_are_timed_in_the_same_rounds(files: dict[str, Path], name: str, no_torch: None) -> None:
    new, old, unlike = PAIRS[name]
    options = BenchOptions(runtimes=("ort-cpu",), shapes=("batch=2,seq=5",), rounds=1, warmup=1)
    with BenchRun(files[new], options, previous_artifact=files[old]) as run:
        run.open_processes()
        result, notes = run.result(), " ".join(run.notes)
    timed = {timing.runtime: timing for timing in result.timings}
    assert timed["ort-cpu"].state == timed["against:ort-cpu"].state == "timed"
    assert timed["ort-cpu"].ratios["against"].median > 0
    assert bool(notes) is bool(unlike) and all(word in notes for word in unlike)
    assert bool(result.no_torch) is (new != "own")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out torch and the lower bound, which take seconds to load."""
    from posexport.bench import candidates

    monkeypatch.setattr(candidates, "ALWAYS", ())
    monkeypatch.setattr(runtimes, "gpu_missing", lambda: "no GPU")


@pytest.mark.slow
def test_a_planted_slowdown_is_found_against_the_original(files: dict[str, Path]) -> None:
    limits = ("--against", files["decoder"], "--max-regression", "100%", "--shape", "seq=2")
    planted = cli("bench", files["slow"], "--runtime", "ort-cpu", "--rounds", 9, "--processes", 3, *limits)
    assert planted.exit_code == 1, planted.output
    assert "1 of 1 got slower." in planted.stdout


def test_an_artifact_beside_another_block_is_still_refused(files: dict[str, Path], tmp_path: Path) -> None:
    from helpers import exported

    from posexport.artifact.onnx_artifact import write_onnx

    write_onnx(exported(one_layer(window=3)), tmp_path / "other.onnx")
    result = cli("bench", files["own"], "--against", tmp_path / "other.onnx", *QUICK)
    assert result.exit_code == 2
    assert "is another block than" in result.stderr and "(window differ)" in result.stderr


def test_a_rewritten_file_has_a_form_and_an_origin_while_its_manifest_is_of_it(tmp_path: Path) -> None:
    from posexport.rewrite.draft import rewrite_file
    from posexport.rewrite.request import RewriteOptions

    source, target = tmp_path / "decoder.onnx", tmp_path / "native.onnx"
    onnx.save(decoder(cache=False), source)
    rewrite_file(source, target, RewriteOptions(form="native"))
    (one,) = load_timed([target], (), {})
    facts = one.facts()
    assert (facts["form"], facts["origin"], facts["opset"]) == ("native", read_graph(source).sha256, 23)
    assert one.warnings == ()
    target.write_bytes(source.read_bytes())
    (stale,) = load_timed([target], (), {})
    assert (stale.facts()["form"], stale.facts()["origin"]) == (None, None)
    assert "native.onnx.json" in stale.warnings[0]


def test_other_weights_than_those_of_the_manifest_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "plain.onnx"
    onnx.save(no_attention(), path, save_as_external_data=True, location="plain.data", size_threshold=0)
    data = {name: value for name, value in onnx_manifest(path).items() if name not in ("spec", "form")}
    for sha256, warned in ((sha256_of(tmp_path / "plain.data"), False), ("0" * 64, True)):
        write_manifest_data(path, {**data, "external_data": {"plain.data": sha256}})
        (one,) = load_timed([path], (), {})
        assert bool(one.warnings) is warned and all("its weights in plain.data" in text for text in one.warnings)


def test_a_plan_of_a_graph_is_refused_and_not_its_graph_timed(files: dict[str, Path], tmp_path: Path) -> None:
    source, plan = tmp_path / "decoder.onnx", tmp_path / "decoder.plan"
    source.write_bytes(files["decoder"].read_bytes())
    plan.write_bytes(b"code")
    data = plan_manifest(plan, source, onnx={"file": source.name, "sha256": sha256_of(source)})
    write_manifest_data(plan, {name: value for name, value in data.items() if name not in ("spec", "form")})
    said = refused(cli("bench", plan, *QUICK), "decoder.plan' is the plan of a graph without a spec")
    assert "decoder.onnx', with the --runtime that built the plan." in said


def test_references_alone_compare_nothing_with_an_earlier_file(files: dict[str, Path]) -> None:
    against = ("bench", files["own"], "--against", files["own"], "--runtime", "torch")
    said = "--runtime is torch, which doesn't run the artifact, so nothing can be compared with --against"
    refused(cli(*against), said)


def test_an_artifact_that_lost_its_spec_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    model = onnx.load(files["own"])
    kept = [entry for entry in model.metadata_props if entry.key != "posexport.spec"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, tmp_path / "lost.onnx")
    with pytest.raises(RequestError, match=r"lacks the metadata posexport\.spec"):
        load_timed([tmp_path / "lost.onnx"], (), {})


def test_the_same_inputs_go_into_a_graph_as_its_spec_asks_for(files: dict[str, Path]) -> None:
    """A worker that gets roles feeds inputs of the same shapes and dtypes as a worker that gets the spec."""
    fed: list[dict[str, Any]] = []

    class Noting:
        def prepare(self, inputs: dict[str, Any]) -> Callable[[], float]:
            fed.append({name: (array.shape, array.dtype) for name, array in inputs.items()})
            return lambda: 1e-6

        def describe(self) -> dict[str, str]:
            return {}

    for one in load_timed([files["own"], files["foreign"]], (), {}):
        worker: Any = Worker()
        worker._runner = Noting()
        worker.shape(seed=0, warmup=1, **one.request(one.read_sizes("batch=2,seq=7")))
    assert fed[0] == fed[1]
    assert read_onnx(files["own"]).spec.hidden_size == fed[0]["hidden_states"][0][2]


def test_graphs_are_compared_with_their_own_origin_alone(files: dict[str, Path], tmp_path: Path) -> None:
    """Of a file, its rewritten file and another file with the same inputs, only the first two are compared."""
    saved = tmp_path / "one.json"
    assert cli("bench", files["decoder"], *QUICK, "--shape", "seq=4", "--processes", 1, "--save", saved).exit_code == 0
    data = json.loads(saved.read_bytes())
    versions = [
        data,
        {**data, "file": "native.onnx", "sha256": "1" * 64, "form": "native", "origin": data["sha256"]},
        {**data, "file": "stranger.onnx", "sha256": "2" * 64},
    ]
    results = []
    for at, version in enumerate(versions):
        path = tmp_path / f"{at}.json"
        path.write_text(json.dumps(version))
        results.append(Result(name=path.name, data=read_benchmark(path)))
    groups = [[*dict.fromkeys(row.benchmark.file for row in one.rows)] for one in comparisons.compare(results)]
    assert groups == [["decoder.onnx", "native.onnx"], ["stranger.onnx"]]
