"""Temporary files and folders are removed at every kind of end. After SIGKILL the next process removes them, and
nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from posexport import temporary
from posexport.files import write_folder, write_json

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks are those of POSIX")
RANDOM = "0" * 16


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files that no test has listed yet."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(temporary, "_leftovers", {})
    return folder


def child(code: str, place: Path, *more: str) -> subprocess.Popen[str]:
    """A process that runs code in `place`, with `temporary` imported."""
    script = f"import os, sys, signal\nfrom pathlib import Path\nfrom posexport import temporary\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", script, *more],
        env={**os.environ, "TMPDIR": str(place)},
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def living(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a folder, and a file beside `a.json`, and now waits."""
    code = "temporary.folder()\ntemporary.file(Path('a.json'))\nprint('made', flush=True)\nsys.stdin.read()"
    with child(code, place) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        yield process
        process.kill()


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_they_are_removed_at_the_end_of_the_interpreter(living: subprocess.Popen[str], place: Path) -> None:
    assert len(names(place)) == 2
    living.communicate("", timeout=60)
    assert names(place) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(living: subprocess.Popen[str], place: Path) -> None:
    (place / names(place)[1] / "deep" / "er").mkdir(parents=True)
    living.kill()
    living.wait()
    assert len(names(place)) == 2
    with temporary.folder() as folder:
        assert names(place)[1:] == [folder.name], "the file beside a target waits for its target"
    write_json(place / "b.json", {})
    assert len(names(place)) == 2
    write_json(place / "a.json", {})
    assert names(place) == ["a.json", "b.json"]


def test_what_a_living_process_has_made_stays(living: subprocess.Popen[str], place: Path) -> None:
    before = names(place)
    write_json(place / "a.json", {})
    with temporary.folder():
        pass
    assert set(names(place)) == {*before, "a.json"}


def test_nothing_else_is_removed(place: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    for name in ("posexport-results", f"posexport-{RANDOM}0", f"posexport-{'x' * 16}", f"other-{RANDOM}"):
        (place / name).mkdir()
    (place / f"posexport-{RANDOM}").symlink_to(outside)
    (place / f".a.json.{RANDOM}.tmp").symlink_to(outside / "file")
    os.mkfifo(place / f".a.json.{'1' * 16}.tmp")
    (place / f".b.json.{RANDOM}.tmp").touch()
    before = names(place)
    with temporary.folder():
        write_json(place / "a.json", {})
    assert names(place) == sorted([*before, "a.json"])
    assert (outside / "file").exists()


def test_what_another_user_left_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / f"posexport-{RANDOM}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with temporary.folder():
        pass
    assert names(place) == [f"posexport-{RANDOM}"]


def test_a_new_one_that_another_process_takes_for_a_leftover_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = temporary.Temporary.lock
    taken: list[Path] = []

    def late(made: temporary.Temporary, descriptor: int) -> bool:
        if len(taken) < 2:
            taken.append(made.path)
            temporary._remove_leftover(made.path)
        return lock(made, descriptor)

    monkeypatch.setattr(temporary.Temporary, "lock", late)
    with temporary.folder() as folder:
        assert folder.is_dir()
        made, descriptor = temporary.file(place / "a.json")
        os.close(descriptor)
        assert made.path.exists()
        made.remove()
    assert len(taken) == 2
    assert names(place) == []


def test_a_forked_child_removes_nothing_of_its_parent(place: Path) -> None:
    with (
        temporary.folder() as folder,
        child(
            "made = temporary.folder()\nif os.fork() == 0:\n    made.remove(); sys.exit()\nos.wait()\n"
            "print(made.path.is_dir(), flush=True)",
            place,
        ) as process,
    ):
        assert process.communicate(timeout=60)[0] == "True\n"
        assert names(place) == [folder.name]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_permissions_of_the_user_and_any_name_that_a_file_can_have(place: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for name in ("a.json", "x" * 255, "ä" * 127):
            write_json(place / name, {})
            assert (place / name).stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)
    assert len(names(place)) == 3


@pytest.mark.parametrize("number", temporary.ENDING_SIGNALS)
def test_a_signal_is_held_back_though_another_thread_gets_it(number: signal.Signals, place: Path) -> None:
    code = (
        "import threading, time\n"
        "def ended(*_): print('signal', flush=True); os._exit(7)\n"
        "number = int(sys.argv[1]); signal.signal(number, ended)\n"
        "threading.Thread(target=sys.stdin.read, daemon=True).start()\n"  # this thread does not block the signal
        "with temporary.uninterrupted():\n"
        "    os.kill(os.getpid(), number)\n"
        "    for _ in range(1000): pass\n"
        "    print('done', flush=True)\n"
    )
    with child(code, place, str(int(number))) as process:
        assert process.communicate(timeout=60)[0] == "done\nsignal\n"
    assert process.returncode == 7


@pytest.mark.parametrize("name", ["models", "y" * 255])
def test_what_a_killed_process_left_of_a_folder_is_removed_too(place: Path, name: str) -> None:
    code = "temporary.folder_beside(Path(sys.argv[1]))\nos.kill(os.getpid(), signal.SIGKILL)"
    with child(code, place, name) as process:
        process.wait()
    assert len(names(place)) == 1
    write_folder(place / name, lambda folder: (folder / "file").touch())
    assert names(place) == [name]
    assert names(place / name) == ["file"]


def test_a_folder_into_which_a_thread_writes_while_it_is_removed_is_removed_at_the_end(place: Path) -> None:
    code = (
        "made = temporary.folder()\nreal = temporary._remove\n"
        "def late(path):\n    real(path)\n    path.mkdir()\n    (path / 'file').touch()\n"
        "temporary._remove = late\nmade.remove()\ntemporary._remove = real\nprint(made.path.is_dir(), flush=True)\n"
    )
    with child(code, place) as process:
        assert process.communicate(timeout=60)[0] == "True\n"
    assert names(place) == []


def test_processes_are_ended_before_the_folders_that_they_may_write_into_are_removed(place: Path) -> None:
    before, order = temporary.registered(), []
    temporary.Running(lambda: order.append(len(names(place))))
    made = temporary.folder()
    assert made.path.is_dir()
    temporary.remove_since(before)
    assert (order, names(place)) == ([1], [])
    assert temporary.registered() == before
