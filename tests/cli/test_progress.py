"""Progress of long commands: lines on stderr in a CI, a bar on a terminal, and nothing on stdout."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner
from helpers import small_spec
from verify_helpers import write

from posexport.cli import console
from posexport.runtimes import RUNTIMES
from posexport.verify import verify


@attrs.define
class FakeClock:
    """A clock that moves only during waits. After `end` seconds the work is over."""

    end: float
    now: float = 1000.0
    start: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now = min(self.now + seconds, self.start + self.end)
        return self.now >= self.start + self.end


def lines(capsys: pytest.CaptureFixture[str], seconds: float, current: console.Steps) -> list[str]:
    clock = FakeClock(seconds)
    console.write_lines(current, clock(), clock, clock.wait)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_less_than_a_minute_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, 59.9, console.Steps("loading torch")) == []


def test_each_full_minute_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    current = console.Steps("loading torch")
    current("timing batch=1,seq=128")
    assert lines(capsys, 200.0, current) == [
        f"still running, {minutes} min: timing batch=1,seq=128" for minutes in (1, 2, 3)
    ]


def test_parts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    current = console.Steps("verifying", total=7)
    current.update("verified a.onnx", advance=1)
    current.update("verified b.onnx", advance=1)
    assert lines(capsys, 61.0, current) == ["still running, 1 min: verified b.onnx (2 of 7 done)"]


def test_minutes_count_from_the_begin_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with several short pieces of work must print lines too."""
    starts: list[float] = []
    monkeypatch.setattr(console, "write_lines", lambda current, start, clock, wait: starts.append(start))
    clock = FakeClock(end=1000.0)

    @click.command()
    def work() -> None:
        for name in ("first", "second"):
            with console.steps(name, clock=clock):
                clock.wait(50.0)

    CliRunner().invoke(work, catch_exceptions=False)
    assert starts == [1000.0, 1000.0]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with console.steps("loading torch", total=2) as progress:
        progress("timing [1]")
        progress.update(advance=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "timing [1] (1 of 2 done)" in captured.err
    assert "still running" not in captured.err


def test_verify_says_what_it_runs_next(tmp_path: Path) -> None:
    steps: list[str] = []
    write(tmp_path, "rope", small_spec("rope"))
    verify([tmp_path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 9}, step=steps.append)
    assert steps == ["drawing inputs for rope.onnx", "running rope.onnx on ort-cpu"]


def test_nothing_is_left_running_after_an_error() -> None:
    import threading

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="stopped"), console.steps("working"):
        raise ValueError("stopped")
    assert set(threading.enumerate()) <= before
