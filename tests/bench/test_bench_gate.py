"""`posexport bench --save`, `--baseline` and `--against`: their files, output and exit codes.

Workers are scripted, except in the slow test, which plants transposes into a graph.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pages
import pytest
from click.testing import CliRunner, Result
from helpers import small_spec

from posexport import files, runtimes
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import benchmark, rounds, session
from posexport.bench.result import read_benchmark
from posexport.bench.rounds import interleave
from posexport.cli import main
from posexport.errors import RequestError
from posexport.export import export
from posexport.models.weights import seeded_weights

pytestmark = pytest.mark.few_inputs


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small_spec("none")
    path = tmp_path_factory.mktemp("gate") / "block.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    return path


class Speeds:
    """Workers whose runs take about a millisecond times a factor of the runtime; the noise is equal in every test."""

    def __init__(self, factors: dict[str, float], luck: float = 0.004) -> None:
        self.factors, self.opened, self.luck = factors, 0, luck

    def worker(self, module: str) -> Any:
        speeds = self

        class Scripted:
            pid = None
            factor = 1.0

            def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
                if request["do"] == "open":
                    speeds.opened += 1
                    luck = 1 + speeds.luck * (speeds.opened * 7 % 5 - 2)
                    self.factor = luck * speeds.factors.get(request["role"] or request["runtime"]["name"], 1.0)
                done: dict[str, dict[str, Any]] = {
                    "open": {"describe": {}, "load_seconds": 1.0, "build_seconds": None},
                    "shape": {"seconds": 1.0, "memory": 1, "gpu_memory": None, "resident": 1, "run_seconds": 1e-3}
                    | {"build_seconds": None, "describe": {}},
                    "time": {"seconds": [1e-3 * self.factor] * 3},
                }
                return {"ok": True, **done[request["do"]]}

            def close(self) -> None: ...

        return Scripted()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(runtimes, "gpu_missing", lambda: "no GPU")
    monkeypatch.setattr(rounds, "interleave", partial(interleave, pause=0.0))

    def run(*arguments: object, luck: float = 0.004, **factors: float) -> Result:
        speeds = Speeds({name.replace("ort_", "ort-"): factor for name, factor in factors.items()}, luck)
        monkeypatch.setattr(rounds, "Worker", speeds.worker)
        return CliRunner().invoke(main, ["bench", *map(str, arguments)])

    return run


@pytest.fixture
def base(block: Path, bench: Callable[..., Result], tmp_path: Path) -> Path:
    path = tmp_path / "base.json"
    result = bench(block, "--runtime", "ort-cpu", "--scenario", "prefill:5,6", "--save", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"saved to {path}\n")
    return path


def test_a_saved_result_says_what_it_is(base: Path) -> None:
    found = json.loads(base.read_text())
    assert list(found)[:4] == ["kind", "version", "file", "sha256"]
    assert {"cpu", "vendor", "instruction_sets"} <= set(found["machine"])
    assert (found["kind"], found["version"], found["processes"]) == ("bench", 1, 7)
    assert [shape["scenario"] for shape in found["shapes"]] == ["prefill:5", "prefill:6"]
    assert "torch-compile" not in {result["runtime"] for result in found["shapes"][0]["results"]}
    assert len(found["shapes"][0]["results"][-1]["processes"]["lower_bound"]) == 7


@pytest.mark.slow
def test_an_unsteady_result_to_save_takes_more_processes(
    block: Path, bench: Callable[..., Result], tmp_path: Path
) -> None:
    """A gated result that is saved takes more processes too: a gate stops early if a result looks faster than it is.

    A warning says that the baseline is unsteady.
    """
    path, other = tmp_path / "base.json", tmp_path / "other.json"
    asked = (block, "--runtime", "ort-cpu", "--scenario", "prefill:5", "--save", path)
    for given, processes in (((), 20), (("--processes", 4), 4)):
        result = bench(*asked, *given, luck=0.2)
        assert result.exit_code == 0, result.output
        assert json.loads(path.read_text())["processes"] == processes
    gated = (block, "--baseline", path, "--max-regression", "900%")
    for given, processes in (((), 7), (("--save", other), 20)):
        result = bench(*gated, *given, "--json", luck=0.2, ort_cpu=0.1)
        assert result.exit_code == 0, result.output
        assert "The baseline's ratios are known to " in result.stderr
        assert json.loads(result.stdout)["processes"] == processes


def test_a_spec_with_lists_is_its_own_baseline(bench: Callable[..., Result], tmp_path: Path) -> None:
    spec = small_spec("alibi", slopes="1,2,3,4", bias=["q_proj"])
    path, saved = tmp_path / "lists.onnx", tmp_path / "base.json"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    for options in (("--save", saved, "--runtime", "ort-cpu", "--shape", "seq=4"), ("--baseline", saved)):
        result = bench(path, *options)
        assert result.exit_code == 0, result.output


def test_an_equal_build_is_fine(block: Path, bench: Callable[..., Result], base: Path) -> None:
    result = bench(block, "--baseline", base)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("Nothing got slower.\n")
    assert "ort-cuda" not in result.stdout  # The runtimes and the scenarios are those of the baseline.
    assert [line for line in result.stdout.splitlines() if line.startswith(" ort-cpu   prefill:")]


def test_a_slowdown_exits_1_with_the_table(block: Path, bench: Callable[..., Result], base: Path) -> None:
    result = bench(block, "--baseline", base, "--max-regression", "10%", ort_cpu=1.3)
    assert result.exit_code == 1, result.output
    assert "got slower by more than 10.0%?" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(" ort-cpu   prefill:5 "))
    assert line.split()[2] == "+30.0%" and line.split()[-1] == "slower"
    assert result.stdout.endswith("2 of 2 got slower.\n")


def test_the_table_names_the_cpu(block: Path, bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "machine", lambda: {"cpu": "Xeon X", "cores": 2, "instruction_sets": ["AVX-512"]})
    result = bench(block, "--runtime", "ort-cpu", "--shape", "seq=5", "--rounds", 1)
    assert "1 rounds; Xeon X, 2 cores, AVX-512\n" in result.stdout


def test_a_slower_machine_is_no_slowdown(block: Path, bench: Callable[..., Result], base: Path) -> None:
    result = bench(block, "--baseline", base, ort_cpu=3.0, torch=3.0, lower_bound=3.0)
    assert result.exit_code == 0, result.output


def test_a_runtime_that_the_baseline_never_timed_is_refused(
    block: Path, bench: Callable[..., Result], base: Path
) -> None:
    result = bench(block, "--baseline", base, "--runtime", "torch")
    assert (result.exit_code, result.stdout) == (2, "")
    said = "--runtime is torch, and the baseline has ort-cpu: name one of those, or none."
    assert result.stderr == f"Error: {said}\n"


def test_few_rounds_have_no_interval(block: Path, bench: Callable[..., Result]) -> None:
    for count, said in ((1, "1.00 (few rounds)"), (20, "1.00 (1.00 to 1.00)")):
        result = bench(block, "--runtime", "ort-cpu", "--shape", "seq=5", "--rounds", count)
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(" torch "))
        assert said in line


def test_what_cannot_be_told_passes_but_for_strict(block: Path, bench: Callable[..., Result], base: Path) -> None:
    limits = ("--max-regression", "5%", "--processes", 3)
    result = bench(block, "--baseline", base, *limits, ort_cpu=1.05)
    assert result.exit_code == 0, result.output
    assert "inconclusive" in result.stdout and "2 of 2 are inconclusive at this noise" in result.stdout
    assert bench(block, "--baseline", base, *limits, "--strict", ort_cpu=1.05).exit_code == 1


def test_the_gate_is_in_the_json(block: Path, bench: Callable[..., Result], base: Path, tmp_path: Path) -> None:
    saved = tmp_path / "now.json"
    result = bench(block, "--baseline", base, "--json", "--save", saved, ort_cpu=1.3)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert json.loads(saved.read_text()) == found
    assert found["gate"]["limit"] == 0.05
    assert [change["state"] for change in found["gate"]["changes"]] == ["slower", "slower"]


@pytest.mark.parametrize(("factor", "code", "said"), [(1.0, 0, "Nothing got slower."), (0.8, 1, "1 of 1 got slower.")])
def test_an_earlier_artifact_is_timed_beside(
    block: Path, bench: Callable[..., Result], tmp_path: Path, factor: float, code: int, said: str
) -> None:
    old = tmp_path / "old.onnx"
    old.write_bytes(block.read_bytes())
    result = bench(block, "--runtime", "ort-cpu", "--shape", "seq=5", "--against", old, against=factor)
    assert result.exit_code == code, result.output
    assert result.stdout.endswith(f"{said}\n")
    assert " against:ort-cpu " in result.stdout and "the earlier artifact" in result.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ort-cuda", "onnx-reference", "torch-compile"])
def test_a_required_runtime_is_timed_beside_those_of_the_baseline(
    block: Path, bench: Callable[..., Result], base: Path, name: str
) -> None:
    result = bench(block, "--baseline", base, "--require", name)
    assert result.exit_code == (3 if name == "ort-cuda" else 0), result.output
    assert any(
        line.split()[:1] == [name] and line.rstrip().endswith(" timed") for line in result.stdout.splitlines()
    ) or ("required runtime ort-cuda was not run: no GPU" in result.stderr)


def test_cuda_graphs_are_as_in_the_baseline(block: Path, bench: Callable[..., Result], tmp_path: Path) -> None:
    saved = tmp_path / "base.json"
    bench(block, "--runtime", "ort-cpu", "--shape", "seq=5", "--cuda-graph", "--save", saved)
    result = bench(block, "--baseline", saved, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cuda_graph"] is True


def test_a_baseline_of_a_busy_machine_is_told_before_anything_is_timed(
    block: Path, bench: Callable[..., Result], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.write_text(json.dumps({**json.loads(base.read_text()), "machine_load": 0.43}))

    def started(speeds: Speeds, module: str) -> Any:
        raise RuntimeError("a process was started")

    monkeypatch.setattr(Speeds, "worker", started)
    result = bench(block, "--baseline", base)
    assert isinstance(result.exception, RuntimeError)
    assert (
        "Warning: block.onnx: The baseline was saved on a busy machine (other work took 43% of the CPU)"
        in result.stderr
    )


def test_what_was_timed_is_shown_even_where_it_cannot_be_saved(
    block: Path, bench: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: object) -> None:
        raise RequestError("can't write the output (No space left on device).")

    monkeypatch.setattr(files, "write_json", full)
    given = (block, "--runtime", "ort-cpu", "--shape", "seq=5", "--processes", 1, "--save", tmp_path / "x.json")
    result = bench(*given)
    assert result.exit_code == 2 and "No space left" in result.stderr
    assert " ort-cpu " in result.stdout and "saved to" not in result.stdout


def other(tmp_path: Path) -> Path:
    spec = small_spec("none", hidden_size=64)
    path = tmp_path / "other.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    return path


def test_wrong_comparisons_exit_2_before_anything_is_timed(
    block: Path, bench: Callable[..., Result], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = other(tmp_path)
    cases: list[tuple[tuple[object, ...], str]] = [
        ((another, "--baseline", base), "the baseline is of file 'block.onnx'"),
        ((block, "--baseline", base, "--shape", "seq=9"), "batch=1,seq=5 is in the baseline only"),
        ((block, "--baseline", base, "--threads", 1), "the threads of the baseline are"),
        ((block, "--baseline", base, "--cuda-graph"), "the run has --cuda-graph, the baseline has not"),
        ((block, "--baseline", tmp_path / "none.json"), "can't read"),
        ((block, "--baseline", block), "can't read"),
        (
            (block, "--against", another),
            f"'{another}' is another block than '{block}' (head_dim, hidden_size, scale differ)",
        ),
        ((block, "--against", base), "is neither .onnx nor .plan"),
        ((block, "--baseline", base, "--against", block), "--baseline and --against were both given"),
        ((block, "--max-regression", "5%"), "--max-regression was given without something to compare with"),
        ((block, "--strict"), "--strict was given without something to compare with"),
        ((block, "--baseline", base, "--max-regression", "much"), "--max-regression is 'much'"),
        ((block, "--save", tmp_path / "no" / "x.json"), "--save is"),
        ((block, "--save", tmp_path), "--save is"),
        ((block, "--save", block), "a file of an artifact"),
        ((block, "--save", f"{block}.json"), "a file of an artifact"),
        ((block, "--baseline", base, "--save", base), "--save and --baseline are both"),
        ((block, "--scenario", "decode:5"), "--scenario decode:5: 'block.onnx' has no cache"),
        ((block, "--seconds", "0"), "seconds is '0'"),
        ((block, "--processes", "0"), "processes is '0'"),
    ]
    for arguments, said in cases:
        monkeypatch.setattr(Speeds, "worker", lambda self, module: pytest.fail("a process was started"))
        result = bench(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert result.stderr.startswith("Error: ") and said in result.stderr, result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_planted_transposes_are_caught_and_an_equal_build_is_not(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
    try:
        import gate
    finally:
        sys.path.pop(0)
    block, old = tmp_path / "block.onnx", tmp_path / "old.onnx"
    gate.make(block)
    old.write_bytes(block.read_bytes())
    limits = ("--runtime", "ort-cpu", "--scenario", "prefill:256", "--against", old, "--max-regression", "20%")
    equal = CliRunner().invoke(main, ["bench", *map(str, (block, *limits))])
    assert equal.exit_code == 0, equal.output
    gate.plant(block, 3)
    planted = CliRunner().invoke(main, ["bench", *map(str, (block, *limits))])
    assert planted.exit_code == 1, planted.output
    assert "1 of 1 got slower." in planted.stdout


def test_a_planted_graph_computes_the_same(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
    try:
        import gate
    finally:
        sys.path.pop(0)
    from posexport.bench.shapes import Sizes, seeded_inputs
    from posexport.runtimes import runtime

    block = tmp_path / "block.onnx"
    gate.make(block, hidden=32)
    inputs = seeded_inputs(small_spec("rope", hidden_size=32), Sizes(seq=7), 0)
    before = runtime("ort-cpu").load(block).run(inputs)["output"]
    gate.plant(block, 2)
    after = runtime("ort-cpu").load(block).run(inputs)["output"]
    assert (before == after).all()


def commands() -> list[list[str]]:
    """Every command of docs/guide/bench.md, in order."""
    page = pages.ROOT / "docs" / "guide" / "bench.md"
    return [shlex.split(line)[1:] for block in pages.blocks(page) for line in block.commands()]


def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Callable[..., Result]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session.BenchSession, "_made", lambda self, role, name, **fields: Path("block.onnx"))
    for command, *arguments in commands():
        result = bench(*arguments) if command == "bench" else CliRunner().invoke(main, [command, *arguments])
        assert result.exit_code == 0, result.output


def test_a_manifest_that_is_not_of_the_file_is_told(block: Path, bench: Callable[..., Result], tmp_path: Path) -> None:
    path, saved = Path(shutil.copy(block, tmp_path)), tmp_path / "now.json"
    manifest = json.loads(Path(f"{block}.json").read_bytes())
    path.with_name("block.onnx.json").write_text(json.dumps({**manifest, "sha256": 64 * "0"}))
    result = bench(path, "--runtime", "ort-cpu", "--shape", "seq=4", "--processes", 1, "--rounds", 1, "--save", saved)
    fault = f"{path}: the file is not the one that its manifest block.onnx.json describes (their sha256 differ)"
    assert (result.exit_code, result.stderr) == (0, f"Warning: {fault}.\n")
    assert read_benchmark(saved).manifest_warnings == (fault,)


def test_a_lower_bound_is_run_as_in_the_first_process_and_as_in_the_baseline(
    block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    class Bounds(Speeds):
        def worker(self, module: str) -> Any:
            made = super().worker(module)
            plain, state = made.ask, {"lower_bound": False}

            def ask(request: dict[str, Any], time_limit: float) -> dict[str, Any]:
                if request["do"] == "open":
                    state["lower_bound"] = request["role"] == "lower_bound"
                found: dict[str, Any] = plain(request, time_limit)
                if request["do"] == "shape" and state["lower_bound"]:
                    asked.append(request["method"])
                    found["describe"] = {"method": request["method"] or f"method {len(asked)}"}
                return found

            made.ask = ask
            return made

    monkeypatch.setattr(rounds, "interleave", partial(interleave, pause=0.0))
    monkeypatch.setattr(rounds, "Worker", Bounds({}).worker)
    options = ["bench", str(block), "--runtime", "ort-cpu", "--scenario", "prefill:5", "--rounds", "3"]
    base = tmp_path / "base.json"
    assert CliRunner().invoke(main, [*options, "--processes", "3", "--save", str(base)]).exit_code == 0
    assert asked == [None, "method 1", "method 1"]
    asked.clear()
    gated = CliRunner().invoke(main, [*options[:4], "--baseline", str(base), "--max-regression", "5%"])
    assert gated.exit_code == 0, gated.output
    assert set(asked) == {"method 1"}
