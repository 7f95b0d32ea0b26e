"""Searches in folders with any content: any depth, circular links, any names and numbers of files."""

from __future__ import annotations

import glob
import os
import subprocess
from pathlib import Path

import pytest
from helpers import cli, refused

from posexport import temporary
from posexport.artifact import folders
from posexport.artifact.folders import files_below, make_folders, walk
from posexport.errors import RequestError
from posexport.workflows.sweep.patterns import matching

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links and depths of POSIX")


def _tree(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_files_are_found_at_any_depth_once_and_in_order(tmp_path: Path) -> None:
    _tree(tmp_path, "b.json", "a/z/y.onnx", "a/.hidden/x", "a/b.onnx")
    (tmp_path / "a" / "circle").symlink_to("..")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "linked.onnx").symlink_to("a/b.onnx")
    found = [str(path.relative_to(tmp_path)) for path in files_below(tmp_path)]
    assert found == ["a/.hidden/x", "a/b.onnx", "a/z/y.onnx", "b.json", "linked.onnx", "loop", "lost"]
    inside = next(walk(tmp_path / "a"))
    assert (sorted(inside.folders), inside.files) == ([".hidden", "circle", "z"], ["b.onnx"])


def test_links_that_cannot_be_followed_hide_nothing(tmp_path: Path) -> None:
    """For example, links to a place without permission. The test uses names that are too long, which are an error for
    every user."""
    names = [f"{number}.{kind}" for number in range(6) for kind in ("link", "onnx")]
    for name in names:
        (tmp_path / name).symlink_to("x" * 300) if name.endswith("link") else (tmp_path / name).touch()
    assert [path.name for path in files_below(tmp_path)] == names


def test_a_folder_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A folder without permission may contain artifacts that are not verified. The test uses a path that is too long,
    which is an error for every user."""
    folder = _tree(tmp_path / "models", "a.onnx")
    deep = Path(*["d" * 250] * 17)
    make = ["sh", "-c", 'for name; do mkdir "$name" && cd "$name" || exit; done', "", *deep.parts]
    subprocess.run(make, cwd=folder, capture_output=True)
    try:
        for arguments in (
            ("verify", folder),
            ("report", folder, "-o", "page.html"),
            ("sweep", "--job", f"verify artifact='{folder}'", "-o", "out"),
            ("sweep", "--job", f"verify artifact='{folder}/**/*.onnx'", "-o", "out"),
        ):
            refused(cli(*arguments), "the folder", "can't be read (File name too long): ")
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def test_a_folder_that_is_a_link_is_searched_itself(tmp_path: Path) -> None:
    _tree(tmp_path, "real/a.onnx")
    (tmp_path / "link").symlink_to("real")
    assert files_below(tmp_path / "link") == [tmp_path / "link" / "a.onnx"]


@pytest.mark.parametrize("most", [5, 6])
def test_too_many_entries_are_refused(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tree(tmp_path, "a/1", "a/2", "b/3", "4")
    monkeypatch.setattr(folders, "MOST_ENTRIES", most)
    if most == 6:
        assert len(files_below(tmp_path)) == 4
        return
    with pytest.raises(RequestError, match="holds more than 5 files and folders: name one nearer"):
        files_below(tmp_path)


def test_folders_are_made_however_many_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    deep = Path(*["d"] * 1_900)
    try:
        make_folders(deep)
        make_folders(deep)
        assert deep.is_dir()
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError):
            make_folders(Path("file"))
        with pytest.raises(NotADirectoryError):
            make_folders(Path("file/below"))
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_commands_search_folders_a_thousand_deep(deep_folder: Path) -> None:
    refused(cli("verify", deep_folder), "holds no .onnx or .plan")
    refused(cli("report", deep_folder), "holds no results and no artifacts")
    for artifact in (deep_folder, deep_folder / "**" / "*.onnx"):
        refused(cli("sweep", "--job", f"verify artifact='{artifact}'", "-o", "out"), "matches no .onnx or .plan")
    assert len([*walk(deep_folder)]) == 1501


PATTERNS = [
    *("*", "*.onnx", "a/*", "a/**/*.onnx", "**/*.onnx", "**/z/*", "**/[xy].onnx", "a/?.onnx", "**", "a/**", "**/.x/*"),
    *("*/*", "**/*/**/*", ".*/*", "nothing/*", "b.json", "a/../*.json", "**/**/y.onnx", "*/../b.json"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_glob_matches(pattern: str, tmp_path: Path) -> None:
    _tree(
        tmp_path, "b.json", "x.onnx", "a/z/y.onnx", "a/z/z/x.onnx", "a/.x/h.onnx", ".x/h.onnx", "a/b.onnx", "a/.h.onnx"
    )
    names = glob.glob(pattern, root_dir=tmp_path, recursive=True)  # noqa: PTH207 (the oracle)
    assert matching(tmp_path, pattern) == sorted({tmp_path / name for name in names if (tmp_path / name).is_file()})
    absolute = glob.escape(str(tmp_path)) + "/" + pattern
    assert matching(Path("elsewhere"), absolute) == matching(tmp_path, pattern)


def test_patterns_enter_each_folder_once(tmp_path: Path) -> None:
    _tree(tmp_path, "models/" + "d/" * 30 + "x.onnx", "models/x.onnx")
    for name in ("one", "two"):
        (tmp_path / "models" / name).symlink_to(".")
    assert len(matching(tmp_path, "models/**/x.onnx")) == 2
    assert len(matching(tmp_path, "**/" * 40 + "x.onnx")) == 2
    assert len(matching(tmp_path, "**/*/" * 20 + "x.onnx")) == 2  # "*" is a link too
    assert matching(tmp_path, "models/one/x.onnx") == [tmp_path / "models" / "one" / "x.onnx"]


def test_a_leftover_that_is_too_deep_to_remove_is_no_error(deep_folder: Path) -> None:
    temporary._remove(deep_folder)
    assert deep_folder.is_dir()
