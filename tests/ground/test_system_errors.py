"""The advice in a message follows from the number of the system's error, wherever a file is written or read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from posexport.errors import RequestError, advice_for, system_error
from posexport.files import check_companions, check_output, check_target, staged, write_folder

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "quota",
    errno.ENAMETOOLONG: "shorter name",
    errno.EACCES: "permissions",
    errno.EPERM: "permissions",
    errno.ENOTDIR: "give a path whose parts are folders",
    errno.ELOOP: "links",
    errno.EMFILE: "open files",
    errno.EIO: "check the disk",
}


@pytest.mark.parametrize("number", ADVICE)
def test_advice_fits_the_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is planted where a file is synced, as with a full disk, and where a folder is filled."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    for write in (lambda: write_folder(tmp_path / "folder", fail), lambda: _write(tmp_path / "a.json")):
        with pytest.raises(RequestError, match=ADVICE[number]) as raised:
            write()
        assert os.strerror(number) in str(raised.value)
        assert number in (errno.ENOSPC, errno.EDQUOT) or "free some space" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def _write(path: Path) -> None:
    with staged() as files:
        files.write(path, lambda file: file.write(b"{}"))


def test_other_errors_have_the_callers_advice() -> None:
    assert advice_for(OSError(errno.ENOENT, "not there"), "make it") == "make it"
    assert advice_for(OSError("no number"), "make it") == "make it"
    with pytest.raises(RequestError, match=r"no \(what a library says\): do this\."), system_error("no", "do this"):
        raise OSError("what a library says")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a" * 300 + ".onnx", "shorter name"),
        ("a" * 247 + ".onnx", "shorter name"),
        ("file/a.json", "parts are folders"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused_before_the_work(name: str, advice: str, tmp_path: Path) -> None:
    """The name of a manifest is longer than the name of its artifact."""
    (tmp_path / "file").write_text("")
    path = tmp_path / name
    with pytest.raises(RequestError, match=advice):
        check_output(path, ".onnx") if path.suffix == ".onnx" else check_target(path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("ending", [".onnx", ".plan"])
def test_the_longest_name_is_one_whose_signature_fits_beside_it(ending: str, tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - len(f"{ending}.json.sig")
    for folder in (tmp_path, tmp_path / "not" / "there"):
        check_companions(folder / f"{'a' * longest}{ending}")
        with pytest.raises(RequestError, match=r"json\.sig' beside it \(File name too long\): give a shorter name\.$"):
            check_companions(folder / f"{'a' * (longest + 1)}{ending}")
    check_output(tmp_path / f"{'a' * longest}{ending}", ending)
    with pytest.raises(RequestError, match="give a shorter name"):
        check_output(tmp_path / f"{'a' * (longest + 1)}{ending}", ending)
    with pytest.raises(RequestError, match="give a shorter name"):  # the whole path is too long
        check_companions(tmp_path.joinpath(*["b" * 200] * 25, f"a{ending}"))
    assert not list(tmp_path.iterdir())


def test_links_in_a_circle_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(RequestError, match="links"):
        check_target(tmp_path / "a" / "b.json")


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        (".onnx", "block.onnx"),
        (".plan", "plan.onnx"),
        ("a.onnx.", "a.onnx"),
        ("a.onnx.gz", "a.onnx"),
        ("a.plan", "a.onnx"),
        ("a", "a.onnx"),
        ("..", "block.onnx"),
    ],
)
def test_the_name_that_is_proposed_can_be_given(name: str, proposed: str) -> None:
    with pytest.raises(RequestError, match=f"name it like {proposed}\\.$"):
        check_output(Path(name), ".onnx")
