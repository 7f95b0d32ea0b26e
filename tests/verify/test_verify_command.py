"""`posexport verify`: folders, runtimes, exit codes and reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import Result
from helpers import case, cli, exported, refused, tree
from mutants import initializer, last
from onnx import helper
from verify_helpers import plant, write

from posexport.artifact.onnx_artifact import write_onnx
from posexport.runtimes import RUNTIMES
from posexport.verify.junit import to_junit
from posexport.verify.result import INCONCLUSIVE, NOT_RUN, NOTHING_COMPARED, PASSED, Report, State, Verdict

pytestmark = pytest.mark.few_inputs

MISSING = next((name for name, row in RUNTIMES.items() if row.missing() is not None), None)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Verify a folder with a sound artifact, a faulty one in a subfolder, and one in bf16. Write all reports."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "below").mkdir()
    write(folder, "sound", case("rope-gqa-window"), "function")
    plant(folder / "below", "faulty", case("alibi"), initializer("encoding.slopes", lambda values: values * 2))
    write(folder, "bf16", case("none", dtype="bf16"))
    runtimes = ("--runtime", "torch", "--runtime", "ort-cpu")
    reports = ("--junit", folder / "r.xml", "--markdown", folder / "r.md", "--json")
    return folder, cli("verify", folder, *runtimes, *reports)


def test_a_folder_is_verified_whole_and_one_failure_is_exit_1(mixed: tuple[Path, Result]) -> None:
    _, result = mixed
    assert result.exit_code == 1
    assert result.stderr == ""
    found = json.loads(result.stdout)
    states = {(Path(each["artifact"]).name, each["runtime"]): each["state"] for each in found["verdicts"]}
    assert states == {
        ("bf16.onnx", "torch"): "passed",
        ("bf16.onnx", "ort-cpu"): "not run",
        ("faulty.onnx", "torch"): "passed",
        ("faulty.onnx", "ort-cpu"): "failed",
        ("sound.onnx", "torch"): "passed",
        ("sound.onnx", "ort-cpu"): "passed",
    }
    assert found["counts"] == {"passed": 4, "failed": 1, "not run": 1}
    reasons = {(Path(each["artifact"]).name, each["runtime"]): each["reason"] for each in found["verdicts"]}
    assert "bf16" in reasons["bf16.onnx", "ort-cpu"]
    assert "off by" in reasons["faulty.onnx", "ort-cpu"]


def test_the_junit_report_counts_each_state_apart(mixed: tuple[Path, Result]) -> None:
    suite = ElementTree.parse(mixed[0] / "r.xml").getroot()
    assert suite.tag == "testsuite"
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "1", "errors": "0", "skipped": "1"}
    (failure,) = suite.findall("testcase/failure")
    assert "off by" in str(failure.get("message"))
    assert "slopes" in str(failure.text)
    (skipped,) = suite.findall("testcase/skipped")
    assert "bf16" in str(skipped.get("message"))


def test_the_markdown_report_is_one_table(mixed: tuple[Path, Result]) -> None:
    text = (mixed[0] / "r.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|") and "| usual range |" not in line]
    assert len(lines) == 2 + 6
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "1 failed" in text


def test_an_unreadable_artifact_is_exit_2_and_the_others_are_told(tmp_path: Path) -> None:
    write(tmp_path, "sound", case("none"))
    cut = write(tmp_path, "cut", case("none"))
    cut.write_bytes(cut.read_bytes()[:100])
    cut.with_name("cut.onnx.json").unlink()
    result = cli("verify", tmp_path, "--runtime", "ort-cpu")
    assert result.exit_code == 2
    assert "1 passed" in result.stdout
    assert result.stderr.startswith("Error: ")
    assert "cut.onnx" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(MISSING is None, reason="every runtime is there")
def test_nothing_run_or_a_required_runtime_not_run_is_exit_3(tmp_path: Path) -> None:
    write_onnx(exported(case("none"), seq=9), path := tmp_path / "none.onnx")
    assert MISSING is not None
    alone = cli("verify", path, "--runtime", MISSING)
    assert alone.exit_code == 3
    assert "not run" in alone.stdout
    assert alone.stderr.startswith(f"Error: nothing was verified: {MISSING} was not run: ")
    required = cli("verify", path, "--runtime", "ort-cpu", "--require", MISSING)
    assert required.exit_code == 3
    assert "1 passed, 0 failed, 1 not run" in required.stdout
    assert f"required runtime {MISSING}" in required.stderr
    assert cli("verify", path, "--runtime", "ort-cpu", "--require", "ort-cpu").exit_code == 0


def test_a_pass_on_torch_alone_is_none_where_other_runtimes_were_asked_for() -> None:
    """torch builds the block of the spec itself: there an edited graph passes too."""

    def code(**states: State) -> int:
        verdicts = [Verdict(artifact="a.onnx", runtime=name.replace("_", "-"), state=states[name]) for name in states]
        return Report(verdicts=tuple(verdicts), unreadable=(), seed=0).exit_code()

    assert code(torch=PASSED, torch_cuda=PASSED, ort_cpu=NOT_RUN) == 3
    assert code(torch=PASSED, ort_cpu=PASSED) == code(torch=PASSED, tensorrt_import=PASSED, ort_cpu=NOT_RUN) == 0
    assert code(torch=PASSED) == 0
    assert code(torch=NOT_RUN) == 3


@pytest.mark.parametrize("code", [INCONCLUSIVE, NOTHING_COMPARED])
def test_with_strict_a_runtime_that_ran_and_shows_nothing_does_not_pass(code: str) -> None:
    """Its verdict is not run. Another runtime passes."""
    verdicts = (
        Verdict(artifact="a.onnx", runtime="onnx-reference", state=PASSED),
        Verdict(artifact="a.onnx", runtime="tensorrt", state=NOT_RUN, reason="no GPU", reason_code="no-gpu"),
        Verdict(
            artifact="a.onnx", runtime="ort-cpu", state=NOT_RUN, reason="rounding errors hide it", reason_code=code
        ),
    )
    loose, strict = (Report(verdicts=verdicts, unreadable=(), seed=0, strict=strict) for strict in (False, True))
    assert (loose.exit_code(), strict.exit_code()) == (0, 1)
    assert b'failures="0" errors="0" skipped="2"' in to_junit(loose)
    assert b'failures="1" errors="0" skipped="1"' in to_junit(strict)
    assert b'<failure message="rounding errors hide it">' in to_junit(strict)


def test_a_wrong_graph_that_nothing_here_can_run_does_not_pass(tmp_path: Path) -> None:
    wrong = last(lambda name: [helper.make_node("Neg", [name], ["output"], name="wrong")])
    path = plant(tmp_path, "bf16", case("none", dtype="bf16"), wrong)
    result = cli("verify", path, "--runtime", "torch", "--runtime", "ort-cpu", "--reach", "seq=9")
    assert result.exit_code == 3
    assert "1 passed, 0 failed, 1 not run" in result.stdout
    assert "nothing was verified: no runtime ran the graph of a file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.onnx",), "nothing.onnx"),
        (("folder",), "no .onnx or .plan"),
        (("text.txt",), "neither .onnx nor .plan"),
        (("none.onnx", "--runtime", "ort-cpuu"), "did you mean 'ort-cpu'"),
        (("none.onnx", "--require", "ort-gpu"), "did you mean 'ort-cpu'"),
        (("none.onnx", "--seed", "-1"), "seed"),
        (("none.onnx", "--time-limit", "0"), "--time-limit is"),
        (("none.onnx", "--inputs", "nothing.npz"), "nothing.npz"),
        (("none.onnx", "--inputs", "text.txt"), "text.txt"),
        (("none.onnx", "--inputs", "x.npz", "--reach", "seq=9"), "--reach was given with --inputs"),
        (("none.onnx", "--inputs", "x.npz", "--cases", "0"), "--cases was given with --inputs"),
        (("none.onnx", "--junit", "nowhere/r.xml"), "nowhere"),
        (("none.onnx", "--markdown", "folder"), "folder"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    write(tmp_path, "none", case("none"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("words")
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    refused(cli("verify", *arguments), said)
    assert tree(tmp_path) == before
