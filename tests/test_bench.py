"""`posexport bench` on a tiny block: states, numbers and exit codes. What is fast or slow is not asserted."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers import small_spec

from posexport import bench as benching
from posexport import runtimes
from posexport.artifact import write_onnx
from posexport.bench_child import Child, ChildError
from posexport.cli import main
from posexport.export import export
from posexport.models.weights import seeded_weights

NO_GPU = "no GPU: the test took it away"


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small_spec("rope")
    path = tmp_path_factory.mktemp("bench") / "block.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    return path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "gpu_missing", lambda: NO_GPU)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)])


def test_every_candidate_has_a_state_and_a_required_one_that_is_missing_exits_3(
    block: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(block.parent / "inductor"))
    options = ("--shape", "seq=5", "--shape", "batch=2,seq=3", "--rounds", 3, "--warmup", 1, "--threads", 1)
    result = invoke(block, "--runtime", "ort-cpu", "--require", "ort-cuda", *options, "--json")
    assert result.exit_code == 3
    assert result.stderr == f"Error: required runtime ort-cuda was not run: {NO_GPU}.\n"
    found = json.loads(result.stdout)
    assert {key: found[key] for key in ("file", "encoding", "form", "opset", "dtype", "rounds", "burst")} == {
        "file": "block.onnx",
        "encoding": "rope",
        "form": "decomposed",
        "opset": 18,
        "dtype": "fp32",
        "rounds": 3,
        "burst": 3,
    }
    assert [(each["batch"], each["seq"]) for each in found["shapes"]] == [(1, 5), (2, 3)]
    for shape in found["shapes"]:
        results = {each["runtime"]: each for each in shape["results"]}
        assert {name: each["state"] for name, each in results.items()} == {
            "torch": "timed",
            "torch-compile": "not run",
            "torch-cuda": "not run",
            "torch-compile-cuda": "not run",
            "ort-cpu": "timed",
            "ort-cuda": "not run",
        }
        assert "no-such-compiler" in results["torch-compile"]["reason"]
        assert results["ort-cuda"]["reason"] == NO_GPU
        assert results["torch"]["ratio"] == {"median": 1, "low": 1, "high": 1, "confidence": 0.75}
        timed = results["ort-cpu"]
        assert timed["against"] == "torch"
        assert timed["engine"]["engine"] == "onnxruntime"
        assert timed["seconds"]["count"] == 9
        assert 0 < timed["seconds"]["p10"] <= timed["seconds"]["median"] <= timed["seconds"]["p99"]
        assert timed["ratio"]["low"] <= timed["ratio"]["median"] <= timed["ratio"]["high"]
        assert timed["memory"] > 0


class Crashing:
    """A child of which every one but torch's own ends in a crash, or fails as the engine would."""

    def __init__(self, how: Callable[[], dict[str, Any]]) -> None:
        self._how, self.runtime = how, ""

    def ask(self, do: str, *, limit: float, **fields: Any) -> dict[str, Any]:
        self.runtime = fields.get("runtime_name", self.runtime)
        if self.runtime != "torch" and do == "time":
            return self._how()
        return {
            "open": {"describe": {}},
            "shape": {"seconds": 1.0, "memory": 1, "gpu_memory": None},
            "time": {"seconds": [1.0, 2.0, 3.0]},
        }[do]

    pid = 0

    def close(self) -> None:
        pass


def crash() -> dict[str, Any]:
    raise ChildError("its process crashed with SIGSEGV")


def refuse() -> dict[str, Any]:
    raise ChildError("NotImplemented: no bf16", "refused")


@pytest.mark.parametrize(("how", "state", "code"), [(crash, "failed", 1), (refuse, "not run", 0)])
def test_a_runtime_that_ends_while_it_is_timed_ends_itself_only(
    block: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[], dict[str, Any]], state: str, code: int
) -> None:
    monkeypatch.setattr(benching, "Child", lambda: Crashing(how))
    result = invoke(block, "--runtime", "ort-cpu", "--shape", "seq=5", "--shape", "seq=6", "--rounds", 2)
    assert result.exit_code == code, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith((" ort-cpu", " torch "))]
    assert [line[-1] if state == "failed" or line[0] == "torch" else " ".join(line[-2:]) for line in lines] == [
        "timed",
        state,
    ] * 2
    reason = "its process crashed with SIGSEGV" if how is crash else "NotImplemented: no bf16"
    assert f"ort-cpu: {reason}" in result.stdout


def test_a_failed_compilation_is_not_the_artifacts_fault(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCompiler(Crashing):
        def ask(self, do: str, *, limit: float, **fields: Any) -> dict[str, Any]:
            if fields.get("options", {}).get("compiled"):
                raise ChildError("InductorError: no C++ compiler")
            return super().ask(do, limit=limit, **fields)

    monkeypatch.setattr(benching, "Child", lambda: NoCompiler(lambda: {"seconds": [1.0]}))
    found = benching.bench(block, runtimes=["torch"], shapes=["seq=5"], rounds=1)
    assert found.states("torch-compile") == {"not run"}
    assert found.states("torch") == {"timed"}


def test_a_plan_runs_on_its_builder_alone_beside_torch_of_its_source(
    block: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx")
    from posexport.compile import compile_plan
    from posexport.trt_build import BuildOptions

    plan = block.with_suffix(".plan")
    compile_plan(block, plan, BuildOptions(runtime="tensorrt-rtx", profile=("seq=4:16:64", "batch=2:2:2")))
    opened = {}

    class Noting(Crashing):
        def ask(self, do: str, *, limit: float, **fields: Any) -> dict[str, Any]:
            if do == "open":
                opened[fields["runtime_name"]] = Path(fields["path"]).name
            return super().ask(do, limit=limit, **fields)

    monkeypatch.setattr(benching, "Child", lambda: Noting(crash))
    result = invoke(plan, "--rounds", 1, "--json")
    assert result.exit_code == 0, result.output
    (shape,) = json.loads(result.stdout)["shapes"]
    assert (shape["batch"], shape["seq"]) == (2, 16)
    reasons = {each["runtime"]: each["reason"] for each in shape["results"]}
    assert reasons["ort-cpu"] == "a plan of tensorrt-rtx runs on nothing else"
    assert reasons["tensorrt-rtx"] == NO_GPU
    assert opened == {"torch": "block.onnx"}
    outside = invoke(plan, "--shape", "seq=65")
    assert (outside.exit_code, outside.stderr) == (
        2,
        "Error: seq is 65: 'block.plan' takes 4 to 64, so give such a --shape.\n",
    )
    plan.write_bytes(plan.read_bytes() + b"more")
    assert invoke(plan).exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runtime", "ort-cup"), "unknown runtime 'ort-cup': did you mean 'ort-cpu'"),
        (("--require", "tensort"), "unknown runtime 'tensort': did you mean 'tensorrt'"),
        (("--rounds", "0"), "rounds is '0': it must be a whole number"),
        (("--warmup", "x"), "warmup is 'x': it must be a whole number"),
        (("--threads", "-1"), "threads is '-1': it must be a whole number"),
        (("--shape", "heads=3"), "unknown dimension in --shape 'heads'"),
    ],
)
def test_bad_requests_exit_2_before_anything_runs(
    block: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(benching, "Child", lambda: pytest.fail("a process was started"))
    result = invoke(block, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"junk", b"\x08\x07"])
def test_files_that_are_no_artifact_exit_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "block.onnx"
    path.write_bytes(content)
    result = invoke(path)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert str(path) in result.stderr


def test_a_crash_names_its_signal() -> None:
    child = Child((sys.executable, "-c", "import os; os.abort()"))
    with pytest.raises(ChildError, match="crashed with SIGABRT"):
        child.ask("open", limit=30.0)
    child.close()


def test_an_end_names_its_code_and_last_words() -> None:
    child = Child((sys.executable, "-c", "import sys; print('no library', file=sys.stderr); sys.exit(7)"))
    with pytest.raises(ChildError, match="ended with code 7: no library"):
        child.ask("open", limit=30.0)
    child.close()


def test_a_hanging_process_is_ended() -> None:
    child = Child((sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(ChildError, match=r"no answer within 0\.2 s"):
        child.ask("open", limit=0.2)


def test_what_an_engine_prints_does_not_disturb_the_answers() -> None:
    code = (
        "import os, sys, posexport.bench_worker as w\n"
        "w.Worker.open = lambda self, **_: (print('noise'), os.write(1, b'more noise\\n'), {'describe': {}})[2]\n"
        "w.main()"
    )
    child = Child((sys.executable, "-P", "-c", code))
    assert child.ask("open", limit=60.0) == {"describe": {}}
    child.close()


@pytest.mark.slow
def test_torch_compile_is_timed_where_there_is_a_compiler(block: Path) -> None:
    import shutil

    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    found = benching.bench(block, runtimes=["ort-cpu"], shapes=["seq=5", "seq=6"], rounds=2)
    assert found.states("torch-compile") == {"timed"}
