"""The sources of a report: every kind of result is recognised by its content, folders are read, and an unusable source
is one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused, tree
from manifest_data import onnx_manifest, write_manifest_data
from page_helpers import bench, everything, write_all

from posexport.bench.evidence import Evidence, Mention
from posexport.report.page import limits
from posexport.report.page.sources import KINDS, read_sources

pytestmark = pytest.mark.few_inputs


def test_every_kind_is_told_by_itself_or_by_its_keys(tmp_path: Path) -> None:
    files = everything()
    for data in files.values():
        data.pop("kind", None)
    found = read_sources(write_all(tmp_path, files))
    assert [KINDS[name.removesuffix("-contrib")].schema for name in files] == [
        type(result.data) for result in found.results
    ]


def test_a_folder_gives_what_it_holds_once_and_names_what_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    paths = write_all(tmp_path, everything())
    (tmp_path / "more" / "package.json").write_text('{"name": "something"}')
    (tmp_path / "more" / "list.json").write_text("[1, 2]")
    (tmp_path / "a.onnx").write_bytes(b"")
    write_manifest_data(tmp_path / "a.onnx", onnx_manifest(tmp_path / "a.onnx"))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.json").write_text("{")
    (tmp_path / "notes.txt").write_text("none")
    found = read_sources([tmp_path, paths[0], tmp_path / "more"])
    assert sorted(result.name for result in found.results) == sorted(path.name for path in paths)
    assert [name for _, name in found.artifacts] == ["a.onnx"]
    assert sorted(found.left) == ["list.json", "package.json"]


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_all(tmp_path / folder, {"bench": bench()})
    found = read_sources([tmp_path])
    assert [result.name for result in found.results] == ["one/bench.json", "two/bench.json"]


def damaged(kind: str, path: str, value: Any) -> dict[str, Any]:
    """A result with one changed place. `path` consists of keys and indices separated by dots."""
    data: Any = copy.deepcopy(everything()[kind])
    *way, last = (int(part) if part.isdecimal() else part for part in path.split("."))
    place = data
    for part in way:
        place = place[part]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    assert isinstance(data, dict)
    return data


DAMAGE: list[tuple[str, str, Any, str]] = [
    ("verify", "verdicts", {}, "verdicts is {}, not a list"),
    ("verify", "verdicts.0.state", "great", "verdicts[0].state is 'great', not one of passed, failed, not run"),
    ("verify", "verdicts.1.worst.max_error", float("nan"), "verdicts[1].worst.max_error is NaN, not a finite number"),
    ("bench", "shapes.0.results.0.runtime", KeyError, "shapes[0].results[0] lacks 'runtime'"),
    ("bench", "shapes.0.results.1.seconds.median", 0, "shapes[0].results[1].seconds 'median' must be > 0: 0"),
    ("bench", "shapes.0.results.1.seconds", None, "shapes[0].results[1] (torch) is timed without seconds"),
    ("bench", "shapes.0.seq", "many", "shapes[0].seq is 'many', not a whole number"),
    ("bench-contrib", "gate.changes.0.state", 1, "gate.changes[0].state is 1"),
    ("bench", "version", 2, "version is 2, this posexport reads 1"),
    ("tune", "candidates.0", [], "candidates[0] is [], not an object"),
    ("tune", "candidates.1.ratio.low", "low", "candidates[1].ratio.low is 'low'"),
    ("matrix", "cells.0.fused", "yes", "cells[0].fused is 'yes', not true or false"),
    ("angles", "rows.0.errors", [1.0], "has a row of rope without one error for each position"),
    ("plot", "rows.0.0.lines.0.y", [1.0], "[0].lines[0] ('parity, torch') has not one number for each x"),
    ("plot", "rows.0.0.scales", ["sideways", "log"], "[0] scales has 'sideways', not linear, log or a number from"),
    ("plot", "rows.0.0.lines.0.look", "red", "[0].lines[0].look"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "said"), DAMAGE, ids=[f"{kind}-{path}" for kind, path, *_ in DAMAGE])
def test_damaged_results_are_refused_by_name_and_place(
    kind: str, path: str, value: Any, said: str, tmp_path: Path
) -> None:
    (file,) = write_all(tmp_path, {kind: damaged(kind, path, value)})
    refused(cli("report", file, "-o", tmp_path / "r.html"), str(file), said)
    assert list(tree(tmp_path)) == [file.name]


TOO_MUCH: list[tuple[str, str, str]] = [
    ("plot", "rows.0", "charts"),
    ("plot", "rows.0.0.lines", "lines"),
    ("plot", "rows.0.0.marks", "lines"),
    ("plot", "rows.0.0.lines", "points"),
    ("plot", "rows.0.0.absent", "rows"),
    ("angles", "rows", "rows"),
    ("angles", "rows", "points"),
    ("bench", "shapes", "shapes"),
    ("bench", "shapes.0.results", "timings"),
    ("bench-contrib", "gate.changes", "rows"),
    ("tune", "candidates", "rows"),
    ("verify", "verdicts", "rows"),
    ("verify", "unreadable", "rows"),
]
"""A kind of result, the path of a list that becomes too long, and the word for its items in the error."""


@pytest.mark.parametrize(
    ("kind", "path", "name"), TOO_MUCH, ids=[f"{kind}-{path}-{name}" for kind, path, name in TOO_MUCH]
)
def test_more_than_a_page_can_show_is_refused_when_it_is_read(
    kind: str, path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: Any = everything()[kind]
    for part in path.split("."):
        items = items[int(part) if part.isdecimal() else part]
    few = damaged(kind, path, [items[0]] * 200)
    (file,) = write_all(tmp_path, {kind: few})
    read_sources([file])
    monkeypatch.setitem(limits.MOST, name, 199)
    said = f"'{file}' is too large for a page (it has "
    refused(cli("report", file, "-o", tmp_path / "r.html"), said, f" {name}, and at most 199 of one file are shown")
    assert list(tree(tmp_path)) == [file.name]


def test_a_small_file_of_many_lines_is_refused_at_once(tmp_path: Path) -> None:
    lines = [{"label": "a", "x": [0, 1], "y": [0, 1]}] * 20_000
    (file,) = write_all(tmp_path, {"plot": damaged("plot", "rows.0.0.lines", lines)})
    refused(cli("report", file, "-o", tmp_path / "r.html"), "it has 20,001 lines, and at most 5,000")


def test_a_wide_table_of_few_verdicts_is_refused(tmp_path: Path) -> None:
    """The table has a row for each artifact and a column for each runtime, so 1,001 verdicts can make a million
    cells."""
    verdict = everything()["verify"]["verdicts"][0]
    many = [{**verdict, "artifact": f"{at}.onnx", "runtime": f"engine {at}"} for at in range(1001)]
    (file,) = write_all(tmp_path, {"verify": damaged("verify", "verdicts", many)})
    refused(cli("report", file, "-o", tmp_path / "r.html"), "it has 1,002,001 cells, and at most 1,000,000")


@pytest.mark.slow
def test_thousands_of_artifacts_are_found_by_name_and_hash() -> None:
    """These are as many artifacts as a page may show. Comparing all pairs would take hours."""
    about: dict[str, Any] = {"source": "verify.json", "runtime": "ort-cpu", "state": "passed"}
    hashed = [Mention(file=f"{at}.onnx", sha256=f"{at:064x}", **about) for at in range(40_000)]
    twins = [Mention(file="twin.onnx", sha256=f"f{at:063x}", **about) for at in range(9_000)]
    named = [Mention(file=f"{at}.onnx", sha256="", **about) for at in range(1_000)]
    found = Evidence((*named, *hashed, *twins), {}).artifacts()
    assert len(found) == 49_000
    assert [len(summary.mentions) for summary in found[999:1001]] == [2, 1]
    assert [len(summary.stale) for summary in found[39_999:40_001]] == [0, 1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "is no whole JSON"),
        ("a.json", "[" * 100_000, "is no whole JSON"),
        ("a.json", "\x00", "is no whole JSON"),
        ("a.json", '{"name": 1}', "holds no results of posexport"),
        ("a.json", '{"kind": "else", "verdicts": []}', "holds no results of posexport"),
        ("a.json", "3", "holds no results of posexport"),
        ("a.txt", "x", "is neither .json nor .onnx nor .plan nor a folder"),
        ("a.onnx", "x", "a.onnx"),
        ("a.plan", "x", "has no manifest a.plan.json"),
    ],
)
def test_files_that_hold_no_results_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refused(cli("report", tmp_path / name, "-o", tmp_path / "r.html"), str(tmp_path / name), said)
    assert list(tree(tmp_path)) == [name]


def test_an_empty_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    refused(cli("report", tmp_path), "holds no results and no artifacts")
    refused(cli("report", tmp_path / "none.json"), "is not there")
    (tmp_path / "broken.json").write_text("{")
    refused(cli("report", tmp_path), "broken.json", "is no whole JSON")


def test_a_manifest_that_is_no_plans_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.plan").write_bytes(b"x")
    (tmp_path / "a.plan.json").write_text(json.dumps({"file": "a.plan"}))
    refused(cli("report", tmp_path), "a.plan.json' can't be used", "lacks", "build the plan again")
