"""Reports for machines: stable keys, XML that parses for any text of an engine, and Markdown with one line per row."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import attrs
import pytest
from helpers import tree
from hypothesis import given
from hypothesis import strategies as st

from posexport.errors import RequestError
from posexport.report.verdicts import COLUMNS, rows, to_markdown, write_reports
from posexport.verify.junit import to_junit
from posexport.verify.parity import TOLERANCES
from posexport.verify.result import FAILED, NOT_RUN, PASSED, Comparison, Report, Unreadable, Verdict

WORST = Comparison(
    case="offset [3, 16]", output="output", state=FAILED, reason="output 'output' is off by 0.5 at [1, 2]",
    max_error=0.5, rms_error=0.1, torch_error=1e-6, limit=1e-5, index=(1, 2), got=1.5, reference=1.0,
)  # fmt: skip
PASS = Verdict(
    artifact="a.onnx", runtime="torch", state=PASSED, cases=6, tolerance=TOLERANCES["fp32"],
    worst=attrs.evolve(WORST, state=PASSED, reason=None, max_error=5e-6), describe={"engine": "torch"},
)  # fmt: skip
FAIL = Verdict(artifact="a.onnx", runtime="ort-cpu", state=FAILED, reason="it is wrong", worst=WORST, where="Add 'n'")
SKIP = Verdict(artifact="a.onnx", runtime="tensorrt", state=NOT_RUN, reason="no GPU: there is no NVIDIA driver")
REPORT = Report(
    verdicts=(PASS, FAIL, SKIP), unreadable=(Unreadable("b.onnx", "'b.onnx' is not an ONNX file."),), seed=3
)

NASTY = "a|b\\c <d> & `e`\nsecond\r\nthird\x0b\x1b[31m\x00\x85\u2028\ud800\ufffe é"
TEXTS = st.text(st.characters(), max_size=30) | st.just(NASTY)  # surrogates and control characters included


def nasty(text: str) -> Report:
    """A report with the text in every place that an engine's text or a file's name can reach."""
    made = [attrs.evolve(each, artifact=text, reason=text, where=text, notes=(text,)) for each in (PASS, FAIL, SKIP)]
    return Report(verdicts=tuple(made), unreadable=(Unreadable(text, text),), seed=0)


def test_json_holds_everything_under_names_that_stay() -> None:
    found = json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))
    assert list(found) == [
        *("kind", "version", "exit_code", "seed", "strict", "counts", "inconclusive", "verdicts", "unreadable")
    ]
    assert found["exit_code"] == 2
    assert found["seed"] == 3
    assert found["counts"] == {"passed": 1, "failed": 1, "not run": 1}
    assert found["unreadable"] == [{"artifact": "b.onnx", "error": "'b.onnx' is not an ONNX file."}]
    verdict = found["verdicts"][1]
    assert list(verdict) == [
        "artifact", "sha256", "weights", "signature", "runtime", "state", "reason", "reason_code", "worst",
        "worst_usual", "tolerance", "cases", "reach", "not_shown", "notes", "where", "departure", "describe", "check",
        "measured", "limit_text",
    ]  # fmt: skip
    assert list(verdict["worst"]) == [
        "case", "far_out", "output", "state", "reason", "reason_code", "max_error", "rms_error", "torch_error", "limit",
        "reference_rms", "index", "got", "reference",
    ]  # fmt: skip
    assert verdict["worst"]["index"] == [1, 2]
    assert found["verdicts"][0]["tolerance"] == {"multiple": 8.0, "floor": 2.0**-20, "ceiling": 0.06}
    assert found["verdicts"][2]["worst"] is None


def test_each_state_is_counted_once_and_not_run_is_none_of_the_others() -> None:
    assert REPORT.counts() == {PASSED: 1, FAILED: 1, NOT_RUN: 1}
    assert Report(verdicts=(), unreadable=(), seed=0).counts() == {PASSED: 0, FAILED: 0, NOT_RUN: 0}


def test_rows_stand_under_their_columns() -> None:
    passed, failed, skipped = (dict(zip(COLUMNS, row, strict=True)) for row in rows(REPORT.verdicts))
    assert passed == {
        "artifact": "a.onnx", "runtime": "torch", "state": "passed", "case": "offset [3, 16]", "error": "5.00e-06",
        "torch error": "1.00e-06",
        "limit": "1.00e-05", "cases": "6", "reach": "", "note": "",
    }  # fmt: skip
    assert failed["note"] == "it is wrong; Add 'n'"
    assert {skipped[key] for key in ("error", "torch error", "limit", "cases")} == {"-"}


def test_junit_has_a_test_for_each_verdict_and_each_unreadable_file() -> None:
    suite = ElementTree.fromstring(to_junit(REPORT))
    assert (suite.tag, suite.get("name")) == ("testsuite", "posexport verify")
    numbers = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    found = {
        (case.get("classname"), case.get("name")): [each.tag for each in case if each.tag != "system-out"]
        for case in suite
    }
    assert found == {
        ("a.onnx", "torch"): [], ("a.onnx", "ort-cpu"): ["failure"], ("a.onnx", "tensorrt"): ["skipped"],
        ("b.onnx", "read"): ["error"],
    }  # fmt: skip
    failure, skipped = suite.find(".//failure"), suite.find(".//skipped")
    assert failure is not None
    assert failure.get("message") == "it is wrong"
    assert "Add 'n'" in str(failure.text)
    assert skipped is not None
    assert skipped.get("message") == "no GPU: there is no NVIDIA driver"


@given(TEXTS)
def test_junit_parses_whatever_an_engine_or_a_file_name_says(text: str) -> None:
    suite = ElementTree.fromstring(to_junit(nasty(text)))
    assert len(suite.findall("testcase")) == 4
    assert suite.find(".//failure") is not None


@given(TEXTS)
def test_markdown_is_one_line_a_row_whatever_is_said(text: str) -> None:
    found = to_markdown(nasty(text))
    found.encode()
    table = [line for line in found.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 3
    for line in table:
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == len(COLUMNS) + 1, line
    assert "<" not in found
    assert len(found.splitlines()) == 2 + len(table) + 2  # heading, empty line, table, empty line, unreadable


def test_markdown_names_the_states_and_what_could_not_be_read() -> None:
    found = to_markdown(REPORT)
    assert found.startswith(
        "### posexport verify: 1 passed, 1 failed, 1 not run, 1 unreadable\n\n| artifact | runtime |"
    )
    assert "| a.onnx | tensorrt | not run | - | - | - | - | - |  | no GPU: there is no NVIDIA driver |" in found
    assert found.endswith("**Unreadable:** 'b.onnx' is not an ONNX file.\n")


def test_both_reports_are_written_whole(tmp_path: Path) -> None:
    write_reports(REPORT, tmp_path / "r.xml", tmp_path / "r.md")
    assert tree(tmp_path) == {"r.md": to_markdown(REPORT).encode(), "r.xml": to_junit(REPORT)}


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path: Path) -> None:
    write_reports(REPORT, None, None)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("bad", ["no/r.md", "folder"])
def test_both_reports_are_written_or_none(tmp_path: Path, bad: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "r.xml").write_text("as before")
    with pytest.raises(RequestError, match="folder"):
        write_reports(REPORT, tmp_path / "r.xml", tmp_path / bad)
    assert tree(tmp_path) == {"r.xml": b"as before"}


def test_one_file_does_not_hold_two_reports(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="two files would be written"):
        write_reports(REPORT, tmp_path / "r", tmp_path / "." / "r")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("verdicts", "broken", "required", "code"),
    [
        ((PASS,), (), (), 0),
        ((PASS, SKIP), (), (), 3),  # torch doesn't run the graph
        ((PASS, SKIP), (), ("torch",), 0),
        ((PASS, SKIP), (), ("tensorrt",), 3),
        ((PASS,), (), ("ort-cuda",), 3),  # there is no verdict of this runtime
        ((SKIP,), (), (), 3),
        ((), (), (), 3),
        ((PASS, FAIL), (), (), 1),
        ((PASS, FAIL, SKIP), (), ("tensorrt",), 1),
        ((PASS, FAIL), (Unreadable("b", "e"),), (), 2),
    ],
)
def test_exit_codes(
    verdicts: tuple[Verdict, ...], broken: tuple[Unreadable, ...], required: tuple[str, ...], code: int
) -> None:
    report = Report(verdicts=verdicts, unreadable=broken, seed=0)
    assert report.exit_code(required) == code
    assert report.to_dict(required)["exit_code"] == code
