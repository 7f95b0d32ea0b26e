"""`posexport tune FILE`: the file and its rewritten files as candidates, the winner, the output, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import onnx
import pytest
from graph_files import one_layer
from graph_signatures import model_of
from helpers import cli, exported, refused
from onnx import numpy_helper
from small_graphs import decoder, no_attention
from test_tune import OPTIONS, World

from posexport.artifact.graph_file import read_graph
from posexport.artifact.loaded import load_sound
from posexport.artifact.manifest import OnnxManifest, WeightSource, read_manifest_of, write_manifest
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.scenarios import Scenario
from posexport.bench.timed_graph import timed_graph
from posexport.bench.tune import publish
from posexport.bench.tune import search as stage
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.file_programs import FilePrograms, TunedFile, _copied
from posexport.bench.tune.file_request import usual_scenario
from posexport.bench.tune.measure import CandidateTimer
from posexport.bench.tune.search import tune
from posexport.bench.tune.space import Limits, Program, Request
from posexport.files import sha256_of
from posexport.rewrite import draft
from posexport.rewrite.files import rewrite_into
from posexport.verify import verifier


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    onnx.save(decoder(cache=False, rope=False), folder / "decoder.onnx")
    onnx.save(decoder(), folder / "cached.onnx")
    onnx.save(no_attention(), folder / "plain.onnx")
    return folder


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites in this process, because a new process takes seconds to start."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(draft, "rewrite_in_child", rewrite_into)


def tuned(path: Path) -> TunedFile:
    return TunedFile(graph=timed_graph(read_graph(path), {}))


def programs(path: Path, folder: Path, **limits: Any) -> FilePrograms:
    request = Request(scenario=Scenario("prefill", 8), limits=Limits(**limits))
    return tuned(path).programs(request, Store(folder), lambda step: None)


ALL = [f"{form}/fp32/{opset}{target}"
       for form, opset in (("decomposed", 18), ("function", 18), ("native", 23), ("contrib", 18))
       for target in ("", "/ort")]  # fmt: skip


def test_candidates_are_the_file_itself_and_every_form_of_it(files: Path, tmp_path: Path) -> None:
    made = programs(files / "decoder.onnx", tmp_path)
    assert list(map(str, made.candidates())) == ["original/fp32/18", *ALL]
    assert made.others(next(made.candidates())) == []
    chosen = programs(files / "decoder.onnx", tmp_path, forms=("native",), targets=("ort",))
    assert list(map(str, chosen.candidates())) == ["native/fp32/23/ort"]
    by_opset = programs(files / "decoder.onnx", tmp_path, forms=("native",), opsets=(22, 24))
    assert [made.refusal(program) is None for program in by_opset.candidates()] == [False, True, False, True]


def test_the_original_is_the_simplest_of_all(files: Path, tmp_path: Path) -> None:
    every = list(programs(files / "decoder.onnx", tmp_path).candidates())
    assert min(every, key=lambda program: program.plainness).form == "original"


def test_programs_are_the_file_as_it_is_and_files_that_were_rewritten(files: Path, tmp_path: Path) -> None:
    source = files / "decoder.onnx"
    with programs(source, tmp_path) as made:
        original = made.prepare(Program(form="original", dtype="fp32", opset=18))
        assert not isinstance(original, str)
        assert (original.sha256, original.size) == (sha256_of(source), source.stat().st_size)
        assert original.sizes == {"batch": 1, "seq": 8}
        assert [role["name"] for role in original.roles] == ["input_ids", "attention_mask", "position_ids"]
        native = Program(form="native", dtype="fp32", opset=23)
        rewritten = made.prepare(native)
        assert not isinstance(rewritten, str)
        assert rewritten.sha256 == sha256_of(made.path(native)) != original.sha256
        assert any(node.op_type == "Attention" for node in onnx.load(made.path(native)).graph.node)
        assert (rewritten.sizes, rewritten.roles) == (original.sizes, original.roles)
        assert made.path(Program(form="original", dtype="fp32", opset=18)) == source


def test_a_file_without_attention_has_one_candidate(files: Path, tmp_path: Path) -> None:
    with programs(files / "plain.onnx", tmp_path) as made:
        made.request = Request(scenario=Scenario("batch", 2))
        prepared = made.prepare(Program(form="native", dtype="fp32", opset=23))
        assert prepared == "no attention was rewritten: none was found"
        assert not isinstance(made.prepare(Program(form="original", dtype="fp32", opset=18)), str)


class FileWorld(World):
    """Gives times by form, without rewriting or running anything."""

    def time(self, name: str) -> float:
        return 0.5 if name.startswith(self.best) else 1.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FileWorld:
    made = FileWorld()
    made.best = "native"
    made.times = made.time
    monkeypatch.setattr(CandidateTimer, "time_rounds", lambda timer, *args: made.time_rounds(timer, *args))
    monkeypatch.setattr(FilePrograms, "identity", lambda programs, program, level=None: (str(program), None))
    monkeypatch.setattr(stage, "verified", made.verify)
    monkeypatch.setattr(stage, "options_of", lambda *args, **more: OPTIONS)
    return made


def tuned_to(path: Path, output: Path, **limits: Any) -> Any:
    request = Request(scenario=Scenario("prefill", 8), limits=Limits(**limits))
    return tune(tuned(path), request, output, Store(output.parent), lambda step: None)


def test_a_rewritten_winner_is_written_with_its_evidence(files: Path, tmp_path: Path, world: FileWorld) -> None:
    source, output = files / "decoder.onnx", tmp_path / "best.onnx"
    result = tuned_to(source, output, forms=("native", "contrib"), targets=("portable",))
    assert result.winner is not None
    assert (result.encoding, result.winner.form, result.winner.opset) == ("decoder.onnx", "native", 23)
    manifest = read_manifest_of(OnnxManifest, output)
    assert manifest is not None and manifest.rewrite is not None and manifest.tune is not None
    assert manifest.sha256 == sha256_of(output) == result.winner.sha256
    assert (manifest.form, manifest.rewrite.changed, manifest.rewrite.source.sha256) == (
        "native",
        True,
        sha256_of(source),
    )
    assert [one["state"] for one in manifest.rewrite.attentions] == ["rewritten"]
    assert manifest.tune["winner"]["name"] == result.winner.name
    assert manifest.tune["options"]["provider"] == "CPUExecutionProvider"


def test_an_original_that_nothing_beats_is_written_as_it_is(files: Path, tmp_path: Path, world: FileWorld) -> None:
    source, output = files / "plain.onnx", tmp_path / "best.onnx"
    request = Request(scenario=Scenario("batch", 2))
    result = tune(tuned(source), request, output, Store(tmp_path), lambda step: None)
    assert result.winner is not None and result.winner.name == "original/fp32/18"
    assert output.read_bytes() == source.read_bytes()
    manifest = read_manifest_of(OnnxManifest, output)
    assert manifest is not None and manifest.rewrite is not None and manifest.tune is not None
    assert (manifest.rewrite.changed, manifest.rewrite.attentions) == (False, ())
    refused_rows = {row.name: row.reason for row in result.candidates if row.state == "refused"}
    assert len(refused_rows) == len(ALL)
    assert set(refused_rows.values()) == {"no attention was rewritten: none was found"}
    again = timed_graph(read_graph(output), {})
    assert (again.form, again.origin) == (None, sha256_of(source))


def test_an_own_block_that_nothing_beats_stays_one(tmp_path: Path) -> None:
    source, output = tmp_path / "block.onnx", tmp_path / "best.onnx"
    write_onnx(exported(one_layer()), source, external_from=0, weights=WeightSource(source="random", seed=0))
    original = Program(form="original", dtype="fp32", opset=18)
    programs(source, tmp_path).write(original, output)
    before, after = load_sound(source), load_sound(output)
    assert before.manifest is not None and after.manifest is not None
    for name in ("spec", "form", "weights", "version"):
        assert getattr(after.manifest, name) == getattr(before.manifest, name) is not None
    assert isinstance(after.manifest, OnnxManifest) and after.manifest.rewrite is not None
    assert after.source.weights()["q_proj.weight"].equal(before.source.weights()["q_proj.weight"])


def test_what_does_not_verify_gives_way_to_the_next(files: Path, tmp_path: Path, world: FileWorld) -> None:
    world.wrong = {"native"}
    result = tuned_to(
        files / "decoder.onnx", tmp_path / "best.onnx", forms=("native", "contrib"), targets=("portable",)
    )
    assert result.winner is not None and result.winner.form == "contrib"
    assert {row.state for row in result.candidates if row.form == "native"} == {"failed"}


@pytest.mark.parametrize("form", ["original", "native"])
def test_programs_are_held_against_the_file_that_is_tuned(
    form: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def verify(paths: Any, **options: Any) -> Any:
        asked.update(options, paths=paths)
        raise RuntimeError("asked")

    monkeypatch.setattr(verifier, "verify", verify)
    with programs(files / "decoder.onnx", tmp_path) as made:
        path = made.against if form == "original" else tmp_path / "rewritten.onnx"
        assert path is not None
        with pytest.raises(RuntimeError, match="asked"):
            publish._verify(made, path, publish.RUNTIMES["ort-cpu"])
    assert asked["against"] == (None if form == "original" else files / "decoder.onnx")
    assert asked["paths"] == [path]


@pytest.mark.slow
def test_a_wrong_program_does_not_verify(files: Path, tmp_path: Path) -> None:
    """A real run: the scale of the scores is wrong by a tenth."""
    model = decoder(cache=False, rope=False)
    (scale,) = (
        tensor for tensor in model.graph.initializer if tensor.name.startswith("const") and _is(tensor, 8**-0.5)
    )
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 1.1, scale.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    onnx.save(decoder(cache=False, rope=False), tmp_path / "right.onnx")
    with programs(files / "decoder.onnx", tmp_path) as made:
        states = {
            name: publish._verify(made, tmp_path / f"{name}.onnx", publish.RUNTIMES["ort-cpu"])[0]
            for name in ("right", "wrong")
        }
    assert states == {"right": "passed", "wrong": "failed"}


def _is(tensor: onnx.TensorProto, value: float) -> bool:
    array = numpy_helper.to_array(tensor)
    return array.dtype == "float32" and array.size == 1 and abs(float(array.item()) - value) < 1e-6


SCENARIOS: dict[str, Callable[[], onnx.ModelProto]] = {
    "decode:512": decoder,
    "prefill:512": lambda: decoder(cache=False),
    "batch:1": no_attention,
    "batch:3": lambda: model_of({"x": ([3, 4], "fp32")}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_usual_scenario_is_one_that_the_file_takes(scenario: str, tmp_path: Path) -> None:
    onnx.save(SCENARIOS[scenario](), tmp_path / "any.onnx")
    graph = timed_graph(read_graph(tmp_path / "any.onnx"), {})
    assert str(usual_scenario(graph)) == scenario
    assert graph.scenario_sizes(usual_scenario(graph))


WRONG: dict[tuple[str, ...], str] = {
    ("decoder.onnx", "--hidden-size", "64"): "--hidden-size was given with the file 'decoder.onnx'",
    ("decoder.onnx", "--encoding", "rope"): "--encoding was given with the file 'decoder.onnx'",
    ("decoder.onnx", "--set", "theta=5"): "--set was given with the file 'decoder.onnx'",
    ("decoder.onnx", "--seed", "1"): "--seed was given with the file 'decoder.onnx'",
    ("decoder.onnx", "--dtype", "fp16"): "--dtype was given with the file 'decoder.onnx'",
    ("decoder.onnx", "--for", "tensorrt"): "'decoder.onnx' can't be tuned for tensorrt",
    ("decoder.onnx", "--for", "torch"): "unknown runtime in --for 'torch'",
    ("decoder.onnx", "--objective", "speed"): "unknown objective 'speed'",
    ("decoder.onnx", "--allow", "consecutive"): "whose positions are as they were written: drop it",
    ("decoder.onnx", "--for", "ort-cuda", "--allow", "denormal-as-zero"): "it is an option of ONNX Runtime on a CPU",
    ("decoder.onnx", "--form", "nat"): "unknown form 'nat'",
    ("decoder.onnx", "--scenario", "prefill"): "is 7 sizes: tune for one",
    ("decoder.onnx", "--scenario", "decode:4"): "'decoder.onnx' has no cache",
    ("decoder.onnx", "-o", "decoder.onnx"): "is a file that this command reads: give another name",
    ("decoder.onnx", "-o", "x.plan"): "must end in .onnx for ort-cpu",
    (
        "decoder.onnx",
        "--input",
        "ids=token_ids",
    ): "--input gives a role to 'ids', which is no input of the file: did you mean 'input_ids'?",
    ("decoder.onnx", "--input", "input_ids=tokens"): "unknown role 'tokens' of the input 'input_ids'",
    ("plain.onnx", "--scenario", "prefill:4"): "'plain.onnx' takes no tokens, so give batch",
    ("gone.onnx",): "'gone.onnx' is not there",
    ("block.plan",): "can't be tuned for ort-cpu",
    ("--encoding", "rope", "--input", "x=features"): "--input was given without a file",
}


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_what_cannot_be_tuned_is_one_sentence(
    options: tuple[str, ...], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("decoder.onnx", "plain.onnx"):
        Path(name).write_bytes((files / name).read_bytes())
    Path("block.plan").write_bytes(b"code")
    refused(cli("tune", *options), WRONG[options])
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"decoder.onnx", "plain.onnx", "block.plan", ".posexport-tune"}


@pytest.mark.parametrize("change", ["manifest", "inputs"])
def test_a_file_of_which_no_manifest_would_be_true_is_not_tuned(change: str, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.onnx"
    model = onnx.load(files / "plain.onnx")
    if change == "inputs":
        model.graph.ClearField("input")
    onnx.save(model, path)
    said = "has no inputs"
    if change == "manifest":
        manifest = _copied(read_graph(path), tmp_path / "copy.onnx", None)
        said = "is not the one that its manifest plain.onnx.json describes"
        write_manifest(path, attrs.evolve(manifest, sha256="0" * 64))
    refused(cli("tune", path, "-o", tmp_path / "out.onnx"), said)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.slow
def test_a_file_is_tuned_with_real_runs_and_verified(files: Path, tmp_path: Path) -> None:
    output, saved = tmp_path / "best.onnx", tmp_path / "tune.json"
    options = ("--scenario", "decode:64", "--target", "ort", "-o", output, "--save", saved)
    result = cli("tune", files / "cached.onnx", *options)
    assert result.exit_code == 0, result.output
    data = json.loads(saved.read_bytes())
    assert data["winner"]["verified"] == "ort-cpu" and data["scenario"] == "decode:64"
    assert {row["form"] for row in data["candidates"]} == {"original", "decomposed", "function", "native", "contrib"}
    held = cli("verify", output, "--against", files / "cached.onnx", "--runtime", "ort-cpu")
    assert held.exit_code == 0, held.output
