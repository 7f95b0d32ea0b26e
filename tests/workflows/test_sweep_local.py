"""Jobs on this machine, in real processes of a stand-in: crashes, ends, files, and a folder that is continued."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from helpers import CHILD_PATH, cli, refused
from sweep_fake import job

from posexport.errors import ERROR_FILE, RequestError
from posexport.workflows.sweep import job_files, local_jobs
from posexport.workflows.sweep.folder import Folder
from posexport.workflows.sweep.job_files import Hashes, chunks, stage_files, write_chunks
from posexport.workflows.sweep.job_plan import Plan
from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, PASSED, File, Job, JobResources, Outcome, Record
from posexport.workflows.sweep.local_jobs import JobCommand, JobRunner, Local
from posexport.workflows.sweep.sweep import SweepResult, drive

LINUX = hasattr(os, "sched_setaffinity")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_jobs, "CHILD", "sweep_fake")
    monkeypatch.setenv("PYTHONPATH", f"{CHILD_PATH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def done(jobs: Sequence[Job], workers: int = 2, time_limit: float = 60) -> dict[str, tuple[Outcome, int]]:
    """The outcomes of jobs, and the number of attempts, by label."""
    found = {}
    with closing(Local(workers, time_limit)) as local:
        drive(jobs, local, lambda each, outcome, n: found.update({each.label: (outcome, n)}))
    return found


ENDS = {
    "fine": ({}, PASSED, None, 1),
    "not equal": ({"exit": 1}, FAILED, "told so", 1),
    "wrong": ({"exit": 2}, FAILED, "told so", 1),
    "not there": ({"exit": 3}, NOT_RUN, "told so", 1),
    "crash": ({"signal": int(signal.SIGSEGV)}, FAILED, "lost 3 times: the process was killed by SIGSEGV", 3),
    "odd": ({"exit": 70}, FAILED, "lost 3 times: the process ended with exit code 70 (told so)", 3),
}


def test_ends_of_a_process_are_said_and_end_no_other() -> None:
    found = done([job(name, **told) for name, (told, *_) in ENDS.items()])
    for name, (_, state, reason, attempts) in ENDS.items():
        outcome, tried = found[name]
        assert (outcome.state, outcome.reason, tried) == (state, reason, attempts), name
        assert (outcome.result is not None) == (name in ("fine", "not equal")), name
        assert outcome.where, name


def test_a_traceback_is_a_crash_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_jobs, "CHILD", "no_such_module")
    found = JobRunner().run(JobCommand.of(job("x"), 60), lambda folder: None)
    assert found.state == LOST
    assert found.reason is not None and found.reason.startswith("the process printed no result (")


@pytest.mark.slow
def test_time_ends_a_job_and_what_it_started(tmp_path: Path) -> None:
    outcome, attempts = done([job("hangs", once=tmp_path / "place")], time_limit=3)["hangs"]
    assert (outcome.state, outcome.reason, attempts) == (FAILED, "no end within 3 s", 1)
    assert not psutil.pid_exists(json.loads((tmp_path / "place").read_text())["pid"])


def test_closing_stops_what_runs(tmp_path: Path) -> None:
    local = Local(1)
    local.submit(job("hangs", once=tmp_path / "place"))
    while not (tmp_path / "place").exists():
        time.sleep(0.02)
    local.close()
    assert not psutil.pid_exists(json.loads((tmp_path / "place").read_text())["pid"])


@pytest.mark.slow
def test_a_timing_has_the_machine_for_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    timings = [job(f"timing {n}", needs=JobResources(cpus=None), log=log, sleep=0.1) for n in range(2)]
    shared = [job(f"parity {n}", log=log, sleep=0.8) for n in range(4)]
    found = done([*timings, *shared])
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[1] for line in lines[-4:]] == ["timing"] * 4
    assert [line[3] for line in lines[-4:]] == ["start", "end"] * 2
    most = now = 0
    for line in lines:
        now += 1 if line[3] == "start" else -1
        most = max(most, now)
    assert most == 2
    threads = {name: (outcome.result or {})["threads"] for name, (outcome, _) in found.items()}
    assert threads["parity 0"] == "1"
    assert threads["timing 0"] == os.environ.get("OMP_NUM_THREADS")
    if LINUX:
        cpus = {name: (outcome.result or {})["cpus"] for name, (outcome, _) in found.items()}
        assert {len(cpus[f"parity {n}"]) for n in range(4)} == {1}
        assert cpus["timing 0"] == sorted(os.sched_getaffinity(0))


def test_needs_that_this_machine_has_not() -> None:
    found = done(
        [job("many", needs=JobResources(cpus=100_000)), job("gpu", needs=JobResources(cpus=1, gpu="X9000", gpus=1))]
    )
    assert {outcome.state for outcome, _ in found.values()} == {NOT_RUN}
    assert (found["many"][0].reason or "").startswith("it needs 100000 CPUs, and this machine has ")
    assert (found["gpu"][0].reason or "").startswith("it needs a GPU X9000, and this machine has ")


def file(folder: Path, name: str, content: bytes) -> File:
    (folder / name).write_bytes(content)
    return Hashes().file(folder / name)


def test_files_come_with_a_job_and_changed_ones_do_not(tmp_path: Path) -> None:
    given = file(tmp_path, "a.onnx", b"12345")
    one = job("files", kind="tune", write="made.onnx")
    one = Job(kind="tune", arguments=one.arguments, needs=JobResources(), label="files", files=(given,))
    outcome = done([one])["files"][0]
    assert outcome.result is not None and outcome.result["files"] == {"a.onnx": 5, "made.onnx": 7}
    assert outcome.outputs == {"made.onnx": b"written"}
    (tmp_path / "a.onnx").write_bytes(b"123456")
    outcome = done([one])["files"][0]
    assert outcome.state == FAILED and "has changed since the sweep began" in (outcome.reason or "")
    with pytest.raises(RequestError, match="has changed since the sweep began"):
        list(chunks(given))


def test_chunks_give_the_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "CHUNK", 4)
    given = file(tmp_path, "a.onnx", b"0123456789")
    parts = list(chunks(given))
    assert parts == [b"0123", b"4567", b"89"]
    write_chunks(tmp_path / "b.onnx", given.sha256, parts)
    assert (tmp_path / "b.onnx").read_bytes() == b"0123456789"
    for damaged in ([b"other"], parts[:2], parts[::-1]):
        with pytest.raises(ValueError, match=r"the bytes of c\.onnx arrived as"):
            write_chunks(tmp_path / "c.onnx", given.sha256, damaged)
        assert not (tmp_path / "c.onnx").exists()


def test_an_error_is_read_as_data_and_not_from_what_is_printed(tmp_path: Path) -> None:
    """A command's error is the JSON in the file that its parent named. The text on stderr does not matter."""
    run = subprocess.run(
        [sys.executable, "-m", "posexport", "verify", str(tmp_path / "none.onnx")],
        env={**os.environ, ERROR_FILE: str(tmp_path / "error.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    sentence = json.loads((tmp_path / "error.json").read_text())["error"]
    assert (run.returncode, run.stderr) == (2, f"Error: {sentence}\n")
    printed = local_jobs._End(code=1, stdout="", last_line="Error: it is printed only.")
    assert local_jobs._judge(printed, JobCommand(words=(), time_limit=1)).state == LOST
    reported = local_jobs._End(code=1, stdout="", error="it failed so")
    outcome = local_jobs._judge(reported, JobCommand(words=(), time_limit=1))
    assert (outcome.state, outcome.reason) == (FAILED, "it failed so")


def test_a_relative_link_is_the_file(tmp_path: Path) -> None:
    for name in ("real", "links", "there"):
        (tmp_path / name).mkdir()
    file(tmp_path / "real", "a.onnx", b"1")
    (tmp_path / "links" / "a.onnx").symlink_to("../real/a.onnx")
    stage_files([Hashes().file(tmp_path / "links" / "a.onnx")], tmp_path / "there")
    assert (tmp_path / "there" / "a.onnx").read_bytes() == b"1"


def test_room_counts_cpus() -> None:
    cores = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count() or 1
    with closing(Local(cores + 2)) as local:
        local._running = {Future(): (job("wide", needs=JobResources(cpus=cores)), ())}
        assert local.room(JobResources(cpus=2))
        assert not local.room(JobResources(cpus=3))


def test_each_job_gets_cpus_that_fewest_others_have() -> None:
    given: list[list[int]] = []
    with closing(Local(4)) as local:
        local._cpus = [0, 1, 4, 5]
        local._threads.submit = lambda work, job, cpus: given.append(sorted(cpus)) or Future()  # type: ignore
        for cpus in (1, 2, 1, 1):
            local.submit(job("one", needs=JobResources(cpus=cpus)))
        del local._running[list(local._running)[1]]
        for needs in (JobResources(cpus=3), JobResources(cpus=None)):
            local.submit(job("more", needs=needs))
    assert given == [[0], [1, 4], [5], [0], [1, 4, 5], [0, 1, 4, 5]]


def judged(code: int, result: object, *asked: str) -> Outcome:
    end = local_jobs._End(code=code, stdout=json.dumps(result))
    return local_jobs._judge(end, JobCommand(words=(), time_limit=1, asked=asked))


def test_what_was_asked_for_and_is_not_there_is_not_run() -> None:
    cpu, cuda = (
        {"runtime": "ort-cpu", "state": "timed"},
        {"runtime": "ort-cuda", "state": "not run", "reason": "no GPU"},
    )
    found = judged(0, {"shapes": [{"results": [cpu, cuda]}]}, "ort-cpu", "ort-cuda")
    assert (found.state, found.reason, found.result is None) == (NOT_RUN, "ort-cuda: no GPU", False)
    assert judged(0, [cpu, cuda]).state == LOST
    assert judged(0, {"results": [cpu, cuda]}, "ort-cpu").state == PASSED
    cell = {"column": "build", "state": "not run", "reason": "takes no bf16"}
    assert judged(0, {"cells": [cell]}, "build").state == NOT_RUN
    assert judged(0, {"cells": [{**cell, "version": "1"}]}, "build").state == PASSED  # the same on every machine


def test_reasons_of_a_gate_and_results_of_a_wrong_request() -> None:
    slow = {"runtime": "ort-cpu", "state": "slower", "reason": "1.2 times"}
    assert judged(1, {"gate": {"changes": [slow]}}).reason == "ort-cpu: 1.2 times"
    assert judged(2, {"unreadable": ["x"]}).result == {"unreadable": ["x"]}


def test_the_folder_tells_what_became_of_every_job(tmp_path: Path) -> None:
    folder, refused_ = Folder(tmp_path), [({"form": "native"}, "why")]
    ends = {
        "fine": Outcome(state=PASSED, result={}),
        "crashed": Outcome(state=FAILED, reason="lost 3 times"),
        "left": None,
    }
    jobs = [job(name) for name in ends] + [job("cells", kind="matrix")]
    with folder.hold():
        records = {
            each.id: folder.keep(each, outcome, 1)
            for each in jobs
            if (outcome := ends.get(each.label, Outcome(state=PASSED, result={}))) is not None
        }
        folder.write_state(Plan(jobs, refused_), records, ["a note"])
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert (told["kind"], told["version"], told["notes"]) == ("sweep", 1, ["a note"])
    assert [(each["label"], each["state"], each["reason"], each["result"]) for each in told["jobs"]] == [
        ("fine", PASSED, None, f"results/verify-{jobs[0].id}.json"),
        ("crashed", FAILED, "lost 3 times", None),
        ("left", NOT_RUN, "it has not run yet: run the sweep again", None),
        ("cells", PASSED, None, "matrix.json"),
    ]


def test_two_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    given = file(tmp_path, "a.onnx", b"1")
    (tmp_path / "there").mkdir()
    stage_files([given], tmp_path / "there")
    assert (tmp_path / "there" / "a.onnx").read_bytes() == b"1"


def test_a_record_stands_for_what_is_there(tmp_path: Path) -> None:
    folder, one = Folder(tmp_path / "sweep"), job("one", kind="tune")
    with folder.hold():
        folder.keep(one, Outcome(state=PASSED, result={"x": 1}, outputs={"a.onnx": b"1"}), 2)
        kept = folder.records()[one.id]
        assert (kept.state, kept.attempts, kept.final) == (PASSED, 2, True)
        assert (tmp_path / "sweep" / "artifacts" / one.id / "a.onnx").read_bytes() == b"1"
        result = tmp_path / "sweep" / str(kept.result)
        assert json.loads(result.read_text()) == {"x": 1}
        record = tmp_path / "sweep" / ".state" / "jobs" / f"{one.id}.json"
        whole = record.read_text()
        for damaged in (whole[:50], "{}", "[]", whole.replace("passed", "psd"), whole.replace(one.id, "0" * 16)):
            record.write_text(damaged)
            assert folder.records() == {}, damaged
        record.write_text(whole)
        result.unlink()
        assert folder.records() == {}


def test_only_what_was_judged_is_final(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.hold():
        ends = {
            "passed": Outcome(state=PASSED, result={}),
            "judged": Outcome(state=FAILED, reason="too far off", result={}),
            "crashed": Outcome(state=FAILED, reason="lost 3 times"),
            "not there": Outcome(state=NOT_RUN, reason="no GPU"),
        }
        for name, outcome in ends.items():
            folder.keep(job(name), outcome, 1)
        assert {record.label for record in folder.records().values() if record.final} == {"passed", "judged"}


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "link to nothing", "device"])
def test_only_a_file_is_the_lock(kind: str, tmp_path: Path) -> None:
    lock, other = tmp_path / "sweep/.state/lock", tmp_path / "other"
    lock.parent.mkdir(parents=True)
    if kind == "link":
        other.write_text("x")
    match kind:
        case "pipe":
            os.mkfifo(lock)
        case "folder":
            lock.mkdir()
        case _:
            lock.symlink_to("/dev/zero" if kind == "device" else other)
    with pytest.raises(RequestError, match="not a regular file, so no lock"), Folder(tmp_path / "sweep").hold():
        pass
    assert other.exists() == (kind == "link")


@pytest.mark.parametrize(
    ("function", "number"),
    [("os.open", errno.ENOSPC), ("os.open", errno.EACCES), ("os.open", errno.EMFILE), ("fcntl.flock", errno.ENOLCK)],
)
def test_why_there_is_no_lock_is_said(
    function: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    folder = Folder(tmp_path / "sweep")
    monkeypatch.setattr(function, fails)
    with pytest.raises(RequestError, match=os.strerror(number)), folder.hold():
        pass


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with (
        Folder(tmp_path).hold(),
        pytest.raises(RequestError, match="another sweep is at work in"),
        Folder(tmp_path).hold(),
    ):
        pass
    with Folder(tmp_path).hold():
        pass
    (tmp_path / "file").write_text("")
    refused(cli("sweep", "--job", "matrix encoding=none", "-o", tmp_path / "file"), "can't be made or written")


def test_the_same_command_goes_on_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    keep = Folder.keep

    def interrupted(self: Folder, one: Job, outcome: Outcome, attempts: int):  # type: ignore[no-untyped-def]
        ended.append(one.id)
        if len(ended) == 2:
            raise KeyboardInterrupt
        return keep(self, one, outcome, attempts)

    arguments = ("sweep", "--job", "tune encoding=rope encoding=alibi encoding=none", "-o", tmp_path, "--json")
    monkeypatch.setattr(Folder, "keep", interrupted)
    stopped = cli(*arguments)
    assert stopped.exit_code == 130
    states = [each["state"] for each in json.loads((tmp_path / "sweep.json").read_text())["jobs"]]
    assert sorted(states) == [NOT_RUN, NOT_RUN, PASSED]
    assert stopped.stderr == "Error: interrupted: 2 of 3 jobs are left, so run it again to continue.\n"
    first = ended[0]
    monkeypatch.setattr(Folder, "keep", lambda self, one, *rest: ended.append(one.id) or keep(self, one, *rest))
    found = json.loads(cli(*arguments).stdout)
    assert found["counts"] == {"passed": 3, "failed": 0, "not run": 0}
    assert found["done_before"] == 1
    assert sorted(ended[2:]) == sorted(each["id"] for each in found["jobs"] if each["id"] != first)
    assert json.loads(cli(*arguments).stdout)["done_before"] == 3
    assert len(ended) == 4


def test_exit_codes() -> None:
    def code(*states: str, words: str = "") -> int:
        jobs = [Job(kind="verify", arguments=(*words.split(), s), needs=JobResources(), label=s) for s in states]
        records = [Record(id=each.id, label=each.label, state=each.label) for each in jobs]
        return SweepResult(plan=Plan(jobs), folder=Path(), records=records, done_before=0).exit_code()

    assert code(PASSED, NOT_RUN) == 0
    assert code(PASSED, FAILED, NOT_RUN) == 1
    assert code(NOT_RUN, NOT_RUN) == 3
    assert code(PASSED, NOT_RUN, words="--require ort-cuda") == 3
    assert code(FAILED, NOT_RUN, words="--require ort-cuda") == 1


def test_what_people_see(tmp_path: Path) -> None:
    arguments = ("sweep", "--job", "tune encoding=rope gpu=X9000", "--job", "tune encoding=rope", "-o", tmp_path / "s")
    shown = cli(*arguments, "--dry-run")
    assert shown.exit_code == 0
    assert "a whole machine and 1 X9000" in shown.stdout and "to do" in shown.stdout
    assert not (tmp_path / "s").exists()
    shown = cli(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "2 jobs, 0 of them done before" in shown.stdout
    assert "not run: 1 job (it needs a GPU X9000, and this machine has " in shown.stdout
    assert shown.stdout.endswith(f"results are in {tmp_path / 's'}\n")
    assert "2 jobs, 1 of them done before" in cli(*arguments).stdout
    nothing = cli("sweep", "--job", "tune encoding=rope gpu=X9000", "-o", tmp_path / "t")
    assert (nothing.exit_code, nothing.stderr) == (3, "Error: no job was run: see their reasons.\n")
    assert "1 job, 0 of them done before" in nothing.stdout


def test_a_wait_sees_an_interrupt(tmp_path: Path) -> None:
    threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        done([job("hangs", once=tmp_path / "place")])
