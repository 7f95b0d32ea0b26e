"""Results that belong together on the report page: sweeps, projects, and one block in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused
from page_helpers import bench, everything, shape, tune, write_all

from posexport.report.page.blocks import Box, Figure, Page, Section, Table
from posexport.report.page.page import make_page
from posexport.report.page.sources import read_sources
from posexport.verify.matrix.table import Cell, Entry, Matrix

pytestmark = pytest.mark.few_inputs


def box(page: Page, name: str) -> Box:
    return next(each for each in page.boxes if each.id == name)


def part(page: Page, name: str) -> Section:
    return next(each for each in page.sections if each.id == name)


def page_of(folder: Path, files: dict[str, Any]) -> Page:
    return make_page(write_all(folder, files))


def verdict(state: str, artifact: str = "rope-native.onnx", runtime: str = "ort-cpu") -> dict[str, Any]:
    """A report with one verdict."""
    data = everything()["verify"]
    data["verdicts"] = [{**data["verdicts"][0], "artifact": artifact, "runtime": runtime, "state": state}]
    return {**data, "unreadable": []}


def sweep(folder: Path, jobs: list[dict[str, Any]], results: dict[str, Any]) -> Path:
    """Write the folder of a sweep."""
    (folder / "results").mkdir()
    write_all(folder, {"sweep": {"kind": "sweep", "version": 1, "jobs": jobs}})
    write_all(folder / "results", results)
    return folder


def job(id: str, state: str | None, result: bool, **over: Any) -> dict[str, Any]:
    told = {"id": id, "kind": "verify", "label": f"verify {id}", "state": state, "reason": "lost 3 times"}
    return {**told, "result": f"results/verify-{id}.json" if result else None, **over}


def test_the_jobs_of_a_sweep_that_failed_or_never_ran_are_told(tmp_path: Path) -> None:
    jobs = [job("a", "passed", True), job("b", "failed", False), job("c", "not run", False), job("d", None, False)]
    page = make_page([sweep(tmp_path, jobs, {"verify-a": verdict("passed")})])
    assert box(page, "wrong").verdict == "1 result failed; 1 check ran."
    assert [(each.head, each.text) for each in box(page, "wrong").points] == [("verify b", "lost 3 times")]
    assert box(page, "not-run").points[0].head == "verify c and verify d"
    assert part(page, "sweep").lead == "4 jobs: 1 passed, 1 failed, 2 not run."


def test_what_the_result_of_a_job_says_is_not_said_twice(tmp_path: Path) -> None:
    jobs = [job("a", "failed", True), job("b", "failed", True)]
    page = make_page([sweep(tmp_path, jobs, {"verify-a": verdict("failed"), "verify-b": verdict("passed", "b.onnx")})])
    heads = [each.head for each in box(page, "wrong").points]
    assert sorted(heads) == ["ort-cpu", "verify b"]  # b failed for a reason other than its verdicts


def test_results_that_no_job_names_are_not_read(tmp_path: Path) -> None:
    results = {"verify-a": verdict("passed"), "verify-old": verdict("failed")}
    folder = sweep(tmp_path, [job("a", "passed", True)], results)
    assert [each.name for each in read_sources([folder]).results] == ["verify-a.json", "sweep.json"]
    (folder / "sweep.json").unlink()
    assert len(read_sources([folder]).results) == 2


def test_artifacts_of_one_name_have_rows_of_their_own(tmp_path: Path) -> None:
    def rows(page: Page) -> list[str]:
        return [row[0].text for each in page.sections for table in each.blocks
                if isinstance(table, Table) and table.heat for row in table.rows]  # fmt: skip

    def files(sha256: str) -> list[dict[str, str]]:
        return [{"name": "rope.onnx", "sha256": sha256 * 8}]

    results = {f"verify-{id}": verdict("passed", "rope.onnx", f"ort-{id}") for id in "abc"}
    jobs = [job(id, "passed", True, files=files("12345678" if id == "a" else "abcdefgh")) for id in "abc"]
    assert rows(make_page([sweep(tmp_path, jobs, results)])) == ["rope.onnx (12345678)", "rope.onnx (abcdefgh)"]
    both = {"one": verdict("passed", "rope.onnx"), "two": verdict("failed", "rope.onnx")}
    assert rows(page_of(tmp_path, both)) == ["rope.onnx (one.json)", "rope.onnx (two.json)"]
    apart = {"one": verdict("passed", "rope.onnx"), "two": verdict("passed", "rope.onnx", "torch")}
    assert rows(page_of(tmp_path, apart)) == ["rope.onnx"]
    both["one"]["verdicts"][0]["sha256"], both["two"]["verdicts"][0]["sha256"] = "1" * 64, "2" * 64
    assert rows(page_of(tmp_path, both)) == ["rope.onnx (11111111)", "rope.onnx (22222222)"]


def test_what_a_sweep_refused_is_told_once(tmp_path: Path) -> None:
    told = {"encoding": "rope", "form": "contrib", "dtype": "fp32", "mode": "mask", "reason": "it takes no mask"}
    folder = sweep(tmp_path, [job("a", "failed", False)], {})
    data = json.loads((folder / "sweep.json").read_text())
    write_all(folder, {"sweep": {**data, "refused": [told, {**told, "dtype": "fp16"}]}})
    page = make_page([folder])
    assert part(page, "sweep").lead.endswith(" 2 combinations refused, for which there is no job.")
    (point,) = box(page, "not-run").closed
    assert (point.label, point.figure, point.text) == ("Refused", "2 results", "it takes no mask (sweep)")
    assert point.head == "rope contrib fp32 mask and rope contrib fp16 mask"
    assert box(page, "not-run").closed_title == "2 refused, each with its reason"
    write_all(folder, {"matrix": Matrix().to_dict()})  # the matrix shows the refused ones as cells
    assert box(make_page([folder]), "not-run").closed == ()


def limit(state: str, ratio: float | None = 2.0) -> dict[str, Any]:
    return {"runtime": "ort-cpu", "scenario": "prefill:128", "reference": "lower_bound", "limit": 1.5, "state": state,
            "reason": "", "ratio": ratio, "low": None, "high": None}  # fmt: skip


def project(*limits: dict[str, Any]) -> dict[str, Any]:
    files = [
        {
            "file": "out/rope-native.onnx",
            "artifact": "rope",
            "state": "timed",
            "limits": list(limits),
            "result": bench(),
        },
        {"file": "out/b.onnx", "artifact": "b", "state": "not run", "reason": "no GPU", "limits": [], "result": None},
        {"file": "out/c.onnx", "artifact": "c", "state": "out of date", "reason": "its spec changed"},
    ]
    return {"kind": "bench-project", "version": 1, "project": "posexport.toml", "exit_code": 1, "files": files}


def test_a_broken_budget_is_wrong(tmp_path: Path) -> None:
    page = page_of(tmp_path, {"p": project(limit("slower"), limit("fine", 1.0))})
    assert [(each.head, each.text) for each in box(page, "wrong").points] == [
        ("c.onnx", "its spec changed"), ("ort-cpu", "2.00× of lower_bound, limit 1.5×")
    ]  # fmt: skip
    assert ("b.onnx", "no GPU (bench)") in [(each.head, each.text) for each in box(page, "not-run").points]
    assert box(page, "fastest").points[0].figure == "6.00 ms"
    absent = {**limit("not run", None), "reason": "lower_bound was not timed beside it"}
    for there, where in ((True, "wrong"), (False, "not-run")):
        page = page_of(tmp_path, {"s": {**bench(), "limits": [{**absent, "there": there}]}})
        assert "lower_bound was not timed beside it" in [
            each.text.partition(" (")[0] for each in box(page, where).points
        ]
    saved = page_of(tmp_path, {"s": {**bench(), "limits": [limit("slower")]}})
    assert box(saved, "wrong").verdict == "1 got slower."


def test_a_broken_limit_without_its_ratio_is_refused(tmp_path: Path) -> None:
    (file,) = write_all(tmp_path, {"p": project(limit("slower", None))})
    refused(cli("report", file), "limits[0] on ort-cpu is broken without a ratio")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"machine": {"cpu": "another"}}, "on another"),
        ({"machine": {"cpu": "a processor", "engines": {"onnxruntime": "1.20"}}}, "onnxruntime 1.20"),
        ({"threads": 4}, "threads 4"),
        ({"spec": {"hidden_size": 64, "layers": 1, "num_heads": 4, "dtype": "fp16"}}, "num heads 4"),
        ({"spec": {"hidden_size": 64, "layers": 1, "dtype": "fp16"}}, None),
        ({"machine": {"cpu": "a processor", "posexport": "9"}}, None),
    ],
    ids=["cpu", "engine", "threads", "heads", "dtype-is-compared", "version-is-compared"],
)
def test_only_what_can_be_compared_is(other: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    points = box(page_of(tmp_path, {"a": bench(), "b": bench("contrib", **other)}), "fastest").points
    assert len(points) == (1 if said is None else 2)
    assert said is None or f"rope, hidden 64, {said}, prefill:128" in points[1].label


def test_the_fastest_says_where_it_failed(tmp_path: Path) -> None:
    def text(one: dict[str, Any]) -> str:
        return box(page_of(tmp_path, {"a": bench(), "v": one}), "fastest").points[0].text

    assert text(verdict("failed")).startswith("✗ but it failed verify; ")
    for other in (verdict("passed"), verdict("failed", "b.onnx"), verdict("failed", runtime="tensorrt")):
        assert "failed" not in text(other)
    assert text(verdict("passed")).endswith("; ✓ verified")
    assert text(verdict("passed", "b.onnx")).startswith("⚠ not verified on ort-cpu here; ")


LEGEND = ("ort-cpu · native", "lower bound: bare matrix products", "torch eager", "ort-cuda · native")


@pytest.mark.slow
def test_one_artifact_timed_in_several_jobs_is_one_curve(tmp_path: Path) -> None:
    files = {f"job-{size}": bench(shapes=(shape(f"prefill:{size}", size),)) for size in (16, 128, 1024)}
    page = page_of(tmp_path, files)
    curves = next(each for each in part(page, "latency").blocks if isinstance(each, Figure))
    legend = [name for name in LEGEND if f">{name}<" in curves.svg]
    assert legend == ["ort-cpu · native", "lower bound: bare matrix products", "torch eager"]
    files["job-16"]["shapes"][0]["also"] = ["batch:1"]
    labels = [each.label for each in box(page_of(tmp_path, files), "fastest").points]
    assert len(labels) == 4 and "rope, hidden 64, batch:1 (16 tokens at once)" in labels
    for size in (16, 128, 1024):
        (tmp_path / f"job-{size}.json").unlink()
    twins = {"a": bench(), "b": bench(file="twin.onnx", sha256="1" * 64)}
    point = box(page_of(tmp_path, twins), "fastest").points[0]
    assert point.head == "ort-cpu · native · rope-native.onnx"
    assert (
        point.confidence
        == "too close to call against ort-cpu · native · twin.onnx (0.60× of torch eager, 0.57 to 0.63, in its own run)"
    )


@pytest.mark.parametrize(
    ("objective", "timed", "said"),
    [
        ("latency", False, "chosen by kernel table: no GPU, not timed, of 4 candidates"),
        ("size", True, "chosen by size, not by time, of 4 candidates"),
    ],
)
def test_a_winner_that_was_not_timed_is_not_the_fastest(objective: str, timed: bool, said: str, tmp_path: Path) -> None:
    data = {**tune(), "objective": objective, "method": "by kernel table: no GPU"}
    for each in data["candidates"] if not timed else ():
        each["seconds"] = None
    found = box(page_of(tmp_path, {"t": data}), "fastest")
    assert "so nothing is known about speed" in found.verdict
    assert found.points[0].text.startswith(said)
    both = box(page_of(tmp_path, {"t": data, "b": bench()}), "fastest")
    assert both.verdict == "One comparison was timed:"


def test_a_number_beyond_floats_is_refused(tmp_path: Path) -> None:
    data = everything()["verify"]
    data["verdicts"][1]["worst"]["max_error"] = 10**400
    (tmp_path / "v.json").write_text(json.dumps(data))
    refused(cli("report", tmp_path / "v.json"), "a whole number of 401 digits")
    (tmp_path / "b.json").write_text(json.dumps(bench(rounds=10**400)))
    refused(cli("report", tmp_path / "b.json"), "a whole number of 401 digits")


def test_only_torch_is_the_measure_of_a_matrix(tmp_path: Path) -> None:
    entry, made = Entry(encoding="rope", form="native", dtype="fp32", mode="prefill"), Matrix()
    made.put([Cell(entry=entry, column=name, state="passed", ratio=1.0) for name in ("torch", "ort-cpu")])
    table = page_of(tmp_path, {"m": made.to_dict()}).sections[0].blocks[0]
    assert isinstance(table, Table)
    assert table.groups == (("", 1), ("ort-cpu", 1))
    assert table.note.endswith(" torch is the reference itself: 1 everywhere.")
