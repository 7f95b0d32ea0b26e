"""Engines in child processes: after crashes, hangs and noise there is still an answer, and no process outlives
posexport."""

from __future__ import annotations

import getpass
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import psutil
import pytest
from helpers import CHILD_PATH, case
from verify_helpers import write

from posexport import machine
from posexport.errors import Reason
from posexport.processes import Worker, child_environment
from posexport.runtimes import RUNTIMES, Runtime
from posexport.runtimes.pool import ALLOCATION, LATE, Answer, Pool, result
from posexport.runtimes.tensors import forget_pages, load_arrays, save_arrays
from posexport.verify import verify
from posexport.verify.result import FAILED, NOT_RUN, PASSED

INPUTS = {"x": np.arange(6.0).reshape(2, 3), "half": np.ones((1, 0), ml_dtypes.bfloat16), "a/b": np.array(3)}

pytestmark = [pytest.mark.usefixtures("real_processes"), pytest.mark.few_inputs]


def faulty(how: str) -> Runtime:
    """A runtime for one of the test engines."""
    return Runtime(
        name=f"faulty-{how}", summary="", module="engines.faulty", package="os", install="", options={"how": how}
    )


@pytest.fixture(autouse=True)
def _findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CHILD_PATH)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(time_limit=20) as made:
        yield made


def ask(pool: Pool, how: str, key: str = "one") -> Answer:
    return result(pool.submit(faulty(how), Path("x.onnx"), [INPUTS], key=key))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_a_run_may_take_what_is_free_and_is_the_first_to_end(pool: Pool) -> None:
    for limited in (True, False):
        runtime = attrs.evolve(faulty("limits"), needs_gpu=not limited)
        (outputs,) = result(pool.submit(runtime, Path("x.onnx"), [INPUTS], key=str(limited))).outputs
        limit, score = int(outputs["limit"]), int(outputs["score"])
        assert (0 < limit < 2 * psutil.virtual_memory().total) == limited
        assert score == 1000


def test_steps_arrive_before_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stepping.py").write_text(
        "from posexport.processes import report, serve\n"
        "def answer(request):\n"
        "    for step in request['steps']:\n"
        "        report(step)\n"
        "    return {'done': True}\n"
        "serve(answer)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    steps: list[str] = []
    worker = Worker("stepping")
    try:
        for expected in (["one", "two"], []):
            assert worker.ask({"steps": expected}, 20, steps.append)["done"]
            assert steps == expected
            steps.clear()
    finally:
        worker.close()


def test_arrays_of_any_name_and_dtype_survive_the_trip(tmp_path: Path) -> None:
    arrays = {**INPUTS, "names": np.array([True, False]), "b": np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16)}
    save_arrays(tmp_path / "a.npz", arrays)
    found = load_arrays(tmp_path / "a.npz")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_arrays_that_are_read_are_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tensors"
    save_arrays(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros((0, 4), np.int8)})
    found, before = load_arrays(path, writable=True), path.read_bytes()
    base: object = found["a"]
    while isinstance(base, np.ndarray | memoryview):
        base = base.obj if isinstance(base, memoryview) else base.base
    assert isinstance(base, mmap.mmap), "it is a copy in memory"
    found["a"][0, 0] = 7.0
    assert path.read_bytes() == before
    path.unlink()
    assert found["a"].tolist() == [[7, 1, 2], [3, 4, 5]]
    assert found["b"].shape == (0, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_pages_that_were_read_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a.tensors"
    save_arrays(path, {"a": np.ones(2**23)})
    found = load_arrays(path)["a"]
    path.unlink()
    before = machine.resident()
    assert found.sum() == 2**23
    assert machine.resident() - before > 2**25
    forget_pages()
    assert machine.resident() - before < 2**24
    assert found.sum() == 2**23
    with pytest.raises(ValueError, match="read-only"):  # a page that is forgotten must not have been written to
        found[0] = 7.0


def test_a_worker_is_reused_and_started_again_after_a_crash(pool: Pool) -> None:
    first, second = ask(pool, "none"), ask(pool, "none")
    assert first.failure is None
    assert first.describe["process"] == second.describe["process"]
    crashed = ask(pool, "segfault")
    assert crashed.outputs == ()
    assert crashed.failure == Reason("crashed", "crashed: the process was killed by SIGSEGV")
    third = ask(pool, "none")
    assert third.failure is None
    assert third.describe["process"] != first.describe["process"]


def test_an_exit_is_told_with_its_code_and_last_words(pool: Pool) -> None:
    failure = ask(pool, "exit").failure
    assert failure == Reason("exited", "crashed: the process ended with exit code 7 (out of luck)")


def test_an_exception_is_one_line_and_the_worker_lives_on(pool: Pool) -> None:
    before = ask(pool, "none").describe["process"]
    assert ask(pool, "raise").failure == Reason("failed", "ValueError: no such kernel")
    assert ask(pool, "none").describe["process"] == before


def test_what_an_engine_prints_does_not_reach_the_answers(pool: Pool) -> None:
    answer = ask(pool, "noise")
    assert answer.failure is None
    np.testing.assert_array_equal(answer.outputs[0]["x"], INPUTS["x"])


@pytest.mark.slow
def test_a_hang_ends_at_the_limit() -> None:
    with Pool(time_limit=1.5) as pool:
        assert ask(pool, "sleep").failure == Reason("timeout", "no answer within 1.5 s")
        assert pool.submit(faulty("sleep"), Path("x"), [], key="two") is not None  # closing doesn't wait for it


def test_a_file_that_hangs_again_and_again_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["timeout", "timeout", "error", *["timeout"] * LATE])
    monkeypatch.setattr(Worker, "ask", lambda *_: {"ok": False, "code": next(answers), "error": "late"})
    with Pool(time_limit=1) as pool:
        failures = [ask(pool, "sleep").failure for _ in range(3 + LATE)]
        assert failures[-LATE:] == [Reason("timeout", "late")] * LATE
        last = ask(pool, "sleep").failure
    assert last == Reason("timeout", f"not tried, as {LATE} runs before gave no answer within 1 s each")


def test_closing_the_pool_leaves_no_process(pool: Pool) -> None:
    process = int(ask(pool, "none").describe["process"])
    pool.__exit__(None, None, None)
    assert not psutil.pid_exists(process)
    assert not pool.folder.exists()


@pytest.mark.sampled(2)
@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_when_the_parent_does(end: signal.Signals) -> None:
    script = (
        "import sys; from pathlib import Path; from test_workers import *\n"
        "with Pool(time_limit=60) as pool:\n"
        "    print(ask(pool, 'none').describe['process'], flush=True)\n"
        "    ask(pool, 'sleep')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(end)
        parent.wait(20)
    until = time.monotonic() + 10
    while _alive(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(worker)


@pytest.mark.parametrize("name", ["SIGINT", "SIGQUIT"])
def test_keys_that_end_a_command_do_not_end_its_workers(name: str) -> None:
    """A terminal sends the signals to both. The command ends its workers after it has cleaned up."""
    code = (
        "import os, signal; from posexport.processes import end_with_parent; end_with_parent();"
        f"os.kill(os.getpid(), signal.{name}); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_a_child_whose_parent_was_gone_before_it_looked_ends() -> None:
    code = "from posexport.processes import end_with_parent; end_with_parent(); print('alive')"
    for parent, output in ((os.getpid(), "alive\n"), (1, "")):
        environment = {**os.environ, "POSEXPORT_PARENT": str(parent)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout == output


def test_a_child_compiles_into_its_own_folder_where_the_cache_is_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise torch.compile would run that user's code."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache, name = tmp_path / f"torchinductor_{getpass.getuser()}", "TORCHINDUCTOR_CACHE_DIR"
    assert name not in child_environment(tmp_path)
    cache.symlink_to(tmp_path)
    assert name not in child_environment(tmp_path)
    cache.unlink()
    cache.mkdir()
    assert child_environment(tmp_path)[name] == str(cache)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert name not in child_environment(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("users", [None, "glibc.malloc.arena_max=1"])
def test_engines_keep_memory_unless_the_user_says_how_it_is_taken(
    users: str | None, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if users is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", users)
    ask(pool, "echo")
    found, wanted = (
        psutil.Process(pool._workers["one"][0].pid).environ()["GLIBC_TUNABLES"],
        users or ALLOCATION["GLIBC_TUNABLES"],
    )
    assert found.split(":")[0] == wanted.split(":")[0]  # the C library may end the text after the first one


def _alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slow", ["faulty-sleep", "torch"])
def test_a_runtime_without_an_answer_in_time_is_not_run(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, module = Worker.ask, faulty("sleep").module if slow == "faulty-sleep" else RUNTIMES[slow].module

    def impatient(worker: Worker, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        return ask(worker, request, 0.01 if request["module"] == module else time_limit)

    monkeypatch.setattr(Worker, "ask", impatient)
    path = write(tmp_path, "rope", case("rope"))
    rows = {"faulty-sleep": faulty("sleep"), "ort-cpu": RUNTIMES["ort-cpu"]}
    report = verify([path], runtimes=rows if slow == "faulty-sleep" else {"ort-cpu": rows["ort-cpu"]}, time_limit=60)
    (verdict,) = [verdict for verdict in report.verdicts if verdict.state == NOT_RUN]
    assert "no answer within 0.01 s" in str(verdict.reason)
    assert report.exit_code([verdict.runtime]) == 3
    assert report.exit_code() == (0 if slow == "faulty-sleep" else 3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps a folder that a process works in")
def test_workers_run_where_the_working_folder_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "rope", case("rope"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    (verdict,) = verify([path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, time_limit=60).verdicts
    assert verdict.state == PASSED, verdict.reason


@pytest.mark.slow
def test_verify_tells_a_crash_and_zeros_apart_and_judges_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, "rope", case("rope"))
    rows = {f"faulty-{how}": faulty(how) for how in ("segfault", "zeros", "raise")}
    report = verify([path], runtimes={**rows, "ort-cpu": RUNTIMES["ort-cpu"]}, time_limit=60)
    found = {verdict.runtime: verdict for verdict in report.verdicts}
    assert {name: verdict.state for name, verdict in found.items()} == {
        "faulty-segfault": FAILED,
        "faulty-zeros": FAILED,
        "faulty-raise": FAILED,
        "ort-cpu": PASSED,
    }
    assert "SIGSEGV" in str(found["faulty-segfault"].reason)
    assert "off by" in str(found["faulty-zeros"].reason)
    assert "no such kernel" in str(found["faulty-raise"].reason)
    assert report.exit_code() == 1
