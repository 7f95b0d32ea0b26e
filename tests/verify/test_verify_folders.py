"""The artifacts that paths refer to: each has its own name, and none is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import case, cli, refused
from verify_helpers import write

from posexport.artifact.paths import find_artifacts

pytestmark = pytest.mark.few_inputs


def test_the_same_file_named_twice_is_verified_once_and_a_link_by_its_own_name(tmp_path: Path) -> None:
    path = write(tmp_path, "none", case("none"))
    assert [file.name for file in find_artifacts([path, tmp_path, path])] == ["none.onnx"]
    (tmp_path / "link.onnx").symlink_to(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/again").symlink_to(tmp_path)
    assert [file.name for file in find_artifacts([path, tmp_path, tmp_path / "folder/again"])] == [
        "none.onnx",
        "link.onnx",
    ]
    manifest = json.loads((tmp_path / "none.onnx.json").read_text())
    (tmp_path / "link.onnx.json").write_text(json.dumps(manifest | {"sha256": "0" * 64}))
    found = cli("verify", path, tmp_path / "link.onnx", "--runtime", "torch", "--json")
    assert found.exit_code == 1
    assert [each["state"] for each in json.loads(found.stdout)["verdicts"]] == ["passed", "failed"]


def test_what_lies_in_a_folder_and_is_no_file_is_not_left_out(tmp_path: Path) -> None:
    """A failed build may leave a broken link, which must not pass."""
    write(tmp_path, "none", case("none"))
    (tmp_path / "lost.onnx").symlink_to("nothing.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "folder.onnx").mkdir()
    result = cli("verify", tmp_path, "--runtime", "torch", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, [each["state"] for each in data["verdicts"]]) == (2, ["passed"])
    assert [Path(each["artifact"]).name for each in data["unreadable"]] == ["lost.onnx", "pipe.onnx"]


def test_a_link_to_itself_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    refused(cli("verify", tmp_path / "loop.onnx", "--runtime", "torch"), "loop.onnx")
