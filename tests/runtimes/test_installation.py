"""Hints to install missing packages: a command for each kind of source that posexport was installed from (PEP 610)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from posexport.runtimes.installation import install_command

FOLDER = "file:///projects/somebody/posexport"
GIT = "https://example.org/posexport.git"
WHEEL = "posexport-0.1-py3-none-any.whl"
HASH = {"hashes": {"sha256": "0" * 64}}

PLACES: dict[str, tuple[Any, str]] = {
    "editable": (
        {"url": FOLDER, "dir_info": {"editable": True}},
        "pip install -e '.[rtx]' in posexport's source folder",
    ),
    "folder": ({"url": FOLDER, "dir_info": {}}, "pip install '.[rtx]' in posexport's source folder"),
    "revision": (
        {"url": GIT, "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "abc"}},
        f"pip install 'posexport[rtx] @ git+{GIT}@main'",
    ),
    "commit in a subdirectory": (
        {"url": GIT, "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "python"},
        f"pip install 'posexport[rtx] @ git+{GIT}@abc#subdirectory=python'",
    ),
    "wheel of a URL": (
        {"url": f"https://example.org/{WHEEL}", "archive_info": HASH},
        f"pip install 'posexport[rtx] @ https://example.org/{WHEEL}'",
    ),
    "wheel of a folder": (
        {"url": f"file:///projects/somebody/{WHEEL}", "archive_info": HASH},
        f"pip install './{WHEEL}[rtx]' in the folder of that file",
    ),
    "index": (None, "pip install 'posexport[rtx]'"),
    "no JSON": ("{", "pip install 'posexport[rtx]'"),
    "no object": ("[]", "pip install 'posexport[rtx]'"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_command_fits_the_place(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, command = PLACES[place]
    installed = tmp_path / "posexport-0.1.dist-info"
    installed.mkdir()
    if data is not None:
        (installed / "direct_url.json").write_text(data if isinstance(data, str) else json.dumps(data))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "missing.zip"), str(tmp_path)])
    assert install_command("posexport[rtx]") == command
    assert "somebody" not in command  # results contain the command, so it must not contain a path of a machine


def test_a_source_tree_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("posexport[ray]") == "pip install '.[ray]' in posexport's source folder"


def test_other_packages_come_from_the_index() -> None:
    assert install_command("onnxruntime-gpu") == "pip install 'onnxruntime-gpu'"
