"""The artifact of a result is found by its sha256 if both sides have one, otherwise by its name. Missing and stale
results."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from helpers import cli, refused
from manifest_data import onnx_manifest, write_manifest_data
from page_helpers import bench, tune, write_all
from test_page_links import box, page_of, part, verdict

from posexport.bench.evidence import Evidence
from posexport.bench.result import Benchmark
from posexport.bench.results import Result
from posexport.jsondata import structure
from posexport.report.page import verdicts
from posexport.report.page.artifacts import evidence_section, sentence
from posexport.report.page.blocks import Page, Table
from posexport.report.page.sources import read_sources
from posexport.report.page.summary import boxes
from posexport.verify.result import Report


def known(page: Page) -> dict[str, tuple[str, str]]:
    """The table of artifacts: (verified, timed) by artifact."""
    (table,) = part(page, "artifacts").blocks
    assert isinstance(table, Table)
    return {row[0].text: (row[1].text, row[2].text) for row in table.rows}


def hashed(state: str, sha256: str | None, **over: Any) -> dict[str, Any]:
    """A verdict on a file with this sha256."""
    data = verdict(state, **over)
    data["verdicts"][0]["sha256"] = sha256
    return data


def test_what_nobody_verified_or_timed_is_said_and_stands_beside_it(tmp_path: Path) -> None:
    files = {"b": bench(), "v": verdict("failed", "other.onnx"), "w": verdict("not run", "idle.plan"), "t": tune()}
    page = page_of(tmp_path, files)
    assert known(page) == {
        "rope-native.onnx": ("· no result on this page", "6.00 ms (ort-cpu, prefill:128)"),
        "tuned.onnx": ("✓ ort-cpu (by tune)", "6.00 ms (ort-cpu, prefill:128, by tune)"),
        "other.onnx": ("✗ failed on ort-cpu", "· no result on this page"),
        "idle.plan": ("· not run on ort-cpu", "· no result on this page"),
    }
    told = [(each.head, each.text) for each in box(page, "not-run").points]
    assert ("rope-native.onnx", "no verdict on this page") in told
    assert ("other.onnx", "no timing on this page") in told
    assert ("idle.plan", "no verdict and no timing on this page") in told
    assert not [head for head, _ in told if "tuned" in head]


def test_a_verdict_belongs_to_the_bytes_that_it_is_of(tmp_path: Path) -> None:
    of = bench()["sha256"]
    files = {"b": bench(), "v": hashed("passed", of, artifact="copy.onnx"), "w": hashed("failed", "5" * 64)}
    page = page_of(tmp_path, files)
    assert known(page) == {
        "rope-native.onnx (native00)": ("✓ ort-cpu", "6.00 ms (ort-cpu, prefill:128)"),
        "rope-native.onnx (55555555)": ("✗ failed on ort-cpu", "⚠ stale: b.json is of other bytes"),
    }
    assert box(page, "fastest").points[0].text.endswith("; ✓ verified")


def test_a_verdict_of_other_bytes_than_the_file_here_is_stale(tmp_path: Path) -> None:
    def marks(sha256: str) -> list[Any]:
        (tmp_path / "rope-native.onnx").write_bytes(b"x")
        write_all(tmp_path, {"v": hashed("passed", sha256), "b": bench(sha256=sha256)})
        sources = read_sources([tmp_path])
        known = Evidence.of(sources.results, sources.sha256)
        (found,), (timed,) = sources.of(Report), sources.of(Benchmark)
        first = found.data.verdicts[0]
        return [known.is_stale(first.artifact, first.sha256), known.is_stale(timed.data.file, timed.data.sha256)]

    own = hashlib.sha256(b"x").hexdigest()
    assert marks(own) == [False, False]
    assert marks("5" * 64) == [True, True]
    sources = read_sources([tmp_path])
    summaries = Evidence.of(sources.results, sources.sha256).artifacts()
    (subject,) = [each for each in summaries if each.name == "rope-native.onnx"]
    assert sentence(subject) == "Verified: ⚠ stale: v.json is of other bytes. Timed: ⚠ stale: b.json is of other bytes."
    reasons = [each.reason for each in evidence_section([subject])[1].findings]
    assert reasons == [
        "its verdict in v.json is of other bytes (stale): verify it again",
        "its timing in b.json is of other bytes (stale): time it again",
    ]


def test_stale_verdicts_prove_nothing() -> None:
    def wrong(state: str) -> tuple[str, list[str]]:
        data = hashed(state, "5" * 64)
        shown = Evidence((), {"rope-native.onnx": "6" * 64})
        _, found = verdicts.section([Result(name="v.json", data=structure(data, Report))], shown)
        made = boxes([found])[1]
        return made.verdict, [f"{each.label}: {each.text}" for each in made.points]

    uncounted = "1 stale verdict not counted, of other bytes than the file here."
    assert wrong("passed") == (f"Nothing was checked here, so nothing is known to be wrong; {uncounted}", [])
    said, (told,) = wrong("failed")
    assert said == f"1 result failed; {uncounted}"
    assert told.startswith("rope-native.onnx (stale): ") and told.endswith("; stale: of other bytes than the file here")


def test_tune_s_own_checks_count(tmp_path: Path) -> None:
    found = box(page_of(tmp_path, {"t": tune()}), "wrong")
    assert found.verdict == "Nothing: the one check that ran passed, by tune itself."
    both = box(page_of(tmp_path, {"t": tune(), "v": verdict("passed")}), "wrong")
    assert both.verdict == "Nothing: all 2 checks that ran passed, 1 of them by tune itself."
    assert box(page_of(tmp_path, {"t": tune()}), "fastest").points[0].text.endswith("; ✓ verified by tune on ort-cpu")


def test_the_manifest_of_a_tuned_artifact_tells_of_its_tuning_once(tmp_path: Path) -> None:
    def kinds(manifest: dict[str, Any]) -> list[str]:
        write_manifest_data(file, manifest)
        return [each.name for each in read_sources([tmp_path]).results]

    file = tmp_path / "tuned.onnx"
    file.write_bytes(b"x")
    plain = onnx_manifest(file, sha256="7" * 64)
    told = {key: value for key, value in tune().items() if key not in ("kind", "version")}
    write_all(tmp_path, {"b": bench()})
    assert kinds({**plain, "tune": told}) == ["b.json", "tuned.onnx.json"]
    assert kinds(plain) == ["b.json"]
    write_manifest_data(file, {**plain, "tune": {"winner": 3}})
    refused(cli("report", tmp_path, "-o", tmp_path / "r.html"), "tuned.onnx.json", "is damaged", "tune again")
    write_all(tmp_path, {"t": tune()})
    assert kinds({**plain, "tune": told}) == ["b.json", "t.json"]
